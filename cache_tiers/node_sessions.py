"""Sessions on a node: whose blocks are here, and moving all of one session's down at a hint.

A hint only queues copies; what the queue has no room for is left where it is. Up: `node_prefetch.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from cache_tiers.extent import TIERS, Placement, TierName
from cache_tiers.node_books import NodeBooks
from cache_tiers.node_stores import NodeStores
from cache_tiers.sessions import SessionHeld

TOP: TierName = "cpu"


class NodeSessions:
    """See `SessionHeld`. Sessions are told apart by tenant's and session's tags."""

    def __init__(self, books: NodeBooks, stores: NodeStores) -> None:
        self._books = books
        self._stores = stores

    def sessions(self, limit: int) -> list[SessionHeld]:
        """At most `limit`, the last used first. Looks at every extent: not for every request."""
        with self._books.lock:
            return self._books.directory.sessions(limit)

    def session_bytes(self, tenant: bytes, sessions: Sequence[bytes]) -> dict[bytes, dict[str, int]]:
        """Bytes by tier of each of `sessions`; empty where nothing is held."""
        with self._books.lock:
            directory = self._books.directory
            return {session: directory.session(tenant, session).nbytes for session in sessions}

    def demote(self, tenant: bytes, session: bytes) -> int:
        """Leave main memory, for the lowest tier that its placement allows. Extents dropped or queued.

        What other sessions have a part in stays; so does what no lower tier can take.
        """
        books, done = self._books, 0
        with books.lock:
            above = [
                extent
                for extent in books.directory.extents_of(tenant, session)
                if TOP in extent.tiers and extent.sessions == {session}
            ]
        for extent in above:
            target = self._lowest(extent.placement)
            if target is None:
                continue
            if target not in extent.tiers:
                done += self._stores.copy(extent.address, target, sinks_from=TOP, is_urgent=True)
                continue
            with books.lock:
                is_safe = target in books.directory.copies(extent.address)
                eviction = books.directory.lose(extent.address, TOP) if is_safe else None
            if eviction is not None:
                books.drop([eviction])
                done += 1
        return done

    def _lowest(self, placement: Placement) -> TierName | None:
        for tier in reversed(TIERS[1:]):
            guard = self._books.guards.get(tier)
            if guard is not None and guard.is_writable and placement.allows(tier):
                return tier
        return None
