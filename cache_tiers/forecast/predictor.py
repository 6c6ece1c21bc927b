"""Predicts when idle sessions resume: a survival curve per session at turn end, learned online from turns.

Sessions are counted by kind (`kaplan_meier.py`), and a small hazard network (`hazard_net.py`) learns from
the latest turns, including those still idle, how each differs from its kind. A guard compares the network's
forecasts with those of the counts alone and uses the better one; while too few have resumed to count, it
uses neither: then the most recent session is worth most (`COLD`).
Pure: clock values come in with the turns. Whatever turns and hints contain, nothing here raises or takes
long, and every curve is finite. Not thread-safe.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from samovar.cache_tiers.forecast.features import (
    AT_RATIO,
    FEATURES,
    LINEAGE_FEATURES,
    SessionHistory,
    Standardiser,
    Vector,
)
from samovar.cache_tiers.forecast.hazard_net import HazardModel, log_odds, with_late
from samovar.cache_tiers.forecast.kaplan_meier import (
    KINDS,
    KINDS_WITHOUT_ASIDE,
    KindForecasts,
    Known,
    kind_of,
    kinds_with_aside,
)
from samovar.cache_tiers.forecast.turns import (
    BINS,
    COLD,
    EDGES,
    EDGES_S,
    LAST_S,
    WIDTHS_S,
    Curves,
    Floats,
    Hint,
    Opening,
    SessionKey,
    Turn,
    curve_of,
    log_survival,
    resume_within,
    times,
)
from samovar.configs.sections import PredictorSettings

Rows = npt.NDArray[np.intp]
TurnsState = dict[str, npt.NDArray[np.generic]]


Calibration = tuple[tuple[float, float, int], ...]
"""Turns by what was forecast for them: mean P(resumes within a horizon), share that did, number of turns."""

CALIBRATION_S: Final = 600.0
"""The horizon of the predictor's calibration."""
_CALIBRATION_BINS: Final = 10


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
        self._curves: Curves = np.zeros((rows_max, 2, EDGES), dtype=np.float32)
        self._kinds: Rows = np.zeros(rows_max, dtype=np.intp)
        self._ended_s: Floats = np.zeros(rows_max)
        self._idle_s: Floats = np.zeros(rows_max)  # when it is known
        self._outcome: npt.NDArray[np.int8] = np.zeros(rows_max, dtype=np.int8)

    def __len__(self) -> int:
        return self._held

    def add(self, features: Vector, kind: int, model: Curves, fallback: Curves, ended_s: float) -> int:
        """Add a finished turn and return its number. `model`, `fallback`: predicted curves, `[EDGES]`."""
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
        """Return `[2, n]`: losses of the two predicted curves, minus the log likelihood of what happened.

        A session that is still idle is judged as well, by the probability that it would be: among resumed
        sessions alone, the best forecast is that all resume.
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

    def calibration(self, rows: Rows, model: int, horizon_s: float, now_s: float) -> Calibration:
        """Return how often the curves `model` came true within `horizon_s`: see `Calibration`.

        Of turns that ended that long ago, so that one which came true early counts no sooner than the
        others. Turns of an earlier process and those no longer followed are left out.
        """
        is_old = (self._ended_s[rows] > 0.0) & (now_s - self._ended_s[rows] >= horizon_s)
        idle_s, is_back = self._idle(rows, now_s)
        came_back = is_back & (idle_s < horizon_s)
        known = is_old & (came_back | (idle_s >= horizon_s))
        curves = np.ascontiguousarray(self._curves[rows[known], model])
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


def check_turns(state: TurnsState, *, kinds: int, added: int) -> None:
    """Raise `ValueError` saying why `state` is not one of `ReplayTurns` after `added` turns."""
    turns = len(state["turn_kinds"]) if state["turn_kinds"].ndim else 0
    if turns > added:
        raise ValueError(f"{turns} turns of {added}")
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
    "turn_curves": ((2, EDGES), np.dtype(np.float32), -1000.0, 0.0),
    "turn_kinds": ((), np.dtype(np.int16), 0.0, 0.0),
    "turn_idle_s": ((), np.dtype(np.float64), 0.0, LAST_S),
    "turn_is_back": ((), np.dtype(np.uint8), 0.0, 1.0),
}
"""Per array of a state: shape of one turn, dtype, and the range of its numbers (features: logs, flags)."""

TURNS_ARRAYS: Final = frozenset(_ARRAYS)


Source = Literal["cold", "type-km", "model"]
"""Where forecasts come from."""

State = dict[str, npt.NDArray[np.generic]]

_JUDGED_MIN: Final = 200
"""Turns that must have been forecast before the model may be trusted."""
_YOUNG: Final = 2000
"""Turns before which each arrival gets two learning steps."""
_JUDGE_EVERY: Final = 32
_SETTLE_EVERY: Final = 16
"""Turns after which slowly changing values (standardisation, the fallback's curves) are recomputed."""

_ASIDE_SURE: Final = 0.05
"""First turns beside others are learned from by this share: all that are as likely to resume, of others as
many fewer as they are less likely. Else titles and tags, three of four requests of some clients, would take
the place of the turns that there is something to learn from."""

_LIMITS: Final = {
    "weights": 1e3,
    "steps": 2**53,
    "sums": 1e12,
    "counts": 1e9,
    "returns": 2**53,
    "is_trusted": 1,
    "added": 2**53,
    "left": 1e9,
}
"""The largest absolute value in a state, by array."""

_NEW_ARRAYS: Final = TURNS_ARRAYS | {"added"}
"""Missing in a state of the first version that is still read."""

_CELL_ARRAYS: Final = frozenset({"ratio_cells", "ratio_counts"})
LINEAGE_ARRAYS: Final = _CELL_ARRAYS | {"left"}
"""Missing in states from before lineages."""


@dataclass(slots=True)
class _Session(Known):
    """A session with its history. `turn`: number of its last turn while it is idle, if it is learned from."""

    history: SessionHistory = field(default_factory=SessionHistory)
    turn: int | None = None


class Predictor(KindForecasts[_Session]):
    """Forecasts resumptions, see the module. `seed`: of the initial weights and of the choice of turns."""

    def __init__(self, settings: PredictorSettings, *, seed: int = 0) -> None:
        super().__init__(settings, _Session)
        self._settings = settings
        self._rng = np.random.default_rng(seed)
        self.model = HazardModel(
            FEATURES, learning_rate=settings.learning_rate, seed=seed, late=LINEAGE_FEATURES
        )
        self.standard = Standardiser(settings.replay_turns)
        self._turns = ReplayTurns(max(settings.replay_turns, settings.guard_outcomes))
        self._judge_every = max(_JUDGE_EVERY, settings.guard_outcomes // 32)
        self._judged = self._settled = 0  # number of turns added at that time
        self._learns_from = 0  # turns required before learning
        self._fallbacks: dict[int, tuple[int, Curves]] = {}  # kind -> (turns added then, curve)
        self._offsets = np.tile(log_odds(-np.expm1(np.diff(COLD.astype(np.float64)))), (KINDS, 1))
        self.is_trusted = False
        self.model_loss = self.fallback_loss = 0.0
        """Mean minus log likelihood of the latest turns, for the model's forecasts and the fallback's."""
        self.switches = 0
        """How often the guard changed its decision."""
        self.calibration: Calibration = ()
        """Of the forecasts in use, over the latest turns; empty until there are enough."""

    @property
    def source(self) -> Source:
        """Where forecasts are taken from now."""
        if self.is_cold:
            return "cold"
        return "model" if self.is_trusted else "type-km"

    @property
    def learned_steps(self) -> int:
        return self.model.steps

    def arrived(self, session: SessionKey, at_s: float, opening: Opening | None = None) -> None:
        """Record that the session's next turn begins: an outcome for its last one, and a learning step."""
        now_s = self._clock.at(at_s)
        known = self._sessions.get(session)
        if known is not None:
            self._sessions.move_to_end(session)
            self._came_back(session, known, now_s)
        self._began(session, opening, now_s)
        self._learn(now_s)

    def ended(self, turn: Turn) -> Curves:
        """Record a finished turn; return its curve, f32 `[EDGES]`, counted from the turn's end."""
        now_s = self._clock.at(turn.ended_s)
        started_s = self._clock.sane(turn.started_s)
        known = self._used(turn.session)
        self._came_back(turn.session, known, started_s)  # if not reported: turns may overlap
        standing = self.lineages.ended(turn, now_s)
        features = known.history.features(turn, started_s, now_s, standing.numbers)
        kind = kind_of(turn, known.history.turns, is_aside=standing.is_aside)
        self.counts.began_idle(turn.session, kind, now_s)
        source, counted = self.source, self._fallback(kind)
        self.lineages.expects(turn.session, standing, COLD if source == "cold" else counted, now_s)
        fallback = times(counted, standing.ratio)
        model = self.model.curve(self.standard.apply(features), self._offsets[kind] + features[AT_RATIO])
        if not standing.is_aside or self._rng.random() < resume_within(fallback, 0.0, LAST_S) / _ASIDE_SURE:
            known.turn = self._turns.add(features, kind, model, fallback, now_s)
        cold = times(COLD, standing.ratio)
        known.curve = model if source == "model" else fallback if source == "type-km" else cold
        known.since_s = now_s
        return known.curve

    def hint(self, hint: Hint) -> Curves | None:
        """See `KindForecasts`; a hint is a feature of the session's next turn, too."""
        if (known := self._sessions.get(hint.session)) is not None:
            known.history.is_hinted = True
        return super().hint(hint)

    def forget(self, session: SessionKey) -> None:
        """See `KindForecasts`; its idle turn is learned from as one that lasted until now."""
        known = self._sessions.get(session)
        if known is not None and known.turn is not None:
            self._turns.resolve(known.turn, Outcome.LOST, self._clock.now_s)
        super().forget(session)

    def state(self) -> State:
        """Return a copy of what was learned and of the turns it is learned from, without the sessions."""
        turns = self._turns
        return {
            **turns.state(self._settings.saved_turns, self._clock.now_s),
            "added": np.array([turns.added, self._settled, self._judged], dtype=np.int64),
            "weights": np.stack([self.model.weights, self.model.average, *self.model.moments]),
            "steps": np.array([self.model.steps], dtype=np.int64),
            "sums": self.standard.sums.copy(),
            "counts": self.counts.counts_so_far(),
            "returns": np.array([self.counts.returns], dtype=np.int64),
            "is_trusted": np.array([self.is_trusted], dtype=np.uint8),
            "ratio_cells": self.lineages.ratios.cells,
            "ratio_counts": self.lineages.ratios.counts,
            "left": self.lineages.left.copy(),
        }

    def restore(self, state: State) -> None:
        """Continue with a `state()`. Raises `ValueError` if it is invalid; then nothing has changed.

        Without its turns (an older version's, or `saved_turns` is small) it forecasts as before, but
        does not learn until `learning_turns_min` are in: steps on a few turns would undo what was learned.
        """
        state = with_lineages(state)
        check_state(state, self.state())
        weights = state["weights"].astype(np.float32)
        self.model.weights, self.model.average = weights[0].copy(), weights[1].copy()
        self.model.moments = weights[2:].copy()
        self.model.steps = int(state["steps"][0])
        self.standard.sums = state["sums"].astype(np.float64)
        self.standard.settle()
        self.counts.counts = state["counts"].astype(np.float64)
        self.counts.returns = int(state["returns"][0])
        self.is_trusted = bool(state["is_trusted"][0])
        self.lineages.restore(
            state["ratio_cells"].astype(np.uint64),
            state["ratio_counts"].astype(np.float64),
            state["left"].astype(np.float64),
        )
        self._restore_turns(state)
        self._fallbacks.clear()
        for kind in range(KINDS):  # the replayed turns are of all kinds
            self._fallback(kind)

    def _restore_turns(self, state: State) -> None:
        turns = self._turns
        if "added" in state:
            added, self._settled, self._judged = map(int, state["added"])
        else:  # an older version's: about one step per turn
            added = self._settled = self._judged = self.model.steps
        turns.restore({name: state[name] for name in TURNS_ARRAYS if name in state}, added)
        wanted = min(self._settings.learning_turns_min, turns.rows_max)
        self._learns_from = wanted if len(turns) < min(wanted, added) else 0

    def _came_back(self, session: SessionKey, known: _Session, at_s: float) -> None:
        self.counts.came_back(session, at_s)
        if known.turn is not None:
            self._turns.resolve(known.turn, Outcome.RETURNED, at_s)
            known.turn = None

    def _fallback(self, kind: int) -> Curves:
        """Return the counted curve of a kind, at most a few turns old."""
        said = self._fallbacks.get(kind)
        if said is None or self._turns.added - said[0] >= _SETTLE_EVERY:
            hazards = self.counts.hazards(kind)
            said = self._fallbacks[kind] = self._turns.added, curve_of(hazards)
            self._offsets[kind] = log_odds(hazards)
            self.model.reach[:] = self.counts.seen()
        return said[1]

    def _learn(self, now_s: float) -> None:
        added = self._turns.added
        if not added:
            return
        fresh = added - self._settled
        if fresh >= min(_SETTLE_EVERY, 1 + added // 4):
            self.standard.add(self._turns.features(self._turns.latest(fresh)))
            self._settled = added
        if added - self._judged >= self._judge_every:
            self._judge(now_s)
            self._judged = added
        if len(self._turns) < self._learns_from:
            return
        for _ in range(2 if added < _YOUNG else 1):
            self._step(now_s)

    def _step(self, now_s: float) -> None:
        rows = self._turns.sample(self._rng, self._settings.batch_turns, self._settings.replay_turns)
        came_back, survived = self._turns.targets(rows, now_s)
        features = self._turns.features(rows)
        offsets = self._offsets[self._turns.kinds(rows)] + features[:, AT_RATIO:]
        self.model.learn(self.standard.apply(features), offsets, came_back, survived)

    def _judge(self, now_s: float) -> None:
        """Trust the model unless it forecast the latest turns worse than the fallback, beyond chance."""
        judged_max = self._settings.guard_outcomes
        if len(self._turns) < min(_JUDGED_MIN, judged_max):
            return
        # Early on only the newer half: the first forecasts may be nonsense.
        rows = self._turns.latest(min(judged_max, self._turns.added // 2))
        losses = self._turns.losses(rows, now_s)
        self.model_loss, self.fallback_loss = losses.mean(axis=1).tolist()
        worse = losses[0] - losses[1]
        # Equal loss is enough: the model tells sessions of one kind apart.
        is_good = bool(worse.mean() <= worse.std() / len(rows) ** 0.5)
        self.switches += is_good != self.is_trusted
        self.is_trusted = is_good
        followed = self._turns.latest(self._turns.added // 2)
        self.calibration = self._turns.calibration(followed, 0 if is_good else 1, CALIBRATION_S, now_s)

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is wrong."""
        super().check_integrity()
        self.model.check_integrity()
        self._turns.check_integrity()
        for known in self._sessions.values():
            assert np.isfinite(known.curve).all(), "a curve is not finite"


def check_state(state: State, like: State) -> None:
    """Raise `ValueError` if `state` is invalid: other arrays than `like`'s, NaN, absurd numbers.

    An older version's has no turns and does not say how many there were.
    """
    if state.keys() not in (like.keys(), like.keys() - _NEW_ARRAYS):
        raise ValueError(f"other arrays: {', '.join(sorted(state))}")
    for name in sorted(state.keys() - TURNS_ARRAYS - _CELL_ARRAYS):
        array, wanted = state[name], like[name]
        if array.shape != wanted.shape or array.dtype != wanted.dtype:
            raise ValueError(f"{name}: {array.dtype} {array.shape}, not {wanted.dtype} {wanted.shape}")
        if not np.isfinite(array).all():
            raise ValueError(f"{name}: not finite")
        if np.abs(array).max() > _LIMITS[name]:
            raise ValueError(f"{name}: beyond reason")
        if name not in ("weights", "sums") and array.min() < 0:
            raise ValueError(f"{name}: negative")
    if state["weights"][3].min() < 0 or state["sums"][(0, 2),].min() < 0:
        raise ValueError("a square is negative")
    if state["left"][1] > state["left"][0]:
        raise ValueError("left: more branches were regained than left")
    _check_cells(state["ratio_cells"], state["ratio_counts"])
    if "added" in state:
        added = int(state["added"][0])
        if state["added"].max() > added:
            raise ValueError("added: more turns were judged than there were")
        check_turns(state, kinds=KINDS, added=added)


def _check_cells(cells: npt.NDArray[np.generic], counts: npt.NDArray[np.generic]) -> None:
    if cells.ndim != 1 or cells.dtype != np.uint64 or len(np.unique(cells)) != len(cells):
        raise ValueError("ratio_cells: not one row of different numbers")
    if counts.shape != (len(cells), 3) or counts.dtype != np.float64:
        raise ValueError(f"ratio_counts: {counts.dtype} {counts.shape} for {len(cells)} cells")
    numbers = counts.astype(np.float64)
    if not ((numbers >= 0.0) & (numbers <= _LIMITS["counts"])).all():  # NaN fails as well
        raise ValueError("ratio_counts: negative, or beyond reason")


def with_later_bins(state: State, bins: int) -> State:
    """Return a state from before the last `bins` bins as one of today: nothing was seen in them."""
    new = dict(state)
    for name, mode in (("counts", "constant"), ("turn_curves", "edge")):
        if bins and name in state and state[name].ndim == 3 and state[name].shape[2]:
            new[name] = np.pad(state[name], ((0, 0), (0, 0), (0, bins)), mode)  # type: ignore[call-overload]
    return new


def with_lineages(state: State) -> State:
    """Return a state from before lineages as one of today; others, and what is no state, as they are.

    Features and kinds that were not there mean nothing, so the forecasts are the same.
    """
    before = FEATURES - LINEAGE_FEATURES
    is_older = not LINEAGE_ARRAYS & state.keys() and {"weights", "sums", "counts"} <= state.keys()
    if not is_older:
        return state
    old_sums, old_counts = (state[name].astype(np.float64) for name in ("sums", "counts"))
    if old_sums.shape != (3, before) or old_counts.shape != (2, KINDS_WITHOUT_ASIDE + 1, BINS):
        return state
    new = dict(state)
    if state["weights"].ndim == 2:
        new["weights"] = with_late(state["weights"].astype(np.float32), before, LINEAGE_FEATURES)
    sums = np.zeros((3, FEATURES))
    sums[:, :before] = old_sums
    sums[0] = old_sums[0, 0]
    counts = np.zeros((2, KINDS + 2, BINS))
    kinds = kinds_with_aside(np.arange(KINDS_WITHOUT_ASIDE))
    counts[:, [*kinds.tolist(), KINDS + 1]] = old_counts
    new["sums"], new["counts"] = sums, counts
    if "turn_features" in state and state["turn_features"].ndim == 2:
        rows = state["turn_features"]
        new["turn_features"] = np.pad(rows, ((0, 0), (0, LINEAGE_FEATURES)))
    if "turn_kinds" in state:
        kinds = kinds_with_aside(state["turn_kinds"].astype(np.intp))
        new["turn_kinds"] = kinds.astype(state["turn_kinds"].dtype)
    new["ratio_cells"] = np.zeros(0, dtype=np.uint64)
    new["ratio_counts"] = np.zeros((0, 3))
    new["left"] = np.zeros(2)
    return new
