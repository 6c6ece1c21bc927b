"""What prefetching has done so far, in bytes. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class PrefetchStats:
    """Bytes since the start. `started`: by why. `used` + `late` + `wasted`: of guesses that were judged.

    `late`: still on their way when they were asked for. `precision`: used share of what was judged.
    `is_on`: whether guesses of a kind are made. Regrets: see `PrefetchRegret`.
    """

    started: dict[str, int] = field(default_factory=dict)
    used: int = 0
    late: int = 0
    wasted: int = 0
    cancelled: int = 0
    guesses: int = 0
    moving: int = 0
    is_on: dict[str, bool] = field(default_factory=dict)
    regret_demand: float | None = None
    regret_pause: float | None = None

    @property
    def precision(self) -> float | None:
        judged = self.used + self.late + self.wasted
        return self.used / judged if judged else None
