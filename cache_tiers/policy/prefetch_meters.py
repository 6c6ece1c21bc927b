"""Meters that decide whether prefetch guesses pay off, and limit their bytes.

Pure. A guess is judged once, by how many of its bytes were used.
"""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from dataclasses import dataclass

from samovar.cache_tiers.forecast import SessionKey


class PrefetchGate:
    """Stops guesses while less than `accuracy_min` of the bytes of the last `guesses` was used.

    On until that many were judged. While off, `probe_share` of the guesses is still made: their outcomes
    switch it on again. `rng`: draws which.
    """

    def __init__(self, *, accuracy_min: float, guesses: int, probe_share: float, rng: random.Random) -> None:
        self._accuracy_min = accuracy_min
        self._guesses = guesses
        self._probe_share = probe_share
        self._rng = rng
        self._judged: deque[tuple[int, int]] = deque()  # bytes used, bytes moved
        self._used = self._moved = 0
        self.switched = 0  # how often it went off or on

    @property
    def useful_share(self) -> float:
        """Share of the latest judged bytes that were used; 1 if nothing was judged."""
        return self._used / self._moved if self._moved else 1.0

    @property
    def is_on(self) -> bool:
        return len(self._judged) < self._guesses or self.useful_share >= self._accuracy_min

    def allows(self) -> bool:
        """Return whether to make this guess. Call once per guess: while off, each call may be a probe."""
        return self.is_on or self._rng.random() < self._probe_share

    def judged(self, used: int, moved: int) -> None:
        """Record that `used` of a guess's `moved` bytes were used. No-op if none was moved."""
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
        """Raise `AssertionError` naming what is wrong."""
        assert len(self._judged) <= self._guesses, "too many outcomes are remembered"
        sums = [sum(column) for column in zip(*self._judged, strict=True)] or [0, 0]
        assert sums == [self._used, self._moved], "the sums differ from the outcomes"


class ByteBudget:
    """A token bucket: refilled at `bytes_per_s` up to `burst_s` worth; starts full. Pure."""

    def __init__(self, bytes_per_s: int, burst_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self.capacity = int(bytes_per_s * burst_s)
        self._saved = float(self.capacity)
        self._at_s: float | None = None

    def saved(self, now_s: float) -> int:
        """Return what may be spent now. A clock that jumped back adds and costs nothing."""
        if self._at_s is not None:
            flowed = max(0.0, now_s - self._at_s) * self._bytes_per_s
            self._saved = min(float(self.capacity), self._saved + flowed)
        self._at_s = now_s
        return int(self._saved)

    def spend(self, nbytes: int, now_s: float) -> None:
        """Spend bytes. Raises `ValueError` if that is more than is saved."""
        if nbytes > self.saved(now_s):
            raise ValueError(f"{nbytes} bytes are more than the budget has")
        self._saved -= nbytes

    def give_back(self, nbytes: int) -> None:
        """Put back bytes that were spent but not used."""
        self._saved = min(float(self.capacity), self._saved + nbytes)


DECAY = 0.999
"""A return that was a thousand returns ago counts for a third."""


@dataclass(slots=True)
class _Share:
    up: float = 0.0
    asked: float = 0.0

    def add(self, up: int, asked: int) -> None:
        self.up = DECAY * self.up + min(up, asked)
        self.asked = DECAY * self.asked + asked

    @property
    def share(self) -> float | None:
        return self.up / self.asked if self.asked > 0 else None


class PrefetchRegret:
    """What guessing gains: the share of requested bytes promoted in time, compared with a hold-out.

    Three shares, of the latest returns: of sessions with guesses, of the hold-out (demand alone, as LRU
    does), and of the hold-out had everything been promoted at the pause. The third is computed, not done:
    what would have been promoted then counts as there for the tier's residence time. Pure.
    `sessions_max`: remembered pauses of the hold-out.
    """

    def __init__(self, sessions_max: int) -> None:
        self._sessions_max = sessions_max
        self._shadows: OrderedDict[SessionKey, tuple[int, float]] = OrderedDict()  # bytes, until when there
        self._guessed = _Share()
        self._demand = _Share()
        self._pause = _Share()

    def paused(self, session: SessionKey, nbytes: int, until_s: float) -> None:
        """Record a hold-out pause: `nbytes` could have been promoted now, to stay until `until_s`."""
        self._shadows[session] = (nbytes, until_s)
        self._shadows.move_to_end(session)
        if len(self._shadows) > self._sessions_max:
            self._shadows.popitem(last=False)

    def returned(
        self, session: SessionKey, up_bytes: int, asked_bytes: int, now_s: float, *, is_held_out: bool
    ) -> None:
        """Record a request for `asked_bytes` that some tier held, `up_bytes` of them in the upper one."""
        shadow, until_s = self._shadows.pop(session, (0, now_s))
        if asked_bytes <= 0:
            return
        if not is_held_out:
            self._guessed.add(up_bytes, asked_bytes)
            return
        self._demand.add(up_bytes, asked_bytes)
        self._pause.add(up_bytes + (shadow if now_s <= until_s else 0), asked_bytes)

    def forget(self, session: SessionKey) -> None:
        self._shadows.pop(session, None)

    @property
    def against_demand(self) -> float | None:
        """Share by which demand alone has more in time; below 0: guessing gains. None: not known yet."""
        return _less(self._demand.share, self._guessed.share)

    @property
    def against_pause(self) -> float | None:
        """As `against_demand`, for promoting everything at the pause."""
        return _less(self._pause.share, self._guessed.share)

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is wrong."""
        assert len(self._shadows) <= self._sessions_max, "too many pauses are remembered"
        for share in (self._guessed, self._demand, self._pause):
            assert 0 <= share.up <= share.asked + 1e-6, "more was up than was asked for"


def _less(other: float | None, ours: float | None) -> float | None:
    return None if other is None or ours is None else other - ours
