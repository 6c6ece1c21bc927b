"""Is guessing worth it? By what became of the latest guesses, and a few more to find out when it is again.

Pure: knows neither sessions nor tiers. A guess is judged once, by how many of its bytes were used.
"""

from __future__ import annotations

import random
from collections import deque


class WasteMeter:
    """Off while less than `useful_share_min` of the bytes of the last `guesses` was used.

    On until so many were judged. While it is off, `probe_share` of the guesses is made all the same: their
    outcomes switch it on again. `rng`: draws which.
    """

    def __init__(
        self, *, useful_share_min: float, guesses: int, probe_share: float, rng: random.Random
    ) -> None:
        self._useful_share_min = useful_share_min
        self._guesses = guesses
        self._probe_share = probe_share
        self._rng = rng
        self._judged: deque[tuple[int, int]] = deque()  # bytes used, bytes moved
        self._used = self._moved = 0
        self.switched = 0  # how often it went off or on

    @property
    def useful_share(self) -> float:
        """Of the latest judged bytes, those that were used; 1 when nothing was judged."""
        return self._used / self._moved if self._moved else 1.0

    @property
    def is_on(self) -> bool:
        return len(self._judged) < self._guesses or self.useful_share >= self._useful_share_min

    def allows(self) -> bool:
        """Shall this guess be made? To be asked once a guess: while off, each question may be a probe."""
        return self.is_on or self._rng.random() < self._probe_share

    def judged(self, used: int, moved: int) -> None:
        """Of a guess's `moved` bytes `used` were of use. Nothing when none was moved."""
        if moved <= 0:
            return
        was_on = self.is_on
        used = min(used, moved)
        self._judged.append((used, moved))
        self._used += used
        self._moved += moved
        while len(self._judged) > self._guesses:
            old_used, old_moved = self._judged.popleft()
            self._used -= old_used
            self._moved -= old_moved
        self.switched += was_on != self.is_on

    def check_integrity(self) -> None:
        """Raises `AssertionError` naming what is wrong."""
        assert len(self._judged) <= self._guesses, "too many outcomes are remembered"
        sums = [sum(column) for column in zip(*self._judged, strict=True)] or [0, 0]
        assert sums == [self._used, self._moved], "the sums differ from the outcomes"
