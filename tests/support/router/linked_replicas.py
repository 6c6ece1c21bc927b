"""An ingress behind the proxy's real guard, with a real link between them."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from starlette.types import ASGIApp, Receive, Scope, Send

from samovar.configs.cluster import LinkSettings
from samovar.configs.settings import LimitsSettings
from samovar.replicas.links import Inlet
from samovar.replicas.messages import ReplyTo
from samovar.router.ingress.taker import RequestTaker
from samovar.router.proxy import ADDRESS, KNOWN, KnownIngresses, ListedIngress, RequestCarrier, RetryBuffer
from samovar.router.proxy.proxy_guard import ProxyGuard
from tests.support.router.router_harness import House

LINKS = LinkSettings(connect_s=30.0)
"""Connecting takes what it takes on a machine that is loaded: only the tests about it bound that."""
LOOPBACK = "127.0.0.1"


class ServeDouble:
    """Serve's own proxy before an app, with what our guard uses of it. `carried`: what it brought itself."""

    def __init__(self, app: ASGIApp, route: str = "/") -> None:
        self.proxy_router = self
        self.deployment_id = uuid.uuid4().hex
        self.route: str | None = route
        self.carried: list[Scope] = []
        self.ongoing = self.counted = 0
        self._served = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.carried.append(scope)
        await self._served(scope, receive, send)

    def match_route(self, path: str) -> tuple[str, ServeDouble, bool] | None:
        return None if self.route is None else (self.route, self, False)

    def _ongoing_requests_start(self) -> None:
        self.ongoing += 1
        self.counted += 1

    def _ongoing_requests_end(self) -> None:
        self.ongoing -= 1


@dataclass
class Proxied:
    """An ingress behind the proxy's guard. `inlet`: the proxy's; `taker`, `ingress`: the ingress's."""

    guard: ProxyGuard
    serve: ServeDouble
    inlet: Inlet
    taker: RequestTaker
    ingress: Inlet
    known: KnownIngresses

    def close(self) -> None:
        self.inlet.close()
        self.ingress.close()


async def proxied(
    app: ASGIApp,
    links: LinkSettings = LINKS,
    *,
    serve: ASGIApp | None = None,
    takes: bool = True,
    limits: LimitsSettings | None = None,
    bodies: RetryBuffer | None = None,
) -> Proxied:
    """Return the guard before an app that takes requests over links. `serve`: by default it runs the app."""
    double, inlet, ingress = (
        ServeDouble(serve or app),
        Inlet(LOOPBACK, links, 0.02),
        Inlet(LOOPBACK, links, 0.02),
    )
    taker, known = RequestTaker(ingress, 60.0), KNOWN.setdefault(double.deployment_id, KnownIngresses())
    taker.app = app
    address = ReplyTo.of((await taker.listen())[ADDRESS]) if takes else None
    known.update([ListedIngress("ingress-1", "here", address)], "here")
    carrier = RequestCarrier(inlet)
    guard = ProxyGuard(double, limits=limits or LimitsSettings(), carrier=carrier, bodies=bodies)
    return Proxied(guard, double, inlet, taker, ingress, known)


@asynccontextmanager
async def through_proxy(
    house: House, links: LinkSettings = LINKS, app: ASGIApp | None = None, **options: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, Proxied]]:
    """A client of the house behind the proxy's guard."""
    there = await proxied(app or house.app, links, **options)
    await house.service.readiness.poll()
    transport = httpx.ASGITransport(there.guard, raise_app_exceptions=True)
    async with httpx.AsyncClient(transport=transport, base_url=f"http://{LOOPBACK}") as client:
        try:
            yield client, there
        finally:
            there.close()


def deltas(body: str) -> list[Any]:
    """The JSON of a stream's events, without what differs between two answers."""
    found = [
        json.loads(line.removeprefix("data: ")) for line in body.splitlines() if line.startswith("data: {")
    ]
    return [{name: part for name, part in one.items() if name not in ("id", "created")} for one in found]
