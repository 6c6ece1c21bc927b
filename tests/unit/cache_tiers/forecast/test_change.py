"""A change of traffic, a node that joins, a session that moves: what others did must not mislead."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bench._forecast_scores import brier
from samovar.cache_tiers.forecast.features import FEATURES, NEW, SessionHistory, moved_record
from samovar.cache_tiers.forecast.kaplan_meier import (
    KINDS,
    POOLS,
    PROFILE_KINDS,
    TAIL_RETURNS_MIN,
    KaplanMeier,
    kind_of,
)
from samovar.cache_tiers.forecast.learner import TurnLearner, decode, encode
from samovar.cache_tiers.forecast.predictor import Expert, Predictor, best_of
from samovar.cache_tiers.forecast.turns import COLD, Turn, resume_within
from samovar.configs.sections import PredictorSettings
from tests.support.turn_streams import Rule, stream

SETTINGS = PredictorSettings()
AGENTS, PEOPLE = Rule(0.85, 0.7, median_s=8.0), Rule(0.5, 0.15)
CHANGED_S = 200.0
HORIZON_S = 300.0


def feed(
    predictor: Predictor, rule: Rule, profile: str, *, begin_s: float, end_s: float, seed: int
) -> tuple[np.ndarray, np.ndarray]:  # type: ignore[type-arg]
    """What is forecast of each turn within `HORIZON_S`, and whether it came true."""
    said, true = [], []
    for turn, idle_s in stream(rule, seed=seed, begin_s=begin_s, end_s=end_s):
        predictor.arrived(turn.session, turn.started_s)
        curve = predictor.ended(replace(turn, profile=profile))
        said.append(resume_within(curve, 0.0, HORIZON_S))
        true.append(idle_s <= HORIZON_S)
    predictor.check_integrity()
    return np.array(said), np.array(true)


def taught(profile: str = "code", rule: Rule = AGENTS) -> Predictor:
    predictor = Predictor(SETTINGS)
    feed(predictor, rule, profile, begin_s=0.0, end_s=CHANGED_S, seed=1)
    return predictor


def test_after_a_change_of_profile_it_is_as_good_as_if_it_had_known_nothing() -> None:
    changed, fresh = taught(), Predictor(SETTINGS)
    after = {"begin_s": CHANGED_S, "end_s": CHANGED_S + 800.0, "seed": 2}
    said, true = feed(changed, PEOPLE, "chat", **after)  # type: ignore[arg-type]
    alone, _ = feed(fresh, PEOPLE, "chat", **after)  # type: ignore[arg-type]
    constant = np.cumsum(true) / np.arange(1, len(true) + 1)
    late = slice(200, None)
    was = brier(np.concatenate([[0.5], constant[:-1]])[late], true[late])
    assert (brier(said[late], true[late]) or 1.0) <= 1.01 * (was or 0.0)
    assert (brier(said, true) or 1.0) <= 1.01 * (brier(alone, true) or 0.0)


def test_kinds_of_other_profiles_say_nothing() -> None:
    counts = KaplanMeier(len(POOLS), sessions_max=5000, window=2000, pools=POOLS)
    before = counts.hazards(0)
    for number in range(1000):
        counts.began_idle(number, 2 * PROFILE_KINDS, float(number))
        counts.came_back(number, number + 0.5)
    assert counts.hazards(0) == before
    assert counts.is_cold(0)
    assert not counts.is_cold(2 * PROFILE_KINDS)
    assert counts.hazards(2 * PROFILE_KINDS + 1) != before, "its own profile's kinds do"


def test_few_returns_beside_conversations_do_not_mute_the_network_of_conversations() -> None:
    """Titles and tags hardly ever come back, and one network is of both."""
    turn, predictor = Turn("s", 0.0, 1.0, 1000, 50), Predictor(SETTINGS)
    chat, aside = kind_of(turn, 1), kind_of(turn, 1, is_aside=True)
    counts = predictor.counts.counts
    counts[0, KINDS + POOLS[chat]] = TAIL_RETURNS_MIN
    predictor.counts.counts = counts
    traffic, row = predictor.traffic(chat // PROFILE_KINDS), np.zeros(FEATURES, dtype=np.float32)
    traffic.model.average = np.full_like(traffic.model.weights, 0.1)
    told = traffic.curves(row, chat, 1.0)
    beside = traffic.curves(row, aside, 1.0)
    assert beside[Expert.MODEL] == pytest.approx(beside[Expert.COUNTS], abs=1e-3), "too few came back"
    assert told[Expert.MODEL] != pytest.approx(told[Expert.COUNTS], abs=1e-3)
    assert np.array_equal(traffic.curves(row, chat, 1.0)[Expert.MODEL], told[Expert.MODEL])
    traffic.turns.add(row, chat, [COLD] * 3, 0.0)
    traffic.learn(100.0)
    assert traffic.model.moments.any(), "nor what it learns of them"


def test_what_was_counted_is_forgotten_within_as_many_sessions_as_the_window() -> None:
    counts = KaplanMeier(1, sessions_max=10, window=100)
    for number in range(1000):
        counts.began_idle(number, 0, 1000.0 * number)
        counts.came_back(number, 1000.0 * number + 0.5)
    assert counts.hazards(0)[0] > 0.8
    for number in range(1000, 1200):
        counts.began_idle(number, 0, 1000.0 * number)
        counts.came_back(number, 1000.0 * number + 500.0)
    assert counts.hazards(0)[0] < 0.5


@pytest.mark.parametrize(
    ("means", "expert"),
    [
        ((1.0, 1.0, 1.0, 1.0), Expert.MODEL),
        ((1.2, 1.0, 1.1, 1.3), Expert.COUNTS),
        ((1.2, 1.1, 1.0, 1.3), Expert.COMMON),
        ((1.3, 1.3, 1.3, 1.0), Expert.RECENCY),
        ((1.0, 0.9999, 1.3, 1.0), Expert.MODEL),
    ],
)
def test_the_guard_takes_whoever_was_no_worse_than_the_best_beyond_chance(
    means: tuple[float, ...], expert: Expert
) -> None:
    rng = np.random.default_rng(0)
    assert best_of(np.array(means)[:, None] + rng.normal(0.0, 0.1, (len(Expert), 400))) == expert


def learner_of(predictor: Predictor) -> TurnLearner:
    learner = TurnLearner(lambda: predictor, queue_max=100, clock=lambda: 0.0)
    learner.arrived("nobody", 0.0)
    learner.work()
    return learner


def test_a_young_predictor_goes_on_from_a_peer_s_and_an_older_one_does_not() -> None:
    peer = learner_of(taught())
    model = peer.learned(1.0)
    young, older = Predictor(SETTINGS), taught(rule=PEOPLE)
    before = older.state()
    for predictor, is_taken in ((young, True), (older, False)):
        learner = learner_of(predictor)
        learner.start_from(model)
        learner.work()
        assert (learner.restored == "from a peer") is is_taken
    assert np.array_equal(older.state()["counts"], before["counts"])
    known = peer.predictor
    assert isinstance(known, Predictor)
    state = young.state()
    assert [name for name, array in known.state().items() if not np.array_equal(array, state[name])] == []
    said, true = feed(young, AGENTS, "code", begin_s=CHANGED_S, end_s=CHANGED_S + 100.0, seed=3)
    alone, _ = feed(Predictor(SETTINGS), AGENTS, "code", begin_s=CHANGED_S, end_s=CHANGED_S + 100.0, seed=3)
    assert (brier(said, true) or 1.0) < (brier(alone, true) or 0.0)


def test_what_is_no_model_is_not_taken_and_nothing_is_told_by_who_knows_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    learner = learner_of(Predictor(SETTINGS))
    assert learner.learned(1.0) == b""
    for model in (b"", b"garbage", encode(taught())[:-1]):
        learner.start_from(model)
    learner.work()
    assert learner.restored == ""
    assert len(caplog.records) == 3
    assert learner.failures == 0


def test_a_session_that_moves_takes_its_history_along() -> None:
    """Its clock is another one there; the next turn's features are those it would have had at home."""
    first, second, offset_s = Predictor(SETTINGS), Predictor(SETTINGS), 5000.0
    for at_s, tokens in ((0.0, 100), (30.0, 150), (90.0, 300)):
        first.ended(Turn("s", at_s, at_s + 2.0, tokens, 10, tokens // 2, "tool_calls", "user"))
    history = first.history("s", 100.0)
    assert first.history("other", 100.0) == b""
    second.moved_here("s", history, 100.0 + offset_s)
    after = Turn("s", 101.0, 104.0, 400, 20, 300)
    first.ended(after)
    second.ended(replace(after, started_s=101.0 + offset_s, ended_s=104.0 + offset_s))
    rows = [of.traffic().turns.features(of.traffic().turns.latest(1)) for of in (first, second)]
    assert np.allclose(rows[0], rows[1], atol=1e-5)
    assert rows[0][0, 5] > 1.0, "it is the fourth turn"
    known = second.history("s", 200.0 + offset_s)
    second.moved_here("s", history, 0.0)
    assert second.history("s", 200.0 + offset_s) == known, "what it knows of its own is newer"


def test_what_is_no_history_is_not_taken() -> None:
    history = SessionHistory()
    history.features(Turn("s", 0.0, 1.0, 100, 10), 0.0, 1.0)
    record = history.record()
    rng = np.random.default_rng(0)
    assert moved_record(record[:-1], 0.0) is None
    assert moved_record(record, float("nan")) is None
    assert moved_record(NEW, 0.0) == NEW
    predictor = Predictor(SETTINGS)
    for number in range(500):
        bits = bytearray(record)
        for at in rng.integers(len(bits), size=3):
            bits[at] = int(rng.integers(256))
        predictor.moved_here(number, bytes(bits), 10.0)
        assert np.isfinite(predictor.ended(Turn(number, 10.0, 11.0, 100, 10))).all()
    predictor.check_integrity()
    Predictor(SETTINGS).restore(decode(encode(predictor)))
