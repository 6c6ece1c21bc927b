"""A `DirectoryLink` without Ray: the actor's own code, in process, and tiers that say what a test wants."""

from __future__ import annotations

from cache_tiers.actors.sessions import SessionActor
from cache_tiers.blocks.extent import Clear
from cache_tiers.forecast.turns import HintEvent
from cache_tiers.messages import Cleared
from cache_tiers.session_table import Move, Sync, Synced
from router.routing.session_directory import DirectoryLost


class StillActor(SessionActor):
    """It looks at no cluster."""

    def _watch(self) -> None:
        pass


class FakeLink:
    """`is_lost`: nobody answers. `holds`: bytes by tier; `nodes`: what each says to a clear."""

    def __init__(self) -> None:
        self.actor = StillActor(1000, 32, 60.0)
        self.is_lost = False
        self.syncs: list[Sync] = []
        self.moves: list[tuple[bytes, bytes, Move]] = []
        self.hints: list[tuple[bytes, bytes, HintEvent | None, float | None]] = []
        self.clears: list[Clear] = []
        self.holds: dict[tuple[bytes, bytes], dict[str, int]] = {}
        self.nodes: dict[str, Cleared | None] = {}

    def restart(self) -> None:
        """A new incarnation, which knows nothing."""
        self.actor = StillActor(1000, 32, 60.0)

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

    def _answer(self) -> None:
        if self.is_lost:
            raise DirectoryLost("it is away")
