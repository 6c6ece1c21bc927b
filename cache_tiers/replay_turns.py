"""The latest turns, with what became of them so far: what the predictor learns from and is judged by.

A ring of arrays. A turn whose session is still idle has survived up to now; one whose session came back
has an idle time; one that was lost sight of has survived up to then (censored). Not thread-safe.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import numpy as np
import numpy.typing as npt

from cache_tiers.features import FEATURES, Vector
from cache_tiers.survival import BINS, EDGES, EDGES_S, LAST_S, WIDTHS_S, Curves, Floats, log_survival

Rows = npt.NDArray[np.intp]


class Outcome(IntEnum):
    IDLE = 0
    RETURNED = 1
    LOST = 2


class ReplayTurns:
    """At most `rows_max` turns, the newest. A turn's number counts all that were ever added."""

    def __init__(self, rows_max: int) -> None:
        self.rows_max = rows_max
        self.added = 0
        self._features: Vector = np.zeros((rows_max, FEATURES), dtype=np.float32)
        self._curves: Curves = np.zeros((rows_max, 2, EDGES), dtype=np.float32)
        self._kinds: Rows = np.zeros(rows_max, dtype=np.intp)
        self._ended_s: Floats = np.zeros(rows_max)
        self._idle_s: Floats = np.zeros(rows_max)  # when it is known
        self._outcome: npt.NDArray[np.int8] = np.zeros(rows_max, dtype=np.int8)

    def __len__(self) -> int:
        return min(self.added, self.rows_max)

    def add(self, features: Vector, kind: int, model: Curves, fallback: Curves, ended_s: float) -> int:
        """A turn is over: its number. `model`, `fallback`: the curves that were predicted, `[EDGES]`."""
        row = self.added % self.rows_max
        self._features[row] = features
        self._kinds[row] = kind
        self._curves[row, 0] = model
        self._curves[row, 1] = fallback
        self._ended_s[row] = ended_s
        self._outcome[row] = Outcome.IDLE
        self.added += 1
        return self.added - 1

    def resolve(self, number: int, outcome: Outcome, now_s: float) -> None:
        """What became of a turn. Nothing if it is none of the latest; lost, if it had not ended by then."""
        if number < self.added - self.rows_max:
            return
        row = number % self.rows_max
        idle_s = now_s - self._ended_s[row]
        self._outcome[row] = outcome if idle_s >= 0.0 else Outcome.LOST
        self._idle_s[row] = max(idle_s, 0.0)

    def latest(self, count: int) -> Rows:
        """The rows of the newest `count`, or of as many as there are."""
        return np.arange(self.added - min(count, len(self)), self.added) % self.rows_max

    def sample(self, rng: np.random.Generator, count: int, among: int) -> Rows:
        """`count` rows of the newest `among`, at random, maybe some twice."""
        newest = min(among, len(self))
        return (self.added - 1 - rng.integers(newest, size=count)) % self.rows_max

    def features(self, rows: Rows) -> Vector:
        """`[n, FEATURES]`"""
        return self._features[rows]

    def kinds(self, rows: Rows) -> npt.NDArray[np.intp]:
        """`[n]`"""
        return self._kinds[rows]

    def targets(self, rows: Rows, now_s: float) -> tuple[Floats, Floats]:
        """`came_back`, `survived`, each `[n, BINS]` in [0, 1].

        A bin that a session has been through counts whole, the bin it is in by its share so far, the bin it
        came back in as an event.
        """
        idle_s, is_back = self._idle(rows, now_s)
        through = (idle_s[:, None] - EDGES_S[:-1]) / WIDTHS_S
        survived = np.minimum(np.maximum(through, 0.0), 1.0)
        came_back = ((through >= 0.0) & (through < 1.0) & is_back[:, None]).astype(np.float64)
        survived *= 1.0 - came_back
        return came_back, survived

    def losses(self, rows: Rows, now_s: float) -> Floats:
        """`[2, n]`: loss of the two curves that were predicted, minus the log likelihood of what happened.

        A session that is still idle is judged as well, by the probability that it would be: among those
        alone that came back the best forecast is that all do.
        """
        idle_s, is_back = self._idle(rows, now_s)
        place = np.searchsorted(EDGES_S, idle_s, side="right") - 1
        is_event = is_back & (idle_s < LAST_S)
        place = np.minimum(place, BINS - 1)
        losses = np.zeros((2, len(rows)))
        for model in range(2):
            curves = np.ascontiguousarray(self._curves[rows, model])
            at = np.arange(len(rows))
            rate = curves[at, place] - curves[at, place + 1]
            happened = log_survival(curves, idle_s) + is_event * np.log(np.maximum(rate, _RATE_MIN))
            losses[model] = -happened
        return losses

    def _idle(self, rows: Rows, now_s: float) -> tuple[Floats, npt.NDArray[np.bool_]]:
        outcome = self._outcome[rows]
        idle_s = np.where(outcome == Outcome.IDLE, now_s - self._ended_s[rows], self._idle_s[rows])
        return np.minimum(np.maximum(idle_s, 0.0), LAST_S), outcome == Outcome.RETURNED

    def check_integrity(self) -> None:
        """Raises `AssertionError` naming what is wrong."""
        rows = self.latest(len(self))
        assert np.isfinite(self._features[rows]).all(), "a feature is not finite"
        assert np.isfinite(self._curves[rows]).all(), "a curve is not finite"
        assert np.isfinite(self._ended_s[rows]).all(), "a time is not finite"
        assert np.isfinite(self._idle_s[rows]).all(), "an idle time is not finite"


_RATE_MIN: Final = 1e-7
