"""A tier's bytes: held, reserved, and evicted but not yet deleted. Also what of it is whose.

Pure arithmetic; whom to evict is decided elsewhere.
"""

from __future__ import annotations

from collections import Counter


class Ledger:
    """The books of one tier of `budget` bytes.

    A reservation that evicts deletes its victims before it writes, so the two never lie in the tier
    together: `promised` is what would otherwise be counted twice.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.held = 0
        self.reserved = 0
        self.dropping = 0
        self.promised = 0
        self.tenants: Counter[bytes] = Counter()  # tenant -> held + reserved

    @property
    def accounted(self) -> int:
        """At least what lies in the tier now."""
        return self.held + self.reserved + self.dropping

    @property
    def charged(self) -> int:
        """At most what may ever lie there when everybody goes on as agreed."""
        return self.accounted - self.promised

    def reserve(self, tenant: bytes, nbytes: int, victims_bytes: int) -> None:
        self.reserved += nbytes
        self.promised += min(nbytes, victims_bytes)
        self.tenants[tenant] += nbytes

    def victim_dropped(self, nbytes: int, before: int, after: int) -> None:
        """Of the victims of a live reservation of `nbytes`, `before` bytes were undeleted, now `after`."""
        self.promised += min(nbytes, after) - min(nbytes, before)

    def end(self, tenant: bytes, nbytes: int, victims_bytes: int, *, is_held: bool) -> None:
        """A reservation became a copy, or was given back. `victims_bytes`: of its, still undeleted."""
        self.reserved -= nbytes
        self.promised -= min(nbytes, victims_bytes)
        if is_held:
            self.held += nbytes
        else:
            self._less(tenant, nbytes)

    def adopt(self, tenant: bytes, nbytes: int) -> None:
        self.held += nbytes
        self.tenants[tenant] += nbytes

    def evict(self, tenant: bytes, nbytes: int) -> None:
        self.held -= nbytes
        self.dropping += nbytes
        self._less(tenant, nbytes)

    def _less(self, tenant: bytes, nbytes: int) -> None:
        self.tenants[tenant] -= nbytes
        if not self.tenants[tenant]:
            del self.tenants[tenant]

    def check_integrity(self) -> None:
        """Raises `AssertionError` naming what is wrong."""
        for name in ("held", "reserved", "dropping", "promised"):
            assert getattr(self, name) >= 0, f"{name} is {getattr(self, name)}"
        assert self.held + self.reserved <= self.budget, "more is held and reserved than the budget allows"
        assert self.held + self.reserved == self.tenants.total(), "the tenants' bytes are not the tier's"
        assert all(nbytes > 0 for nbytes in self.tenants.values()), "a tenant without bytes is remembered"
