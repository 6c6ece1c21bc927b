"""The proxy's end: requests go to ingresses over links, and their responses come back over others.

Where no ingress is known, reached, or takes the request, it goes the way it always could: through Serve.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections import deque

from starlette.types import Message, Receive, Scope, Send

from samovar.replicas.links import FAILED, Inlet, Link, LinkLost, Links, Mailbox
from samovar.router.proxy.known_ingresses import KnownIngresses, ListedIngress
from samovar.router.proxy.wire import CUT, READ_BYTES, WHOLE, packed_request, read_head

logger = logging.getLogger("ray.serve")  # only Serve's loggers have a handler in the proxy's process

EARLY_WAIT_S = 0.002
"""How long the request waits for its body: clients often send it in a packet of its own."""
NO_BEAT_S = 3600.0
"""Links to ingresses carry no streams that could be silent."""


class _NotTaken(Exception):
    """The ingress has not taken the request."""


class _Failed(Exception):
    """The ingress has failed at the request."""


class _Left(Exception):
    """The client is gone."""


class EarlyBody:
    """ASGI `receive` of a request, whose beginning can be read ahead, and is given again."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._ahead: deque[Message] = deque()

    async def __call__(self) -> Message:
        return self._ahead.popleft() if self._ahead else await self._receive()

    async def read_ahead(self, bytes_max: int) -> tuple[bytes, bool]:
        """Return what comes of the body at once, about `bytes_max`, and whether more does. Raises `_Left`."""
        nbytes, more = 0, True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(EARLY_WAIT_S):
                while more and nbytes < bytes_max:
                    message = await self._receive()
                    self._ahead.append(message)
                    if message["type"] != "http.request":
                        raise _Left
                    nbytes += len(message.get("body", b""))
                    more = message.get("more_body", False)
        return b"".join(one.get("body", b"") for one in self._ahead), more

    async def left(self) -> None:
        """Wait, after the body, until the client is gone."""
        while (message := await self._receive())["type"] != "http.disconnect":
            pass
        self._ahead.append(message)  # should Serve have to bring the request after all

    def taken(self) -> None:
        """Drop what was read ahead of the body: it has arrived."""
        self._ahead.clear()


class RequestCarrier:
    """Sends requests to ingresses. `inlet`: where their responses come."""

    def __init__(self, inlet: Inlet) -> None:
        self._inlet = inlet
        self._links = Links(inlet.settings, NO_BEAT_S)
        self._is_listening = True

    async def carry(
        self, ingresses: KnownIngresses, session: str, scope: Scope, body: EarlyBody, send: Send
    ) -> bool:
        """Have an ingress serve a request; return whether one has taken it.

        If none has, nothing was sent, and the body can still be read whole. If one has, the response may
        still be missing, or end early: the ingress was lost, or the client.
        """
        reached = await self._reached(ingresses.order(session))
        if reached is None:
            return False
        ingress, link = reached
        with ingresses.busy(ingress):
            return await _Carried(self._inlet, link, body).run(scope, send)

    async def _reached(self, ingresses: list[ListedIngress]) -> tuple[ListedIngress, Link] | None:
        """Return the first ingress that is reached; each is waited for once a minute at most."""
        if not self._is_listening:
            return None
        try:
            await self._inlet.address()
        except OSError as error:
            logger.warning("no links: this proxy cannot listen for them: %s", error)
            self._is_listening = False
            return None
        for ingress in ingresses:
            link = await self._links.reach(ingress.address)
            if link is not None:
                return ingress, link
        return None


class _Carried:
    """One request on its way, and its response."""

    def __init__(self, inlet: Inlet, link: Link, body: EarlyBody) -> None:
        self._inlet = inlet
        self._link = link
        self._body = body
        self._ticket = uuid.uuid4().hex
        self._box: Mailbox = inlet.expect(self._ticket)
        self._go = asyncio.get_running_loop().create_future()
        self._is_over = False

    async def run(self, scope: Scope, send: Send) -> bool:
        feeding: asyncio.Task[None] | None = None
        try:
            more = await self._begin(scope)
            feeding = asyncio.create_task(self._feed(more=more))
            await self._answer(send)
        except _NotTaken:
            return False
        except LinkLost:
            self._link.cut()  # the other connection may not have ended yet: no request is to go there
            return True
        except (_Failed, _Left):
            return True
        finally:
            self._link.close(self._ticket, is_over=self._is_over)
            self._inlet.forget(self._ticket)
            if feeding is not None:
                feeding.cancel()
                await asyncio.gather(feeding, return_exceptions=True)
        return True

    async def _begin(self, scope: Scope) -> bool:
        """Send the request with what is there of its body; return whether more comes."""
        early, more = await self._body.read_ahead(self._inlet.settings.body_bytes_max)
        request = packed_request(scope, await self._inlet.address(), self._ticket, early, more=more)
        try:
            self._link.call(self._ticket, request, self._lose, self._refuse)
        except LinkLost as lost:
            raise _NotTaken from lost
        return more

    async def _feed(self, *, more: bool) -> None:
        """Send the rest of the body, then wait for the client to leave."""
        if more:
            await self._go
            while more:
                message = await self._body()
                if message["type"] == "http.disconnect":
                    self._box.fail(_Left())
                    return
                piece = message.get("body", b"")
                more = message.get("more_body", False)
                for begin in range(0, len(piece), READ_BYTES):
                    await self._link.drained(self._ticket)
                    self._link.send(self._ticket, piece[begin : begin + READ_BYTES])
            self._link.send(self._ticket, WHOLE)
        await self._body.left()
        self._box.fail(_Left())

    async def _answer(self, send: Send) -> None:
        """Pass on status, headers and body as they come, until the body is whole or cut."""
        while not self._is_over:
            payloads = await self._box.next(READ_BYTES)
            if payloads and not self._go.done():
                self._body.taken()
                self._go.set_result(None)
            body = b"".join(part for part in payloads if isinstance(part, bytes))
            for head in payloads:
                if isinstance(head, list):
                    await send(read_head(head))
            self._is_over = WHOLE in payloads
            if body or self._is_over:
                await send({"type": "http.response.body", "body": body, "more_body": not self._is_over})
            if CUT in payloads:
                return

    def _lose(self) -> None:
        self._box.fail(LinkLost("the connection to the ingress has ended"))

    def _refuse(self, why: str) -> None:
        """Note that there will be no answer: the request was not taken, or has failed."""
        self._box.fail(_Failed() if why == FAILED else _NotTaken(why))
