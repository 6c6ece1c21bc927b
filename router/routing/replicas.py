"""How the front door reaches replicas: a protocol and what can go wrong.

Knows nothing of Ray (see `replicas.py`) and decides nothing.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from ray.exceptions import NodeDiedError, ObjectLostError, RayActorError, RayError, WorkerCrashedError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException

from cache_tiers.forecast import HintEvent
from cache_tiers.messages import Cleared, NodeStats
from replicas.messages import (
    Admitted,
    Delta,
    EngineStats,
    Event,
    Failed,
    Forgotten,
    GenerateRequest,
    Refused,
    ReplicaInfo,
    TierSign,
)
from router.routing import load_tracker as load_book

logger = logging.getLogger(__name__)


class ReplicaLost(Exception):
    """The replica died or cannot be reached. The request may be tried again."""


class ReplicaFailed(Exception):
    """The replica raised. A fault of ours; trying again will not help."""


@dataclass(frozen=True, slots=True)
class ClearCounts:
    """What a clear reached, in all replicas that answered; `silent` is how many did not.

    `unreachable`: tiers whose records are deleted only when those answer again.
    """

    replicas: int = 0
    silent: int = 0
    pages: int = 0
    extents: int = 0
    nbytes: int = 0
    unreachable: tuple[str, ...] = ()

    def __add__(self, other: ClearCounts) -> ClearCounts:
        """Two clears, one after the other."""
        return ClearCounts(
            replicas=min(self.replicas, other.replicas),
            silent=max(self.silent, other.silent),
            pages=self.pages + other.pages,
            extents=self.extents + other.extents,
            nbytes=self.nbytes + other.nbytes,
            unreachable=tuple(dict.fromkeys((*self.unreachable, *other.unreachable))),
        )

    def with_nodes(self, cleared: Sequence[Cleared]) -> ClearCounts:
        """The same clear asked of tiers again, directly: what replicas had not reached comes on top."""
        extents = sum(one.extents for one in cleared)
        nbytes = sum(one.nbytes for one in cleared)
        tiers = (tier for one in cleared for tier in one.unreachable)
        return replace(
            self,
            extents=self.extents + extents,
            nbytes=self.nbytes + nbytes,
            unreachable=tuple(dict.fromkeys((*self.unreachable, *tiers))),
        )


def clear_counts(answers: Sequence[object]) -> ClearCounts:
    """What replicas said to one clear; whatever is no `Forgotten` did not answer.

    Pages are summed. Extents are not: the replicas of a node share its tiers, so each tells of the same
    ones, or, as the second to ask, of none.
    """
    good = [answer for answer in answers if isinstance(answer, Forgotten)]
    return ClearCounts(
        replicas=len(good),
        silent=len(answers) - len(good),
        pages=sum(answer.pages for answer in good),
        extents=max((answer.extents for answer in good), default=0),
        nbytes=max((answer.nbytes for answer in good), default=0),
        unreachable=tuple(dict.fromkeys(tier for answer in good for tier in answer.unreachable)),
    )


class ReplicaClient(Protocol):
    """What the front door needs of replicas."""

    def generate(self, request: GenerateRequest, session_key: str) -> AsyncGenerator[list[Event], None]:
        """Events of one request; an empty list is a sign of life. `aclose()` cancels it on the replica.

        Iterating raises `ReplicaLost` or `ReplicaFailed`.
        """
        ...

    async def describe(self) -> list[ReplicaInfo]:
        """The replicas that answer now; empty when none is up."""
        ...

    async def stats(self) -> list[EngineStats]:
        """Counters of the replicas that answer now."""
        ...

    async def cache_stats(self) -> list[NodeStats]:
        """The cache tiers of the nodes whose replicas answer now, each node once."""
        ...

    async def tiers_up(self) -> dict[str, bool]:
        """Node id -> does its tier actor answer, of nodes whose replicas have tiers and answer now."""
        ...

    async def pool_bytes(self, tenant: bytes, session: bytes) -> int:
        """Bytes of a session's blocks in the pools of the replicas that answer now."""
        ...

    async def cool(self, tenant: bytes, session: bytes) -> None:
        """The session's blocks are the next to leave the pools."""
        ...

    async def hint(
        self, tenant: bytes, session: bytes, event: HintEvent | None, expected_return_s: float | None
    ) -> None:
        """What its client says about an idle session: the pools rank its blocks accordingly."""
        ...

    async def clear(self, tenant: bytes, sessions: tuple[bytes, ...] | None) -> ClearCounts:
        """Forget what a tenant (a tag) made, or only its `sessions`, in every pool and tier.

        No replica at all, or one that fails, shows in the counts; nothing is raised.
        """
        ...


def choices_ended(events: Sequence[Event], choices_open: int) -> int:
    """How many of a request's `choices_open` answers end with `events`."""
    if any(isinstance(event, Refused | Failed) for event in events):
        return choices_open
    return sum(1 for event in events if isinstance(event, Delta) and event.finish_reason is not None)


# Replicas behind a Ray Serve handle.
#
# The only place that knows a Serve handle on the way of a request. It turns Ray's exceptions into ours,
# so that nobody above has to know Ray. Which replica serves is the handle's router's business.


Answer = TypeVar("Answer")

LOST = (RayActorError, NodeDiedError, WorkerCrashedError, ObjectLostError, DeploymentUnavailableError)
"""The replica is dead, or what it has said has gone with it or its node."""


class RayReplicaClient:
    """`ReplicaClient` over the Serve handle of the replica deployment.

    `control_timeout_s`: how long `describe` and the statistics wait for the slowest replica;
    `clear_timeout_s`: how long `clear` does, which deletes files and objects. `stall_s`: a replica that says
    nothing about a request for so long is suspected.
    """

    def __init__(
        self,
        handle: Any,
        *,
        retry_after_s: float,
        control_timeout_s: float = 2.0,
        clear_timeout_s: float = 60.0,
        stall_s: float = 15.0,
    ) -> None:
        self._stall_s = stall_s
        self._handle = handle
        self._retry_after_s = retry_after_s
        self._control_timeout_s = control_timeout_s
        self._clear_timeout_s = clear_timeout_s

    async def generate(self, request: GenerateRequest, session_key: str) -> AsyncGenerator[list[Event], None]:
        """See `ReplicaClient.generate`."""
        ticket = uuid.uuid4().hex
        request = replace(request, route=replace(request.route, ticket=ticket))
        handle = self._handle.options(stream=True, session_id=session_key)
        # In an empty context: Serve gives calls from one HTTP request the same internal id, and of two
        # calls with the same id that are routed at the same moment it forgets one (docs/adr/001).
        response = contextvars.Context().run(handle.generate.remote, request)
        choices_open = request.n
        loop = asyncio.get_running_loop()
        heard_s = loop.time()
        try:
            async for events in response:
                choices_open -= choices_ended(events, choices_open)
                _book(ticket, events)
                yield events
                heard_s = loop.time()
            choices_open = 0
        except BackPressureError:
            choices_open = 0
            message = "All replicas' queues are full. Try again later."
            yield [Refused("queue_full", message, self._retry_after_s)]
        except LOST as lost:
            choices_open = 0
            load_book.BOOK.failed(ticket)
            raise ReplicaLost(type(lost).__name__) from lost
        except (RayError, RayServeException) as failed:
            choices_open = 0
            raise ReplicaFailed(type(failed).__name__) from failed
        finally:
            if choices_open > 0 and loop.time() - heard_s >= self._stall_s:
                load_book.BOOK.failed(ticket)  # whoever reads this has lost patience
            load_book.BOOK.ended(ticket)
            if choices_open > 0:  # what has ended needs no cancelling
                response.cancel()

    async def describe(self) -> list[ReplicaInfo]:
        """See `ReplicaClient.describe`."""
        return await self._ask_all("describe", ReplicaInfo)

    async def stats(self) -> list[EngineStats]:
        """See `ReplicaClient.stats`."""
        return await self._ask_all("stats", EngineStats)

    async def cache_stats(self) -> list[NodeStats]:
        """See `ReplicaClient.cache_stats`."""
        nodes = await self._ask_all("tier_stats", NodeStats)
        return list({node.incarnation: node for node in nodes}.values())

    async def tiers_up(self) -> dict[str, bool]:
        """See `ReplicaClient.tiers_up`. One replica that hears of it is enough."""
        up: dict[str, bool] = {}
        for sign in await self._ask_all("tier_sign", TierSign):
            up[sign.node_id] = up.get(sign.node_id, False) or sign.is_up
        return up

    async def pool_bytes(self, tenant: bytes, session: bytes) -> int:
        """See `ReplicaClient.pool_bytes`."""
        answers = await self._broadcast("pool_bytes", self._control_timeout_s, tenant + session)
        return sum(answer for answer in answers if isinstance(answer, int))

    async def cool(self, tenant: bytes, session: bytes) -> None:
        """See `ReplicaClient.cool`."""
        await self._broadcast("cool", self._control_timeout_s, tenant + session)

    async def hint(
        self, tenant: bytes, session: bytes, event: HintEvent | None, expected_return_s: float | None
    ) -> None:
        """See `ReplicaClient.hint`."""
        await self._broadcast("hint", self._control_timeout_s, tenant + session, event, expected_return_s)

    async def clear(self, tenant: bytes, sessions: tuple[bytes, ...] | None) -> ClearCounts:
        """See `ReplicaClient.clear`."""
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
        """Every replica's answer, or what it raised; nothing when they cannot be asked, or not in time."""
        try:
            response = self._handle.broadcast(method, *args)
            answers: list[Any] = await response.results_async(timeout_s=timeout_s, return_exceptions=True)
        except (TimeoutError, DeploymentUnavailableError) as none:
            logger.debug("%s: no replica answered: %s", method, type(none).__name__)
            return []
        except (RayError, RayServeException) as failed:  # callers go on with what they know themselves
            logger.warning("%s: asking the replicas failed: %s", method, failed)
            return []
        return answers


def _book(ticket: str, events: list[Event]) -> None:
    """What the events of a call say about its replica."""
    for event in events:
        if isinstance(event, Admitted):
            load_book.BOOK.admitted(ticket, event.receipt)
        elif isinstance(event, Failed) and event.replica_lost:
            load_book.BOOK.failed(ticket)
