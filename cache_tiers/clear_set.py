"""A bounded set of clears: which tenants, and which sessions of them, were forgotten.

When there are too many, the tenant with the most is taken for cleared as a whole: too much of its own
is forgotten then, nothing of anybody else's. Pure; not thread-safe.
"""

from __future__ import annotations

from collections.abc import Iterator

from cache_tiers.messages import Clear


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
