"""The proxy's end: requests go to ingresses over links, and their responses come back over others.

Where no ingress is known, reached, or takes the request, it goes the way it always could: through Serve. An
ingress that dies takes its requests with it: those of whose answer nothing was sent yet may go to another, if
they do no more than read or generate, so their bodies are kept until then. The rest is the client's to
repeat.

As payloads of a link, plain data: a request is one, which has where its answer is awaited, its head, and what
of its body had come. The rest of the body follows in pieces, once the ingress has said `GO`. A response is
its head, pieces of its body, and `WHOLE` or `CUT`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections import deque
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from samovar.replicas.links import FAILED, Inlet, Link, LinkLost, Links, Mailbox
from samovar.replicas.messages import ReplyTo
from samovar.router.proxy.known_ingresses import KnownIngresses, ListedIngress

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
        self._links = Links(inlet.settings, NO_BEAT_S, inlet.tls)
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


GO = "go"
"""The ingress has taken the request, and wants the rest of its body."""
WHOLE, CUT = True, False
"""The last payload of a body: that it was all; of a response also that it failed."""
UNREACHED = "unreached"
"""Why an ingress takes no request: it cannot reach the proxy with its answer."""
READ_BYTES = 1 << 14
"""A body goes over a link, and to its client, in pieces: one message must not fill what all streams share,
and each piece that the client takes tells the ingress that it reads."""
PLAIN = ("asgi", "http_version", "method", "scheme", "root_path", "path", "raw_path", "query_string")
PAIRS = ("client", "server")


def packed_request(scope: Scope, to: ReplyTo, ticket: str, body: bytes, *, more: bool) -> list[Any]:
    """Return the first payload of a request. `more`: whether more of its body comes."""
    head = {name: scope[name] for name in (*PLAIN, *PAIRS, "headers") if name in scope}
    return [[to.host, to.port, to.secret], ticket, head, body, more]


def read_request(payload: Any) -> tuple[ReplyTo, str, Scope, bytes, bool]:
    """Return what `packed_request` was given, with a scope that an app may write to. Raises `ValueError`."""
    try:
        (host, port, secret), ticket, head, body, more = payload
        scope: Scope = {"type": "http", **head, "state": {}}
        scope["headers"] = [(name, value) for name, value in head["headers"]]
        scope.update({name: tuple(head[name]) for name in PAIRS if head.get(name) is not None})
        return ReplyTo(host, port, secret), ticket, scope, body, more
    except (TypeError, LookupError, ValueError) as error:
        raise ValueError(f"no request: {error}") from error


def packed_head(message: Message) -> list[Any]:
    """Return the head of a response."""
    return [message["status"], [list(pair) for pair in message.get("headers", [])]]


def read_head(payload: Any) -> Message:
    """Return the ASGI message of a response's head."""
    status, headers = payload
    return {"type": "http.response.start", "status": status, "headers": [tuple(pair) for pair in headers]}


SAFE_METHODS = frozenset({"GET", "HEAD"})
GENERATION_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"})
READING_PATHS = frozenset({"/v1/messages/count_tokens", "/tokenize", "/detokenize"})


class RetryBuffer:
    """The room for the bodies of a proxy's open requests. Use it from one event loop.

    `bytes_max`: of all together; a request whose body finds no room is not repeated. 0: none is.
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.held_bytes = 0
        self.repeated = 0
        """Requests that were sent again."""

    def of(self, scope: Scope, receive: Receive) -> RetryBody:
        """Return the ASGI `receive` of a request, which keeps what it gives. Call `drop` in the end."""
        path = scope["path"]
        is_safe = scope["method"] in SAFE_METHODS or (
            scope["method"] == "POST" and (path in GENERATION_PATHS or path in READING_PATHS)
        )
        return RetryBody(self, receive, is_kept=is_safe and self.bytes_max > 0)


class RetryBody:
    """ASGI `receive` of one request, which can begin again."""

    def __init__(self, room: RetryBuffer, receive: Receive, *, is_kept: bool) -> None:
        self._room = room
        self._receive = receive
        self._is_kept = is_kept
        self._given: list[Message] = []
        self._again: deque[Message] = deque()
        self._held_bytes = 0

    async def __call__(self) -> Message:
        if self._again:
            return self._again.popleft()
        message = await self._receive()
        if self._is_kept and message["type"] == "http.request":
            self._keep(message)
        return message

    def rewind(self) -> bool:
        """Begin again, once; return whether all that was given can be given again."""
        if not self._is_kept:
            return False
        self._again.extend(self._given)
        self._is_kept = False
        self._room.repeated += 1
        return True

    def drop(self) -> None:
        """Keep nothing from now on: the answer has begun. What is being given again is given to its end."""
        self._is_kept = False
        self._given.clear()
        self._room.held_bytes -= self._held_bytes
        self._held_bytes = 0

    def _keep(self, message: Message) -> None:
        size = len(message.get("body", b""))
        if self._room.held_bytes + size > self._room.bytes_max:
            self.drop()
            return
        self._given.append(message)
        self._room.held_bytes += size
        self._held_bytes += size
