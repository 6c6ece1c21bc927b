"""Scripted replicas whose events come over a real link, and a front door behind the proxy's real guard."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx

from configs.cluster import LinkSettings
from configs.settings import LimitsSettings
from replicas.links import EventSender, Inlet, Links
from replicas.messages import Event, GenerateRequest
from router.http.direct_reply import DirectReplies
from router.http.proxy_guard import ProxyGuard
from router.routing.linked_call import LinkedCall
from tests.support.router.fake_replica import FakeReplicas, Script
from tests.support.router.router_harness import House

LINKS = LinkSettings()
LOOPBACK = "127.0.0.1"


class LinkedReplicas(FakeReplicas):
    """`FakeReplicas` at the far end of a link, as `replicas.deployment.Replica` is."""

    def __init__(self, script: Callable[[GenerateRequest], Script]) -> None:
        super().__init__(script)
        self.inlet = Inlet(LOOPBACK, LINKS, 0.02)
        self.links = Links(LINKS, 60.0)

    async def generate(self, request: GenerateRequest, session_key: str) -> AsyncGenerator[list[Event], None]:
        ticket = uuid.uuid4().hex
        asked = replace(
            request, route=replace(request.route, ticket=ticket), reply_to=await self.inlet.address()
        )
        call = LinkedCall(self._replica(asked, session_key), self.inlet, ticket)
        is_over = False
        try:
            async for events in call:
                yield events
                is_over = any(getattr(event, "finish_reason", None) for event in events)
        finally:
            call.close(is_over=is_over)

    async def _replica(self, request: GenerateRequest, session_key: str) -> AsyncIterator[list[Event]]:
        link = await self.links.reach(request.reply_to)
        assert link is not None
        sender = EventSender(request.n, link, request.route.ticket, lambda event: event)
        try:
            async with aclosing(super().generate(request, session_key)) as scripted:
                async for events in scripted:
                    for event in events:
                        sender.put(event)
            async for unsent in sender.unsent():
                yield unsent
        finally:
            sender.close()


@asynccontextmanager
async def through_proxy(
    house: House, links: LinkSettings = LINKS, guard_app: Any = None
) -> AsyncIterator[tuple[httpx.AsyncClient, Inlet]]:
    """A client of the house behind the proxy's guard; the inlet is the proxy's."""
    inlet = Inlet(LOOPBACK, links, 0.02)
    guard = ProxyGuard(guard_app or house.app, limits=LimitsSettings(), replies=DirectReplies(inlet))
    await house.service.readiness.poll()
    transport = httpx.ASGITransport(guard, raise_app_exceptions=True)
    async with httpx.AsyncClient(transport=transport, base_url=f"http://{LOOPBACK}") as client:
        try:
            yield client, inlet
        finally:
            inlet.close()


def deltas(body: str) -> list[Any]:
    """The JSON of a stream's events, without what differs between two answers."""
    found = [
        json.loads(line.removeprefix("data: ")) for line in body.splitlines() if line.startswith("data: {")
    ]
    return [{name: part for name, part in one.items() if name not in ("id", "created")} for one in found]
