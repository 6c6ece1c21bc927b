"""The index by which who is back soonest per second of room stays longest."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samovar.cache_tiers.forecast.turns import BINS, COLD, EDGES_S, LAST_S, WIDTHS_S, curve_of
from samovar.cache_tiers.policy.idle_sessions import IdleSessions, excesses, indices
from samovar.cache_tiers.policy.policies import Candidates, LikelyReturn

NEVER = curve_of(np.zeros(BINS))
AFTER_A_MINUTE = curve_of(np.where(EDGES_S[:-1] == 60.0, 0.9, 0.0))
HAZARDS = st.lists(st.floats(0.0, 0.99), min_size=BINS, max_size=BINS)


def index(curve: np.ndarray, idle_s: float) -> float:  # type: ignore[type-arg]
    return float(indices(curve[None], excesses(curve[None]), np.array([idle_s]))[0])


def by_definition(curve: np.ndarray, begin: int) -> float:  # type: ignore[type-arg]
    """The best over all ends of bins, by the definition, of who has been idle up to a bin's beginning."""
    hazards = -np.diff(curve.astype(np.float64)) / WIDTHS_S
    best, stays, waited = 0.0, 1.0, 0.0
    for hazard, width_s in zip(hazards[begin:], WIDTHS_S[begin:], strict=True):
        kept = float(np.exp(-hazard * width_s))
        waited += stays * ((1.0 - kept) / hazard if hazard > 1e-15 else width_s)
        stays *= kept
        best = max(best, (1.0 - stays) / waited)
    return best


@settings(derandomize=True, deadline=None, max_examples=200)
@given(hazards=HAZARDS, begin=st.integers(0, BINS - 1))
def test_at_a_bin_s_beginning_it_is_the_best_return_for_the_time_waited(
    hazards: list[float], begin: int
) -> None:
    curve = curve_of(np.array(hazards))
    assert index(curve, float(EDGES_S[begin])) == pytest.approx(
        by_definition(curve, begin), rel=1e-4, abs=1e-12
    )


@settings(derandomize=True, deadline=None, max_examples=200)
@given(hazards=HAZARDS, idle_s=st.floats(0.0, 4 * LAST_S))
def test_it_is_never_below_the_hazard_and_finite(hazards: list[float], idle_s: float) -> None:
    curve = curve_of(np.array(hazards))
    at_s = min(idle_s, LAST_S)
    place = min(int(np.searchsorted(EDGES_S, at_s, side="right")) - 1, BINS - 1)
    hazard = float(curve[place] - curve[place + 1]) / WIDTHS_S[place] * LAST_S / max(idle_s, LAST_S)
    found = index(curve, idle_s)
    assert np.isfinite(found)
    assert found >= hazard * (1.0 - 1e-9)


def test_where_hazards_fall_it_is_the_hazard_and_says_nothing_more() -> None:
    assert (excesses(np.stack([COLD, NEVER])) == 0.0).all()
    assert index(NEVER, 100.0) == 0.0


def test_who_comes_back_after_a_minute_is_worth_more_the_nearer_that_is() -> None:
    rising = [index(AFTER_A_MINUTE, idle_s) for idle_s in (0.0, 20.0, 40.0, 55.0, 60.0)]
    assert rising == sorted(rising)
    assert rising[0] > 0.0, "it looks beyond hazards of 0"
    assert index(AFTER_A_MINUTE, 200.0) == 0.0, "its time has passed"


def test_who_is_back_first_stays_longer_where_room_is_short_and_not_where_it_lasts() -> None:
    """One is back within seconds or never, one is more likely, but later."""
    soon = curve_of(np.where(EDGES_S[:-1] == 2.0, 0.5, 0.0))
    late = curve_of(np.where(EDGES_S[:-1] == 60.0, 0.6, 0.0))
    policy, sessions = LikelyReturn("learned"), IdleSessions(10)
    for name, curve in (("soon", soon), ("late", late)):
        sessions.ended(name, 1000.0, curve)
    slots = np.array([sessions.slot("soon"), sessions.slot("late")])
    both = Candidates(slots, np.full(2, 1000.0), np.zeros(2), np.ones(2))
    for horizon_s, first in ((300.0, 0), (80_000.0, 1)):
        worth = policy.worth(both, sessions, 1000.0, horizon_s)
        assert int(worth.argmax()) == first, horizon_s
    chances = sessions.probabilities(slots, 1000.0, 300.0)
    assert chances[1] > chances[0], "by the probability alone the late one stays"


def test_a_curve_that_changes_is_ranked_by_what_it_says_now() -> None:
    sessions = IdleSessions(300)
    for number in range(300):
        sessions.ended(number, 0.0, AFTER_A_MINUTE)
    slots = sessions.all_slots()
    for _ in range(2):  # more than are worked out in one call
        found = sessions.indices(slots, np.zeros(len(slots)))
    assert (found == found[0]).all()
    assert found[0] > 0.0
    sessions.ended(7, 0.0, NEVER)
    seven = np.array([sessions.slot(7)])
    assert sessions.indices(seven, np.zeros(1))[0] == 0.0
    sessions.set_curve(7, AFTER_A_MINUTE, 0.0)
    assert sessions.indices(seven, np.zeros(1))[0] == found[0]
    sessions.check_integrity()
