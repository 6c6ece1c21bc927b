"""What was cleared here a short while ago: nothing of it is taken from another node meanwhile.

A clear reaches the nodes one after the other. Between the first and the last of them, what is gone here
is still there, and a fetch would bring it back behind the clear's back. After `grace_s` every node has
cleared it, or the clear was reported as failed. Pure; not thread-safe.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from cache_tiers.messages import Clear


class RecentClears:
    """At most `clears_max`; were there more, all is taken for cleared until the one forgotten is old.

    `clock`: monotonic seconds.
    """

    def __init__(self, grace_s: float, clears_max: int, clock: Callable[[], float]) -> None:
        self._grace_s = grace_s
        self._clears_max = clears_max
        self._clock = clock
        self._cleared_s: OrderedDict[Clear, float] = OrderedDict()  # the oldest first
        self._all_until_s = -float("inf")

    def add(self, clear: Clear) -> None:
        now_s = self._clock()
        self._forget(now_s)
        self._cleared_s[clear] = now_s
        self._cleared_s.move_to_end(clear)
        if len(self._cleared_s) > self._clears_max:
            _, cleared_s = self._cleared_s.popitem(last=False)
            self._all_until_s = max(self._all_until_s, cleared_s + self._grace_s)

    def forbids(self, tenant: bytes, session: bytes) -> bool:
        """What this session made may have been cleared here and not yet elsewhere."""
        now_s = self._clock()
        self._forget(now_s)
        if now_s < self._all_until_s:
            return True
        return Clear(tenant) in self._cleared_s or Clear(tenant, session) in self._cleared_s

    def check_integrity(self) -> None:
        """Raises `AssertionError` naming what is wrong."""
        assert len(self._cleared_s) <= self._clears_max, "more clears than there is room for"
        times = list(self._cleared_s.values())
        assert times == sorted(times), "clears are out of order"

    def _forget(self, now_s: float) -> None:
        self._all_until_s = min(self._all_until_s, now_s + self._grace_s)
        while self._cleared_s:
            clear, cleared_s = next(iter(self._cleared_s.items()))
            if cleared_s > now_s:  # the clock jumped back: the grace begins anew
                self._cleared_s = OrderedDict.fromkeys(self._cleared_s, now_s)
                return
            if now_s - cleared_s < self._grace_s:
                return
            del self._cleared_s[clear]
