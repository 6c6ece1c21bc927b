"""A bounded table with rows of several tenants: when full, the tenant with the most rows loses one.

So no tenant's rows push out those of a tenant with fewer. Pure; not thread-safe.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

V = TypeVar("V")
Name = bytes | None


class TenantRows(Generic[V]):
    """At most `rows_max` rows (tenant, name) -> value; of one tenant, the oldest entry is dropped first."""

    def __init__(self, rows_max: int) -> None:
        self._rows_max = rows_max
        self._rows: dict[bytes, OrderedDict[Name, V]] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def get(self, tenant: bytes, name: Name) -> V | None:
        rows = self._rows.get(tenant)
        return None if rows is None else rows.get(name)

    def has(self, tenant: bytes) -> bool:
        return tenant in self._rows

    def put(self, tenant: bytes, name: Name, value: V) -> tuple[bytes, V] | None:
        """Set a row as the latest entry; return the tenant and value of the row dropped for it, if any."""
        rows = self._rows.setdefault(tenant, OrderedDict())
        self._size += name not in rows
        rows[name] = value
        rows.move_to_end(name)
        if self._size <= self._rows_max:
            return None
        most = max(self._rows, key=lambda one: len(self._rows[one]))
        return most, self.pop_first(most)

    def pop_first(self, tenant: bytes) -> V:
        """Remove the tenant's oldest row and return its value. Raises `KeyError` if it has none."""
        rows = self._rows[tenant]
        _, value = rows.popitem(last=False)
        self._size -= 1
        if not rows:
            del self._rows[tenant]
        return value

    def values(self, tenant: bytes) -> list[V]:
        """Return one tenant's values, oldest first."""
        return list(self._rows.get(tenant, {}).values())

    def names(self, tenant: bytes) -> list[Name]:
        return list(self._rows.get(tenant, {}))

    def tenants(self) -> list[bytes]:
        return list(self._rows)

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is wrong."""
        assert self._size == sum(map(len, self._rows.values())), "rows are miscounted"
        assert self._size <= self._rows_max, "too many rows"
        assert all(self._rows.values()), "a tenant without rows is remembered"
