"""CORS: which pages in a browser may call the API from their scripts. Off without `server.cors_origins`."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

ANY = "*"
SHOWN_HEADERS = ("x-request-id", "traceparent", "x-cache", "x-replica", "x-ignored-fields", "retry-after")
"""Headers of a response that scripts may read."""


class CorsOrigins:
    """ASGI middleware: Starlette's CORS for the allowed `origins`; all else passes as if it were not there.

    A key is sent in a header, so cookies and the browser's own credentials are never allowed.
    """

    def __init__(self, app: ASGIApp, *, origins: Sequence[str]) -> None:
        self._app = app
        self._origins = frozenset(origins)
        self._cors = CORSMiddleware(
            app,
            allow_origins=tuple(origins),
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=(ANY,),
            allow_credentials=False,
            allow_private_network=True,
            expose_headers=SHOWN_HEADERS,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_allowed = scope["type"] == "http" and self.allows(Headers(scope=scope).get("origin"))
        await (self._cors if is_allowed else self._app)(scope, receive, send)

    def allows(self, origin: str | None) -> bool:
        """Return whether scripts of an origin may call the API."""
        return origin is not None and (ANY in self._origins or origin in self._origins)
