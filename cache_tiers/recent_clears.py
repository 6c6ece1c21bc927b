"""What was cleared here a short while ago: nothing of it is taken from another node meanwhile.

A clear reaches the nodes one after the other. Between the first and the last of them, what is gone here
is still there, and a fetch would bring it back behind the clear's back. After `grace_s` every node has
cleared it, or the clear was reported as failed. Pure; not thread-safe.
"""

from __future__ import annotations

from collections.abc import Callable

from cache_tiers.messages import Clear
from cache_tiers.tenant_rows import TenantRows


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
