"""The outermost middleware: request id, host, API key, and an OpenAI-shaped answer for every failure.

Nothing gets past it without a caller, and nothing leaves it without an `x-request-id`. Faults of
ours are logged with that id and answered with nothing but it. Knows ASGI; nothing of what the
routes behind it do.
"""

from __future__ import annotations

import logging
import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.auth import Authenticator
from router.errors import ApiError, ClientClosedRequest, InternalError
from router.local_hosts import LocalHosts
from router.metrics import Metrics

logger = logging.getLogger("samovar.front_door")

REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
POLICY_VIOLATION = 1008  # WebSocket close code
SESSIONS = "/v1/sessions/"
SESSIONS_ROUTE = "/v1/sessions/{session_id:path}"
HINT_ROUTE = "/v1/sessions/{session_id:path}/hint"
HINT = "/hint"
OTHER_ROUTE = "other"  # label of everything that is not a route: clients choose paths


class FrontDoor:
    """ASGI middleware. Sets `caller` (None on the open health path) and `request_id` in the state.

    `hosts`: which names an endpoint without keys answers to; None where keys protect it.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        authenticator: Authenticator,
        hosts: LocalHosts | None,
        metrics: Metrics,
        routes: frozenset[str],
    ) -> None:
        self._app = app
        self._authenticator = authenticator
        self._hosts = hosts
        self._metrics = metrics
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": POLICY_VIOLATION})

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = request_id_of(Headers(scope=scope))
        reply = _Reply(send, request_id)
        status = 499  # until something is sent
        try:
            if self._hosts is not None:
                self._hosts.check(scope)
            caller = self._authenticator.caller(scope)
            scope["state"] = {**scope.get("state", {}), "caller": caller, "request_id": request_id}
            with self._metrics.in_flight.track_inprogress():
                await self._app(scope, receive, reply)
            status = reply.status or status
        except ApiError as error:
            status = error.status
            await self._refuse(reply, error)
        except Exception:  # the last place where a fault can still become an answer
            logger.exception("request %s failed", request_id)
            status = 500
            await self._refuse(reply, InternalError(request_id))
        finally:
            route = _label(scope["path"], self._routes)
            self._metrics.requests.labels(route, str(status)).inc()

    async def _refuse(self, reply: _Reply, error: ApiError) -> None:
        if reply.status is not None or isinstance(error, ClientClosedRequest):
            return  # too late, or nobody is there; the server closes the connection
        await send_error(reply, error)


def _label(path: str, routes: frozenset[str]) -> str:
    """The route of `path` as a label; `other` for whatever clients make up."""
    if path.startswith(SESSIONS) and SESSIONS_ROUTE in routes:
        return HINT_ROUTE if path.endswith(HINT) and HINT_ROUTE in routes else SESSIONS_ROUTE
    return path if path in routes else OTHER_ROUTE


class _Reply:
    """`send` that adds the request id and remembers the status."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._request_id = request_id
        self.status: int | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            MutableHeaders(scope=message)["x-request-id"] = self._request_id
        await self._send(message)


async def send_error(send: Send, error: ApiError) -> None:
    """The whole response of `error`."""
    body = error.body_bytes()
    headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers}
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": raw})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def request_id_of(headers: Headers) -> str:
    """The client's `x-request-id` when it is sane, else a new one."""
    given = headers.get("x-request-id", "")
    return given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
