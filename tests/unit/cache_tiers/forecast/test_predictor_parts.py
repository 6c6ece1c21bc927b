"""The parts of the predictor, each against its definition done slowly."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from samovar.cache_tiers.forecast.features import (
    CLIP,
    FEATURES,
    LINEAGE_FEATURES,
    NUMBERS,
    RANGED,
    SaneClock,
    SessionHistory,
    Standardiser,
    Vector,
)
from samovar.cache_tiers.forecast.hazard_net import HazardModel, log_odds
from samovar.cache_tiers.forecast.kaplan_meier import KINDS, SHRINKAGE, TAIL_RETURNS_MIN, KaplanMeier, kind_of
from samovar.cache_tiers.forecast.lineages import oldest_of
from samovar.cache_tiers.forecast.predictor import Outcome, ReplayTurns
from samovar.cache_tiers.forecast.turns import BINS, COLD, EDGES, EDGES_S, LAST_S, Turn, bin_of, curve_of

TURN = Turn("s", 0.0, 1.0, 1000, 50)
OFFSET = log_odds(-np.expm1(np.diff(COLD.astype(np.float64))))


def features(history: SessionHistory, turn: Turn) -> Vector:
    return history.features(turn, turn.started_s, turn.ended_s)


def loss(model: HazardModel, rows: Vector, came_back: np.ndarray, survived: np.ndarray) -> float:
    """The mean over rows of minus the log likelihood, by the curve that `model` gives each."""
    model.average = model.weights
    total = 0.0
    for row, back, kept in zip(rows, came_back, survived, strict=True):
        stayed = np.diff(model.curve(row, OFFSET).astype(np.float64))
        total -= float((kept * stayed + back * np.log(-np.expm1(stayed))).sum())
    return total / len(rows)


def test_the_gradient_is_that_of_the_likelihood() -> None:
    rng = np.random.default_rng(0)
    model = HazardModel(6, learning_rate=1e-3, seed=0)
    model.weights += rng.normal(0.0, 0.3, model.weights.shape).astype(np.float32)
    rows = rng.normal(size=(5, 6)).astype(np.float32)
    came_back = np.zeros((5, BINS))
    came_back[range(4), [0, 3, 5, 9]] = 1.0
    survived = np.cumsum(rng.random((5, BINS)) < 0.1, axis=1) == 0
    survived = survived * (1.0 - came_back) * 0.7
    seen: list[np.ndarray] = []
    model._adam = lambda gradient: seen.append(gradient.astype(np.float64))  # type: ignore[method-assign]
    model.learn(rows, np.tile(OFFSET, (5, 1)), came_back, survived)
    (gradient,) = seen
    errors = []
    for index in rng.integers(len(model.weights), size=60):
        before, step = model.weights[index].copy(), np.float32(1e-3)
        ends = []
        for sign in (1, -1):
            model.weights[index] = before + sign * step
            ends.append(loss(model, rows, came_back, survived))
        model.weights[index] = before
        errors.append(abs(gradient[index] - (ends[0] - ends[1]) / (2 * step)))
    assert np.quantile(errors, 0.9) < 4e-3, "but for the hidden layer's kinks and f32"


def test_an_untaught_model_says_its_offset() -> None:
    model = HazardModel(4, learning_rate=1e-3, seed=0)
    assert model.curve(np.ones(4, dtype=np.float32), OFFSET) == pytest.approx(COLD, abs=1e-4)


def test_a_model_learns_how_far_sessions_are_from_their_offset() -> None:
    """In one bin those with a sign come back e times as often as their kind, the others a third as often."""
    rng = np.random.default_rng(0)
    model = HazardModel(1, learning_rate=3e-3, seed=0)
    often, seldom = (log_odds(np.full(BINS, hazard)) for hazard in (0.05, 0.005))
    survived = np.tile(1.0 - np.eye(BINS)[9], (64, 1))
    for _ in range(2000):
        signs = rng.choice([-1.0, 1.0], size=(64, 1)).astype(np.float32)
        is_often = rng.random((64, 1)) < 0.5
        hazards = np.where(is_often, 0.05, 0.005) * np.exp(signs)
        back = (rng.random((64, 1)) < hazards) * np.eye(BINS)[9]
        model.learn(signs, np.where(is_often, often, seldom), back, survived + (1.0 - back) * np.eye(BINS)[9])
    sign = np.ones(1, dtype=np.float32)
    ratios = []
    for offset in (often, seldom):
        hazards = -np.diff(np.stack([model.curve(sign, offset), model.curve(-sign, offset)]), axis=1)[:, 9]
        ratios.append(hazards[0] / hazards[1])
    assert ratios == pytest.approx([math.e**2] * 2, rel=0.5), "of both kinds alike"


def test_log_odds_are_finite() -> None:
    odds = log_odds([0.0, 1.0, 0.5])
    assert np.isfinite(odds).all()
    assert odds[2] == 0.0


def test_a_model_that_is_lost_starts_anew() -> None:
    model = HazardModel(4, learning_rate=1e-3, seed=0)
    rows = np.full((2, 4), np.nan, dtype=np.float32)
    model.learn(rows, np.tile(OFFSET, (2, 1)), np.ones((2, BINS)), np.zeros((2, BINS)))
    assert model.resets == 1
    model.check_integrity()
    assert model.curve(np.ones(4, dtype=np.float32), OFFSET) == pytest.approx(COLD, abs=1e-4)


def test_counting_is_the_life_table_with_those_still_idle() -> None:
    """Against the definition, from the whole list of sessions at the end."""
    rng = np.random.default_rng(1)
    counts = KaplanMeier(3, sessions_max=10_000, window=10_000)
    ended_s = np.sort(rng.uniform(0.0, 3000.0, 900))
    idle_s = np.where(rng.random(900) < 0.5, rng.exponential(200.0, 900), np.inf)
    kinds = rng.integers(3, size=900)
    now_s = 4000.0
    events = [(at_s, 0, number) for number, at_s in enumerate(ended_s)]
    events += [(ended_s[n] + idle_s[n], 1, n) for n in range(900) if ended_s[n] + idle_s[n] < now_s]
    for at_s, is_back, number in sorted(events):
        if is_back:
            counts.came_back(number, at_s)
        else:
            counts.began_idle(number, int(kinds[number]), at_s)
        counts.check_integrity()
    for _ in range(BINS):
        counts.came_back("nobody", now_s)
    is_back = ended_s + idle_s < now_s
    seen_s = np.where(is_back, idle_s, now_s - ended_s)
    share = np.clip((seen_s[:, None] - EDGES_S[:-1]) / np.diff(EDGES_S), 0.0, 1.0)
    here = (seen_s[:, None] >= EDGES_S[:-1]) & (seen_s[:, None] < EDGES_S[1:])
    back = here & is_back[:, None]
    seen = np.where(back, 1.0, np.where(here, share, np.floor(share)))
    cold = -np.expm1(np.diff(COLD.astype(np.float64)))
    of_all = (back.sum(axis=0) + SHRINKAGE * cold) / (seen.sum(axis=0) + SHRINKAGE)
    later = np.cumsum(back.sum(axis=0)[::-1])[::-1]
    is_told_apart = later >= TAIL_RETURNS_MIN
    assert counts.seen() == is_told_apart.tolist()
    assert 0 < is_told_apart.sum() < BINS, "a tail that few have lived to see is the same for all"
    for kind in range(3):
        own = kinds == kind
        wanted = (back[own].sum(axis=0) + SHRINKAGE * of_all) / (seen[own].sum(axis=0) + SHRINKAGE)
        wanted = np.where(is_told_apart, wanted, np.where(EDGES_S[:-1] < 86_400.0, of_all, cold))
        assert counts.hazards(kind) == pytest.approx(wanted, abs=1e-9)


@pytest.mark.parametrize(("returns", "says"), [(int(TAIL_RETURNS_MIN) - 1, False), (400, True)])
def test_days_say_nothing_before_enough_came_back_after_days(returns: int, says: bool) -> None:
    """A curve lives for days: one of last week with a made-up tail would be compared with one of today."""
    counts = KaplanMeier(1, sessions_max=1000, window=10_000)
    for number in range(returns):
        counts.began_idle(number, 0, float(number))
    for number in range(returns):
        counts.came_back(number, number + 1.5 * 86_400.0)
    cold = -np.expm1(np.diff(COLD.astype(np.float64)))
    after_a_day = bin_of(86_400.0)
    hazards = counts.hazards(0)
    assert (hazards[after_a_day] > 0.5) is says
    assert says or hazards[after_a_day:] == cold[after_a_day:].tolist()


def test_who_goes_on_without_the_idle_ones_has_the_same_hazards() -> None:
    first, second = (KaplanMeier(2, sessions_max=100, window=1000) for _ in range(2))
    for number in range(60):
        first.began_idle(number, number % 2, float(number))
        if number % 3 == 0:
            first.came_back(number, number + 0.9)
    second.counts = first.counts_so_far()
    assert len(second) == 0
    for kind in range(2):
        assert second.hazards(kind) == pytest.approx(first.hazards(kind))
        second.counts = first.counts
        assert second.hazards(kind) != pytest.approx(first.hazards(kind))
        second.counts = first.counts_so_far()


def test_what_was_counted_fades() -> None:
    counts = KaplanMeier(1, sessions_max=10, window=100)
    for number in range(1000):
        counts.began_idle(number, 0, float(number))
        counts.came_back(number, number + 0.5)
    assert counts.counts[:, -1, 0].sum() <= 200


def test_a_jump_of_the_clock_holds_nobody_up() -> None:
    counts = KaplanMeier(1, sessions_max=5000, window=100_000)
    for number in range(5000):
        counts.began_idle(number, 0, float(number))
    counts.came_back("nobody", 1e9)
    assert counts.counts[1, -1].sum() <= 256
    counts.check_integrity()


def test_kinds_are_told_apart_and_bounded() -> None:
    kinds = {
        kind_of(replace(TURN, stop=stop, profile=profile), turns, is_aside=is_aside)
        for stop in ("tool_calls", "stop", "length", "gone", "?")
        for profile in ("chat", "documents", "code", "batch", "?")
        for turns in (1, 2, 3, 4)
        for is_aside in (False, True)
    }
    assert kinds == set(range(KINDS))


def test_features_tell_what_they_should() -> None:
    def after(**changed: object) -> Vector:
        history = SessionHistory()
        features(history, TURN)
        second = replace(TURN, started_s=31.0, ended_s=32.0, input_tokens=1100, kept_tokens=1000)
        return features(history, replace(second, **changed))

    plain = after()
    assert plain.shape == (FEATURES,)
    for changed in (
        {"stop": "tool_calls"},
        {"stop": "gone"},
        {"role": "tool"},
        {"profile": "code"},
        {"input_tokens": 5000},
        {"output_tokens": 3},
        {"kept_tokens": 0},
        {"started_s": 10.0},
        {"ended_s": 60.0},
    ):
        assert (after(**changed) != plain).any(), changed
    assert plain[6] == pytest.approx(math.log1p(30.0)), "the last gap is idle time"


def test_gaps_are_kept_apart_by_what_they_followed() -> None:
    history = SessionHistory()
    features(history, replace(TURN, stop="tool_calls"))
    features(history, replace(TURN, started_s=3.0, ended_s=4.0))
    row = features(history, replace(TURN, started_s=104.0, ended_s=105.0))
    assert row[9] == pytest.approx(math.log1p(100.0))
    assert row[11] == pytest.approx(math.log1p(2.0))
    assert row[8] == pytest.approx(math.log1p(100.0)), "the longest"


def test_a_shorter_prompt_is_an_edit_and_a_growing_one_is_not() -> None:
    for inputs, kept, is_edit in ((1200, 1000, False), (900, 900, True), (1200, 100, True)):
        history = SessionHistory()
        features(history, TURN)
        assert features(history, replace(TURN, input_tokens=inputs, kept_tokens=kept))[3] == is_edit


def test_standardised_features_are_centred_and_clipped() -> None:
    rng = np.random.default_rng(0)
    standard = Standardiser(1000)
    rows = rng.normal(5.0, 3.0, (3000, FEATURES)).astype(np.float32)
    for begin in range(0, 3000, 10):
        standard.add(rows[begin : begin + 10])
    applied = standard.apply(rows)
    early = FEATURES - LINEAGE_FEATURES
    plain = np.delete(applied, range(early, early + RANGED), axis=1)
    assert plain.shape == rows.shape
    assert np.abs(plain.mean(axis=0)).max() < 0.2
    assert plain.std(axis=0) == pytest.approx(1.0, abs=0.1)
    ranged = applied[:, early : early + RANGED].reshape(len(rows), NUMBERS, -1)
    assert (ranged.min(), ranged.max()) == (0.0, 1.0)
    assert (np.diff(ranged, axis=2) <= 0.0).all(), "it is through a range before it is in the next"
    number = applied[:, 7].argsort()
    assert (np.diff(ranged[number, 7], axis=0) >= 0.0).all(), "and the further through it the larger it is"
    assert standard.apply(np.full(FEATURES, 1e9, dtype=np.float32)).max() == CLIP
    assert standard.sums[0, 0] <= 2000, "old turns fade"


def test_a_clock_that_is_none_stands_still() -> None:
    clock = SaneClock()
    assert clock.at(5.0) == 5.0
    for at_s in (math.nan, math.inf, -math.inf, 1e300, 10**400):
        assert clock.at(at_s) == 5.0
    assert clock.at(3.0) == 3.0


def replay(idle: list[tuple[Outcome, float]], now_s: float = 1000.0) -> tuple[ReplayTurns, np.ndarray]:
    turns = ReplayTurns(8)
    for outcome, idle_s in idle:
        number = turns.add(np.zeros(FEATURES, dtype=np.float32), 0, [COLD] * 3, now_s - idle_s)
        if outcome != Outcome.IDLE:
            turns.resolve(number, outcome, now_s)
    turns.check_integrity()
    return turns, turns.latest(len(idle))


def test_targets_are_bins_gone_through_and_the_event() -> None:
    turns, rows = replay([(Outcome.IDLE, 25.0), (Outcome.RETURNED, 25.0), (Outcome.LOST, 8.0)])
    came_back, survived = turns.targets(rows, 1000.0)
    assert survived[0].tolist() == [1, 1, 1, 1, 1, 1, 0.5] + [0] * (BINS - 7)
    assert survived[1].tolist() == [1, 1, 1, 1, 1, 1] + [0] * (BINS - 6)
    assert survived[2].tolist() == [1, 1, 1, 1] + [0] * (BINS - 4)
    assert came_back.sum(axis=1).tolist() == [0, 1, 0]
    assert came_back[1, 6] == 1
    later = turns.targets(rows, 1005.0)[1]
    assert later[0, 6] == 1.0, "the idle one goes on, the others do not"
    assert (later[1:] == survived[1:]).all()


def test_one_that_came_back_after_the_last_bin_survived_all() -> None:
    turns, rows = replay([(Outcome.RETURNED, 2 * LAST_S)], now_s=1e6)
    came_back, survived = turns.targets(rows, 1e6)
    assert came_back.sum() == 0
    assert survived.sum() == BINS


def test_losses_prefer_the_curve_that_was_right_about_those_who_stay_away_too() -> None:
    turns = ReplayTurns(4)
    returns = curve_of(np.full(BINS, 0.5))
    stays = curve_of(np.full(BINS, 0.01))
    for outcome, wanted in ((Outcome.IDLE, 1), (Outcome.RETURNED, 0)):
        number = turns.add(np.zeros(FEATURES, dtype=np.float32), 0, [returns, stays, stays], 0.0)
        if outcome == Outcome.RETURNED:
            turns.resolve(number, outcome, 9.0)
        losses = turns.losses(turns.latest(1), 100.0)[:2, 0]
        assert losses.argmin() == wanted


def test_a_full_table_gives_up_its_oldest_and_a_large_one_a_few_at_once() -> None:
    assert oldest_of(dict.fromkeys("abc")) == ["a"]
    assert oldest_of(dict.fromkeys(range(3000))) == [0, 1, 2]
    counts = KaplanMeier(1, sessions_max=3000, window=100)
    for number in range(3001):
        counts.began_idle(number, 0, float(number))
    counts.check_integrity()
    assert [number for number in (0, 2, 3, 3000) if counts.follows(number)] == [3, 3000]


def test_a_turn_that_has_left_the_ring_is_nobody() -> None:
    turns = ReplayTurns(2)
    first = turns.add(np.zeros(FEATURES, dtype=np.float32), 0, [COLD] * 3, 0.0)
    for _ in range(2):
        turns.add(np.zeros(FEATURES, dtype=np.float32), 0, [COLD] * 3, 0.0)
    turns.resolve(first, Outcome.RETURNED, 5.0)
    assert turns.targets(turns.latest(2), 0.0)[0].sum() == 0
    assert len(turns) == 2
    assert COLD.shape == (EDGES,)
