"""What was cleared, and when: so that a store which was under way then does not bring it back afterwards.

Who stores has looked up before: of a session that nobody asked for, and that holds nothing, there is
nothing under way, and its clear leaves no tombstone. Bounded: when there are too many, whoever has the
most loses its oldest, and what it began before that clear is refused; nobody else is. Pure;
"when" is a count of clears, no time.
"""

from __future__ import annotations

from cache_tiers.tenant_rows import TenantRows


class Tombstones:
    """The last clear of each tenant and session, `tombstones_max` of them; as many who asked."""

    def __init__(self, tombstones_max: int) -> None:
        if tombstones_max < 1:
            raise ValueError(f"at least one tombstone must have room, not {tombstones_max}")
        self._tombstones_max = tombstones_max
        self._seqs: TenantRows[int] = TenantRows(tombstones_max)
        self._floors: dict[bytes, int] = {}  # tenant -> the latest clear of it that was forgotten
        self._floor = 0  # of tenants that are forgotten themselves
        self._asked: TenantRows[bool] = TenantRows(tombstones_max)
        # Tenants of whom somebody asked who is forgotten; None: of any.
        self._unsure: set[bytes] | None = set()

    def __len__(self) -> int:
        return len(self._seqs)

    def asked(self, tenant: bytes, session: bytes) -> None:
        """This session is looked up, and may store what it computes then."""
        lost = self._asked.put(tenant, session, True)
        if lost is not None and self._unsure is not None:
            self._unsure.add(lost[0])
            if len(self._unsure) > self._tombstones_max:
                self._unsure = None

    def may_store(self, tenant: bytes, session: bytes | None) -> bool:
        """Did this session (with None: any of the tenant) ask, or may it have?"""
        if self._unsure is None or tenant in self._unsure:
            return True
        if session is None:
            return self._asked.has(tenant)
        return self._asked.get(tenant, session) is not None

    def add(self, tenant: bytes, session: bytes | None, seq: int) -> None:
        """The clear number `seq` (they grow) forgot this session, or with None the whole tenant."""
        lost = self._seqs.put(tenant, session, seq)
        if lost is None:
            return
        whose, oldest = lost
        self._floors[whose] = max(self._floors.get(whose, 0), oldest)
        if len(self._floors) > self._tombstones_max:
            self._floor = max(self._floor, self._floors.pop(next(iter(self._floors))))

    def forbids(self, tenant: bytes, session: bytes, clear_seq: int) -> bool:
        """What this session made, by one who knew of `clear_seq` clears, may have been cleared since."""
        of_tenant, of_session = self._seqs.get(tenant, None), self._seqs.get(tenant, session)
        return clear_seq < max(self._floor, self._floors.get(tenant, 0), of_tenant or 0, of_session or 0)

    def check_integrity(self) -> None:
        """Raises `AssertionError` naming what is wrong."""
        self._seqs.check_integrity()
        self._asked.check_integrity()
        assert len(self._floors) <= self._tombstones_max, "too many floors"
        assert self._unsure is None or len(self._unsure) <= self._tombstones_max, "too many to be unsure of"
        for tenant in self._seqs.tenants():
            seqs = self._seqs.values(tenant)
            assert seqs == sorted(set(seqs)), "tombstones are out of order"
            assert self._floors.get(tenant, 0) < seqs[0], "a tombstone is older than what was forgotten"
