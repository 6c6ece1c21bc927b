"""One call of a replica over a link: the request goes there, and its events come back, without Ray Serve.

This is the road to a replica, and back. Who takes a call is decided as Serve's router does. Where no replica
does, Serve carries it, with its events: it queues, and says why not (docs/adr/018).
"""

from __future__ import annotations

import logging
from dataclasses import replace

from samovar.configs.cluster import LinkSettings
from samovar.replicas.links import CLOSING, FAILED, FULL, Inlet, Link, LinkLost, Links, events_of, said_events
from samovar.replicas.messages import Event, GenerateRequest
from samovar.replicas.serving.requests import pack_request, request_form
from samovar.router.routing import load_tracker, roster
from samovar.router.routing.score import Ranking

logger = logging.getLogger(__name__)

READ_BYTES = 1 << 14
"""Of a kept answer that is told again, so much is read at once: then others have their turn."""

TRIES_MAX = 4
"""Replicas that are asked before Serve is, which knows more of who is full."""


class CallRefused(Exception):
    """A replica gives no answer to a call. `args[0]`: why (`replicas/links`)."""


class DirectCall:
    """Iterates over the lists of events of one call; an empty one is a sign of life.

    `joins`: deltas that come together become one. Iterating raises `LinkLost`, or `CallRefused`. `close` at
    the end.
    """

    def __init__(self, inlet: Inlet, link: Link, ticket: str, *, joins: bool) -> None:
        self._inlet = inlet
        self._link = link
        self._ticket = ticket
        self._joins = joins
        self._mailbox = inlet.expect(ticket)
        self._first: list[Event] | None = None

    async def begin(self, payload: bytes) -> None:
        """Send the request, and wait until the replica says something of it. Raises as iterating does."""
        self._link.call(self._ticket, payload, self._lose, self._refuse)
        self._first = await self._next()

    def __aiter__(self) -> DirectCall:
        return self

    async def __anext__(self) -> list[Event]:
        if self._first is not None:
            first, self._first = self._first, None
            return first
        return await self._next()

    async def _next(self) -> list[Event]:
        if self._joins:
            return events_of(await self._mailbox.next())
        return said_events(await self._mailbox.next(READ_BYTES))

    def close(self, *, is_over: bool) -> None:
        """Drop what still comes. `is_over`: the answer is whole; else it is cancelled."""
        self._inlet.forget(self._ticket)
        self._link.close(self._ticket, is_over=is_over)

    def _lose(self) -> None:
        self._mailbox.fail(LinkLost("the connection to the replica has ended"))

    def _refuse(self, reason: str) -> None:
        self._mailbox.fail(CallRefused(reason))


class DirectCalls:
    """Calls replicas over links, as far as these are known and reached. `inlet`: where events are awaited."""

    def __init__(self, links: Links, inlet: Inlet) -> None:
        self._links = links
        self._inlet = inlet
        self._settings: LinkSettings = inlet.settings
        self._is_listening = True
        request_form()

    async def begin(self, request: GenerateRequest, session_key: str) -> DirectCall | None:
        """Return the call of the first replica that takes it; None: Serve is to carry it.

        Raises `LinkLost` if that replica is lost before it has said anything, `CallRefused` if it has failed.
        """
        if request.sampling.prompt_logprobs is not None:
            return None  # megabytes in one message: it must not fill what all streams share
        if not self._is_listening or roster.ROSTER.queued:
            return None  # while earlier requests wait with Serve, later ones stand behind them
        book = load_tracker.BOOK
        replicas, ranking = roster.ROSTER.ranked(request, session_key, book)
        if not replicas or replicas[0].address is None:
            return None
        ticket = request.route.ticket
        if ranking is not None:  # at once, so that concurrent choices see it
            book.routed(ticket, replicas[0].name, ranking.work_s[replicas[0].name], None)
        payload = await self._packed(request)
        if payload is None:
            return None
        for one in replicas[:TRIES_MAX]:
            link = await self._links.reach(one.address)
            if link is None:
                return None  # not another one: here may be the session's blocks
            if ranking is not None and book.replica_of(ticket) != one.name:
                book.routed(ticket, one.name, ranking.work_s[one.name], None)
            call = await self._taken(link, request, payload)
            if call is not None:
                _count(ranking, one.name)
                return call
        return None

    async def _packed(self, request: GenerateRequest) -> bytes | None:
        try:
            payload = pack_request(replace(request, reply_to=await self._inlet.address()))
        except OSError as error:
            logger.warning("Serve carries all calls: this ingress cannot listen for events: %s", error)
            self._is_listening = False
            return None
        except ValueError as error:
            logger.warning("request %s goes through Serve: %s", request.request_id, error)
            return None
        return payload if len(payload) <= self._settings.call_bytes_max else None

    async def _taken(self, link: Link, request: GenerateRequest, payload: bytes) -> DirectCall | None:
        """Return the call, if the replica takes it."""
        ticket = request.route.ticket
        await link.drained(ticket)  # while the connection takes no more
        call = DirectCall(self._inlet, link, ticket, joins=request.keep is None)
        try:
            await call.begin(payload)
        except CallRefused as refused:
            call.close(is_over=True)
            if refused.args[0] == FAILED:
                raise
            level = logging.DEBUG if refused.args[0] in (FULL, CLOSING) else logging.WARNING
            logger.log(level, "request %s is refused: %s", request.request_id, refused.args[0])
            return None
        except BaseException:
            call.close(is_over=False)
            raise
        return call


def _count(ranking: Ranking | None, name: str) -> None:
    if ranking is not None:
        load_tracker.BOOK.counted(ranking.outcomes.get(name))
