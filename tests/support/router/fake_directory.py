"""A `DirectoryLink` without Ray: the actor's own code, in process, and tiers that say what a test wants."""

from __future__ import annotations

from collections import Counter

from samovar.cache_tiers.blocks.extent import Clear
from samovar.cache_tiers.forecast.turns import HintEvent
from samovar.cache_tiers.messages import Cleared, NodeGlance
from samovar.cache_tiers.sessions import Item, Kind, Use
from samovar.cache_tiers.sessions.actor import SessionActor
from samovar.cache_tiers.sessions.session_table import (
    Move,
    Recalled,
    SessionRow,
    SessionsCleared,
    Sync,
    Synced,
)
from samovar.router.routing.session_directory import DirectoryLost


class StillActor(SessionActor):
    """It looks at no cluster."""

    def _watch(self) -> None:
        pass


class FakeLink:
    """`is_lost`: no answers. `holds`: bytes by tier. Nodes say `nodes` to a clear, `shows` to a glance.

    `silent_s`: see `Quotas`. The clock is the real one, so by default no test takes long enough to notice who
    died.
    """

    def __init__(self, silent_s: float = 3600.0) -> None:
        self._silent_s = silent_s
        self.restart()
        self.is_lost = False
        self.syncs: list[Sync] = []
        self.moves: list[tuple[bytes, bytes, Move]] = []
        self.hints: list[tuple[bytes, bytes, HintEvent | None, float | None]] = []
        self.clears: list[Clear] = []
        self.holds: dict[tuple[bytes, bytes], dict[str, int]] = {}
        self.nodes: dict[str, Cleared | None] = {}
        self.shows: dict[str, NodeGlance] = {}
        self.glances: list[tuple[tuple[bytes, ...], bool]] = []
        self.recalls = 0

    def restart(self) -> None:
        """A new incarnation, which knows nothing."""
        self.actor = StillActor(1000, 32, 60.0, ingress_silent_s=self._silent_s)

    async def sync(self, sync: Sync) -> Synced:
        self._answer()
        self.syncs.append(sync)
        return self.actor.sync(sync)

    async def held(self, tenant: bytes, sessions: tuple[bytes, ...]) -> dict[bytes, dict[str, int]]:
        self._answer()
        return {session: self.holds.get((tenant, session), {}) for session in sessions}

    async def likely(
        self, tenant: bytes, sessions: tuple[bytes, ...], horizon_s: float
    ) -> dict[bytes, float]:
        self._answer()
        return {session: 0.25 for session in sessions if (tenant, session) in self.holds}

    async def tenant_held(self, tenant: bytes) -> dict[str, int]:
        self._answer()
        held: Counter[str] = Counter()
        for (owner, _), nbytes in self.holds.items():
            held.update(nbytes if owner == tenant else {})
        return dict(held)

    async def glance(
        self, owners: tuple[bytes, ...], at_s: tuple[float, ...], with_stats: bool
    ) -> dict[str, NodeGlance]:
        self._answer()
        self.glances.append((owners, with_stats))
        return {
            name: NodeGlance(
                {owner: one for owner, one in node.lineages.items() if owner in owners},
                node.stats if with_stats else None,
            )
            for name, node in self.shows.items()
        }

    async def move(self, tenant: bytes, session: bytes, how: Move) -> int:
        self._answer()
        self.moves.append((tenant, session, how))
        return 3

    async def hint(
        self, tenant: bytes, session: bytes, event: HintEvent | None, expected_return_s: float | None
    ) -> int:
        self._answer()
        self.hints.append((tenant, session, event, expected_return_s))
        return 1

    async def clear(self, clear: Clear) -> dict[str, Cleared | None]:
        self._answer()
        self.clears.append(clear)
        return dict(self.nodes)

    async def keep(self, items: tuple[Item, ...], rows: tuple[SessionRow, ...]) -> int:
        self._answer()
        return self.actor.keep(items, rows)

    async def recall(self, tenant: bytes, session: bytes) -> Recalled:
        self._answer()
        self.recalls += 1
        return self.actor.recall(tenant, session)

    async def kept(self, tenant: bytes, kind: Kind, name: bytes) -> Item | None:
        self._answer()
        return self.actor.kept(tenant, kind, name)

    async def discard(self, tenant: bytes, kind: Kind, name: bytes) -> bool:
        self._answer()
        return self.actor.discard(tenant, kind, name)

    async def forget(self, clears: tuple[SessionsCleared, ...]) -> int:
        self._answer()
        return self.actor.forget(clears)

    async def allow(self, ingress: str, asked: int, tenant: bytes, wanted: Use, limit: Use) -> bool | None:
        self._answer()
        return self.actor.allow(ingress, asked, tenant, wanted, limit)

    def _answer(self) -> None:
        if self.is_lost:
            raise DirectoryLost("it is away")
