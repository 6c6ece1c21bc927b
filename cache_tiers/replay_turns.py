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
TurnsState = dict[str, npt.NDArray[np.generic]]


class Outcome(IntEnum):
    IDLE = 0
    RETURNED = 1
    LOST = 2


class ReplayTurns:
    """At most `rows_max` turns, the newest. A turn's number counts all that were ever added."""

    def __init__(self, rows_max: int) -> None:
        self.rows_max = rows_max
        self.added = 0
        self._held = 0
        self._features: Vector = np.zeros((rows_max, FEATURES), dtype=np.float32)
        self._curves: Curves = np.zeros((rows_max, 2, EDGES), dtype=np.float32)
        self._kinds: Rows = np.zeros(rows_max, dtype=np.intp)
        self._ended_s: Floats = np.zeros(rows_max)
        self._idle_s: Floats = np.zeros(rows_max)  # when it is known
        self._outcome: npt.NDArray[np.int8] = np.zeros(rows_max, dtype=np.int8)

    def __len__(self) -> int:
        return self._held

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
        self._held = min(self._held + 1, self.rows_max)
        return self.added - 1

    def resolve(self, number: int, outcome: Outcome, now_s: float) -> None:
        """What became of a turn. Nothing if it is none of the latest; lost, if it had not ended by then."""
        if number < self.added - self.rows_max:
            return
        row = number % self.rows_max
        idle_s = now_s - self._ended_s[row]
        self._outcome[row] = outcome if idle_s >= 0.0 else Outcome.LOST
        self._idle_s[row] = max(idle_s, 0.0)

    def state(self, rows_max: int, now_s: float) -> TurnsState:
        """A copy of the newest `rows_max`. What is still idle is censored: who goes on will not know it."""
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
        """Goes on after `added` turns with the newest of `state()` that there is room for.

        `state` may be of other settings, but is one of `check_turns`. Empty: none of those turns is known.
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
        assert 0 <= self._held <= min(self.added, self.rows_max), "more turns than were added"
        rows = self.latest(len(self))
        assert np.isfinite(self._features[rows]).all(), "a feature is not finite"
        assert np.isfinite(self._curves[rows]).all(), "a curve is not finite"
        assert np.isfinite(self._ended_s[rows]).all(), "a time is not finite"
        assert np.isfinite(self._idle_s[rows]).all(), "an idle time is not finite"


def check_turns(state: TurnsState, *, kinds: int, added: int) -> None:
    """Raises `ValueError` saying why `state` is none of `ReplayTurns` after `added` turns."""
    turns = len(state["turn_kinds"]) if state["turn_kinds"].ndim else 0
    if turns > added:
        raise ValueError(f"{turns} turns of {added}")
    for name, (shape, dtype, lowest, highest) in _ARRAYS.items():
        array, wanted = state[name], (turns, *shape)
        if array.shape != wanted or array.dtype != dtype:
            raise ValueError(f"{name}: {array.dtype} {array.shape}, not {dtype} {wanted}")
        highest = kinds - 1 if name == "turn_kinds" else highest
        # Not finite is not within either.
        numbers = array.astype(np.float64)
        if not ((numbers >= lowest) & (numbers <= highest)).all():
            raise ValueError(f"{name}: not within {lowest:g} and {highest:g}")
    curves = state["turn_curves"].astype(np.float64)
    if (curves[..., :1] != 0.0).any() or (curves[..., 1:] > curves[..., :-1]).any():
        raise ValueError("turn_curves: a curve that rises")


_RATE_MIN: Final = 1e-7
_ARRAYS: Final[dict[str, tuple[tuple[int, ...], npt.DTypeLike, float, float]]] = {
    "turn_features": ((FEATURES,), np.dtype(np.float32), -100.0, 100.0),
    "turn_curves": ((2, EDGES), np.dtype(np.float32), -1000.0, 0.0),
    "turn_kinds": ((), np.dtype(np.int16), 0.0, 0.0),
    "turn_idle_s": ((), np.dtype(np.float64), 0.0, LAST_S),
    "turn_is_back": ((), np.dtype(np.uint8), 0.0, 1.0),
}
"""Of a state: shape of one turn, dtype, and the range of its numbers (features are logs and flags)."""

TURNS_ARRAYS: Final = frozenset(_ARRAYS)
