"""The ingress's end: requests that come over links are served by the ASGI app that Serve runs."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from starlette.types import ASGIApp, Message

from samovar.replicas.links import Inlet, Link, LinkCall, LinkLost, Links
from samovar.router.proxy import ADDRESS, CUT, GO, READ_BYTES, UNREACHED, WHOLE, packed_head, read_request

logger = logging.getLogger(__name__)


class RequestTaker:
    """Serves requests of the proxies. For one event loop. `app`: set before `listen`."""

    def __init__(self, inlet: Inlet, heartbeat_s: float) -> None:
        self.app: ASGIApp | None = None
        self._inlet = inlet
        self._links = Links(inlet.settings, heartbeat_s, inlet.tls)

    async def listen(self) -> dict[str, Any]:
        """Take requests from now on; return what Serve is to tell the proxies."""
        try:
            to = await self._inlet.address()
        except OSError as error:
            logger.warning("no requests over links: this ingress cannot listen for them: %s", error)
            return {}
        self._inlet.calls.take(self._serve)
        return {ADDRESS: [to.host, to.port, to.secret]}

    def refuse(self) -> None:
        """Take no more requests; the proxies send them elsewhere."""
        self._inlet.calls.stop()

    async def finish(self, timeout_s: float) -> None:
        """Wait until the requests that were taken are answered, at most so long."""
        if not await self._inlet.calls.over(timeout_s):
            logger.warning("%d requests are not answered after %g s", self._inlet.calls.open, timeout_s)

    async def _serve(self, call: LinkCall) -> None:
        to, ticket, scope, body, more = read_request(call.payload)
        call.payload = None  # it is there as long as the stream
        link = await self._links.reach(to)
        reply = None if link is None else LinkedReply.open(link, ticket)
        if reply is None or self.app is None:
            call.refuse(UNREACHED)
            return
        if more:
            reply.say(GO)
        receive = _TakenBody(call, body, more=more)
        del body
        try:
            await self.app(scope, receive, reply)
        finally:
            reply.close()


class _TakenBody:
    """ASGI `receive`. After the body nothing comes: if the client leaves, the call is cancelled."""

    def __init__(self, call: LinkCall, first: bytes, *, more: bool) -> None:
        self._call = call
        self._first: bytes | None = first
        self._more = more

    async def __call__(self) -> Message:
        if self._first is not None:
            body, self._first = self._first, None
            if body or not self._more:
                return {"type": "http.request", "body": body, "more_body": self._more}
        while self._more:
            payloads = await self._call.more(READ_BYTES)
            body = b"".join(part for part in payloads if isinstance(part, bytes))
            self._more = WHOLE not in payloads
            if body or not self._more:
                return {"type": "http.request", "body": body, "more_body": self._more}
        await asyncio.get_running_loop().create_future()
        raise AssertionError("it is set by none")


class LinkedReply:
    """ASGI `send` of one response. A proxy that is lost cancels the task that opened this."""

    def __init__(self, link: Link, ticket: str) -> None:
        self._link = link
        self._ticket = ticket
        self._is_over = False
        self._task = asyncio.current_task()
        link.open(ticket, self._lose)

    @classmethod
    def open(cls, link: Link, ticket: str) -> LinkedReply | None:
        """Return the reply; None: the link is lost."""
        try:
            return cls(link, ticket)
        except LinkLost:
            return None

    def say(self, payload: Any) -> None:
        """Send what is no part of the response."""
        self._link.send(self._ticket, payload)

    async def __call__(self, message: Message) -> None:
        if self._is_over:
            return
        if message["type"] == "http.response.start":
            self.say(packed_head(message))
            return
        body = message.get("body", b"")
        for begin in range(0, len(body), READ_BYTES):
            await self._link.drained(self._ticket)
            self.say(bytes(body[begin : begin + READ_BYTES]))
        if message.get("more_body", False):
            if not body:
                await self._link.drained(self._ticket)
            return
        self.say(WHOLE)
        self._is_over = True

    def _lose(self) -> None:
        assert self._task is not None
        self._task.cancel()

    def close(self) -> None:
        """End the response, if it is not over: the proxy says so to the client."""
        if not self._is_over:
            self._is_over = True
            self.say(CUT)
        self._link.close(self._ticket)
