"""Predicts when idle sessions resume: a survival curve per session at turn end, learned online from turns.

Sessions are counted by kind (`kaplan_meier.py`); of each profile's turns a small network learns how each
differs from its kind, and a guard uses the forecasts that were best for the like: the network's, the
counts' by kind or of all kinds together, or recency. While too few of a profile have resumed to count, none
is used: then the most recent session is worth most (`COLD`).
Pure: clock values come in with the turns. Whatever turns and hints contain, nothing here raises or takes
long, and every curve is finite. Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from samovar.cache_tiers.forecast.features import (
    AT_RATIO,
    FEATURES,
    INPUTS,
    LINEAGE_FEATURES,
    NEW,
    PROFILES,
    RANGED,
    SessionHistory,
    Standardiser,
    Vector,
    hinted_record,
    moved_record,
)
from samovar.cache_tiers.forecast.hazard_net import HazardModel, Weights, log_odds, weights_of, with_late
from samovar.cache_tiers.forecast.kaplan_meier import (
    KINDS,
    KINDS_WITHOUT_ASIDE,
    POOLS,
    PROFILE_KINDS,
    KaplanMeier,
    KindForecasts,
    Known,
    kind_of,
    kinds_with_aside,
)
from samovar.cache_tiers.forecast.tool_times import ToolTimes, check_tools
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
    bins_of,
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


# As the arrays below have them: numbers of an enum are slow to compare with.
_IDLE, _RETURNED = np.int8(Outcome.IDLE), np.int8(Outcome.RETURNED)
_BEGINS_S: Final[Floats] = EDGES_S[:-1].copy()
_PASSED: Final[Floats] = np.tri(BINS, k=-1)
"""`[BINS, BINS]`: 1 for each bin that one who is in a later one has passed."""


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
        return self._features.take(rows, axis=0)

    def kinds(self, rows: Rows) -> npt.NDArray[np.intp]:
        """Return kinds `[n]`."""
        return self._kinds.take(rows)

    def targets(self, rows: Rows, now_s: float) -> tuple[Floats, Floats]:
        """Return `came_back`, `survived`, each `[n, BINS]` in [0, 1].

        A bin that a session has passed counts whole, the bin it is in by its share so far, the bin it
        resumed in as an event.
        """
        idle_s, is_back = self._idle(rows, now_s)
        bins = bins_of(idle_s)
        survived = _PASSED.take(bins, axis=0)
        places = np.arange(0, survived.size, BINS)
        places += bins
        survived.put(places, (idle_s - _BEGINS_S.take(bins)) / WIDTHS_S.take(bins))
        came_back = np.zeros(survived.shape)
        events = places[is_back & (idle_s < LAST_S)]
        came_back.put(events, 1.0)
        survived.put(events, 0.0)
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
        outcome = self._outcome.take(rows)
        idle_s = np.where(outcome == _IDLE, now_s - self._ended_s.take(rows), self._idle_s.take(rows))
        np.maximum(idle_s, 0.0, out=idle_s)
        return np.minimum(idle_s, LAST_S, out=idle_s), outcome == _RETURNED

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


Source = Literal["cold", "type-km", "constant", "model"]
"""Where forecasts come from."""

State = dict[str, npt.NDArray[np.generic]]

_SOURCES: Final[dict[Expert, Source]] = {
    Expert.MODEL: "model",
    Expert.COUNTS: "type-km",
    Expert.COMMON: "constant",
    Expert.RECENCY: "cold",
}
_TRAFFICS: Final = len(PROFILES) + 1
"""Profiles, and one for all others."""
_POOLS: Final = max(POOLS) + 1
_WEIGHTS: Final = weights_of(INPUTS)

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
    "choices": max(Expert),
    "added": 2**53,
    "left": 1e9,
}
"""The largest absolute value in a state, by array."""

_NEW_ARRAYS: Final = TURNS_ARRAYS | {"added"}
"""Missing in a state of the first version that is still read."""

_CELL_ARRAYS: Final = frozenset({"ratio_cells", "ratio_counts"})
_TOOL_ARRAYS: Final = ("tool_keys", "tool_counts", "tool_judged")
"""As `ToolTimes.state` has them; missing in states from before tools were told apart."""
_NO_TOOLS: Final[State] = dict(zip(_TOOL_ARRAYS, ToolTimes().state(), strict=True))
LINEAGE_ARRAYS: Final = _CELL_ARRAYS | {"left"}
"""Missing in states from before lineages."""


JUDGED_MIN: Final = 200
"""Turns, or turns of a kind, that must have been forecast before it is judged whose forecasts are used."""
_YOUNG: Final = 2000
"""Turns before which each arrival gets two learning steps."""
_JUDGE_EVERY: Final = 32
_SETTLE_EVERY: Final = 16
"""Turns after which slowly changing values (standardisation, the counts' curves) are recomputed."""


class ProfileModel:
    """The turns of one profile, whose kinds are numbered from `first_kind` on.

    `counts`: of all profiles. `rng`: chooses turns to learn from. Not thread-safe.
    """

    def __init__(
        self,
        settings: PredictorSettings,
        counts: KaplanMeier,
        first_kind: int,
        rng: np.random.Generator,
        *,
        seed: int,
    ) -> None:
        self._settings = settings
        self._counts = counts
        self._first_kind = first_kind
        self._rng = rng
        self.model = HazardModel(
            INPUTS, learning_rate=settings.learning_rate, seed=seed, late=LINEAGE_FEATURES
        )
        self.standard = Standardiser(settings.replay_turns)
        self.turns = ReplayTurns(max(settings.replay_turns, settings.guard_outcomes))
        self._judge_every = max(_JUDGE_EVERY, settings.guard_outcomes // 32)
        self.judged = self.settled = 0  # number of turns added at that time
        self._learns_from = 0  # turns required before learning
        self._said: dict[int, tuple[int, Curves, Curves]] = {}  # kind -> turns added then, curves
        self._offsets: Weights = np.tile(
            log_odds(-np.expm1(np.diff(COLD.astype(np.float64)))), (PROFILE_KINDS, 1)
        )
        self._reach: Weights = np.ones((PROFILE_KINDS, BINS), dtype=np.float32)  # kinds are of two pools
        self.choice = Expert.COUNTS
        """Whose forecasts are used where a kind has too few turns to say."""
        self.by_kind: dict[int, Expert] = {}
        self.losses: Floats = np.zeros(len(Expert))
        """Mean minus log likelihood of the latest turns, by expert."""
        self.switches = 0
        """How often the guard changed its decision."""
        self.calibration: Calibration = ()
        """Of the forecasts in use, over the latest turns; empty until there are enough."""

    def chosen(self, kind: int) -> Expert:
        """Return whose forecasts of this kind are used."""
        return self.by_kind.get(kind, self.choice)

    def counted(self, kind: int) -> tuple[Curves, Curves]:
        """Return the counted curves of a kind and of all kinds, at most a few turns old."""
        said = self._said.get(kind)
        if said is None or self.turns.added - said[0] >= _SETTLE_EVERY:
            hazards, common = self._counts.hazards_of(kind)
            said = self._said[kind] = self.turns.added, curve_of(hazards), curve_of(common)
            self._offsets[kind - self._first_kind] = log_odds(hazards)
            self._reach[kind - self._first_kind] = self._counts.seen(kind)
        return said[1:]

    def curves(self, features: Vector, kind: int, ratio: float) -> tuple[Curves, Curves, Curves]:
        """Return what each expert forecasts, in the order of `Expert`; `ratio`: see `lineages.Standing`."""
        counted, common = self.counted(kind)
        own = kind - self._first_kind
        offset = self._offsets[own]
        if ratio != 1.0:
            offset = offset + features[AT_RATIO]
            counted, common = times(counted, ratio), times(common, ratio)
        return self.model.curve(self.standard.apply(features), offset, self._reach[own]), counted, common

    def learn(self, now_s: float) -> None:
        """Take a learning step, two while there are few turns, and judge if that is due."""
        added = self.turns.added
        if not added:
            return
        fresh = added - self.settled
        if fresh >= min(_SETTLE_EVERY, 1 + added // 4):
            self.standard.add(self.turns.features(self.turns.latest(fresh)))
            self.settled = added
        if added - self.judged >= self._judge_every:
            self._judge(now_s)
            self.judged = added
        if len(self.turns) < self._learns_from:
            return
        for _ in range(2 if added < _YOUNG else 1):
            rows = self.turns.sample(self._rng, self._settings.batch_turns, self._settings.replay_turns)
            came_back, survived = self.turns.targets(rows, now_s)
            features = self.turns.features(rows)
            own = self.turns.kinds(rows) - self._first_kind
            offsets = self._offsets.take(own, axis=0)
            offsets += features[:, AT_RATIO:]
            reach = self._reach.take(own, axis=0)
            self.model.learn(self.standard.apply(features), offsets, came_back, survived, reach)

    def restored(self, added: int, settled: int, judged: int) -> None:
        """Go on after a restart with what was put into `model`, `standard` and `turns`.

        With few of its turns it does not learn until `learning_turns_min` are in: steps on a few turns would
        undo what was learned.
        """
        self.settled, self.judged = settled, judged
        wanted = min(self._settings.learning_turns_min, self.turns.rows_max)
        self._learns_from = wanted if len(self.turns) < min(wanted, added) else 0
        self.recount()

    def recount(self) -> None:
        """Ask the counts again for the curves of all kinds: the replayed turns are of all."""
        self._said.clear()
        for kind in range(self._first_kind, self._first_kind + PROFILE_KINDS):
            self.counted(kind)

    def _judge(self, now_s: float) -> None:
        """Use the first expert that forecast the latest turns no worse than the best, beyond chance."""
        judged_max = self._settings.guard_outcomes
        turns = self.turns
        if len(turns) < min(JUDGED_MIN, judged_max):
            return
        # Early on only the newer half: the first forecasts may be nonsense.
        rows = turns.latest(min(judged_max, turns.added // 2))
        losses = turns.losses(rows, now_s)
        self.losses = losses.mean(axis=1)
        choice = best_of(losses)
        self.switches += choice != self.choice
        self.choice = choice
        kinds = turns.kinds(rows)
        counted = np.bincount(kinds)
        self.by_kind = {
            kind: best_of(losses[:, kinds == kind]) for kind in np.flatnonzero(counted >= JUDGED_MIN).tolist()
        }
        followed = turns.latest(turns.added // 2)
        used = np.array([self.chosen(kind) for kind in turns.kinds(followed).tolist()], dtype=np.intp)
        self.calibration = turns.calibration(followed, used, CALIBRATION_S, now_s)


def best_of(losses: Floats) -> Expert:
    """Return the first expert whose loss is no higher than the least, or by chance; `losses`: `[experts, n]`.

    Equal loss is enough: the model tells sessions of one kind apart.
    """
    worse = losses - losses[losses.mean(axis=1).argmin()]
    is_good = worse.mean(axis=1) <= worse.std(axis=1) / losses.shape[1] ** 0.5
    return Expert(int(is_good.argmax()))


@dataclass(slots=True)
class _Session(Known):
    """A session with its history, a record of `SessionHistory`.

    `turn`: number of its last turn while it is idle, if it is learned from. `traffic`: of its last turn.
    """

    history: bytes = NEW
    turn: int | None = None
    traffic: ProfileModel | None = None


class Predictor(KindForecasts[_Session]):
    """Forecasts resumptions, see the module. `seed`: of the initial weights and of the choice of turns."""

    def __init__(self, settings: PredictorSettings, *, seed: int = 0) -> None:
        super().__init__(settings, _Session)
        self._settings = settings
        self._seed = seed
        self._rng = np.random.default_rng(seed)
        self._traffics: dict[int, ProfileModel] = {}  # by profile
        self._latest: ProfileModel | None = None

    def traffic(self, profile: int = 0) -> ProfileModel:
        """Return what is learned of a profile's turns, by its number; nothing at first."""
        traffic = self._traffics.get(profile)
        if traffic is None:
            first = profile * PROFILE_KINDS
            traffic = ProfileModel(self._settings, self.counts, first, self._rng, seed=self._seed)
            self._traffics[profile] = traffic
        return traffic

    @property
    def busiest(self) -> ProfileModel:
        """What is learned of the profile with most turns."""
        return max(self._traffics.values(), key=lambda of: of.turns.added, default=None) or self.traffic()

    @property
    def source(self) -> Source:
        """Where most forecasts are taken from now."""
        return "cold" if self.is_cold else _SOURCES[self.busiest.choice]

    @property
    def losses(self) -> tuple[float, float]:
        """Mean minus log likelihood of the latest turns: the model's forecasts, the best fallback's."""
        model, *others = self.busiest.losses.tolist()
        return model, min(others)

    @property
    def calibration(self) -> Calibration:
        """Of the forecasts in use, over the latest turns; empty until there are enough."""
        return self.busiest.calibration

    @property
    def learned_steps(self) -> int:
        return sum(of.model.steps for of in self._traffics.values())

    def arrived(self, session: SessionKey, at_s: float, opening: Opening | None = None) -> None:
        """Record that the session's next turn begins: an outcome for its last one, and a learning step."""
        now_s = self._clock.at(at_s)
        known = self._sessions.get(session)
        traffic = self._latest
        if known is not None:
            self._sessions[session] = self._sessions.pop(session)
            traffic = known.traffic or traffic
            self._came_back(session, known, now_s)
        self._began(session, opening, now_s)
        if traffic is not None:
            traffic.learn(now_s)

    def ended(self, turn: Turn) -> Curves:
        """Record a finished turn; return its curve, f32 `[EDGES]`, counted from the turn's end."""
        now_s = self._clock.at(turn.ended_s)
        started_s = self._clock.sane(turn.started_s)
        known = self._used(turn.session)
        if known.turn is not None or self.counts.follows(turn.session):
            self._came_back(turn.session, known, started_s)  # not reported, or turns overlap
        standing = self.lineages.ended(turn, now_s)
        history = SessionHistory(known.history)
        features = history.features(turn, started_s, now_s, standing.numbers)
        known.history = history.record()
        kind = kind_of(turn, history.turns, is_aside=standing.is_aside)
        self.counts.began_idle(turn.session, kind, now_s)
        known.traffic = traffic = self._latest = self.traffic(kind // PROFILE_KINDS)
        expert = Expert.RECENCY if self.counts.is_cold(kind) else traffic.chosen(kind)
        if standing.is_aside:
            counted, _ = traffic.counted(kind)
            self.lineages.expects(
                turn.session, standing, COLD if expert == Expert.RECENCY else counted, now_s
            )
        curves = traffic.curves(features, kind, standing.ratio)
        likely = standing.is_aside and resume_within(curves[Expert.COUNTS], 0.0, LAST_S)
        if not standing.is_aside or self._rng.random() < likely / _ASIDE_SURE:
            known.turn = traffic.turns.add(features, kind, curves, now_s)
        curve = times(COLD, standing.ratio) if expert == Expert.RECENCY else curves[expert]
        if turn.tool and expert != Expert.RECENCY:
            curve = self._with_tools(turn, curve, now_s)
        known.told, known.since_s = curve.tobytes(), now_s
        return curve

    def hint(self, hint: Hint) -> Curves | None:
        """See `KindForecasts`; a hint is a feature of the session's next turn, too."""
        if (known := self._sessions.get(hint.session)) is not None:
            known.history = hinted_record(known.history)
        return super().hint(hint)

    def forget(self, session: SessionKey) -> None:
        """See `KindForecasts`; its idle turn is learned from as one that lasted until now."""
        known = self._sessions.get(session)
        if known is not None and known.turn is not None and known.traffic is not None:
            known.traffic.turns.resolve(known.turn, Outcome.LOST, self._clock.now_s)
        super().forget(session)

    def history(self, session: SessionKey, now_s: float) -> bytes:
        """Return what is known of a session's turns, its times counted from `now_s`; empty: nothing.

        May be called from any thread: it reads what is replaced as a whole, or for a moment not there.
        """
        known = self._sessions.get(session)
        return (moved_record(known.history, -now_s) or b"") if known is not None else b""

    def moved_here(self, session: SessionKey, history: bytes, now_s: float) -> None:
        """Continue a session with its `history` at another node; no-op if it is known, or if that is none."""
        record = moved_record(history, self._clock.sane(now_s))
        if record is not None and session not in self._sessions:
            self._used(session).history = record

    def state(self) -> State:
        """Return a copy of what was learned and of the turns it is learned from, without the sessions.

        One row a profile; turns are ordered by profile, oldest first.
        """
        used = sorted(profile for profile, of in self._traffics.items() if of.turns.added)
        shares = {profile: self._settings.saved_turns // max(1, len(used)) for profile in used}
        weights = np.zeros((_TRAFFICS, 4, _WEIGHTS), dtype=np.float32)
        sums = np.zeros((_TRAFFICS, 3, FEATURES))
        added, steps = np.zeros((_TRAFFICS, 3), dtype=np.int64), np.zeros(_TRAFFICS, dtype=np.int64)
        choices = np.full(KINDS, Expert.COUNTS, dtype=np.uint8)
        turns = [self.traffic(profile).turns.state(shares[profile], self._clock.now_s) for profile in used]
        for profile in used:
            of = self.traffic(profile)
            weights[profile] = of.model.weights, of.model.average, *of.model.moments
            sums[profile], steps[profile] = of.standard.sums, of.model.steps
            added[profile] = of.turns.added, of.settled, of.judged
            first = profile * PROFILE_KINDS
            choices[first : first + PROFILE_KINDS] = [of.chosen(first + at) for at in range(PROFILE_KINDS)]
        turns = turns or [ReplayTurns(1).state(0, 0.0)]
        tools = None if self.tools is None else self.tools.state()
        return {
            **(_NO_TOOLS if tools is None else dict(zip(_TOOL_ARRAYS, tools, strict=True))),
            **{name: np.concatenate([state[name] for state in turns]) for name in sorted(TURNS_ARRAYS)},
            "added": added,
            "weights": weights,
            "steps": steps,
            "sums": sums,
            "counts": self.counts.counts_so_far(),
            "returns": np.array(self.counts.returns, dtype=np.int64),
            "choices": choices,
            "ratio_cells": self.lineages.ratios.cells,
            "ratio_counts": self.lineages.ratios.counts,
            "left": self.lineages.left.copy(),
        }

    def restore(self, state: State) -> None:
        """Continue with a `state()`. Raises `ValueError` if it is invalid; then nothing has changed.

        Without its turns (an older version's, or `saved_turns` is small) it forecasts as before, but
        does not learn until `learning_turns_min` are in.
        """
        state = with_tools(with_profiles(with_lineages(state)))
        check_state(state, self.state())
        self.counts.counts = state["counts"].astype(np.float64)
        self.counts.returns = tuple(map(int, state["returns"]))
        self.lineages.restore(
            state["ratio_cells"].astype(np.uint64),
            state["ratio_counts"].astype(np.float64),
            state["left"].astype(np.float64),
        )
        keys, counts, judged = (state[name] for name in _TOOL_ARRAYS)
        self.tools = ToolTimes()
        self.tools.restore(keys.astype(np.uint64), counts.astype(np.float64), judged.astype(np.float64))
        self._traffics.clear()
        for profile in np.flatnonzero(state["steps"].astype(np.int64) + _added(state)).tolist():
            self._restore(profile, state)

    def _restore(self, profile: int, state: State) -> None:
        of = self.traffic(profile)
        weights = state["weights"][profile].astype(np.float32)
        of.model.weights, of.model.average = weights[0].copy(), weights[1].copy()
        of.model.moments = weights[2:].copy()
        of.model.steps = steps = int(state["steps"][profile])
        of.standard.sums = state["sums"][profile].astype(np.float64)
        of.standard.settle()
        first = profile * PROFILE_KINDS
        choices = [Expert(int(choice)) for choice in state["choices"][first : first + PROFILE_KINDS]]
        of.choice = max(set(choices), key=choices.count)
        of.by_kind = {first + at: each for at, each in enumerate(choices) if each != of.choice}
        # An older version's: about one step per turn.
        added, settled, judged = map(int, state["added"][profile]) if "added" in state else [steps] * 3
        turns = {}
        if "turn_kinds" in state:
            own = state["turn_kinds"].astype(np.intp) // PROFILE_KINDS == profile
            turns = {name: state[name][own] for name in TURNS_ARRAYS}
        of.turns.restore(turns, added)
        of.restored(added, settled, judged)
        if self._latest is None or added > self._latest.turns.added:
            self._latest = of

    def _came_back(self, session: SessionKey, known: _Session, at_s: float) -> None:
        self.counts.came_back(session, at_s)
        if self.tools is not None:
            self.tools.came_back(session, at_s)
        if known.turn is not None and known.traffic is not None:
            known.traffic.turns.resolve(known.turn, Outcome.RETURNED, at_s)
            known.turn = None

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is wrong."""
        super().check_integrity()
        for of in self._traffics.values():
            of.model.check_integrity()
            of.turns.check_integrity()
        for known in self._sessions.values():
            assert np.isfinite(np.frombuffer(known.told, dtype=np.float32)).all(), "a curve is not finite"


def _added(state: State) -> npt.NDArray[np.int64]:
    """Return `[profiles]`: turns that were ever added."""
    added = state.get("added")
    return np.zeros(_TRAFFICS, dtype=np.int64) if added is None else added[:, 0].astype(np.int64)


def check_state(state: State, like: State) -> None:
    """Raise `ValueError` if `state` is invalid: other arrays than `like`'s, NaN, absurd numbers.

    An older version's has no turns and does not say how many there were.
    """
    if state.keys() not in (like.keys(), like.keys() - _NEW_ARRAYS):
        raise ValueError(f"other arrays: {', '.join(sorted(state))}")
    for name in sorted(state.keys() - TURNS_ARRAYS - _CELL_ARRAYS - set(_TOOL_ARRAYS)):
        array, wanted = state[name], like[name]
        if array.shape != wanted.shape or array.dtype != wanted.dtype:
            raise ValueError(f"{name}: {array.dtype} {array.shape}, not {wanted.dtype} {wanted.shape}")
        if not np.isfinite(array).all():
            raise ValueError(f"{name}: not finite")
        if np.abs(array).max() > _LIMITS[name]:
            raise ValueError(f"{name}: beyond reason")
        if name not in ("weights", "sums") and array.min() < 0:
            raise ValueError(f"{name}: negative")
    if state["weights"][:, 3].min() < 0 or state["sums"][:, (0, 2)].min() < 0:
        raise ValueError("a square is negative")
    if state["left"][1] > state["left"][0]:
        raise ValueError("left: more branches were regained than left")
    _check_cells(state["ratio_cells"], state["ratio_counts"])
    check_tools(*(state[name] for name in _TOOL_ARRAYS))
    if "added" in state:
        added = state["added"].astype(np.int64)
        if (added.max(axis=1) > added[:, 0]).any():
            raise ValueError("added: more turns were judged than there were")
        check_turns(state, kinds=KINDS)
        turns = np.bincount(state["turn_kinds"].astype(np.intp) // PROFILE_KINDS, minlength=_TRAFFICS)
        if (turns > added[:, 0]).any():
            raise ValueError(f"{turns.tolist()} turns of {added[:, 0].tolist()}")


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


def with_tools(state: State) -> State:
    """Return a state from before tools were told apart as one of today: none is known; others as they are."""
    if state.keys() & set(_TOOL_ARRAYS):
        return state
    return state | _NO_TOOLS


def with_profiles(state: State) -> State:
    """Return a state from when all profiles shared one network as one of today; others as they are.

    It becomes the network of each profile that was seen.
    """
    if "is_trusted" not in state or state["counts"].shape != (2, KINDS + 2, BINS):
        return state
    new = dict(state)
    is_trusted = bool(new.pop("is_trusted")[0])
    counts = state["counts"].astype(np.float64)[:, :KINDS]
    pools = np.zeros((2, _POOLS, BINS))
    for kind, pool in enumerate(POOLS):
        pools[:, pool] += counts[:, kind]
    new["counts"] = np.concatenate([counts, pools], axis=1)
    returned = pools[0].sum(axis=1)
    is_seen = pools.sum(axis=(0, 2)).reshape(_TRAFFICS, 2).sum(axis=1) > 0.0
    whole = int(state["returns"][0])
    is_only = (returned > 0.0).sum() == 1
    new["returns"] = np.where(returned > 0.0, whole if is_only else returned, 0).astype(np.int64)
    choice = Expert.MODEL if is_trusted else Expert.COUNTS
    seen_kinds = np.repeat(is_seen, PROFILE_KINDS)
    new["choices"] = np.where(seen_kinds, choice, Expert.COUNTS).astype(np.uint8)
    for name in ("weights", "steps", "sums", "added"):
        if name in state:
            one = state[name][0] if name == "steps" else state[name]
            if name == "weights" and one.ndim == 2:  # nor did it know of ranges
                one = with_late(one.astype(np.float32), FEATURES - LINEAGE_FEATURES, RANGED)
            rows = np.zeros((_TRAFFICS, *np.shape(one)), dtype=state[name].dtype)
            rows[is_seen] = one
            new[name] = rows
    if "turn_curves" in state and state["turn_curves"].ndim == 3:
        curves = state["turn_curves"]
        new["turn_curves"] = np.concatenate([curves, curves[:, -1:]], axis=1)[:, :TOLD]
    return new
