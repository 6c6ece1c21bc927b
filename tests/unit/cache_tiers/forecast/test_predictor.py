"""The predictor as a whole: what it learns, what it makes of hints, and that nothing it is told upsets it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench._forecast_scores import auc, ece
from samovar.cache_tiers.forecast.kaplan_meier import TypeKm
from samovar.cache_tiers.forecast.predictor import Expert, Outcome, Predictor, ProfileModel, ReplayTurns, Rows
from samovar.cache_tiers.forecast.turns import (
    COLD,
    EDGES,
    Curves,
    Floats,
    Hint,
    Turn,
    resume_probability,
    resume_within,
)
from samovar.configs.sections import PredictorSettings
from tests.support.constants import tuned
from tests.support.inside import turns_of
from tests.support.turn_streams import Rule, stream

HORIZON_S = 300.0
SMALL = tuned(PredictorSettings(sessions_max=50), replay_turns=64, batch_turns=8, guard_outcomes=50)


class Naive(ReplayTurns):
    """Learns from a turn when its session is back, or has not been seen for an hour: the trap."""

    def targets(self, rows: Rows, now_s: float) -> tuple[Floats, Floats]:
        came_back, survived = super().targets(rows, now_s)
        known = (self._outcome[rows] != Outcome.IDLE) | (now_s - self._ended_s[rows] >= 3600.0)
        return came_back * known[:, None], survived * known[:, None]


class Unguarded(Predictor):
    """The model alone."""

    def traffic(self, profile: int = 0) -> ProfileModel:
        of = super().traffic(profile)
        of.chosen = lambda kind: Expert.MODEL  # type: ignore[method-assign]
        self.counts.is_cold = lambda kind: False  # type: ignore[method-assign]
        return of


def feed(
    forecaster: Predictor | TypeKm,
    rule: Rule,
    *,
    seed: int,
    begin_s: float = 0.0,
    end_s: float = 2400.0,
    score_from: float = 0.5,
) -> tuple[Floats, np.ndarray[Any, np.dtype[np.bool_]], list[str]]:
    """Forecasts and outcomes at `HORIZON_S` of the later part, and where each turn's forecast came from."""
    forecasts, came_back, sources = [], [], []
    from_s = begin_s + score_from * (end_s - begin_s)
    for turn, idle_s in stream(rule, seed=seed, begin_s=begin_s, end_s=end_s):
        forecaster.arrived(turn.session, turn.started_s)
        curve = forecaster.ended(turn)
        if from_s <= turn.ended_s <= end_s - HORIZON_S:
            forecasts.append(resume_within(curve, 0.0, HORIZON_S))
            came_back.append(idle_s <= HORIZON_S)
        sources.append(forecaster.source if isinstance(forecaster, Predictor) else "")
    forecaster.check_integrity()
    return np.array(forecasts), np.array(came_back), sources


def test_it_learns_online_what_counting_by_kind_cannot() -> None:
    learned, came_back, sources = feed(Predictor(PredictorSettings()), Rule(), seed=1)
    counted, _, _ = feed(TypeKm(PredictorSettings()), Rule(), seed=1)
    assert (auc(learned, came_back) or 0) > 0.78
    assert (auc(counted, came_back) or 1) < 0.6
    assert (ece(learned, came_back) or 1) <= 0.03
    assert sources[0] == "cold"
    assert sources[-1] == "model"


def test_calibration_is_of_turns_that_were_seen_for_the_whole_horizon() -> None:
    predictor = Predictor(PredictorSettings())
    assert predictor.calibration == ()
    feed(predictor, Rule(), seed=1)
    points = predictor.calibration
    assert points
    said, true, turns = (np.array(column) for column in zip(*points, strict=True))
    assert (np.diff(said) > 0).all()
    assert float((np.abs(said - true) * turns).sum() / turns.sum()) < 0.05
    assert turns.sum() <= len(turns_of(predictor))


def test_trap_naive_labels_break_calibration_and_masked_ones_do_not() -> None:
    """Never wait until a session is back or timed out: those who stay away are then not learned in time."""
    masked, came_back, _ = feed(Unguarded(PredictorSettings()), Rule(), seed=2)
    naive = Unguarded(PredictorSettings())
    naive.traffic().turns = Naive(turns_of(naive).rows_max)
    biased, same, _ = feed(naive, Rule(), seed=2)
    assert (came_back == same).all()
    assert (ece(masked, came_back) or 1) <= 0.03
    assert (ece(biased, came_back) or 0) > 0.1
    assert biased.mean() > came_back.mean() + 0.1, "naive labels believe that nearly all come back"


def test_the_guard_fires_when_the_world_turns_round_and_lets_go_again() -> None:
    """Who came back now stays away: the model is surely wrong, counting by kind is right on average."""
    predictor = Predictor(tuned(PredictorSettings(), guard_outcomes=300, replay_turns=1000))
    forward, backward = Rule(0.9, 0.05), Rule(0.05, 0.9)
    _, _, before = feed(predictor, forward, seed=3, end_s=1200.0)
    assert before[-1] == "model"
    _, _, after = feed(predictor, backward, seed=4, begin_s=1200.0, end_s=4000.0)
    fired = next(at for at, source in enumerate(after) if source != "model")
    assert fired < 500, "within about a window"
    assert after[-1] == "model", "it has learned the other way round"
    assert predictor.traffic().switches >= 3


def test_without_the_guard_that_turn_costs_more() -> None:
    losses = []
    for kind in (Predictor, Unguarded):
        predictor = kind(tuned(PredictorSettings(), guard_outcomes=300, replay_turns=1000))
        feed(predictor, Rule(0.9, 0.05), seed=3, end_s=1200.0)
        turned, begin_s = Rule(0.05, 0.9), 1200.0
        forecasts, came_back, _ = feed(
            predictor, turned, seed=4, begin_s=begin_s, end_s=2000.0, score_from=0.2
        )
        losses.append(float(np.square(forecasts - came_back).mean()))
    assert losses[0] < 0.95 * losses[1]


def test_cold_start_is_the_curve_of_the_latest_first() -> None:
    for forecaster in (Predictor(PredictorSettings()), TypeKm(PredictorSettings())):
        for number in range(40):
            forecaster.arrived(number, float(number))
            assert np.array_equal(forecaster.ended(Turn(number, number, number + 0.5, 100, 10)), COLD)


def test_two_of_the_same_seed_say_the_same() -> None:
    first, second = (feed(Predictor(PredictorSettings(), seed=7), Rule(), seed=5, end_s=600.0) for _ in "ab")
    assert np.array_equal(first[0], second[0])


def test_a_turn_that_nobody_announced_is_an_outcome_all_the_same() -> None:
    announced, silent = (Predictor(PredictorSettings()) for _ in range(2))
    for turn, _ in stream(Rule(), seed=6, end_s=600.0):
        announced.arrived(turn.session, turn.started_s)
        announced.ended(turn)
        silent.ended(turn)
    assert sum(silent.counts.returns) == sum(announced.counts.returns) > 0


def test_turns_that_overlap_are_no_return() -> None:
    predictor = Predictor(PredictorSettings())
    for session in range(100):
        begin_s = 10.0 * session
        for at_s in (begin_s, begin_s + 1.0):
            predictor.arrived(session, at_s)
        for took_s in (5.0, 6.0):
            predictor.ended(Turn(session, begin_s + 1.0, begin_s + took_s, 100, 10))
    assert sum(predictor.counts.returns) == 0
    came_back, _ = turns_of(predictor).targets(turns_of(predictor).latest(200), 1000.0)
    assert came_back.sum() == 0
    predictor.check_integrity()


def test_sessions_are_bounded_and_forgotten() -> None:
    for forecaster in (Predictor(SMALL), TypeKm(SMALL)):
        for number in range(500):
            forecaster.ended(Turn(number, number, number + 0.5, 100, 10))
            forecaster.check_integrity()
        assert len(forecaster) == SMALL.sessions_max
        assert forecaster.hint(Hint(0, 600.0)) is None
        forecaster.forget(499)
        forecaster.forget("nobody")
        assert forecaster.hint(Hint(499, 600.0)) is None
        forecaster.check_integrity()


@pytest.mark.parametrize("make", [Predictor, TypeKm])
def test_hints_move_the_curve(make: type[Predictor] | type[TypeKm]) -> None:
    forecaster = make(PredictorSettings())
    forecaster.ended(Turn("s", 0.0, 1.0, 100, 10))

    def soon(hint: Hint, idle_s: float, within_s: float) -> float:
        curve = forecaster.hint(hint)
        assert curve is not None
        return resume_within(curve, idle_s, within_s)

    assert forecaster.hint(Hint("other", 2.0, "typing")) is None
    assert soon(Hint("s", 2.0, expected_return_s=1000.0), 0.0, 300.0) < 0.2
    assert soon(Hint("s", 3.0, expected_return_s=1000.0), 600.0, 1800.0) > 0.7
    assert soon(Hint("s", 4.0, "typing"), 0.0, 30.0) > 0.7
    assert soon(Hint("s", 5.0, "tool_finished"), 0.0, 8.0) > 0.7
    assert soon(Hint("s", 6.0, "typing"), 3600.0, 30.0) < 0.1, "it did not come: not believed for ever"
    assert soon(Hint("s", 7.0, "closed"), 0.0, 86400.0) == 0.0


def test_a_hint_that_says_nothing_new_keeps_what_was_left() -> None:
    predictor = Predictor(PredictorSettings())
    curve = predictor.ended(Turn("s", 0.0, 0.0, 100, 10))
    later = predictor.hint(Hint("s", 100.0, "tool_started"))
    assert later is not None
    for within_s in (20.0, 200.0, 2000.0):  # a curve is straight within a bin, and the bins begin anew
        assert resume_within(later, 0.0, within_s) == pytest.approx(
            resume_within(curve, 100.0, within_s), abs=0.02
        )


NUMBERS = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True),
    st.integers(-(10**400), 10**400),
    st.floats(0, 1e5),
)
TEXTS = st.text(st.characters(codec=None), max_size=100)
TURNS = st.builds(
    Turn,
    session=st.integers(0, 5),
    started_s=NUMBERS,
    ended_s=NUMBERS,
    input_tokens=NUMBERS,
    output_tokens=NUMBERS,
    kept_tokens=NUMBERS,
    stop=st.one_of(st.sampled_from(["tool_calls", "stop", "length", "gone"]), TEXTS),
    role=st.one_of(st.sampled_from(["user", "tool", "other"]), TEXTS),
    tool=TEXTS,
    profile=TEXTS,
)
HINTS = st.builds(
    Hint,
    session=st.integers(0, 5),
    at_s=NUMBERS,
    event=st.sampled_from([None, "typing", "tool_started", "tool_finished", "closed"]),
    expected_return_s=st.one_of(st.none(), NUMBERS),
)
CALLS = st.one_of(TURNS, HINTS, st.tuples(st.integers(0, 5), NUMBERS), st.integers(0, 5))


def assert_sane(curve: Curves) -> None:
    assert curve.shape == (EDGES,)
    assert curve.dtype == np.float32
    assert np.isfinite(curve).all()
    assert curve[0] == 0.0
    assert (np.diff(curve) <= 0.0).all()


@given(calls=st.lists(CALLS, max_size=60))
@settings(derandomize=True, deadline=None, max_examples=80)
def test_whatever_it_is_told_every_curve_is_one(calls: list[Any]) -> None:
    for forecaster in (Predictor(SMALL), TypeKm(SMALL)):
        if isinstance(forecaster, Predictor):
            for profile in range(5):
                forecaster.traffic(profile).choice = Expert.MODEL
        forecaster.counts.returns = (1000,) * len(forecaster.counts.returns)
        for call in calls:
            curve = None
            match call:
                case Turn():
                    curve = forecaster.ended(call)
                case Hint():
                    curve = forecaster.hint(call)
                case (session, at_s):
                    forecaster.arrived(session, at_s)
                case session:
                    forecaster.forget(session)
            if curve is not None:
                assert_sane(curve)
                assert 0.0 <= resume_within(curve, 5.0, 60.0) <= 1.0
        forecaster.check_integrity()
        if isinstance(forecaster, Predictor):
            Predictor(SMALL).restore(forecaster.state())


def test_adversarial_sessions_do_not_spoil_the_forecasts_of_others() -> None:
    """One turn in ten is absurd: the clock, the lengths, the names."""
    predictor = Predictor(PredictorSettings())
    rng = np.random.default_rng(0)
    absurd = [math.nan, math.inf, -math.inf, -1e300, 1e300, 10**400, 0]
    forecasts, came_back = [], []
    for turn, idle_s in stream(Rule(), seed=8, end_s=2400.0):
        if rng.random() < 0.1:
            odd = [absurd[index] for index in rng.integers(len(absurd), size=5)]
            predictor.ended(Turn("odd", turn.started_s, turn.ended_s, odd[0], odd[1], odd[2], tool="\ud800"))  # type: ignore[arg-type]
            predictor.arrived("odd", odd[3] if not odd[3] else math.nan)
        predictor.arrived(turn.session, turn.started_s)
        curve = predictor.ended(turn)
        if 1200.0 <= turn.ended_s <= 2400.0 - HORIZON_S:
            forecasts.append(resume_within(curve, 0.0, HORIZON_S))
            came_back.append(idle_s <= HORIZON_S)
    predictor.check_integrity()
    assert (auc(np.array(forecasts), np.array(came_back)) or 0) > 0.75


def test_a_clock_that_jumps_back_costs_labels_only() -> None:
    predictor = Predictor(PredictorSettings())
    feed(predictor, Rule(), seed=9, begin_s=1e6, end_s=1e6 + 600)
    feed(predictor, Rule(), seed=10, begin_s=0.0, end_s=1200.0)
    assert_sane(predictor.ended(Turn("s", 1200.0, 1201.0, 100, 10)))


def test_integrity_names_what_is_wrong() -> None:
    predictor = Predictor(SMALL)
    predictor.ended(Turn("s", 0.0, 1.0, 100, 10))
    predictor.check_integrity()
    predictor.traffic().model.weights[5] = np.nan
    with pytest.raises(AssertionError, match="a weight is not finite"):
        predictor.check_integrity()


def test_probabilities_of_many_at_once_are_those_of_each() -> None:
    predictor = Unguarded(PredictorSettings())
    curves = np.stack([predictor.ended(turn) for turn, _ in stream(Rule(), seed=11, end_s=60.0)])
    idle_s = np.linspace(0.0, 5000.0, len(curves))
    together = resume_probability(curves, idle_s, 60.0)
    assert together == pytest.approx([resume_within(*row, 60.0) for row in zip(curves, idle_s, strict=True)])
