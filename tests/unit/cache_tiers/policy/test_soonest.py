"""Who is back soonest stays longest, among those that come back within the tier's horizon."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samovar.cache_tiers.forecast.turns import BINS, COLD, EDGES_S, Curves, Floats, curve_of
from samovar.cache_tiers.policy.idle_sessions import IdleSessions
from samovar.cache_tiers.policy.policies import HORIZON_SHARES, Candidates, LikelyReturn

HAZARDS = st.lists(st.floats(0.0, 0.9), min_size=BINS, max_size=BINS)


def once(at_s: float, likely: float) -> Curves:
    """Who comes back in the bin that begins at `at_s`, or never."""
    return curve_of(np.where(EDGES_S[:-1] == at_s, likely, 0.0))


def worths(curves: list[Curves], horizon_s: float, policy: LikelyReturn | None = None) -> Floats:
    """Of sessions that became idle just now."""
    sessions = IdleSessions(len(curves))
    for number, curve in enumerate(curves):
        sessions.ended(number, 1000.0, curve)
    slots = np.array([sessions.slot(number) for number in range(len(curves))])
    among = Candidates(slots, np.full(len(curves), 1000.0), np.zeros(len(curves)), np.ones(len(curves)))
    return (policy or LikelyReturn("learned")).worth(among, sessions, 1000.0, horizon_s)


def test_who_is_back_in_seconds_stays_before_who_is_likelier_back_in_minutes() -> None:
    soon, late = once(2.0, 0.5), once(120.0, 0.7)
    assert worths([soon, late], 600.0).argmax() == 0
    assert worths([soon, late], 600.0, LikelyReturn("plain", (1.0,))).argmax() == 1
    assert worths([soon, once(120.0, 0.95)], 60.0).argmax() == 0, "after the horizon nothing counts"


def test_who_is_back_later_stays_where_that_is_far_likelier() -> None:
    assert worths([once(2.0, 0.2), once(120.0, 0.9)], 600.0).argmax() == 1


@settings(derandomize=True, deadline=None, max_examples=100)
@given(hazards=HAZARDS, bin_=st.integers(0, BINS - 2), horizon_s=st.floats(30.0, 86_400.0))
def test_a_return_that_is_moved_forward_is_worth_no_less(
    hazards: list[float], bin_: int, horizon_s: float
) -> None:
    later = np.array(hazards)
    sooner = later.copy()
    # As many have come back after both bins, more of them in the first.
    through = (1.0 - later[bin_]) * (1.0 - later[bin_ + 1])
    sooner[bin_], sooner[bin_ + 1] = 1.0 - through, 0.0
    first, second = worths([curve_of(sooner), curve_of(later)], horizon_s).tolist()
    assert first >= second * (1.0 - 1e-5)


@pytest.mark.parametrize("per_s", [1e-4, 1e-2, 1.0])
def test_what_many_share_is_weighed_as_a_session_that_returns_as_often(per_s: float) -> None:
    policy, horizon_s = LikelyReturn("learned"), 300.0
    alone = worths([curve_of(-np.expm1(-per_s * np.diff(EDGES_S)))], horizon_s)
    rates, used_s, none = np.array([per_s]), np.array([1000.0]), np.zeros(1)
    for saved_s in (1.0, 2.6e-8):
        shared = policy.shared_worth(rates, used_s, np.array([saved_s]), none, horizon_s)
        assert shared[0] == pytest.approx(saved_s * alone[0], rel=2e-3), "in the unit of what one saves"
    assert policy.shared_worth(none, none, np.ones(1), np.array([0.5]), horizon_s)[0] == 0.5


def test_it_is_a_mean_of_probabilities() -> None:
    assert worths([once(0.0, 1.0)], 3600.0)[0] == pytest.approx(1.0, rel=2e-3)
    each = [worths([COLD], 3600.0, LikelyReturn("one", (share,)))[0] for share in HORIZON_SHARES]
    assert worths([COLD], 3600.0)[0] == pytest.approx(np.mean(each))
