"""Streamed bodies go from the front door to Serve's HTTP proxy over a link, beside the request's Serve call.

The proxy names in a header where it listens; a front door that streams sends status, headers and body
there, and tells Serve about it in the end. Requests, their end and their cancelling stay with Serve. Where
there is no link (other methods, whole answers, a proxy that is not reached) Serve carries all of it.

The other way, a small request body goes with the request, in its scope: Serve's front doors ask the proxy's
actor for it, a call there and back before anything can be done. And they ask at most once: whether the client
is still there is the proxy's to watch, which has the call cancelled (else one more call is open for each
stream, in both processes, to say the same).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from configs.cluster import LinkSettings
from configs.settings import Settings
from replicas.links import Inlet, Link, LinkLost, Links, open_inlet
from replicas.messages import ReplyTo
from router.doors import GENERATION_PATHS
from router.openai import ClientClosedRequest, declared_bytes

logger = logging.getLogger("ray.serve")

CALLBACK_VARIABLE = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
CALLBACK = "router.http.proxy_guard.install"
PREFIX = "SAMOVAR_PROXY_LINKS_"
WAIT_MS = f"{PREFIX}WAIT_MS"
REPLY_TO = b"x-samovar-reply-to"
LINKED = (b"x-samovar-linked", b"1")
"""On the head that Serve gets of a response whose body has gone over a link."""
READ_BYTES = 1 << 14
"""A body goes over a link, and to its client, in pieces: one message must not fill what all streams share,
and each piece that the client takes tells the front door that it reads."""
LIVE_PATH = "/v1/live"
EARLY_BODY = "samovar.early_body"
"""In a request's scope: what of its body had come when it went to a front door, and whether more comes."""
IS_WATCHED = "samovar.is_watched"
"""In a request's scope: the proxy watches for a client that leaves, and nothing comes after the body."""
SERVES_FETCH = "_receive_asgi_messages"
"""What Serve's ASGI `receive` calls to fetch messages from the proxy (`ASGIReceiveProxy`)."""
EARLY_WAIT_S = 0.002
"""How long the request waits for its body: clients often send it in a packet of its own."""
WHOLE, CUT = True, False
"""The last payload of a response: that its body was all, or that it failed."""


def links_environment(settings: Settings) -> dict[str, str]:
    """Return the variables that tell the proxies whether and how to listen."""
    links = {f"{PREFIX}{name.upper()}": str(value) for name, value in settings.cluster.links}
    return links | {WAIT_MS: str(settings.engine.coalesce_ms)}


def inlet_from_environment(environ: Mapping[str, str]) -> Inlet | None:
    """Return the inlet that `links_environment` described; None: there is to be none."""
    if WAIT_MS not in environ:
        return None
    given = {name: environ.get(f"{PREFIX}{name.upper()}") for name in LinkSettings.model_fields}
    links = LinkSettings.model_validate({name: value for name, value in given.items() if value is not None})
    return open_inlet(links, float(environ[WAIT_MS]) / 1000)


def are_proxies_guarded(environ: Mapping[str, str]) -> bool:
    """Whether the cluster was started with our guard in its proxies, which drops the header from clients.

    Nodes of a cluster are started alike: this process has what its proxies have. On a cluster that is
    not ours a client could have the front door connect to any address.
    """
    return environ.get(CALLBACK_VARIABLE) == CALLBACK and WAIT_MS in environ


class ReplySender:
    """ASGI middleware of the front door: sends streamed bodies over links, where the proxy asks for it."""

    def __init__(self, app: ASGIApp, *, settings: Settings) -> None:
        self._app = app
        links = settings.cluster.links
        self._links = Links(links, settings.router.heartbeat_s) if links.enabled else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if EARLY_BODY in scope or IS_WATCHED in scope:
            receive = _GivenBody(scope, receive)
        asked = None if scope["type"] != "http" or self._links is None else _asked(scope)
        if asked is None or self._links is None:
            await self._app(scope, receive, send)
            return
        reply = _LinkedSend(send, self._links, *asked)
        try:
            await self._app(scope, receive, reply)
        finally:
            reply.close()


def _asked(scope: Scope) -> tuple[ReplyTo, str] | None:
    """Return where the proxy listens for this response, and its ticket."""
    for name, value in scope["headers"]:
        if name == REPLY_TO:
            try:
                host, port, secret, ticket = value.decode().split(" ")
                return ReplyTo(host, int(port), secret), ticket
            except ValueError:
                logger.warning("a request's %s cannot be read", REPLY_TO.decode())
    return None


async def _no_more(_: object) -> bytes:
    """Say, as Serve's proxy does of a request that is over, that there is nothing to fetch."""
    raise KeyError


def _ask_for_nothing(receive: Any) -> None:
    """Have Serve not ask the proxy: all is here. Its task for that (ray 2.60) begins when we first wait.

    Another version of Serve asks, and hears of the body's end.
    """
    if hasattr(receive, SERVES_FETCH):
        setattr(receive, SERVES_FETCH, _no_more)


class _GivenBody:
    """ASGI `receive` of a request as `_SentBody` has sent it.

    What was early comes again, later. After the body of a request that is watched nothing comes: Serve
    cancels the request of a client that leaves.
    """

    def __init__(self, scope: Scope, receive: Receive) -> None:
        # Taken out: a scope, with all that is in it, is there as long as the stream.
        self._early: tuple[bytes, bool] | None = scope.pop(EARLY_BODY, None)
        self._is_watched: bool = scope.pop(IS_WATCHED, False)
        self._comes_again = self._early is not None
        self._is_whole = False
        self._receive = receive
        if self._is_watched and self._early is not None and not self._early[1]:
            _ask_for_nothing(receive)

    async def __call__(self) -> Message:
        if self._is_whole and self._is_watched:
            await asyncio.get_running_loop().create_future()
        if self._early is not None:
            (body, more), self._early = self._early, None
            self._is_whole = not more
            return {"type": "http.request", "body": body, "more_body": more}
        message = await self._receive()
        if self._comes_again and message["type"] == "http.request":
            self._comes_again = False
            message = await self._receive()
        self._is_whole = message["type"] == "http.request" and not message.get("more_body", False)
        return message


class _LinkedSend:
    """ASGI `send` of one response: over a link if it is a stream."""

    def __init__(self, send: Send, links: Links, to: ReplyTo, ticket: str) -> None:
        self._send = send
        self._links = links
        self._to = to
        self._ticket = ticket
        self._link: Link | None = None
        self._head: Message = {}
        self._is_lost = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._link = await self._opened(message)
            if self._link is not None:
                self._head = message
                head = [message["status"], [list(pair) for pair in message["headers"]]]
                self._link.send(self._ticket, head)
                return
        if self._link is None:
            await self._send(message)
            return
        body = message.get("body", b"")
        for begin in range(0, max(1, len(body)), READ_BYTES):
            await self._link.drained(self._ticket)
            if self._is_lost:
                raise ClientClosedRequest
            if body:
                self._link.send(self._ticket, body[begin : begin + READ_BYTES])
        if not message.get("more_body", False):
            self._link.send(self._ticket, WHOLE)
            link, self._link = self._link, None
            link.close(self._ticket)
            await self._send({**self._head, "headers": [*self._head["headers"], LINKED]})
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _opened(self, head: Message) -> Link | None:
        """Return the link, with the stream open on it; None if Serve is to carry this response."""
        kind = Headers(raw=list(head.get("headers", []))).get("content-type", "")
        if not kind.startswith("text/event-stream"):
            return None
        link = await self._links.reach(self._to)
        if link is not None:
            try:
                link.open(self._ticket, self._lose)
            except LinkLost:
                return None
        return link

    def _lose(self) -> None:
        self._is_lost = True

    def close(self) -> None:
        """End a response that has failed: the proxy says so to the client."""
        if self._link is not None:
            self._link.send(self._ticket, CUT)
            self._link.close(self._ticket)


class DirectReplies:
    """The proxy's end: tells front doors where it listens, and passes on what comes."""

    def __init__(self, inlet: Inlet | None) -> None:
        self._inlet = inlet
        self._body_bytes_max = 0 if inlet is None else inlet.settings.body_bytes_max

    async def sent_on(self, scope: Scope, receive: Receive, reply: DirectReply) -> tuple[Scope, Receive]:
        """Return the request as it goes to Serve: with the reply's header, and a small body in its scope.

        Who does not look there finds the body where it always is.
        """
        asked = {**scope, "headers": [*scope["headers"], reply.header]}
        asked |= {IS_WATCHED: True} if scope["path"] in GENERATION_PATHS else {}
        first: Message | None = None
        declared = declared_bytes(Headers(scope=scope))
        if declared and declared <= self._body_bytes_max:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(EARLY_WAIT_S):
                    first = await receive()
        if first is not None and first["type"] == "http.request":
            asked[EARLY_BODY] = first.get("body", b""), first.get("more_body", False)
        return asked, _SentBody(first, receive, asked)

    async def expect(self, scope: Scope, reply: Send) -> DirectReply | None:
        """Return the reply to a request that may be streamed over a link; None: it will not be."""
        is_stream = scope["method"] == "POST" or scope["path"] == LIVE_PATH
        if self._inlet is None or not is_stream:
            return None
        try:
            to = await self._inlet.address()
        except OSError as error:
            logger.warning("no links: this proxy cannot listen for them: %s", error)
            self._inlet = None
            return None
        return DirectReply(self._inlet, to, reply)


class BodyOver(dict[str, str]):
    """After a request's body: to Serve's proxy no message it knows, to a front door the last that comes.

    A front door stops asking when it hears of a disconnect. The proxy must not hear of one: it would cancel
    the request.
    """

    def __init__(self) -> None:
        super().__init__(type="samovar.body_over")

    def __reduce__(self) -> tuple[type, tuple[dict[str, str]]]:
        return dict, ({"type": "http.disconnect"},)


class _SentBody:
    """ASGI `receive` as Serve's proxy has it. `first`: a message that has been looked at.

    Of a request that is watched, the body's end is said. Serve reads this when it has sent the scope.
    """

    def __init__(self, first: Message | None, receive: Receive, scope: Scope) -> None:
        self._first = first
        self._receive = receive
        self._scope = scope
        self._is_watched = IS_WATCHED in scope
        self._is_whole = False

    async def __call__(self) -> Message:
        if self._is_whole:
            self._is_whole = self._is_watched = False
            return BodyOver()
        first, self._first = self._first, None
        self._scope.pop(EARLY_BODY, None)  # Serve keeps the scope as long as the stream
        message = await self._receive() if first is None else first
        is_last = message["type"] == "http.request" and not message.get("more_body", False)
        self._is_whole = self._is_watched and is_last
        return message


class DirectReply:
    """One response that comes over a link, through Serve, or not at all.

    `reply`: ASGI `send` to the client. Call `finish` when Serve is done with the request, then `close`.
    """

    def __init__(self, inlet: Inlet, to: ReplyTo, reply: Callable[[Message], Awaitable[None]]) -> None:
        ticket = uuid.uuid4().hex
        self.header = (REPLY_TO, f"{to.host} {to.port} {to.secret} {ticket}".encode())
        self._inlet = inlet
        self._ticket = ticket
        self._mailbox = inlet.expect(ticket)
        self._reply = reply
        self._is_linked = False
        self._is_replying = False
        self._passing = asyncio.create_task(self._pass())

    async def send(self, message: Message) -> None:
        """Pass on what Serve says of the response, unless a link says it."""
        if message["type"] == "http.response.start" and LINKED in message.get("headers", []):
            self._is_linked = True
        if not self._is_linked:
            await self._reply(message)

    async def finish(self, silence_s: float, total_s: float) -> None:
        """Wait for the rest of a body that comes over a link, while its client reads, at most `total_s`.

        `silence_s`: how long nothing may come while the client waits. A client that reads nothing is the
        connection's to end (`http_guard`).
        """
        if not self._is_linked:
            return
        try:
            async with asyncio.timeout(total_s):
                while not (await asyncio.wait({self._passing}, timeout=silence_s))[0]:
                    if not self._is_replying:
                        raise TimeoutError
                await self._passing
        except TimeoutError:
            self._passing.cancel()
            logger.warning("the rest of a response did not come in time")

    async def close(self) -> None:
        """Drop what still comes."""
        self._passing.cancel()
        self._inlet.forget(self._ticket)
        await asyncio.gather(self._passing, return_exceptions=True)

    async def _pass(self) -> None:
        """Pass on status, headers and body as they come, until the body is whole or lost."""
        more = True
        while more:
            try:
                payloads = await self._mailbox.next(READ_BYTES)
            except LinkLost as lost:
                logger.warning("a response is cut: %s", lost)
                return
            self._is_replying = True
            body = b"".join(part for part in payloads if isinstance(part, bytes))
            for head in payloads:
                if isinstance(head, list):
                    self._is_linked = True
                    await self._reply(_head(head))
            more = WHOLE not in payloads
            if body or not more:
                await self._reply({"type": "http.response.body", "body": body, "more_body": more})
            if CUT in payloads:
                return
            self._is_replying = False


def _head(payload: list[Any]) -> Message:
    status, headers = payload
    return {"type": "http.response.start", "status": status, "headers": [tuple(pair) for pair in headers]}
