"""How a replica serves the calls that come to it: over links, and those that Ray Serve carries.

A request is bytes of a link, and back: plain data, validated where it arrives. What Serve carries is answered
by an `EventStream`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from array import array
from collections import deque
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, closing
from dataclasses import replace
from functools import lru_cache
from typing import Any

import msgpack
from pydantic import TypeAdapter, ValidationError

from samovar.replicas.links import (
    FULL,
    EventSender,
    Handler,
    LinkCall,
    LinkLost,
    Links,
    pack_event,
    said_events,
)
from samovar.replicas.messages import Delta, Event, Failed, GenerateRequest, Refused

logger = logging.getLogger(__name__)


UNREACHED, UNREADABLE = "unreached", "unreadable"
"""Why a call is refused: the ingress is not reached, or what came is no request. Serve may carry it."""

Answering = Callable[[GenerateRequest, EventSender], AbstractAsyncContextManager[None]]
"""Has a request's events put into the sender while the block runs."""


class Places:
    """Counts the requests that a replica has open, however they came. For one event loop.

    `places`: from so many on calls over links are refused, which try another replica. Requests that Serve
    carries have been queued by then, and Serve counts only those: they wait here, at most `waiting_max`; more
    are let in, for the engine to refuse.
    """

    def __init__(self, places: int, waiting_max: int) -> None:
        self._places = places
        self._waiting_max = waiting_max
        self._waiting: deque[asyncio.Future[None]] = deque()
        self.taken = 0

    def take_now(self) -> bool:
        """Take a place, if one is free and no request waits; return whether."""
        if self.taken >= self._places or self._waiting:
            return False
        self.taken += 1
        return True

    async def take(self) -> None:
        """Take a place, as soon as there is one."""
        if self.take_now():
            return
        if len(self._waiting) >= self._waiting_max:
            self.taken += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn  # who leaves has taken the place for us
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave()
            elif turn in self._waiting:
                self._waiting.remove(turn)
            raise

    def leave(self) -> None:
        """Give a place back."""
        self.taken -= 1
        while self._waiting and self.taken < self._places:
            turn = self._waiting.popleft()
            if not turn.done():
                self.taken += 1
                turn.set_result(None)


def call_handler(links: Links, places: Places, answering: Answering) -> Handler:
    """Return what serves an ingress's call over a link: its events go over another one, back to there."""
    request_form()

    async def handle(call: LinkCall) -> None:
        try:
            request = unpack_request(call.payload)
        except BadRequestBytes as error:
            logger.warning("a call over a link is no request: %s", error)
            call.refuse(UNREADABLE)
            return
        link = await links.reach(request.reply_to)
        if link is None:
            call.refuse(UNREACHED)
            return
        if not places.take_now():
            call.refuse(FULL)
            return
        try:
            with closing(EventSender(request.n, link, request.route.ticket)) as sender:
                async with answering(request, sender):
                    await sender.over()
        except LinkLost:
            call.refuse(UNREACHED)
        finally:
            places.leave()

    return handle


class EventStream:
    """Carries events of one request from the engine's thread to the reader of its answer, through Serve.

    The way where there is no link (`replicas/links`). The first token is sent at once; later ones are
    batched, because a message through a Serve handle costs about 3 CPU-ms. After
    `heartbeat_s` without events the reader gets an empty list, so that silence means a dead replica.

    `choices`: answers of the request. `joins`: events that wait become one. `put` and `next` must run on one
    event loop.
    """

    def __init__(self, choices: int, *, coalesce_s: float, heartbeat_s: float, joins: bool = True) -> None:
        self._events: list[Event] = []
        self._arrived = asyncio.Event()
        self._over = asyncio.Event()
        self._read = asyncio.Event()
        self._choices_open = choices
        self._coalesce_s = coalesce_s
        self._heartbeat_s = heartbeat_s
        self._has_spoken = False
        self._joins = joins

    @property
    def is_over(self) -> bool:
        """Whether the request's last event has come."""
        return self._over.is_set()

    @property
    def is_read(self) -> bool:
        """Whether the request is over and `next` has returned all of its events."""
        return self.is_over and not self._events

    def put(self, event: Event) -> None:
        self._events.append(event)
        if isinstance(event, Delta) and event.finish_reason is not None:
            self._choices_open -= 1
        if self._choices_open == 0 or isinstance(event, Refused | Failed):
            self._over.set()
        self._arrived.set()

    def put_packed(self, piece: bytes) -> None:
        """Take several events, packed one behind the other."""
        for event in said_events([piece]):
            self.put(event)

    def caught_up(self, choices_open: int) -> None:
        """Do nothing: each event was counted."""

    async def drained(self) -> None:
        """Wait until what was put is read."""
        while self._events:
            self._read.clear()
            await self._read.wait()

    async def next(self) -> list[Event]:
        """Return the new events; empty if none came for `heartbeat_s`. Not for a stream that is read."""
        if self._has_spoken:
            with contextlib.suppress(TimeoutError):  # the end is sent without waiting for a batch
                await asyncio.wait_for(self._over.wait(), self._coalesce_s)
        try:
            async with asyncio.timeout(self._heartbeat_s):
                await self._arrived.wait()
        except TimeoutError:
            return []
        events, self._events = self._events, []
        self._arrived.clear()
        self._read.set()
        self._has_spoken = any(isinstance(event, Delta) for event in events)
        return merge_deltas(events) if self._joins else events


def merge_deltas(events: list[Event]) -> list[Event]:
    """Join consecutive `Delta`s of the same choice into one; the order of choices stays."""
    merged: list[Event] = []
    last_of_choice: dict[int, int] = {}
    for event in events:
        if isinstance(event, Delta) and event.index in last_of_choice:
            place = last_of_choice[event.index]
            earlier = merged[place]
            assert isinstance(earlier, Delta)
            merged[place] = Delta(
                event.index,
                earlier.text + event.text,
                earlier.token_ids + event.token_ids,
                earlier.logprobs + event.logprobs,
                event.finish_reason,
            )
            continue
        if isinstance(event, Delta):
            last_of_choice[event.index] = len(merged)
        merged.append(event)
    return merged


TOKEN_CODE = "I"
"""Token ids go as four bytes each, the lowest first: a list of them takes 20 times as long to validate."""
OTHER_ORDER = sys.byteorder != "little"


class BadRequestBytes(ValueError):
    """What came is no request."""


@lru_cache(1)
def request_form() -> TypeAdapter[GenerateRequest]:
    """Return the form of requests. Making it takes some ms: call this before the first one comes."""
    return TypeAdapter(GenerateRequest)


def pack_request(request: GenerateRequest) -> bytes:
    """Return a request as bytes. Raises `ValueError` at what cannot be said so: then Serve carries it."""
    keep = request.keep
    bare = replace(request, prompt_token_ids=[], keep=None if keep is None else replace(keep, before=()))
    try:
        ids = array(TOKEN_CODE, request.prompt_token_ids)
        if OTHER_ORDER:
            ids.byteswap()
        fields = request_form().dump_python(bare, exclude_defaults=True, warnings="error")
        said = [] if keep is None else [pack_event(event) for event in keep.before]
        data: bytes = msgpack.packb([fields, ids.tobytes(), said], unicode_errors="surrogatepass")
    except (OverflowError, TypeError) as error:
        raise ValueError(f"a request that is no plain data: {error}") from error
    return data


def unpack_request(data: Any) -> GenerateRequest:
    """Return the request of these bytes. Raises `BadRequestBytes`."""
    if not isinstance(data, bytes):
        raise BadRequestBytes("not bytes")
    try:
        fields, ids, said = msgpack.unpackb(data, unicode_errors="surrogatepass", strict_map_key=True)
        tokens = array(TOKEN_CODE, ids)
        if OTHER_ORDER:
            tokens.byteswap()
        request = request_form().validate_python(fields)
        before = tuple(said_events(said))
    except (ValueError, TypeError, msgpack.UnpackException, LinkLost, RecursionError) as error:
        # Not its text: it may quote the prompt.
        raise BadRequestBytes(_where(error)) from None
    request = replace(request, prompt_token_ids=tokens.tolist())
    if before:
        if request.keep is None:
            raise BadRequestBytes("events of an answer that is not kept")
        request = replace(request, keep=replace(request.keep, before=before))
    return request


def _where(error: Exception) -> str:
    if isinstance(error, ValidationError):
        places = [".".join(map(str, one["loc"])) for one in error.errors(include_input=False)]
        return f"not valid: {', '.join(places[:8])}"
    return type(error).__name__
