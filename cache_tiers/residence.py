"""How long a tier keeps what it holds, measured, and from it how far ahead its policy looks.

A tier in which a copy survives for a minute need not ask who returns within the hour. By Little's law the
mean residence is what is held divided by the rate at which it goes. Pure.
"""

from __future__ import annotations

import math

FORGET_S = 120.0
"""Time constant of the rate: what went that long ago counts for a third."""


class Residence:
    """`horizon_s_min`, `horizon_s_max`: bounds of the answer."""

    def __init__(self, horizon_s_min: float, horizon_s_max: float) -> None:
        self._min_s = horizon_s_min
        self._max_s = max(horizon_s_min, horizon_s_max)
        self._went = 0.0  # decayed sum of bytes (or pages) that went
        self._since_s = -math.inf
        self._began_s: float | None = None

    def went(self, amount: float, now_s: float) -> None:
        """So much was evicted."""
        self._decay(now_s)
        self._went += amount

    def horizon_s(self, held: float, now_s: float) -> float:
        """The mean residence of what is `held` now, within the bounds; the upper one while nothing goes."""
        self._decay(now_s)
        if self._went <= 0 or self._began_s is None:
            return self._max_s
        # Of a tier that began to evict a moment ago only that moment is known.
        seen_s = FORGET_S * -math.expm1(-max(now_s - self._began_s, 1.0) / FORGET_S)
        return min(max(held * seen_s / self._went, self._min_s), self._max_s)

    def _decay(self, now_s: float) -> None:
        if self._began_s is None:
            self._began_s = self._since_s = now_s
        idle_s = max(0.0, now_s - self._since_s)
        self._went *= math.exp(-idle_s / FORGET_S)
        if self._went < 1e-9:
            self._went = 0.0
        self._since_s = max(self._since_s, now_s)
