"""What was cleared, and when, so that a store in flight at that time does not bring it back.

"When" is a count of clears, not a time. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from cache_tiers.blocks import Clear, TenantRows


class Tombstones:
    """The last clear of each tenant and session, and the sessions looked up; `tombstones_max` of each.

    A store follows a lookup: a session that was never looked up and holds nothing has no store in flight,
    and its clear leaves no tombstone. When there are too many, the tenant with the most tombstones loses
    its oldest, and its stores begun before that clear are refused; no other tenant's are.
    """

    def __init__(self, tombstones_max: int) -> None:
        if tombstones_max < 1:
            raise ValueError(f"at least one tombstone must have room, not {tombstones_max}")
        self._tombstones_max = tombstones_max
        self._seqs: TenantRows[int] = TenantRows(tombstones_max)
        self._floors: dict[bytes, int] = {}  # tenant -> its latest clear whose tombstone was dropped
        self._floor = 0  # for tenants dropped from `_floors`
        self._asked: TenantRows[bool] = TenantRows(tombstones_max)
        # Tenants with a lookup that was dropped from `_asked`; None: any tenant.
        self._unsure: set[bytes] | None = set()

    def __len__(self) -> int:
        return len(self._seqs)

    def asked(self, tenant: bytes, session: bytes) -> None:
        """Record a lookup of this session, which may store what it computes afterwards."""
        lost = self._asked.put(tenant, session, True)
        if lost is not None and self._unsure is not None:
            self._unsure.add(lost[0])
            if len(self._unsure) > self._tombstones_max:
                self._unsure = None

    def may_store(self, tenant: bytes, session: bytes | None) -> bool:
        """Return whether this session (None: any of the tenant) was, or may have been, looked up."""
        if self._unsure is None or tenant in self._unsure:
            return True
        if session is None:
            return self._asked.has(tenant)
        return self._asked.get(tenant, session) is not None

    def add(self, tenant: bytes, session: bytes | None, seq: int) -> None:
        """Record that clear number `seq` (increasing) forgot this session, or with None the tenant."""
        lost = self._seqs.put(tenant, session, seq)
        if lost is None:
            return
        whose, oldest = lost
        self._floors[whose] = max(self._floors.get(whose, 0), oldest)
        if len(self._floors) > self._tombstones_max:
            self._floor = max(self._floor, self._floors.pop(next(iter(self._floors))))

    def forbids(self, tenant: bytes, session: bytes, clear_seq: int) -> bool:
        """Return whether a store of this session, begun after `clear_seq` clears, may be cleared since."""
        of_tenant, of_session = self._seqs.get(tenant, None), self._seqs.get(tenant, session)
        return clear_seq < max(self._floor, self._floors.get(tenant, 0), of_tenant or 0, of_session or 0)

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is wrong."""
        self._seqs.check_integrity()
        self._asked.check_integrity()
        assert len(self._floors) <= self._tombstones_max, "too many floors"
        assert self._unsure is None or len(self._unsure) <= self._tombstones_max, "too many to be unsure of"
        for tenant in self._seqs.tenants():
            seqs = self._seqs.values(tenant)
            assert seqs == sorted(set(seqs)), "tombstones are out of order"
            assert self._floors.get(tenant, 0) < seqs[0], "a tombstone is older than what was forgotten"


class RecentClears:
    """Recent local clears: for `grace_s`, nothing they cover is taken from another node.

    A clear reaches the nodes one after the other. In between, what is gone here still exists elsewhere,
    and a fetch would bring it back. After `grace_s` every node has cleared it, or the clear was reported
    as failed. Holds at most `clears_max`; a tenant that had more counts as wholly cleared until those are
    old. `clock`: monotonic seconds. Pure; not thread-safe.
    """

    def __init__(self, grace_s: float, clears_max: int, clock: Callable[[], float]) -> None:
        self._grace_s = grace_s
        self._clock = clock
        self._cleared_s: TenantRows[float] = TenantRows(clears_max)
        self._all_since_s: TenantRows[float] = TenantRows(clears_max)  # tenants with too many clears

    def add(self, clear: Clear) -> None:
        now_s = self._clock()
        self._forget(clear.tenant, now_s)
        lost = self._cleared_s.put(clear.tenant, clear.session, now_s)
        if lost is not None:
            self._all_since_s.put(lost[0], None, lost[1])

    def forbids(self, tenant: bytes, session: bytes) -> bool:
        """Return whether what this session made may be cleared here but not yet elsewhere."""
        now_s = self._clock()
        self._forget(tenant, now_s)
        return (
            self._all_since_s.get(tenant, None) is not None
            or self._cleared_s.get(tenant, None) is not None
            or self._cleared_s.get(tenant, session) is not None
        )

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is wrong."""
        for rows in (self._cleared_s, self._all_since_s):
            rows.check_integrity()
            for tenant in rows.tenants():
                assert rows.values(tenant) == sorted(rows.values(tenant)), "clears are out of order"

    def _forget(self, tenant: bytes, now_s: float) -> None:
        """Drop a tenant's old entries. Other tenants keep theirs until their own next call."""
        for rows in (self._cleared_s, self._all_since_s):
            while (cleared_s := rows.first(tenant)) is not None:
                if cleared_s > now_s:  # the clock jumped back: restart the grace period
                    rows.fill(tenant, now_s)
                if now_s - min(cleared_s, now_s) < self._grace_s:
                    break
                rows.pop_first(tenant)


class ClearSet:
    """A bounded set of clears; one of several sessions is added one by one (`Clear.each`).

    Above `clears_max`, the tenant with the most counts as cleared as a whole: too much of its own data
    is forgotten then, nothing of other tenants. Pure; not thread-safe.
    """

    def __init__(self, clears_max: int) -> None:
        self._clears_max = clears_max
        self._rows: dict[bytes, dict[bytes | None, int]] = {}  # tenant -> session -> number of its entry
        self._size = 0
        self._last = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Clear]:
        for tenant, sessions in self._rows.items():
            for session in sessions:
                yield Clear(tenant, session)

    def __contains__(self, clear: Clear) -> bool:
        return clear.session in self._rows.get(clear.tenant, ())

    def add(self, clear: Clear) -> int | None:
        """Add a clear; return its entry number for `discard`, or None: no room, too many tenants."""
        rows = self._rows.setdefault(clear.tenant, {})
        self._size += clear.session not in rows
        self._last += 1
        rows[clear.session] = self._last
        if self._size <= self._clears_max:
            return self._last
        most = max(self._rows, key=lambda tenant: len(self._rows[tenant]))
        if len(self._rows[most]) > 1:
            self._size -= len(self._rows[most]) - 1
            self._rows[most] = {None: self._last}
            return self._last
        self.discard(clear)
        return None

    def covers(self, tenant: bytes, session: bytes) -> bool:
        """Return whether what this session made was forgotten."""
        rows = self._rows.get(tenant)
        return rows is not None and (None in rows or session in rows)

    def discard(self, clear: Clear, number: int | None = None) -> None:
        """Remove a clear that is no longer needed. With `number`: unless it was added again since."""
        rows = self._rows.get(clear.tenant, {})
        if clear.session not in rows or number not in (None, rows[clear.session]):
            return
        del rows[clear.session]
        self._size -= 1
        if not rows:
            del self._rows[clear.tenant]

    def number(self, clear: Clear) -> int:
        """Return a clear's entry number. Raises `KeyError`."""
        return self._rows[clear.tenant][clear.session]

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is wrong."""
        assert self._size == sum(map(len, self._rows.values())), "clears are miscounted"
        assert self._size <= self._clears_max, "too many clears"
        assert all(self._rows.values()), "a tenant without clears is remembered"
