"""Protocol of the replica client and its errors. Independent of Ray (see `ray_clients.py`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from samovar.cache_tiers.forecast import HintEvent
from samovar.cache_tiers.messages import Cleared, NodeStats
from samovar.replicas.messages import (
    Delta,
    EngineStats,
    Event,
    Failed,
    Forgotten,
    GenerateRequest,
    LoggedAnswer,
    Refused,
    ReplicaGlance,
    ReplicaInfo,
)


class ReplicaLost(Exception):
    """The replica died or cannot be reached. The request may be retried."""


class ReplicaFailed(Exception):
    """The replica raised an exception. An internal error; retrying does not help."""


@dataclass(frozen=True, slots=True)
class ClearCounts:
    """What a clear reached in all replicas that answered; `silent` is the number that did not answer.

    `unreachable`: tiers that will delete their records only when they answer again. `overwriting`: replicas
    whose pages nothing finds any more, and that are not overwritten yet.
    """

    replicas: int = 0
    silent: int = 0
    pages: int = 0
    extents: int = 0
    nbytes: int = 0
    unreachable: tuple[str, ...] = ()
    overwriting: int = 0

    def __add__(self, other: ClearCounts) -> ClearCounts:
        """Combine two consecutive clears."""
        return ClearCounts(
            replicas=min(self.replicas, other.replicas),
            silent=max(self.silent, other.silent),
            pages=self.pages + other.pages,
            extents=self.extents + other.extents,
            nbytes=self.nbytes + other.nbytes,
            unreachable=tuple(dict.fromkeys((*self.unreachable, *other.unreachable))),
            overwriting=max(self.overwriting, other.overwriting),
        )

    def with_nodes(self, cleared: Sequence[Cleared]) -> ClearCounts:
        """Add the same clear sent directly to the tiers: it finds what the replicas had not reached."""
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
    """Combine the replicas' answers to one clear; anything that is not a `Forgotten` counts as silent.

    Pages are summed. Extents are not: the replicas of a node share its tiers, so each reports the same
    extents, or none if it is not the first to clear.
    """
    good = [answer for answer in answers if isinstance(answer, Forgotten)]
    return ClearCounts(
        replicas=len(good),
        silent=len(answers) - len(good),
        pages=sum(answer.pages for answer in good),
        extents=max((answer.extents for answer in good), default=0),
        nbytes=max((answer.nbytes for answer in good), default=0),
        unreachable=tuple(dict.fromkeys(tier for answer in good for tier in answer.unreachable)),
        overwriting=sum(answer.leaves_pages for answer in good),
    )


class ReplicaClient(Protocol):
    """What the ingress needs from the replicas."""

    def generate(self, request: GenerateRequest, session_key: str) -> AsyncGenerator[list[Event], None]:
        """Yield the events of one request; `aclose()` cancels it on the replica.

        An empty list is a heartbeat. Iterating raises `ReplicaLost` or `ReplicaFailed`.
        """
        ...

    async def describe(self) -> list[ReplicaInfo]:
        """Return the replicas that answer now; empty if none is up."""
        ...

    async def stats(self) -> list[EngineStats]:
        """Return the counters of the replicas that answer now."""
        ...

    async def cache_stats(self) -> list[NodeStats]:
        """Return the cache tiers of the nodes whose replicas answer now, each node once."""
        ...

    async def tiers_up(self) -> dict[str, bool]:
        """Return node id -> whether its tier actor answers.

        Covers nodes whose replicas have tiers and answer now.
        """
        ...

    async def kept(self, tenant: bytes, ref: bytes) -> tuple[LoggedAnswer | None, bool]:
        """Return the answer that a tenant's client has named so (see `Keep`), and whether all were asked.

        One that is over counts more than one that is not.
        """
        ...

    async def pool_bytes(self, tenant: bytes, session: bytes) -> int | None:
        """Return the bytes of a session's blocks in the pools of the replicas that answer now.

        None: an engine does not say whose its pages are.
        """
        ...

    async def glance(self, owners: tuple[bytes, ...]) -> list[ReplicaGlance]:
        """Return counters, and blocks of these lineages in the pool, of the replicas that answer now."""
        ...

    async def cool(self, tenant: bytes, session: bytes) -> None:
        """Make the session's blocks the next to be evicted from the pools."""
        ...

    async def hint(
        self, tenant: bytes, session: bytes, event: HintEvent | None, expected_return_s: float | None
    ) -> None:
        """Pass on a client's hint about an idle session: the pools rank its blocks accordingly."""
        ...

    async def clear(self, tenant: bytes, sessions: tuple[bytes, ...] | None) -> ClearCounts:
        """Forget what a tenant (a tag) made, or only its `sessions`, in every pool and tier.

        Raises nothing: missing or failing replicas show in the counts.
        """
        ...


class ReplicasOfAll:
    """`ReplicaClient` of several models: a request goes to its own model's replicas, all else to all.

    `clients`: by the fingerprint of their model.
    """

    def __init__(self, clients: Mapping[str, ReplicaClient]) -> None:
        self._clients = dict(clients)
        self._all = tuple(self._clients.values())

    def generate(self, request: GenerateRequest, session_key: str) -> AsyncGenerator[list[Event], None]:
        return self._clients[request.model].generate(request, session_key)

    async def describe(self) -> list[ReplicaInfo]:
        return [one for found in await asyncio.gather(*(c.describe() for c in self._all)) for one in found]

    async def stats(self) -> list[EngineStats]:
        return [one for found in await asyncio.gather(*(c.stats() for c in self._all)) for one in found]

    async def cache_stats(self) -> list[NodeStats]:
        found = await asyncio.gather(*(client.cache_stats() for client in self._all))
        return list({node.incarnation: node for nodes in found for node in nodes}.values())

    async def tiers_up(self) -> dict[str, bool]:
        up: dict[str, bool] = {}
        for signs in await asyncio.gather(*(client.tiers_up() for client in self._all)):
            up |= {node: is_up or up.get(node, False) for node, is_up in signs.items()}
        return up

    async def kept(self, tenant: bytes, ref: bytes) -> tuple[LoggedAnswer | None, bool]:
        found = await asyncio.gather(*(client.kept(tenant, ref) for client in self._all))
        kept = [one for one, _ in found if one is not None]
        return max(kept, key=lambda one: one.is_over, default=None), all(is_whole for _, is_whole in found)

    async def pool_bytes(self, tenant: bytes, session: bytes) -> int | None:
        found = await asyncio.gather(*(client.pool_bytes(tenant, session) for client in self._all))
        return None if None in found else sum(one for one in found if one is not None)

    async def glance(self, owners: tuple[bytes, ...]) -> list[ReplicaGlance]:
        found = await asyncio.gather(*(client.glance(owners) for client in self._all))
        return [one for glances in found for one in glances]

    async def cool(self, tenant: bytes, session: bytes) -> None:
        await asyncio.gather(*(client.cool(tenant, session) for client in self._all))

    async def hint(
        self, tenant: bytes, session: bytes, event: HintEvent | None, expected_return_s: float | None
    ) -> None:
        await asyncio.gather(*(c.hint(tenant, session, event, expected_return_s) for c in self._all))

    async def clear(self, tenant: bytes, sessions: tuple[bytes, ...] | None) -> ClearCounts:
        done = await asyncio.gather(*(client.clear(tenant, sessions) for client in self._all))
        return ClearCounts(
            replicas=sum(one.replicas for one in done),
            silent=sum(one.silent for one in done),
            pages=sum(one.pages for one in done),
            extents=max(one.extents for one in done),  # as of one model's: they share their node's tiers
            nbytes=max(one.nbytes for one in done),
            unreachable=tuple(dict.fromkeys(tier for one in done for tier in one.unreachable)),
            overwriting=sum(one.overwriting for one in done),
        )


def choices_ended(events: Sequence[Event], choices_open: int) -> int:
    """Return how many of a request's `choices_open` answers end with `events`."""
    if any(isinstance(event, Refused | Failed) for event in events):
        return choices_open
    return sum(1 for event in events if isinstance(event, Delta) and event.finish_reason is not None)
