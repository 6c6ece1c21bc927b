"""Guard in front of Ray Serve's own HTTP proxy, inside the proxy's process.

Serve calls `install` there (the function named by `RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH`, see
`proxy_environment`) before it starts uvicorn. The guard bounds headers, bodies and slow clients, hides
Serve's control paths, removes headers with which a client could steer the proxy, and gives every answer
that Serve makes itself OpenAI's shape. Settings are passed by environment, because nothing else reaches
that process. HAProxy, which Ray 2.60 can put in its place, bounds headers and slow clients as well; until it
stands there this is the wall (F31 and F33 in docs/faults.md).
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn.config
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from samovar.configs.optional_sections import IngressSettings, TelemetrySettings
from samovar.configs.settings import LimitsSettings, Settings
from samovar.configs.telemetry import NO_SPAN, Span, Tracer, open_tracer
from samovar.configs.tls import RenewedContext, TlsFiles
from samovar.router.auth import OPEN_PATH
from samovar.router.openai import (
    ApiError,
    BadHttp,
    BodyTooLarge,
    InternalError,
    InvalidValue,
    Loading,
    RequestTimeout,
    RouteNotFound,
    Stopping,
    TooManyRequests,
    Unavailable,
    declared_bytes,
)
from samovar.router.openai import dialect as sse
from samovar.router.proxy.asgi import POLICY_VIOLATION, TRACED, request_id_of, send_error
from samovar.router.proxy.carrier import EarlyBody, RequestCarrier, RetryBuffer
from samovar.router.proxy.environment import (
    CALLBACK,
    CALLBACK_VARIABLE,
    inlet_from_environment,
    links_environment,
)
from samovar.router.proxy.http_guard import CONTROL_OPEN, ConnectionLimits, guarded_protocol
from samovar.router.proxy.known_ingresses import KNOWN, KnownIngresses

logger = logging.getLogger("ray.serve")  # only Serve's loggers have a handler in the proxy's process


PREFIX = "SAMOVAR_PROXY_"
LIMIT_FIELDS = (
    "header_bytes_max",
    "header_read_s",
    "body_bytes_max",
    "write_idle_s",
    "request_timeout_s",
    "retry_after_s",
)
REPEAT_BYTES = f"{PREFIX}REPEAT_BYTES_MAX"
TELEMETRY_PREFIX = f"{PREFIX}TELEMETRY_"
TELEMETRY_FIELDS = ("otlp_endpoint", "sample_ratio", "queue_max", "export_interval_s")

CONTROL_PREFIX = "/-/"
STOPPING_S = 60.0  # how long an app that is gone counts as stopping; then a new one is awaited
HEALTH_WAIT_S = 2.0  # Serve holds requests while no ingress is up; /health must not wait for that
# Headers with which a client could disable Serve's timeouts and its disconnect detection, steer its routing,
# or name (to ingresses of before docs/adr/018) where its answer goes.
STEERING_HEADERS = frozenset(
    {
        b"x_request_timeout_seconds",
        b"x_request_disconnect_disabled",
        b"serve_multiplexed_model_id",
        b"x_samovar_reply_to",
    }
)
SESSION_HEADER = b"x_session_id"
TRACE_HEADER = b"traceparent"


def proxy_environment(settings: Settings) -> dict[str, str]:
    """Return the variables to set before Ray starts, so that its proxies install this guard."""
    limits = settings.limits.model_dump(include=set(LIMIT_FIELDS))
    return (
        {CALLBACK_VARIABLE: CALLBACK, REPEAT_BYTES: str(settings.ingress.repeat_bytes_max)}
        | links_environment(settings)
        | {f"{PREFIX}{name.upper()}": str(value) for name, value in limits.items()}
        | _telemetry_environment(settings.telemetry)
    )


def read_by_proxies(settings: Settings) -> dict[str, object]:
    """Return, by setting, what a proxy knows from its environment: it is read once, when the proxy starts."""
    limits = {f"limits.{name}": getattr(settings.limits, name) for name in LIMIT_FIELDS}
    telemetry = {f"telemetry.{name}": getattr(settings.telemetry, name) for name in TELEMETRY_FIELDS}
    return limits | telemetry | {"ingress.repeat_bytes_max": settings.ingress.repeat_bytes_max}


def _telemetry_environment(settings: TelemetrySettings) -> dict[str, str]:
    if settings.otlp_endpoint is None:
        return {}
    return {f"{TELEMETRY_PREFIX}{name.upper()}": str(getattr(settings, name)) for name in TELEMETRY_FIELDS}


def tracer_from_environment(environ: Mapping[str, str]) -> Tracer | None:
    """Return the tracer of this proxy by what `proxy_environment` wrote; None: without traces."""
    named = ((name, f"{TELEMETRY_PREFIX}{name.upper()}") for name in TELEMETRY_FIELDS)
    given = {name: environ[variable] for name, variable in named if variable in environ}
    try:
        return open_tracer(TelemetrySettings.model_validate(given), "proxy")
    except ImportError as error:  # requests are worth more than their traces
        logger.error("no spans of this proxy: %s; install the extra otel on this node", error)
        return None


def limits_from_environment(environ: Mapping[str, str]) -> LimitsSettings:
    """Return the limits that `proxy_environment` wrote; defaults for missing ones."""
    given = {name: environ.get(f"{PREFIX}{name.upper()}") for name in LIMIT_FIELDS}
    return LimitsSettings.model_validate({name: value for name, value in given.items() if value is not None})


def install() -> list[Middleware]:
    """Replace uvicorn's HTTP protocol and return the middleware for its app. Called by Serve."""
    limits = limits_from_environment(os.environ)
    connection = ConnectionLimits(limits.header_bytes_max, limits.header_read_s, limits.write_idle_s)
    # uvicorn accepts a class where it expects the name of one; Serve leaves `http` at "auto".
    uvicorn.config.HTTP_PROTOCOLS["auto"] = guarded_protocol(connection)  # type: ignore[assignment]
    # It knows one certificate for ever, and Serve's options have no way to ask clients for theirs.
    uvicorn.config.create_ssl_context = _renewed_context  # type: ignore[assignment]
    inlet = inlet_from_environment(os.environ)
    carrier = None if inlet is None else RequestCarrier(inlet)
    tracer = tracer_from_environment(os.environ)
    bodies = RetryBuffer(int(os.environ.get(REPEAT_BYTES, IngressSettings().repeat_bytes_max)))
    return [Middleware(ProxyGuard, limits=limits, carrier=carrier, tracer=tracer, bodies=bodies)]


def _renewed_context(
    certfile: str, keyfile: str, *args: Any, ca_certs: str | None = None, **kwargs: Any
) -> ssl.SSLContext:
    """Return what uvicorn's own returns for these files, of TLS 1.2 at least and renewed as they change."""
    return RenewedContext(
        TlsFiles(Path(certfile), Path(keyfile), Path(ca_certs) if ca_certs else None)
    ).context


class AppPresence:
    """Whether there is no app yet, or none any more, as the answers of Serve's proxy show. Pure."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._was_up = False
        self._gone_at_s: float | None = None

    def answered(self) -> None:
        """Note an answer of the app."""
        self._was_up, self._gone_at_s = True, None

    def missed(self, retry_after_s: float) -> Unavailable:
        """Note that there is no app, and return the error that says why."""
        now_s = self._clock()
        if self._gone_at_s is None:
            self._gone_at_s = now_s
        is_stopping = self._was_up and now_s - self._gone_at_s < STOPPING_S
        return Stopping(retry_after_s) if is_stopping else Loading(retry_after_s)


class ProxyGuard:
    """The outermost ASGI middleware of Serve's proxy. `tracer`: of what is posted or deleted, or None.

    `carrier`: brings requests to ingresses over links; None: Serve brings them all. `bodies`: of requests
    that it sends once more, if their ingress dies before the answer begins.

    The ingress's span of a traced request stands below the proxy's, which lasts from the request's head
    until the last byte of the answer has been handed to the connection.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        limits: LimitsSettings,
        carrier: RequestCarrier | None = None,
        tracer: Tracer | None = None,
        bodies: RetryBuffer | None = None,
    ) -> None:
        self._tracer = tracer
        self._bodies = bodies or RetryBuffer(0)
        self._app = app
        self._limits = limits
        self._carrier = carrier
        self._serve = ServeProxy(app)
        self._presence = AppPresence()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": POLICY_VIOLATION})
        elif scope["type"] == "http":
            await self._http(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = request_id_of(Headers(scope=scope))
        if self._tracer is None or scope["method"] not in TRACED:
            await self._pass(scope, receive, send, request_id, NO_SPAN)
            return
        span = self._tracer.request("proxy", Headers(scope=scope))
        status = 499  # until a response starts

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._pass(scope, receive, noted, request_id, span)
        finally:
            span.set({"http.request.method": scope["method"], "http.response.status_code": status})
            span.set({"samovar.request_id": request_id})
            span.end(str(status) if status >= 500 else "")

    async def _pass(self, scope: Scope, receive: Receive, send: Send, request_id: str, span: Span) -> None:
        """Pass a request on, and make sure of its answer."""
        kept = self._bodies.of(scope, receive)

        async def answer(message: Message) -> None:
            kept.drop()
            await send(message)

        reply = _GuardedSend(answer, scope, request_id, self._limits, self._presence, span.header)
        body = _BoundedBody(kept, self._limits.body_bytes_max)
        try:
            self._check(scope)
            cleaned = _cleaned(scope, request_id, span.header)
            is_lost = await self._once(cleaned, body, reply)
            if is_lost and kept.rewind():
                logger.warning("request %s: its ingress was lost; it goes to another", request_id)
                body.begin_again()
                is_lost = await self._once(cleaned, body, reply)
        except TimeoutError:  # the app is there, and its process is not
            await reply.fail(Loading(self._limits.retry_after_s))
        except ApiError as error:
            await reply.fail(error)
        except Exception:  # Serve's own exceptions must end in an answer too
            logger.exception("request %s failed in the proxy", request_id)
            await reply.fail(InternalError(request_id))
        else:
            if body.is_too_large:
                await reply.fail(BodyTooLarge(self._limits.body_bytes_max))
            elif is_lost:
                message = "The process that handled this request was lost. Try again."
                await reply.fail(Unavailable(message, self._limits.retry_after_s, code="ingress_lost"))
        finally:
            kept.drop()

    async def _once(self, cleaned: Scope, body: _BoundedBody, reply: _GuardedSend) -> bool:
        """Send a request to an ingress; return whether that was lost before it had answered."""
        wait_s = HEALTH_WAIT_S if cleaned["path"] == OPEN_PATH else None
        async with asyncio.timeout(wait_s) as patience:
            early = EarlyBody(body)
            if not await self._over_link(cleaned, early, reply):
                await self._app(cleaned, early, reply)
        if patience.expired():  # Serve's proxy swallows the cancellation
            raise TimeoutError
        return not (reply.is_complete or body.is_disconnected or body.is_too_large)

    async def _over_link(self, cleaned: Scope, body: EarlyBody, reply: _GuardedSend) -> bool:
        """Have an ingress serve a request over a link; return whether one has taken it."""
        path = cleaned["path"]
        if self._carrier is None or path.startswith(CONTROL_PREFIX):
            return False
        if (ingresses := self._serve.ingresses(path)) is None:
            return False
        given = (value for name, value in cleaned["headers"] if _normal(name) == SESSION_HEADER)
        session = next(given, b"").decode("ascii")
        with self._serve.counted():
            return await self._carrier.carry(ingresses, session, cleaned, body, reply)

    def _check(self, scope: Scope) -> None:
        path = scope["path"]
        if not path.startswith("/"):  # `OPTIONS *`: Serve has no route for it, as before there is an app
            raise BadHttp("The request's target is not a path that begins with /.")
        if path.startswith(CONTROL_PREFIX) and path != CONTROL_OPEN:
            raise RouteNotFound(scope["method"], path)
        declared = declared_bytes(Headers(scope=scope))
        if declared is not None and declared > self._limits.body_bytes_max:
            raise BodyTooLarge(self._limits.body_bytes_max)
        for name, value in scope["headers"]:
            if _normal(name) == SESSION_HEADER and not value.isascii():
                raise InvalidValue("x-session-id", "x-session-id holds characters that are not ASCII.")


class _BoundedBody:
    """ASGI `receive` that ends the request if the body is over the limit."""

    def __init__(self, receive: Receive, bytes_max: int) -> None:
        self._receive = receive
        self._bytes_max = self._bytes_left = bytes_max
        self.is_too_large = False
        self.is_disconnected = False

    async def __call__(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.is_disconnected = True
            return message
        self._bytes_left -= len(message.get("body", b""))
        if self._bytes_left < 0:
            self.is_too_large = True
            return {"type": "http.disconnect"}  # makes Serve cancel the request; we answer it
        return message

    def begin_again(self) -> None:
        """Count from the body's beginning."""
        self._bytes_left = self._bytes_max


class _GuardedSend:
    """ASGI `send` that replaces Serve's own errors. `fail` does nothing once the reply is complete."""

    def __init__(
        self,
        send: Send,
        scope: Scope,
        request_id: str,
        limits: LimitsSettings,
        presence: AppPresence,
        traceparent: str,
    ) -> None:
        self._traceparent = traceparent.encode()
        self._presence = presence
        self._send = send
        self._scope = scope
        self._request_id = request_id
        self._limits = limits
        self._is_started = False
        self.is_complete = False
        self._is_stream = False
        self._replacement: ApiError | None = None

    async def __call__(self, message: Message) -> None:
        if self.is_complete:
            return
        if message["type"] == "http.response.start":
            content_type = Headers(raw=list(message.get("headers", []))).get("content-type", "")
            if message["status"] >= 400 and not content_type.startswith(("application/json", "text/event-")):
                self._replacement = self._of_serve(message["status"])
                return
            if not self._scope["path"].startswith(CONTROL_PREFIX):
                self._presence.answered()
            self._is_stream = content_type.startswith("text/event-stream")
            self._is_started = True
            await self._send({**message, "headers": self._headers(message)})
        elif self._replacement is not None:
            if not message.get("more_body", False):
                await self.fail(self._replacement)
        else:
            self.is_complete = not message.get("more_body", False)
            await self._send(message)

    async def fail(self, error: ApiError) -> None:
        """End the response with `error`, as far as what has been sent allows."""
        if self.is_complete:
            return
        if not self._is_started:
            self.is_complete = True
            await send_error(self._with_id, error)
        elif self._is_stream:
            self.is_complete = True
            await self._send({"type": "http.response.body", "body": sse.error(error), "more_body": False})
        # else: uvicorn closes the connection; the missing bytes tell the client

    async def _with_id(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": self._headers(message)}
        await self._send(message)

    def _headers(self, message: Message) -> list[tuple[bytes, bytes]]:
        """Return the headers with exactly one `x-request-id`: both Serve and the ingress set it.

        Of an answer that the ingress has not made, the trace is the proxy's.
        """
        kept = [
            (name, value) for name, value in message.get("headers", []) if name.lower() != b"x-request-id"
        ]
        if self._traceparent and all(name.lower() != TRACE_HEADER for name, _ in kept):
            kept.append((TRACE_HEADER, self._traceparent))
        return [*kept, (b"x-request-id", self._request_id.encode())]

    def _of_serve(self, status: int) -> ApiError:
        """Return the error that replaces an error page made by Serve."""
        wait_s = self._limits.retry_after_s
        if status == 404:  # our app takes every path, so there is no app yet, or none any more
            return self._presence.missed(wait_s)
        if status == 408:
            return RequestTimeout("The whole request", self._limits.request_timeout_s)
        if status == 429:
            return TooManyRequests("Too many requests. Try again later.", wait_s)
        if status == 503:
            return Unavailable("The server cannot take this request now. Try again later.", wait_s)
        logger.error("request %s: the proxy answered %d", self._request_id, status)
        return InternalError(self._request_id)


def _cleaned(scope: Scope, request_id: str, traceparent: str = "") -> Scope:
    """Return the scope without steering headers and with one valid `x-request-id`.

    `traceparent`: of the proxy's span, in place of the client's; empty: the client's stays.
    """
    headers = [
        (name, value)
        for name, value in scope["headers"]
        if name.isascii() and name != b"x-request-id" and _normal(name) not in STEERING_HEADERS
    ]
    if traceparent:
        headers = [one for one in headers if one[0] != TRACE_HEADER]
        headers.append((TRACE_HEADER, traceparent.encode()))
    return {**scope, "headers": [*headers, (b"x-request-id", request_id.encode())]}


def _normal(name: bytes) -> bytes:
    """Return a header's name as Serve compares it."""
    return name.lower().replace(b"-", b"_")


OURS = ("proxy_router", "_ongoing_requests_start", "_ongoing_requests_end")
ROUTE = "/"


class ServeProxy:
    """Serve's routes, and its count of open requests: a proxy with some is not stopped with its node (ray
    2.60).

    `app`: what Serve passes requests to, the proxy itself or a middleware before it. Another version of Serve
    may have neither; then it carries all requests.
    """

    def __init__(self, app: ASGIApp | None) -> None:
        found: Any = app
        while found is not None and not all(hasattr(found, name) for name in OURS):
            found = getattr(found, "_app", None)
        self._proxy = found

    def ingresses(self, path: str) -> KnownIngresses | None:
        """Return the ingresses that a path is routed to; None: it is not ours, or there is no app."""
        if self._proxy is None:
            return None
        matched = self._proxy.proxy_router.match_route(path)
        return None if matched is None or matched[0] != ROUTE else KNOWN.get(matched[1].deployment_id)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count an open request."""
        self._proxy._ongoing_requests_start()
        try:
            yield
        finally:
            self._proxy._ongoing_requests_end()
