"""The newest turns of a profile with what became of them, to learn from and to judge forecasts by."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Final

import numpy as np
import numpy.typing as npt

from samovar.cache_tiers.forecast.features import FEATURES, Vector
from samovar.cache_tiers.forecast.turns import (
    BINS,
    COLD,
    EDGES,
    EDGES_S,
    LAST_S,
    WIDTHS_S,
    Curves,
    Floats,
    log_survival,
)

Rows = npt.NDArray[np.intp]
TurnsState = dict[str, npt.NDArray[np.generic]]

Calibration = tuple[tuple[float, float, int], ...]
"""Turns by what was forecast for them: mean P(resumes within a horizon), share that did, number of turns."""

CALIBRATION_S: Final = 600.0
"""The horizon of the predictor's calibration."""
_CALIBRATION_BINS: Final = 10


class Expert(IntEnum):
    """Whose forecast it is: of the network, the counts by kind, those of all together, recency (`COLD`)."""

    MODEL = 0
    COUNTS = 1
    COMMON = 2
    RECENCY = 3


TOLD: Final = 3
"""Experts whose curves are kept with a turn; recency's is always the same."""


class Outcome(IntEnum):
    IDLE = 0
    RETURNED = 1
    LOST = 2


class ReplayTurns:
    """The newest `rows_max` turns and their outcomes, to learn from and to judge forecasts by.

    A ring of arrays; a turn's number counts all turns ever added. A turn whose session is still idle has
    survived up to now; one whose session resumed has an idle time; one that is no longer followed has
    survived up to then (censored). Not thread-safe.
    """

    def __init__(self, rows_max: int) -> None:
        self.rows_max = rows_max
        self.added = 0
        self._held = 0
        self._features: Vector = np.zeros((rows_max, FEATURES), dtype=np.float32)
        self._curves: Curves = np.zeros((rows_max, TOLD, EDGES), dtype=np.float32)
        self._kinds: Rows = np.zeros(rows_max, dtype=np.intp)
        self._ended_s: Floats = np.zeros(rows_max)
        self._idle_s: Floats = np.zeros(rows_max)  # when it is known
        self._outcome: npt.NDArray[np.int8] = np.zeros(rows_max, dtype=np.int8)

    def __len__(self) -> int:
        return self._held

    def add(self, features: Vector, kind: int, curves: Sequence[Curves], ended_s: float) -> int:
        """Add a finished turn and return its number. `curves`: predicted, `[EDGES]`, one an `Expert`."""
        row = self.added % self.rows_max
        self._features[row] = features
        self._kinds[row] = kind
        self._curves[row] = curves
        self._ended_s[row] = ended_s
        self._outcome[row] = Outcome.IDLE
        self.added += 1
        self._held = min(self._held + 1, self.rows_max)
        return self.added - 1

    def resolve(self, number: int, outcome: Outcome, now_s: float) -> None:
        """Record a turn's outcome. No-op if it is too old; `LOST` if it had not ended by `now_s`."""
        if number < self.added - self.rows_max:
            return
        row = number % self.rows_max
        idle_s = now_s - self._ended_s[row]
        self._outcome[row] = outcome if idle_s >= 0.0 else Outcome.LOST
        self._idle_s[row] = max(idle_s, 0.0)

    def state(self, rows_max: int, now_s: float) -> TurnsState:
        """Return a copy of the newest `rows_max`. Turns still idle are saved as censored."""
        rows = self.latest(rows_max)
        idle_s, is_back = self._idle(rows, now_s)
        return {
            "turn_features": self._features[rows],
            "turn_curves": self._curves[rows],
            "turn_kinds": self._kinds[rows].astype(np.int16),
            "turn_idle_s": idle_s,
            "turn_is_back": is_back.astype(np.uint8),
        }

    def restore(self, state: TurnsState, added: int) -> None:
        """Continue after `added` turns with the newest turns of a `state()` that there is room for.

        `state` may come from other settings, but has passed `check_turns`. Empty: no turn is known.
        """
        self.added, self._held = added, 0
        if not state:
            return
        self._held = min(len(state["turn_kinds"]), self.rows_max)
        rows, newest = self.latest(self._held), slice(len(state["turn_kinds"]) - self._held, None)
        self._features[rows] = state["turn_features"][newest]
        self._curves[rows] = state["turn_curves"][newest]
        self._kinds[rows] = state["turn_kinds"][newest]
        self._idle_s[rows] = state["turn_idle_s"][newest]
        self._ended_s[rows] = 0.0
        self._outcome[rows] = np.where(state["turn_is_back"][newest], Outcome.RETURNED, Outcome.LOST)

    def latest(self, count: int) -> Rows:
        """Return the rows of the newest `count`, or of as many as there are."""
        return np.arange(self.added - min(count, len(self)), self.added) % self.rows_max

    def sample(self, rng: np.random.Generator, count: int, among: int) -> Rows:
        """Return `count` random rows of the newest `among`, with replacement."""
        newest = min(among, len(self))
        return (self.added - 1 - rng.integers(newest, size=count)) % self.rows_max

    def features(self, rows: Rows) -> Vector:
        """Return features `[n, FEATURES]`."""
        return self._features[rows]

    def kinds(self, rows: Rows) -> npt.NDArray[np.intp]:
        """Return kinds `[n]`."""
        return self._kinds[rows]

    def targets(self, rows: Rows, now_s: float) -> tuple[Floats, Floats]:
        """Return `came_back`, `survived`, each `[n, BINS]` in [0, 1].

        A bin that a session has passed counts whole, the bin it is in by its share so far, the bin it
        resumed in as an event.
        """
        idle_s, is_back = self._idle(rows, now_s)
        through = (idle_s[:, None] - EDGES_S[:-1]) / WIDTHS_S
        survived = np.minimum(np.maximum(through, 0.0), 1.0)
        came_back = ((through >= 0.0) & (through < 1.0) & is_back[:, None]).astype(np.float64)
        survived *= 1.0 - came_back
        return came_back, survived

    def losses(self, rows: Rows, now_s: float) -> Floats:
        """Return `[experts, n]`: losses of their curves, minus the log likelihood of what happened.

        A session that is still idle is judged as well, by the probability that it would be: among resumed
        sessions alone, the best forecast is that all resume.
        """
        idle_s, is_back = self._idle(rows, now_s)
        place = np.searchsorted(EDGES_S, idle_s, side="right") - 1
        is_event = is_back & (idle_s < LAST_S)
        place = np.minimum(place, BINS - 1)
        losses = np.zeros((len(Expert), len(rows)))
        at = np.arange(len(rows))
        for expert in Expert:
            if expert == Expert.RECENCY:
                curves = np.broadcast_to(COLD, (len(rows), EDGES))
            else:
                curves = np.ascontiguousarray(self._curves[rows, expert])
            rate = curves[at, place] - curves[at, place + 1]
            happened = log_survival(curves, idle_s) + is_event * np.log(np.maximum(rate, _RATE_MIN))
            losses[expert] = -happened
        return losses

    def calibration(self, rows: Rows, experts: Rows, horizon_s: float, now_s: float) -> Calibration:
        """Return how often the curves of `experts`, one of each row, came true within `horizon_s`.

        See `Calibration`. Of turns that ended that long ago, so that one which came true early counts no
        sooner than the others. Turns of an earlier process and those no longer followed are left out.
        """
        is_old = (self._ended_s[rows] > 0.0) & (now_s - self._ended_s[rows] >= horizon_s)
        idle_s, is_back = self._idle(rows, now_s)
        came_back = is_back & (idle_s < horizon_s)
        known = is_old & (came_back | (idle_s >= horizon_s))
        told = experts[known]
        curves = self._curves[rows[known], np.minimum(told, TOLD - 1)]
        curves[told == Expert.RECENCY] = COLD
        said = -np.expm1(log_survival(curves, np.full(len(curves), horizon_s)))
        true, bins = (
            came_back[known],
            np.minimum((said * _CALIBRATION_BINS).astype(np.intp), _CALIBRATION_BINS - 1),
        )
        return tuple(
            (float(said[bins == one].mean()), float(true[bins == one].mean()), int((bins == one).sum()))
            for one in np.unique(bins)
        )

    def _idle(self, rows: Rows, now_s: float) -> tuple[Floats, npt.NDArray[np.bool_]]:
        outcome = self._outcome[rows]
        idle_s = np.where(outcome == Outcome.IDLE, now_s - self._ended_s[rows], self._idle_s[rows])
        return np.minimum(np.maximum(idle_s, 0.0), LAST_S), outcome == Outcome.RETURNED

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is wrong."""
        assert 0 <= self._held <= min(self.added, self.rows_max), "more turns than were added"
        rows = self.latest(len(self))
        assert np.isfinite(self._features[rows]).all(), "a feature is not finite"
        assert np.isfinite(self._curves[rows]).all(), "a curve is not finite"
        assert np.isfinite(self._ended_s[rows]).all(), "a time is not finite"
        assert np.isfinite(self._idle_s[rows]).all(), "an idle time is not finite"


def check_turns(state: TurnsState, *, kinds: int) -> None:
    """Raise `ValueError` saying why `state` is not one of `ReplayTurns`."""
    turns = len(state["turn_kinds"]) if state["turn_kinds"].ndim else 0
    for name, (shape, dtype, lowest, highest) in _ARRAYS.items():
        array, wanted = state[name], (turns, *shape)
        if array.shape != wanted or array.dtype != dtype:
            raise ValueError(f"{name}: {array.dtype} {array.shape}, not {dtype} {wanted}")
        highest = kinds - 1 if name == "turn_kinds" else highest
        # NaN and inf fail this check as well.
        numbers = array.astype(np.float64)
        if not ((numbers >= lowest) & (numbers <= highest)).all():
            raise ValueError(f"{name}: not within {lowest:g} and {highest:g}")
    curves = state["turn_curves"].astype(np.float64)
    if (curves[..., :1] != 0.0).any() or (curves[..., 1:] > curves[..., :-1]).any():
        raise ValueError("turn_curves: a curve that rises")


_RATE_MIN: Final = 1e-7
_ARRAYS: Final[dict[str, tuple[tuple[int, ...], npt.DTypeLike, float, float]]] = {
    "turn_features": ((FEATURES,), np.dtype(np.float32), -100.0, 100.0),
    "turn_curves": ((TOLD, EDGES), np.dtype(np.float32), -1000.0, 0.0),
    "turn_kinds": ((), np.dtype(np.int16), 0.0, 0.0),
    "turn_idle_s": ((), np.dtype(np.float64), 0.0, LAST_S),
    "turn_is_back": ((), np.dtype(np.uint8), 0.0, 1.0),
}
"""Per array of a state: shape of one turn, dtype, and the range of its numbers (features: logs, flags)."""

TURNS_ARRAYS: Final = frozenset(_ARRAYS)
