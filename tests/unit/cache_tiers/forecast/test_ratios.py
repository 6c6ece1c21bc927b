"""How much likelier than forecast sessions resume: right for any share, also while most are still idle."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samovar.cache_tiers.forecast.lineages import RATIO_MAX, RATIO_MIN, WINDOW, ReturnRatios
from samovar.cache_tiers.forecast.turns import BINS, EDGES_S, curve_of, times

HAZARDS = np.full(BINS, 0.05)
CURVE = curve_of(HAZARDS)


def returned_s(rng: np.random.Generator, ratio: float) -> float:
    """When a session resumes whose hazards are `ratio` times those of `CURVE`; infinity: not within a day."""
    drawn = math.log(rng.random())
    curve = times(CURVE, ratio).astype(float)
    if drawn < curve[-1]:
        return math.inf
    return float(np.interp(-drawn, -curve, EDGES_S))


def play(ratio: float, *, sessions: int, until_s: float, seed: int = 0) -> ReturnRatios:
    """A session every 3 s, of one cell, up to `until_s`."""
    ratios = ReturnRatios(100, 10_000)
    rng = np.random.default_rng(seed)
    events = []
    for number in range(sessions):
        idle_s = returned_s(rng, ratio)
        events += [(3.0 * number, 0, number), (3.0 * number + idle_s, 1, number)]
    for at_s, is_return, number in sorted(events):
        if at_s > until_s:
            break
        ratios.advance(at_s)
        if is_return:
            ratios.came_back(number, at_s)
        else:
            ratios.opened(number, (7,), CURVE, at_s)
        ratios.check_integrity()
    ratios.advance(until_s)
    return ratios


@pytest.mark.parametrize("ratio", [0.05, 0.5, 1.0, 4.0])
@pytest.mark.parametrize("until_s", [400.0, 6000.0], ids=["most are still idle", "all is known"])
def test_the_factor_is_found(ratio: float, until_s: float) -> None:
    found = [play(ratio, sessions=130, until_s=until_s, seed=seed).ratio((7,)) for seed in range(5)]
    assert np.mean(found) == pytest.approx(ratio, rel=0.3, abs=0.05)


def test_nothing_is_said_before_anything_was_seen_and_little_after_little() -> None:
    ratios = ReturnRatios(100, 100)
    assert ratios.ratio((1, 2)) == 1.0
    ratios.opened("a", (1,), CURVE, 0.0)
    ratios.advance(4000.0)
    assert ratios.ratio((1,)) == 1.0, "one is none"
    ratios.opened("b", (1,), CURVE, 4000.0)
    ratios.advance(8000.0)
    assert 0.3 < ratios.ratio((1,)) < 1.0


def test_a_special_cell_begins_with_what_the_general_one_says() -> None:
    ratios = ReturnRatios(100, 100)
    for number in range(50):
        ratios.opened(number, (1,), CURVE, 0.0)
    ratios.advance(4000.0)
    general = ratios.ratio((1,))
    assert general < 0.1
    assert ratios.ratio((1, 2)) == general
    for number in range(50):
        ratios.opened(number, (2,), CURVE, 4000.0)
        ratios.came_back(number, 4001.0)
    assert ratios.ratio((1, 2)) > 1.0
    assert RATIO_MIN <= ratios.ratio((1,)) <= ratios.ratio((1, 2)) <= RATIO_MAX


def test_it_learns_again_when_the_times_change() -> None:
    ratios = ReturnRatios(100, 1000)
    for number in range(3 * int(WINDOW)):
        ratios.opened(number, (1,), CURVE, 10.0 * number)
        ratios.advance(10.0 * number)
    before = ratios.ratio((1,))
    at_s = 30.0 * WINDOW + 4000.0
    for number in range(2 * int(WINDOW)):
        ratios.opened(number, (1,), CURVE, at_s)
        ratios.came_back(number, at_s + 5.0)
    assert before < 0.1 < 5.0 < ratios.ratio((1,))


@given(st.data())
@settings(derandomize=True, deadline=None, max_examples=100)
def test_whatever_comes_it_is_bounded_and_finite(data: st.DataObject) -> None:
    ratios = ReturnRatios(5, 4)
    for _ in range(data.draw(st.integers(1, 60))):
        at_s = data.draw(st.sampled_from([0.0, 1.0, 100.0, 1e5, -50.0]))
        name = data.draw(st.integers(0, 8))
        call = data.draw(st.sampled_from(["opened", "came_back", "dropped", "advance"]))
        if call == "opened":
            ratios.opened(name, data.draw(st.lists(st.integers(0, 8), max_size=4)), CURVE, at_s)
        elif call == "came_back":
            ratios.came_back(name, at_s)
        elif call == "dropped":
            ratios.dropped(name)
        else:
            ratios.advance(at_s)
        ratios.check_integrity()
        assert RATIO_MIN <= ratios.ratio((0, 1, 2)) <= RATIO_MAX
    again = ReturnRatios(5, 4)
    again.restore(ratios.cells, ratios.counts)
    assert [again.ratio((cell,)) for cell in range(9)] == [ratios.ratio((cell,)) for cell in range(9)]
