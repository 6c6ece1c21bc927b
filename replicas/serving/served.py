"""How a replica serves the calls that come to it over links, beside those that Ray Serve carries."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, closing

from samovar.replicas.links import FULL, EventSender, Handler, LinkCall, LinkLost, Links
from samovar.replicas.messages import GenerateRequest
from samovar.replicas.serving.requests import BadRequestBytes, request_form, unpack_request

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
