"""A breaker: a tier that failed several times in a row is left alone for a while.

Pure; knows nothing of tiers, and not what a failure is: whoever calls the tier tells it. One user at a
time: the caller locks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

BreakerState = Literal["closed", "open", "half-open"]


class Breaker:
    """closed -> (`failures_max` failures in a row) open -> (after a while) half-open: one trial.

    The trial's success closes it, its failure opens it for twice as long, up to `open_s_max`. A trial
    of which nothing was heard for that long is given up and another one let through. `clock` is
    monotonic, in seconds; when it jumps back all the same, the wait starts anew from there.
    """

    def __init__(
        self, failures_max: int, open_s: float, open_s_max: float, clock: Callable[[], float]
    ) -> None:
        """Raises `ValueError` unless there is at least one failure and the times are positive."""
        if failures_max < 1 or not open_s > 0 or not open_s_max > 0:
            raise ValueError(f"no breaker of {failures_max} failures, {open_s} s, {open_s_max} s")
        self._failures_max = failures_max
        self._open_s_first = min(open_s, open_s_max)
        self._open_s_max = open_s_max
        self._clock = clock
        self._state: BreakerState = "closed"
        self._failures = 0
        self._open_s = self._open_s_first
        self._since_s = 0.0
        self._opened = 0

    @property
    def state(self) -> BreakerState:
        """Looking changes nothing: an open breaker stays open until `allows` lets a trial through."""
        return self._state

    @property
    def opened(self) -> int:
        """How often it opened since its start."""
        return self._opened

    def allows(self) -> bool:
        """May the tier be called now? True while half-open makes that call the trial.

        Whoever got True says `succeeded` or `failed` afterwards.
        """
        if self._state == "closed":
            return True
        now_s = self._clock()
        self._since_s = min(self._since_s, now_s)
        if now_s - self._since_s < self._open_s:
            return False
        self._state = "half-open"
        self._since_s = now_s
        return True

    def succeeded(self) -> None:
        """A call was answered (a miss is an answer). While open it is a late one, and says nothing."""
        if self._state == "open":
            return
        self._state = "closed"
        self._failures = 0
        self._open_s = self._open_s_first

    def failed(self) -> None:
        """A call failed. While open it is a late one, and does not prolong the wait."""
        if self._state == "open":
            return
        self._failures += 1
        if self._state == "half-open":
            self._open_s = min(2 * self._open_s, self._open_s_max)
        elif self._failures < self._failures_max:
            return
        self._state = "open"
        self._since_s = self._clock()
        self._failures = 0
        self._opened += 1

    def check_integrity(self) -> None:
        """Raises `AssertionError` naming what is wrong."""
        assert 0 <= self._failures < self._failures_max, f"{self._failures} failures and not open"
        assert self._state == "closed" or self._failures == 0, f"{self._failures} failures in {self._state}"
        assert self._open_s_first <= self._open_s <= self._open_s_max, f"open for {self._open_s} s"
        assert self._state != "closed" or self._open_s == self._open_s_first, "closed, yet it remembers"
        assert self._state == "closed" or self._opened > 0, f"{self._state}, yet it never opened"
