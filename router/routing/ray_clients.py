"""Clients for the replicas and the session directory over Ray.

The only place on a request's path that holds a Serve handle. Ray's exceptions are turned into ours, so that
no caller depends on Ray. The handle's router chooses the replica.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any, TypeVar

from ray import get_runtime_context
from ray.exceptions import NodeDiedError, ObjectLostError, RayActorError, RayError, WorkerCrashedError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException

from samovar.cache_tiers.actors import rpc
from samovar.cache_tiers.blocks import Clear
from samovar.cache_tiers.forecast import HintEvent
from samovar.cache_tiers.messages import Cleared, NodeGlance, NodeStats
from samovar.cache_tiers.sessions import (
    Item,
    Kind,
    Move,
    Recalled,
    SessionRow,
    SessionsCleared,
    Sync,
    Synced,
    Use,
)
from samovar.cache_tiers.transport import PeerError
from samovar.configs.telemetry import Tracer
from samovar.replicas.links import FAILED, Inlet, LinkLost, Links
from samovar.replicas.messages import (
    Admitted,
    EngineStats,
    Event,
    Failed,
    GenerateRequest,
    LoggedAnswer,
    Refused,
    ReplicaGlance,
    ReplicaInfo,
    TierSign,
)
from samovar.router.routing import load_tracker, roster
from samovar.router.routing.answer_search import AnswerSearch
from samovar.router.routing.direct_call import CallRefused, DirectCall, DirectCalls
from samovar.router.routing.replica_client import (
    ClearCounts,
    ReplicaFailed,
    ReplicaLost,
    choices_ended,
    clear_counts,
)
from samovar.router.routing.session_directory import DirectoryLost

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

LOST = (RayActorError, NodeDiedError, WorkerCrashedError, ObjectLostError, DeploymentUnavailableError)
"""The replica is dead, or its output was lost with it or its node."""


class RayReplicaClient:
    """`ReplicaClient` over the Serve handle of the replica deployment.

    `control_timeout_s`: how long `describe` and the statistics wait for the slowest replica.
    `clear_timeout_s`: the same for `clear`, which deletes files and objects. `stall_s`: a replica that
    sends nothing about a request for this long is suspected. `links`: requests go over these to replicas that
    take them, and events come back to the `inlet`; None, or where none does: Serve carries both.
    """

    def __init__(
        self,
        handle: Any,
        *,
        retry_after_s: float,
        control_timeout_s: float = 2.0,
        clear_timeout_s: float = 60.0,
        stall_s: float = 15.0,
        tracer: Tracer | None = None,
        inlet: Inlet | None = None,
        links: Links | None = None,
    ) -> None:
        self._direct = None if inlet is None or links is None else DirectCalls(links, inlet)
        self._tracer = tracer
        self._stall_s = stall_s
        self._handle = handle
        self._retry_after_s = retry_after_s
        self._control_timeout_s = control_timeout_s
        self._search = AnswerSearch(control_timeout_s)
        self._clear_timeout_s = clear_timeout_s

    async def generate(self, request: GenerateRequest, session_key: str) -> AsyncGenerator[list[Event], None]:
        ticket = uuid.uuid4().hex
        request = replace(
            request, route=replace(request.route, ticket=ticket, ingress=load_tracker.BOOK.ingress)
        )
        call: DirectCall | _ServeCall | None = None
        choices_open = request.n
        loop = asyncio.get_running_loop()
        heard_s = began_s = loop.time()
        is_routing = self._tracer is not None and bool(request.trace)
        try:
            if self._direct is not None:
                call = await self._direct.begin(request, session_key)
            if call is None:
                call = self._serve_call(request, session_key)
            async for events in call:
                if is_routing:
                    is_routing = False
                    self._record_route(request, began_s)
                choices_open -= choices_ended(events, choices_open)
                _book(ticket, events)
                yield events
                heard_s = loop.time()
                if choices_open <= 0 and isinstance(call, DirectCall):
                    break  # a link says no more of it; a call of Serve's returns
            choices_open = 0
        except BackPressureError:
            choices_open = 0
            message = "All replicas' queues are full. Try again later."
            yield [Refused("queue_full", message, self._retry_after_s)]
        except LinkLost as lost:
            load_tracker.BOOK.failed(ticket)
            raise ReplicaLost(str(lost)) from lost  # the call itself may still run: it is cancelled
        except CallRefused as refused:
            choices_open = 0
            if refused.args[0] == FAILED:
                raise ReplicaFailed("the replica has failed") from refused
            load_tracker.BOOK.failed(ticket)
            raise ReplicaLost(f"an answer has ended: {refused}") from refused
        except LOST as lost:
            choices_open = 0
            load_tracker.BOOK.failed(ticket)
            raise ReplicaLost(type(lost).__name__) from lost
        except (RayError, RayServeException) as failed:
            choices_open = 0
            raise ReplicaFailed(type(failed).__name__) from failed
        finally:
            if choices_open > 0 and loop.time() - heard_s >= self._stall_s:
                load_tracker.BOOK.failed(ticket)  # the reader gave up on a silent replica
            load_tracker.BOOK.ended(ticket)
            if call is not None:
                call.close(is_over=choices_open <= 0)

    def _serve_call(self, request: GenerateRequest, session_key: str) -> _ServeCall:
        handle = self._handle.options(stream=True, session_id=session_key)
        # `start`, because Serve gives calls from one HTTP request the same internal id, and if two calls with
        # the same id are routed at the same moment, it loses one (docs/adr/001).
        response = rpc.start(handle.generate, request)
        return _ServeCall(response, request.route.ticket)

    def _record_route(self, request: GenerateRequest, began_s: float) -> None:
        """Record the span of choosing a replica; nothing where another router than ours chose it."""
        ticket = request.route.ticket
        routed_s = load_tracker.BOOK.routed_s(ticket)
        if self._tracer is not None and routed_s is not None:
            replica = {"samovar.replica": load_tracker.BOOK.replica_of(ticket)}
            self._tracer.record("route", request.trace, began_s, routed_s, replica)

    async def describe(self) -> list[ReplicaInfo]:
        return await self._ask_all("describe", ReplicaInfo)

    async def stats(self) -> list[EngineStats]:
        return await self._ask_all("stats", EngineStats)

    async def cache_stats(self) -> list[NodeStats]:
        nodes = await self._ask_all("tier_stats", NodeStats)
        return list({node.incarnation: node for node in nodes}.values())

    async def tiers_up(self) -> dict[str, bool]:
        """See `ReplicaClient.tiers_up`. One replica that reaches the tier actor is enough."""
        up: dict[str, bool] = {}
        for sign in await self._ask_all("tier_sign", TierSign):
            up[sign.node_id] = up.get(sign.node_id, False) or sign.is_up
        return up

    async def kept(self, tenant: bytes, ref: bytes) -> tuple[LoggedAnswer | None, bool]:
        try:
            async with asyncio.timeout(self._control_timeout_s):
                # Serve's own `results_async` waits for the slowest (ray 2.60, `handle.py`).
                asked = self._handle.broadcast("kept", tenant, ref)._fetch_replica_results_async()
                calls = [one.get_async() for one in await asked]
        except (TimeoutError, RayError, RayServeException) as failed:
            logger.warning("kept: asking the replicas failed: %s", type(failed).__name__)
            return None, False
        return await self._search.find(calls, load_tracker.BOOK.nodes)

    async def pool_bytes(self, tenant: bytes, session: bytes) -> int:
        answers = await self._broadcast("pool_bytes", self._control_timeout_s, tenant + session)
        return sum(answer for answer in answers if isinstance(answer, int))

    async def glance(self, owners: tuple[bytes, ...]) -> list[ReplicaGlance]:
        answers = await self._broadcast("glance", self._control_timeout_s, owners)
        return [answer for answer in answers if isinstance(answer, ReplicaGlance)]

    async def cool(self, tenant: bytes, session: bytes) -> None:
        await self._broadcast("cool", self._control_timeout_s, tenant + session)

    async def hint(
        self, tenant: bytes, session: bytes, event: HintEvent | None, expected_return_s: float | None
    ) -> None:
        await self._broadcast("hint", self._control_timeout_s, tenant + session, event, expected_return_s)

    async def clear(self, tenant: bytes, sessions: tuple[bytes, ...] | None) -> ClearCounts:
        answers = await self._broadcast("clear", self._clear_timeout_s, tenant, sessions)
        for answer in answers:
            if isinstance(answer, Exception):
                logger.warning("clear: a replica failed: %s", type(answer).__name__)
        return clear_counts(answers)

    async def _ask_all(self, method: str, kind: type[Answer]) -> list[Answer]:
        answers = await self._broadcast(method, self._control_timeout_s)
        good = [answer for answer in answers if isinstance(answer, kind)]
        if len(good) < len(answers):
            logger.debug(
                "%s: %d of %d replicas did not answer", method, len(answers) - len(good), len(answers)
            )
        return good

    async def _broadcast(self, method: str, timeout_s: float, *args: object) -> list[Any]:
        """Return every replica's answer or exception; empty if they cannot be asked or are too late."""
        try:
            response = self._handle.broadcast(method, *args)
            answers: list[Any] = await response.results_async(timeout_s=timeout_s, return_exceptions=True)
        except (TimeoutError, DeploymentUnavailableError) as none:
            logger.debug("%s: no replica answered: %s", method, type(none).__name__)
            return []
        except (RayError, RayServeException) as failed:  # callers continue with what they know
            logger.warning("%s: asking the replicas failed: %s", method, failed)
            return []
        return answers


class _ServeCall:
    """A call that Serve carries, with its events: while it waits in Serve's queue, later ones do."""

    def __init__(self, response: Any, ticket: str) -> None:
        self._response = response
        self._ticket = ticket
        self._events = aiter(response)
        roster.ROSTER.queued.add(ticket)

    def __aiter__(self) -> _ServeCall:
        return self

    async def __anext__(self) -> list[Event]:
        events: list[Event] = await anext(self._events)
        roster.ROSTER.queued.discard(self._ticket)
        return events

    def close(self, *, is_over: bool) -> None:
        """Drop what still comes. `is_over`: a finished call needs no cancelling."""
        roster.ROSTER.queued.discard(self._ticket)
        if not is_over:
            self._response.cancel()


def _book(ticket: str, events: list[Event]) -> None:
    """Update the load tracker from the events of a call."""
    for event in events:
        if isinstance(event, Admitted):
            load_tracker.BOOK.admitted(ticket, event.receipt)
        elif isinstance(event, Failed) and event.replica_lost:
            load_tracker.BOOK.failed(ticket)


class RayDirectoryLink:
    """`DirectoryLink` over Ray. `timeout_s`: of one call; `clear_s_max`: of a clear in the actor."""

    def __init__(self, actor: rpc.ActorRef, *, timeout_s: float = 5.0, clear_s_max: float = 60.0) -> None:
        self._actor = actor
        self._timeout_s = timeout_s
        self._clear_s_max = clear_s_max

    async def sync(self, sync: Sync) -> Synced:
        actor = get_runtime_context().get_actor_id() or ""
        reply: Synced = await self._ask("sync", self._timeout_s, replace(sync, actor=actor))
        return reply

    async def held(self, tenant: bytes, sessions: tuple[bytes, ...]) -> dict[bytes, dict[str, int]]:
        held: dict[bytes, dict[str, int]] = await self._ask("held", self._timeout_s, tenant, sessions)
        return held

    async def tenant_held(self, tenant: bytes) -> dict[str, int]:
        held: dict[str, int] = await self._ask("tenant_held", self._timeout_s, tenant)
        return held

    async def likely(
        self, tenant: bytes, sessions: tuple[bytes, ...], horizon_s: float
    ) -> dict[bytes, float]:
        found: dict[bytes, float] = await self._ask("likely", self._timeout_s, tenant, sessions, horizon_s)
        return found

    async def glance(
        self, owners: tuple[bytes, ...], at_s: tuple[float, ...], with_stats: bool
    ) -> dict[str, NodeGlance]:
        nodes: dict[str, NodeGlance] = await self._ask("glance", self._timeout_s, owners, at_s, with_stats)
        return nodes

    async def move(self, tenant: bytes, session: bytes, how: Move) -> int:
        moved: int = await self._ask("move", self._timeout_s, tenant, session, how)
        return moved

    async def hint(
        self, tenant: bytes, session: bytes, event: HintEvent | None, expected_return_s: float | None
    ) -> int:
        told: int = await self._ask("hint", self._timeout_s, tenant, session, event, expected_return_s)
        return told

    async def clear(self, clear: Clear) -> dict[str, Cleared | None]:
        cleared: dict[str, Cleared | None] = await self._ask(
            "clear", self._clear_s_max + self._timeout_s, clear
        )
        return cleared

    async def keep(self, items: tuple[Item, ...], rows: tuple[SessionRow, ...]) -> int:
        kept: int = await self._ask("keep", self._timeout_s, items, rows)
        return kept

    async def recall(self, tenant: bytes, session: bytes) -> Recalled:
        found: Recalled = await self._ask("recall", self._timeout_s, tenant, session)
        return found

    async def kept(self, tenant: bytes, kind: Kind, name: bytes) -> Item | None:
        found: Item | None = await self._ask("kept", self._timeout_s, tenant, kind, name)
        return found

    async def discard(self, tenant: bytes, kind: Kind, name: bytes) -> bool:
        was_there: bool = await self._ask("discard", self._timeout_s, tenant, kind, name)
        return was_there

    async def forget(self, clears: tuple[SessionsCleared, ...]) -> int:
        erased: int = await self._ask("forget", self._timeout_s, clears)
        return erased

    async def allow(self, ingress: str, asked: int, tenant: bytes, wanted: Use, limit: Use) -> bool | None:
        may: bool | None = await self._ask("allow", self._timeout_s, ingress, asked, tenant, wanted, limit)
        return may

    async def _ask(self, method: str, timeout_s: float, *args: object) -> Any:
        try:
            return await self._actor.call_async(method, *args, timeout_s=timeout_s)
        except PeerError as error:
            raise DirectoryLost(f"{method}: {error}") from error
