"""The outermost middleware: request id, host check, API key, and OpenAI-shaped errors.

Every request that passes has a caller, and every response has an `x-request-id`. Internal errors are logged
with that id and answered with nothing but the id.
"""

from __future__ import annotations

import ipaddress
import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from samovar.configs.telemetry import NO_SPAN, Span, Tracer, noted_request
from samovar.router.auth import PAGE_FILES, Authenticator, is_open, is_preflight
from samovar.router.metrics import Metrics
from samovar.router.openai import ApiError, ClientClosedRequest, Forbidden, InternalError, shown
from samovar.router.paths import (
    DOCUMENT_ROUTE,
    DOCUMENTS,
    KEY_ROUTE,
    KEYS,
    PREFILL,
    PREFILL_ROUTE,
    ROTATE,
    ROTATE_ROUTE,
)
from samovar.router.proxy import POLICY_VIOLATION, TRACED, request_id_of, send_error

logger = logging.getLogger(__name__)


AUTHORITY = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\[\]:/@\s]+))(?::\d{0,5})?")
ORIGIN = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)")  # browsers send scheme, host and port, or `null`
DEFAULT_PORTS = {"http": ":80", "https": ":443"}


class LocalHosts:
    """Host names that an endpoint without API keys answers to.

    Such an endpoint listens on loopback, but a browser on that machine also runs foreign pages: a page may
    post to 127.0.0.1, or point its own name at our address (DNS rebinding) and read the answers. Both show
    in the headers that the browser itself writes, `Host` and `Origin`. Allowed hosts: `localhost`, every
    loopback address, and the names in `allowed` (`server.allowed_hosts`). Allowed pages: those that come from
    this very host and port, as another port may be another user's, and `origins` (`server.cors_origins`).
    """

    def __init__(self, allowed: Iterable[str], origins: Iterable[str] = ()) -> None:
        self._origins = frozenset(origins)
        self._allowed = frozenset(name.lower() for name in allowed) | {"localhost"}

    def check(self, scope: Scope) -> None:
        """Raise `Forbidden` for a foreign `Host` or `Origin`, except on the open health path."""
        if is_open(scope):
            return
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if len(hosts) != 1:
            raise Forbidden(f"One Host header is needed; this request has {len(hosts)}.")
        if not self._is_ours(hosts[0]):
            raise Forbidden(
                f"The Host {shown(hosts[0])} is neither localhost nor a loopback address, and this endpoint "
                "has no API keys. If it is yours, put its name into server.allowed_hosts, or set "
                "auth.api_keys."
            )
        for origin in headers.getlist("origin"):
            if origin not in self._origins and not _is_own(origin, hosts[0]):
                raise Forbidden(
                    f"The Origin {shown(origin)} is not that of the Host {shown(hosts[0])}, and this "
                    "endpoint has no API keys. If the page is yours, put its origin into "
                    "server.cors_origins, or set auth.api_keys."
                )

    def _is_ours(self, authority: str) -> bool:
        """Return whether `authority`, a host with or without a port, is allowed."""
        match = AUTHORITY.fullmatch(authority)
        if match is None:
            return False
        host = (match[1] or match[2]).lower()
        if match[2] and host.removesuffix(".") in self._allowed:
            return True
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return False  # a name: it may resolve to anything


def _is_own(origin: str, host: str) -> bool:
    """Return whether a page's origin is the host, with its port, that its request goes to."""
    match = ORIGIN.fullmatch(origin)
    if match is None:
        return False
    default = DEFAULT_PORTS.get(match[1].lower(), "")
    return match[2].lower().removesuffix(default) == host.lower().removesuffix(default)


SESSIONS = "/v1/sessions/"
RESPONSES = "/v1/responses/"
RESPONSE_ROUTE = "/v1/responses/{response_id}"
SESSIONS_ROUTE = "/v1/sessions/{session_id:path}"
HINT_ROUTE = "/v1/sessions/{session_id:path}/hint"
PAGE_ROUTE = PAGE_FILES + "{name:path}"
HINT = "/hint"
KNOWLEDGE = "/v1/knowledge/"
KNOWLEDGE_ROUTE = "/v1/knowledge/{entry}"
OTHER_ROUTE = "other"  # label for unknown paths: clients choose paths

ErrorBody = Callable[[ApiError, str], bytes]
"""An error and the request's id, to the body in an API's own shape."""


def openai_error(error: ApiError, request_id: str) -> bytes:
    """Return the body of an error in OpenAI's shape; the id is in a header only."""
    return error.body_bytes()


class AuthMiddleware:
    """ASGI middleware. Sets `caller` (None on an open path), `request_id` and `span` in the state.

    `hosts`: names an endpoint without keys answers to; None if keys protect it. `errors`: by the beginning
    of a path, the shape of its errors where it is not OpenAI's. `tracer`: of what is posted or deleted.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        authenticator: Authenticator,
        hosts: LocalHosts | None,
        metrics: Metrics,
        routes: frozenset[str],
        errors: Mapping[str, ErrorBody],
        tracer: Tracer | None = None,
    ) -> None:
        self._app = app
        self._errors = errors
        self._authenticator = authenticator
        self._hosts = hosts
        self._metrics = metrics
        self._routes = routes
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": POLICY_VIOLATION})

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = request_id_of(Headers(scope=scope))
        route = route_label(scope["path"], self._routes)
        span, started_s = self._span(scope), time.monotonic()
        reply = _TrackedSend(send, request_id, span.header)
        status = 499  # until a response starts
        noted_request(request_id, span.trace_id)
        try:
            if self._hosts is not None:
                self._hosts.check(scope)
            if is_preflight(scope):
                status = 204
                await _answer_preflight(reply)
                return
            caller = self._authenticator.caller(scope)
            scope["state"] = {
                **scope.get("state", {}),
                "caller": caller,
                "request_id": request_id,
                "span": span,
            }
            with self._metrics.in_flight.track_inprogress():
                await self._app(scope, receive, reply)
            status = reply.status or status
        except ApiError as error:
            status = error.status
            await self._refuse(reply, error, scope["path"])
        except Exception:  # the last place where an exception can become an answer
            logger.exception("request %s failed", request_id)
            status = 500
            await self._refuse(reply, InternalError(request_id), scope["path"])
        finally:
            self._metrics.requests.labels(route, str(status)).inc()
            span.set(
                {"http.request.method": scope["method"], "http.route": route}
                | {"http.response.status_code": status, "samovar.request_id": request_id}
            )
            span.end(str(status) if status >= 500 else "")
            if logger.isEnabledFor(logging.INFO):
                self._log(request_id, route, status, time.monotonic() - started_s)

    def _span(self, scope: Scope) -> Span:
        if self._tracer is None or scope["method"] not in TRACED:
            return NO_SPAN
        return self._tracer.request("request", Headers(scope=scope))

    def _log(self, request_id: str, route: str, status: int, seconds: float) -> None:
        fields = {"route": route, "status": status, "seconds": round(seconds, 6)}
        message = "request %s: %s answered %d in %.3f s"
        logger.info(message, request_id, route, status, seconds, extra={"fields": fields})

    async def _refuse(self, reply: _TrackedSend, error: ApiError, path: str) -> None:
        if reply.status is not None or isinstance(error, ClientClosedRequest):
            return  # too late, or the client is gone; the server closes the connection
        shapes = (
            made for begin, made in self._errors.items() if path == begin or path.startswith(f"{begin}/")
        )
        await send_error(reply, error, next(shapes, openai_error)(error, reply.request_id))


async def _answer_preflight(send: Send) -> None:
    """Answer a browser's preflight: no origin is allowed, which the browser concludes from the silence."""
    headers = [(b"allow", b"GET, POST, DELETE, OPTIONS"), (b"vary", b"Origin")]
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


def route_label(path: str, routes: frozenset[str]) -> str:
    """Return the route of `path` as a label; `other` for unknown paths."""
    if path.startswith(SESSIONS) and SESSIONS_ROUTE in routes:
        return HINT_ROUTE if path.endswith(HINT) and HINT_ROUTE in routes else SESSIONS_ROUTE
    if path.startswith(PAGE_FILES) and PAGE_ROUTE in routes:
        return PAGE_ROUTE
    if path.startswith(RESPONSES) and RESPONSE_ROUTE in routes:
        return RESPONSE_ROUTE
    if path.startswith(KNOWLEDGE) and path not in routes and KNOWLEDGE_ROUTE in routes:
        return KNOWLEDGE_ROUTE
    if path.startswith(f"{DOCUMENTS}/") and DOCUMENT_ROUTE in routes:
        return PREFILL_ROUTE if path.endswith(PREFILL) else DOCUMENT_ROUTE
    if path.startswith(f"{KEYS}/") and KEY_ROUTE in routes:
        return ROTATE_ROUTE if path.endswith(ROTATE) else KEY_ROUTE
    return path if path in routes else OTHER_ROUTE


class _TrackedSend:
    """ASGI `send` that adds the ids of request and trace, and remembers the status."""

    def __init__(self, send: Send, request_id: str, traceparent: str) -> None:
        self._send = send
        self._traceparent = traceparent
        self.request_id = request_id
        self.status: int | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["x-request-id"] = self.request_id
            if self._traceparent:
                headers["traceparent"] = self._traceparent
        await self._send(message)
