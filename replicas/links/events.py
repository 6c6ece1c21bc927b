"""A replica's events as payloads of a link, and back. Pure, but for the sender."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import msgpack

from samovar.replicas.links.link import Link
from samovar.replicas.links.wire import LinkLost
from samovar.replicas.messages import Admitted, Delta, Event, Failed, Receipt, Refused, TokenLogprob

_OTHERS = {"refused": Refused, "failed": Failed}


def pack_event(event: Event) -> list[Any]:
    """Return an event as plain data."""
    if isinstance(event, Delta):
        packed = [event.index, event.text, event.token_ids, event.finish_reason]
        return [*packed, [_pack_token(token) for token in event.logprobs]] if event.logprobs else packed
    if isinstance(event, Admitted):
        tokens = [_pack_token(token) for token in event.prompt_logprobs]
        receipt = asdict(event.receipt)
        return ["admitted", event.replica_id, event.cached_tokens, event.queue_s, receipt, tokens]
    return [type(event).__name__.lower(), asdict(event)]


def _pack_token(token: TokenLogprob) -> list[Any]:
    top = [_pack_token(other) for other in token.top]
    return [token.token_id, token.token, token.token_bytes, token.logprob, top, token.rank]


def whole_bytes(data: bytes) -> int:
    """Return how many of these bytes are whole payloads, packed one behind the other."""
    unpacker = msgpack.Unpacker(max_buffer_size=max(1, len(data)), unicode_errors="surrogatepass")
    unpacker.feed(data)
    whole = 0
    try:
        while True:
            unpacker.skip()
            whole = unpacker.tell()
    except msgpack.OutOfData:
        return whole


def said_events(payloads: Iterable[Any]) -> list[Event]:
    """Return the events of payloads, each as it was said. Raises `LinkLost`.

    A payload of bytes is several, packed one behind the other.
    """
    return [event for payload in payloads for one in _unpacked(payload) for event in events_of([one])]


def _unpacked(payload: Any) -> Iterable[Any]:
    if not isinstance(payload, bytes):
        return [payload]
    unpacker = msgpack.Unpacker(max_buffer_size=max(1, len(payload)), unicode_errors="surrogatepass")
    try:
        unpacker.feed(payload)
        return list(unpacker)
    except (ValueError, msgpack.UnpackException) as error:
        raise LinkLost(f"events that are none: {error}") from error


def events_of(payloads: Iterable[Any]) -> list[Event]:
    """Return the events of payloads, with consecutive deltas of a choice as one. Raises `LinkLost`."""
    events: list[Event] = []
    deltas: dict[int, list[Any]] = {}  # by choice, since the last other event: text, ids, log-probabilities
    try:
        for payload in payloads:
            first = payload[0] if payload else None
            if isinstance(first, int):
                index, text, token_ids, finish_reason, *logprobs = payload
                if (delta := deltas.get(index)) is None:
                    delta = deltas[index] = [[], [], [], None]
                delta[0].append(text)
                delta[1].extend(token_ids)
                delta[2].extend(logprobs[0] if logprobs else ())
                delta[3] = finish_reason
                continue
            _join(deltas, events)
            if first == "admitted":
                _, replica_id, cached_tokens, queue_s, receipt, tokens = payload
                shown = tuple(_token(token) for token in tokens)
                events.append(Admitted(replica_id, cached_tokens, queue_s, Receipt(**receipt), shown))
            else:
                events.append(_OTHERS[payload[0]](**payload[1]))
        _join(deltas, events)
    except (TypeError, ValueError, LookupError) as error:
        raise LinkLost(f"an event that is none: {error}") from error
    return events


def _join(deltas: dict[int, list[Any]], events: list[Event]) -> None:
    for index, (texts, token_ids, logprobs, finish_reason) in deltas.items():
        tokens = tuple(_token(token) for token in logprobs)
        events.append(Delta(index, "".join(texts), tuple(token_ids), tokens, finish_reason))
    deltas.clear()


def _token(packed: list[Any]) -> TokenLogprob:
    token_id, token, token_bytes, logprob, top, rank = packed
    return TokenLogprob(token_id, token, token_bytes, logprob, tuple(_token(one) for one in top), rank)


class EventSender:
    """Carries events of one request over a link, as they come.

    `choices`: answers of the request. `put` and `over` must run on one event loop. Raises `LinkLost`.
    """

    def __init__(self, choices: int, link: Link, ticket: str) -> None:
        self._choices_open = choices
        self._link = link
        self._ticket = ticket
        self._over = asyncio.Event()
        self._is_lost = False
        self.is_over = False
        link.open(ticket, self._lose)

    def put(self, event: Event) -> None:
        self._link.send(self._ticket, pack_event(event))
        if isinstance(event, Delta) and event.finish_reason is not None:
            self._choices_open -= 1
        if self._choices_open == 0 or isinstance(event, Refused | Failed):
            self._end()

    def put_packed(self, piece: bytes) -> None:
        """Send several events, packed one behind the other; `caught_up` says what they were."""
        self._link.send(self._ticket, piece)

    def caught_up(self, choices_open: int) -> None:
        """Note how many choices go on after what was packed."""
        self._choices_open = choices_open
        if choices_open <= 0:
            self._end()

    async def drained(self) -> None:
        """Wait while the reader has more than enough to read."""
        await asyncio.sleep(0)  # what was sent goes out, and its reader's answer comes in
        await self._link.drained(self._ticket)

    def _end(self) -> None:
        self.is_over = True
        self._over.set()

    async def over(self) -> None:
        """Wait until the last event has been put. Raises `LinkLost` if the link is lost before."""
        await self._over.wait()
        if self._is_lost:
            raise LinkLost("the connection to the ingress has ended")

    def close(self) -> None:
        """Take the stream off its link."""
        self._link.close(self._ticket)

    def _lose(self) -> None:
        self._is_lost = not self.is_over
        self._over.set()
