"""What is learned from the turns of one profile, and whose forecasts of them are used.

A network (`hazard_net.py`) learns from the profile's latest turns how each differs from its kind. A guard
compares its forecasts with those of the counts by kind, of the counts of all kinds together and of recency,
over the latest turns, of each kind on its own where there are enough, and uses the best. Pure.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from samovar.cache_tiers.forecast.features import (
    AT_RATIO,
    FEATURES,
    LINEAGE_FEATURES,
    NUMBERS,
    Standardiser,
    Vector,
)
from samovar.cache_tiers.forecast.hazard_net import HazardModel, Weights, log_odds
from samovar.cache_tiers.forecast.kaplan_meier import PROFILE_KINDS, KaplanMeier
from samovar.cache_tiers.forecast.replay_turns import (
    CALIBRATION_S,
    Calibration,
    Expert,
    ReplayTurns,
)
from samovar.cache_tiers.forecast.turns import COLD, Curves, Floats, curve_of, times
from samovar.configs.sections import PredictorSettings

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
            FEATURES,
            learning_rate=settings.learning_rate,
            seed=seed,
            numbers=NUMBERS,
            late=LINEAGE_FEATURES,
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
            hazards = self._counts.hazards(kind)
            common = curve_of(self._counts.common(kind))
            said = self._said[kind] = self.turns.added, curve_of(hazards), common
            self._offsets[kind - self._first_kind] = log_odds(hazards)
            self.model.reach[:] = self._counts.seen(kind)
        return said[1:]

    def curves(self, features: Vector, kind: int, ratio: float) -> tuple[Curves, Curves, Curves]:
        """Return what each expert forecasts, in the order of `Expert`; `ratio`: see `lineages.Standing`."""
        counted, common = self.counted(kind)
        offset = self._offsets[kind - self._first_kind]
        if ratio != 1.0:
            offset = offset + features[AT_RATIO]
            counted, common = times(counted, ratio), times(common, ratio)
        return self.model.curve(self.standard.apply(features), offset), counted, common

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
            self._step(now_s)

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

    def _step(self, now_s: float) -> None:
        rows = self.turns.sample(self._rng, self._settings.batch_turns, self._settings.replay_turns)
        came_back, survived = self.turns.targets(rows, now_s)
        features = self.turns.features(rows)
        offsets = self._offsets[self.turns.kinds(rows) - self._first_kind] + features[:, AT_RATIO:]
        self.model.learn(self.standard.apply(features), offsets, came_back, survived)

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

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is wrong."""
        self.model.check_integrity()
        self.turns.check_integrity()


def best_of(losses: Floats) -> Expert:
    """Return the first expert whose loss is no higher than the least, or by chance; `losses`: `[experts, n]`.

    Equal loss is enough: the model tells sessions of one kind apart.
    """
    worse = losses - losses[losses.mean(axis=1).argmin()]
    is_good = worse.mean(axis=1) <= worse.std(axis=1) / losses.shape[1] ** 0.5
    return Expert(int(is_good.argmax()))
