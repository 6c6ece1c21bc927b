"""How the front door reaches replicas: a protocol and what can go wrong.

Knows nothing of Ray (see `replicas.py`) and decides nothing.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from cache_tiers.forecast import HintEvent
from cache_tiers.messages import Cleared, NodeStats
from replicas.messages import (
    Delta,
    EngineStats,
    Event,
    Failed,
    Forgotten,
    GenerateRequest,
    Refused,
    ReplicaInfo,
)

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
