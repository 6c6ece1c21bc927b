"""How long tools take is learned by tool, and trusted once it has been right."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from bench._trace_generator import GeneratorOptions, generate
from bench.forecast_tools import named, score
from samovar.cache_tiers.blocks import TAG_BYTES
from samovar.cache_tiers.forecast import COLD, EDGES_S, Curves, Predictor, SessionKey, Turn, TypeKm, tool_tags
from samovar.cache_tiers.forecast.learner import decode, encode
from samovar.cache_tiers.forecast.predictor import State
from samovar.cache_tiers.forecast.tool_times import JUDGED_MIN, WAITING_MAX, WAITS_S, ToolTimes, check_tools
from samovar.cache_tiers.forecast.turns import BINS, curve_of, resume_within
from samovar.cluster.plan.traces.replay import forecasts
from samovar.configs.sections import PredictorSettings

READ, BASH, TESTS, NEW = (tool_tags([name]) for name in ("Read", "Bash", "tests", "new"))
MIXED = curve_of([0.3] * BINS)
"""A forecast that knows no tool."""


def owner(tenant: str, session: str = "s") -> bytes:
    return tenant.encode().ljust(TAG_BYTES, b".") + session.encode().ljust(TAG_BYTES, b".")


class House:
    """Sessions of one clock, a call at a time."""

    def __init__(self, **limits: int) -> None:
        self.times = ToolTimes(**limits)
        self.now_s = 0.0

    def call(self, tools: str, took_s: float, session: SessionKey = "s") -> Curves:
        """A turn that calls `tools`, and the next one; its forecast."""
        told = self.times.ended(session, tools, MIXED, self.now_s)
        self.now_s += took_s
        self.times.came_back(session, self.now_s)
        self.times.check_integrity()
        return told

    def calls(self, count: int, session: SessionKey = "s") -> None:
        """Short reads, and tests that take three minutes."""
        for _ in range(count):
            self.call(READ, 1.0, session)
            self.call(TESTS, 180.0, session)

    def forecast(self, tools: str, session: SessionKey = "s") -> Curves:
        """What would be told now, without waiting for it."""
        told = self.times.ended(session, tools, MIXED, self.now_s)
        self.times.dropped(session, self.now_s)
        return told


def soon(curve: Curves, within_s: float = 2.0) -> float:
    return resume_within(curve, 0.0, within_s)


def test_tags_are_all_that_is_told_of_a_name() -> None:
    tags = tool_tags(["Bash", "ask_my_bank", "\ud800"])
    assert tags.split() == [tool_tags([name]) for name in ("Bash", "ask_my_bank", "\ud800")]
    assert all(len(tag) == 8 and int(tag, 16) >= 0 for tag in tags.split())
    assert len(tool_tags(["x"] * 100).split()) == 8, "as many as a message has room for"
    assert tool_tags([]) == ""


def test_a_fast_tool_is_back_soon_and_a_slow_one_late() -> None:
    house = House()
    house.calls(30)
    fast, slow = house.forecast(READ), house.forecast(TESTS)
    assert soon(fast) > 0.8 > soon(MIXED) > 0.1 > soon(slow)
    assert soon(slow, 300.0) > 0.9, "and that it comes"
    fast_s, slow_s = (house.times.quantile("s", tools, 0.5) for tools in (READ, TESTS))
    assert fast_s is not None
    assert fast_s < 2.0
    assert slow_s is not None
    assert 120.0 <= slow_s <= 300.0


def test_nothing_is_trusted_before_it_has_been_right() -> None:
    house = House()
    for count in range(int(JUDGED_MIN)):
        assert (house.call(TESTS, 180.0) == MIXED).all(), count
    while (house.forecast(TESTS) == MIXED).all():
        house.call(TESTS, 180.0)
        assert house.now_s < 40 * 180.0, "it is never trusted"


def test_a_tool_whose_times_say_nothing_is_not_used() -> None:
    """Times as they are forecast without it: what seems to be learned of it is chance."""
    house, rng = House(), random.Random(1)
    gone = np.exp(MIXED.astype(np.float64))
    used = 0
    for _ in range(400):
        place = int(np.searchsorted(-gone, -rng.random())) - 1
        told = house.call(BASH, float(np.interp(place + 0.5, np.arange(BINS + 1), EDGES_S)))
        used += not (told == MIXED).all()
    assert used < 60


def test_a_tool_that_changes_is_learned_anew() -> None:
    house = House()
    for _ in range(300):
        house.call(TESTS, 180.0)
    assert soon(house.forecast(TESTS)) < 0.1
    for _ in range(300):
        house.call(TESTS, 1.0)
    assert soon(house.forecast(TESTS)) > 0.5


def test_calls_in_parallel_are_over_with_the_last_one() -> None:
    house = House()
    house.calls(30)
    both = f"{READ} {TESTS}"
    assert soon(house.forecast(both)) < 0.1, "as the slowest, before both were seen together"
    assert (house.forecast(both) == house.forecast(f"{TESTS} {READ}")).all(), "in any order"
    for _ in range(30):
        house.call(both, 1.0)
    assert soon(house.forecast(both)) > 0.5, "what was seen of both together counts more"
    assert soon(house.forecast(TESTS)) < 0.2, "and says next to nothing of one alone"


def test_a_tool_not_seen_yet_is_as_all_of_its_tenant() -> None:
    house = House()
    for _ in range(60):
        house.call(TESTS, 180.0, owner("slow"))
    assert soon(house.forecast(NEW, owner("slow"))) < 0.1
    for _ in range(100):
        house.call(READ, 1.0, owner("fast"))
    assert soon(house.forecast(NEW, owner("fast"))) > 0.6
    assert soon(house.forecast(NEW, owner("slow"))) < 0.1, "another tenant's tools say nothing of these"


def test_names_are_a_tenants_own() -> None:
    house = House()
    for _ in range(40):
        house.call(BASH, 1.0, owner("one"))
        house.call(BASH, 180.0, owner("two"))
    assert soon(house.forecast(BASH, owner("one"))) > 0.6
    assert soon(house.forecast(BASH, owner("two"))) < 0.1


def test_sessions_that_stay_away_count() -> None:
    """Else a tool that half of the sessions never return from would seem quick."""
    house = House()
    for number in range(200):
        session = f"s{number}"
        if number % 2:
            house.call(BASH, 1.0, session)
        else:
            house.times.ended(session, BASH, MIXED, house.now_s)
            house.now_s += 30.0
    assert soon(house.forecast(BASH)) > soon(MIXED)
    house.now_s += WAITS_S
    for number in range(100):
        house.forecast(READ, f"later{number}")  # looks at some that are overdue
    assert len(house.times.open) == 0
    assert 0.3 < soon(house.forecast(BASH), 3000.0) < 0.9


def test_it_is_bounded_and_who_invents_names_forgets_their_own() -> None:
    house = House(tools_max=40, tenant_tools_max=10)
    for _ in range(20):
        house.call(TESTS, 180.0, owner("good"))
    for number in range(100):
        house.call(tool_tags([f"made-{number}"]), 1.0, owner("bad"))
    assert len(house.times) <= 13
    assert soon(house.forecast(TESTS, owner("good"))) < 0.1
    for number in range(100):
        house.call(READ, 1.0, owner(f"tenant{number}"))
    assert len(house.times) <= 40
    assert house.times.quantile(owner("good"), TESTS, 0.5) is None, "the longest unused is forgotten"


def test_sessions_that_are_waited_for_are_bounded() -> None:
    times = ToolTimes()
    for number in range(WAITING_MAX + 5):
        times.ended(number, READ, MIXED, float(number) * 0.01)
    assert len(times.open) == WAITING_MAX
    times.check_integrity()


@pytest.mark.parametrize("tools", ["x", "no hex", "\ud800 \ud800", "deadbeef " * 50, "   ", "\x00"])
def test_whatever_a_replica_says_nothing_breaks(tools: str) -> None:
    house = House()
    for at_s in (0.0, 5.0, -100.0, 1e11):
        house.call(tools, at_s)
        assert np.isfinite(house.forecast(tools)).all()
    house.times.came_back("unknown", 1.0)
    house.times.dropped("unknown", 1.0)


def test_a_restart_changes_nothing() -> None:
    house = House()
    house.calls(30, owner("t"))
    other = ToolTimes()
    check_tools(*house.times.state())
    other.restore(*house.times.state())
    other.check_integrity()
    for tools in (READ, TESTS, NEW, f"{READ} {TESTS}"):
        told = house.times.ended(owner("t"), tools, MIXED, house.now_s)
        assert (other.ended(owner("t"), tools, MIXED, house.now_s) == told).all()
    small = ToolTimes(tools_max=2)
    small.restore(*house.times.state())
    assert len(small) == 2
    small.check_integrity()


def taught() -> Predictor:
    predictor = Predictor(PredictorSettings())
    now_s = 0.0
    for number in range(400):
        session = f"s{number % 5}"
        is_slow = number % 3 == 0
        predictor.arrived(session, now_s)
        predictor.ended(
            Turn(session, now_s, now_s, 1000, 10, 900, "tool_calls", "tool", TESTS if is_slow else READ)
        )
        now_s += 180.0 if is_slow else 1.0
        predictor.arrived(session, now_s)
        predictor.ended(Turn(session, now_s, now_s, 1000, 10, 900))
        now_s += 10.0
    predictor.check_integrity()
    return predictor


def test_it_goes_with_the_predictors_file() -> None:
    predictor, again = taught(), Predictor(PredictorSettings())
    again.restore(decode(encode(predictor)))
    assert predictor.tools is not None
    assert again.tools is not None
    assert again.tools.quantile("s", TESTS, 0.5) == predictor.tools.quantile("s", TESTS, 0.5) is not None
    older = {name: array for name, array in predictor.state().items() if not name.startswith("tool_")}
    again.restore(older)
    assert len(again.tools) == 0, "a file from before"


def bad_states() -> list[tuple[str, State]]:
    state = taught().state()
    keys, counts, judged = (state[f"tool_{name}"] for name in ("keys", "counts", "judged"))
    twice = np.concatenate([keys[:1], keys[:-1]])
    return [
        ("twice", {"tool_keys": twice}),
        ("tool_keys", {"tool_keys": keys.astype(np.float32)}),
        ("tool_counts", {"tool_counts": counts[:, :, :-1]}),
        ("tool_counts", {"tool_counts": counts[:-1]}),
        ("tool_counts", {"tool_counts": counts.astype(np.float64) * np.nan}),
        ("tool_counts", {"tool_counts": counts.astype(np.float64) - 1.0}),
        ("tool_judged", {"tool_judged": judged.astype(np.float64) - 1e6}),
        ("other arrays", {"tool_more": keys}),
    ]


def test_a_damaged_file_is_refused_by_name() -> None:
    state = taught().state()
    for words, change in bad_states():
        predictor = Predictor(PredictorSettings())
        with pytest.raises(ValueError, match=words):
            predictor.restore(state | change)
        assert predictor.tools is None


def test_sessions_without_tools_and_cold_forecasts_are_as_they_were() -> None:
    predictor = Predictor(PredictorSettings())
    turn = Turn("s", 0.0, 1.0, 100, 10, stop="tool_calls", tool=READ)
    assert (predictor.ended(turn) == COLD).all()
    assert predictor.tools is None, "recency is not judged"
    known = taught()
    assert known.tools is not None
    before = len(known.tools.open)
    known.ended(replace(turn, tool="", started_s=1e5, ended_s=1e5))
    assert len(known.tools.open) == before


def test_names_make_generated_traffic_easier_to_forecast() -> None:
    turns = list(generate(GeneratorOptions("tools", 6000, 1, block_tokens=4096)).turns())
    found = {}
    for has_names in (False, True):
        told = forecasts(named(turns, has_names=has_names), TypeKm(PredictorSettings()))
        found[has_names] = score(turns, told)
    assert found[True]["residual_sd"] < 0.7 * found[False]["residual_sd"]
    assert found[True]["brier_5s"] < 0.6 * found[False]["brier_5s"]
