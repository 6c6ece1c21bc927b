"""What was cleared, and when: so that a store which was under way then does not bring it back afterwards.

Who stores has looked up before: of a session that nobody asked for, and that holds nothing, there is
nothing under way, and its clear leaves no tombstone. Bounded: when there are too many, whoever has the
most loses its oldest, and what it began before that clear is refused; nobody else is. Pure;
"when" is a count of clears, no time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from cache_tiers.blocks import Clear, TenantRows


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


# What was cleared here a short while ago: nothing of it is taken from another node meanwhile.
#
# A clear reaches the nodes one after the other. Between the first and the last of them, what is gone here
# is still there, and a fetch would bring it back behind the clear's back. After `grace_s` every node has
# cleared it, or the clear was reported as failed. Pure; not thread-safe.


class RecentClears:
    """At most `clears_max`; of a tenant that had more, all is taken for cleared until those are old.

    `clock`: monotonic seconds.
    """

    def __init__(self, grace_s: float, clears_max: int, clock: Callable[[], float]) -> None:
        self._grace_s = grace_s
        self._clock = clock
        self._cleared_s: TenantRows[float] = TenantRows(clears_max)
        self._all_since_s: TenantRows[float] = TenantRows(clears_max)  # tenants of whom too much was cleared

    def add(self, clear: Clear) -> None:
        now_s = self._clock()
        self._forget(clear.tenant, now_s)
        lost = self._cleared_s.put(clear.tenant, clear.session, now_s)
        if lost is not None:
            self._all_since_s.put(lost[0], None, lost[1])

    def forbids(self, tenant: bytes, session: bytes) -> bool:
        """What this session made may have been cleared here and not yet elsewhere."""
        now_s = self._clock()
        self._forget(tenant, now_s)
        return (
            self._all_since_s.get(tenant, None) is not None
            or self._cleared_s.get(tenant, None) is not None
            or self._cleared_s.get(tenant, session) is not None
        )

    def check_integrity(self) -> None:
        """Raises `AssertionError` naming what is wrong."""
        for rows in (self._cleared_s, self._all_since_s):
            rows.check_integrity()
            for tenant in rows.tenants():
                assert rows.values(tenant) == sorted(rows.values(tenant)), "clears are out of order"

    def _forget(self, tenant: bytes, now_s: float) -> None:
        """What of a tenant is old. Others keep theirs until they ask, or clear something."""
        for rows in (self._cleared_s, self._all_since_s):
            while (cleared_s := rows.first(tenant)) is not None:
                if cleared_s > now_s:  # the clock jumped back: the grace begins anew
                    rows.fill(tenant, now_s)
                if now_s - min(cleared_s, now_s) < self._grace_s:
                    break
                rows.pop_first(tenant)


# A bounded set of clears: which tenants, and which sessions of them, were forgotten.
#
# When there are too many, the tenant with the most is taken for cleared as a whole: too much of its own
# is forgotten then, nothing of anybody else's. Pure; not thread-safe.


class ClearSet:
    """At most `clears_max`, of several sessions one by one (`Clear.each`)."""

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
        """The number of this entry, for `discard`; None: no room, as there are so many tenants."""
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
        """Was what this session made forgotten?"""
        rows = self._rows.get(tenant)
        return rows is not None and (None in rows or session in rows)

    def discard(self, clear: Clear, number: int | None = None) -> None:
        """It need not be known any more. With `number`: unless it was entered again since."""
        rows = self._rows.get(clear.tenant, {})
        if clear.session not in rows or number not in (None, rows[clear.session]):
            return
        del rows[clear.session]
        self._size -= 1
        if not rows:
            del self._rows[clear.tenant]

    def number(self, clear: Clear) -> int:
        """Of its entry. Raises `KeyError`."""
        return self._rows[clear.tenant][clear.session]

    def check_integrity(self) -> None:
        """Raises `AssertionError` naming what is wrong."""
        assert self._size == sum(map(len, self._rows.values())), "clears are miscounted"
        assert self._size <= self._clears_max, "too many clears"
        assert all(self._rows.values()), "a tenant without clears is remembered"
