"""What is used of Ray Serve's own HTTP proxy beside its ASGI interface, in its process (ray 2.60)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from starlette.types import ASGIApp

from samovar.router.proxy.known_ingresses import KNOWN, KnownIngresses

OURS = ("proxy_router", "_ongoing_requests_start", "_ongoing_requests_end")
ROUTE = "/"


class ServeProxy:
    """Serve's routes, and its count of open requests: a proxy with some is not stopped with its node.

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
