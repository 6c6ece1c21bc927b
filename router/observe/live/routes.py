"""Routes of the live page: its files, and its data: the stream, and a tenant's usage.

The files are read once from the package and served with headers that forbid everything else. One is found by
its whole name among those that were read, so no request can name another path.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

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
from samovar.router.observe.live.feed import Json
from samovar.router.observe.live.hub import LiveHub
from samovar.router.observe.live.state import totals_of
from samovar.router.openai import RouteNotFound, Unavailable
from samovar.router.routing import DirectoryLost

logger = logging.getLogger(__name__)


PING = b": ping\n\n"
STREAM_HEADERS = [
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
            await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
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

    async def _held(self, tenant: str) -> dict[str, int | None] | None:
        """Return a tenant's bytes by tier (see `SessionRoutes`); None if the directory does not answer."""
        client, link = self._service.client, self._service.directory.link
        tag = tenant_tag(self._service.secret, tenant)
        held: dict[str, int | None] = {
            "gpu": await client.pool_bytes(tag, b""),
            **dict.fromkeys(TIERS, 0),
        }
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


FOLDER = Path(__file__).resolve().parent / "page"
INDEX = "index.html"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".woff2": "font/woff2",
    ".txt": "text/plain; charset=utf-8",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"  # no text ever becomes markup or code
)
FILE_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",  # asked for again each time; the tag says that nothing has changed
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file: its bytes, their type and their tag."""

    content: bytes
    content_type: str
    etag: str


def read_files(folder: Path) -> dict[str, PageFile]:
    """Return the files below `folder` of the types that are served, by name relative to it."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.suffix in TYPES and path.is_file() and not any(part.startswith(".") for part in name.parts):
            content = path.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
            found[name.as_posix()] = PageFile(content, TYPES[path.suffix], etag)
    return found


class PageFiles:
    """Handlers of `/` and `/page/...`. They raise `ApiError`. `files`: by default those of the package."""

    def __init__(self, files: Mapping[str, PageFile] | None = None) -> None:
        self._files = read_files(FOLDER) if files is None else files

    async def index(self, request: Request) -> Response:
        """Handle GET /."""
        return self._answer(INDEX, request)

    async def one(self, request: Request) -> Response:
        """Handle GET /page/{name}."""
        return self._answer(request.path_params["name"], request)

    def _answer(self, name: str, request: Request) -> Response:
        file = self._files.get(name)
        if file is None:
            raise RouteNotFound(request.method, request.url.path)
        headers = {**FILE_HEADERS, "etag": file.etag}
        if file.etag in (tag.strip().removeprefix("W/") for tag in _tags(request)):
            return Response(status_code=304, headers=headers)
        return Response(file.content, headers={**headers, "content-type": file.content_type})


def _tags(request: Request) -> list[str]:
    return request.headers.get("if-none-match", "").split(",")
