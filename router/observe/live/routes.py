"""Routes of the live page's data: the stream, and a tenant's usage."""

from __future__ import annotations

import asyncio
import logging
from contextlib import closing

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from samovar.cache_tiers.blocks import TIERS, tenant_tag
from samovar.router.auth import ADMIN, Caller
from samovar.router.generation import (
    IngressServices,
    ResponseSender,
    TenantUsage,
    cancel_on_disconnect,
    summed,
)
from samovar.router.observe.live.hub import LiveHub
from samovar.router.observe.live.merge_patch import Json
from samovar.router.observe.live.state import totals_of
from samovar.router.openai import Unavailable
from samovar.router.routing import DirectoryLost

logger = logging.getLogger(__name__)

PING = b": ping\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # else nginx buffers the stream
]


class LiveRoutes:
    """Handlers of `/v1/live` and `/v1/usage`. They raise `ApiError`."""

    def __init__(self, service: IngressServices, hub: LiveHub) -> None:
        self._service = service
        self._hub = hub

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle GET /v1/live, a raw ASGI app: a stream, until the reader leaves or its time is over."""
        if self._hub.is_closing:
            message = "The server is stopping. Try again later."
            raise Unavailable(message, self._service.settings.limits.retry_after_s, code="draining")
        caller: Caller = scope["state"]["caller"]
        with closing(ResponseSender(send, self._service.settings.limits.write_idle_s)) as sender:
            await cancel_on_disconnect(receive, self._stream(caller, scope["method"], sender), sender)

    async def _stream(self, caller: Caller, method: str, send: Send) -> None:
        settings, keepalive_s = self._service.settings.live, self._service.settings.server.sse_keepalive_s
        with self._hub.stream(caller) as (outbox, wake):
            await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
            try:
                async with asyncio.timeout(0 if method == "HEAD" else settings.stream_s_max):
                    while not self._hub.is_closing:
                        wake.clear()
                        news = outbox.take()
                        if news:
                            await send(_body(news))
                            await asyncio.sleep(settings.period_s)  # the least time between two messages
                        elif not await _set_within(wake, keepalive_s):
                            await send(_body(PING))
            except TimeoutError:
                logger.debug("a stream of /v1/live has lasted live.stream_s_max")
        await send(_body(b"", more=False))

    async def usage(self, request: Request) -> Response:
        """Handle GET /v1/usage: the tenant's own; the administrator gets the sums and every tenant's."""
        caller: Caller = request.scope["state"]["caller"]
        book = self._service.usage
        with self._service.reads.lease(caller.tenant or ADMIN):
            if caller.tenant is not None:
                own = self._told(caller.tenant, book.of(caller.tenant))
                return JSONResponse(own | {"bytes_held": await self._held(caller.tenant)})
            every = book.all()
            tenants = {name: self._told(name, usage) for name, usage in every.items()}
            return JSONResponse(self._told(None, summed(every.values())) | {"tenants": tenants})

    def _told(self, tenant: str | None, usage: TenantUsage) -> Json:
        return {
            "object": "usage",
            **({} if tenant is None else {"tenant": tenant}),
            "since_unix_s": round(self._service.usage.since_unix_s, 3),
            "prompt_tokens": usage.prompt_tokens,
            **totals_of(usage),
        }

    async def _held(self, tenant: str) -> dict[str, int] | None:
        """Return a tenant's bytes by tier; None if the directory does not answer."""
        client, link = self._service.client, self._service.directory.link
        tag = tenant_tag(self._service.secret, tenant)
        held = {"gpu": await client.pool_bytes(tag, b""), **dict.fromkeys(TIERS, 0)}
        if link is None:
            return held
        try:
            return held | await link.tenant_held(tag)
        except DirectoryLost as lost:
            logger.warning("the bytes of a tenant could not be requested: %s", lost)
            return None


def _body(part: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": part, "more_body": more}


async def _set_within(event: asyncio.Event, seconds: float) -> bool:
    """Wait for an event, at most `seconds`; return whether it is set."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True
