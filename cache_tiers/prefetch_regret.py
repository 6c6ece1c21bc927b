"""What guessing gains: the share of asked bytes that were up in time, beside sessions nothing is guessed for.

Three shares, of the latest returns: of sessions with guesses, of the hold-out (that is: demand alone, as
LRU does), and of the hold-out had everything been brought up at the pause. The third is counted, not done:
what would have been brought up then counts as there for as long as the tier keeps things. Pure.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from cache_tiers.turns import SessionKey

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
    """`sessions_max`: pauses of the hold-out that are remembered."""

    def __init__(self, sessions_max: int) -> None:
        self._sessions_max = sessions_max
        self._shadows: OrderedDict[SessionKey, tuple[int, float]] = OrderedDict()  # bytes, there until
        self._guessed = _Share()
        self._demand = _Share()
        self._pause = _Share()

    def paused(self, session: SessionKey, nbytes: int, until_s: float) -> None:
        """A session of the hold-out: `nbytes` could have been brought up now, and stayed `until_s`."""
        self._shadows[session] = (nbytes, until_s)
        self._shadows.move_to_end(session)
        if len(self._shadows) > self._sessions_max:
            self._shadows.popitem(last=False)

    def returned(
        self, session: SessionKey, up_bytes: int, asked_bytes: int, now_s: float, *, is_held_out: bool
    ) -> None:
        """It asked for `asked_bytes` that some tier held, `up_bytes` of them in the upper one."""
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
        """Share by which demand alone has more up in time; below 0: guessing gains. None: not known yet."""
        return _less(self._demand.share, self._guessed.share)

    @property
    def against_pause(self) -> float | None:
        """As `against_demand`, for bringing everything up at the pause."""
        return _less(self._pause.share, self._guessed.share)

    def check_integrity(self) -> None:
        """Raises `AssertionError` naming what is wrong."""
        assert len(self._shadows) <= self._sessions_max, "too many pauses are remembered"
        for share in (self._guessed, self._demand, self._pause):
            assert 0 <= share.up <= share.asked + 1e-6, "more was up than was asked for"


def _less(other: float | None, ours: float | None) -> float | None:
    return None if other is None or ours is None else other - ours
