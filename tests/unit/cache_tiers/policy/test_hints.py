"""What hints are worth is learned: by tenant, session and kind, and a lie costs the liar."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import numpy as np
import pytest

from samovar.cache_tiers.forecast.turns import (
    BINS,
    EDGES,
    EDGES_S,
    Curves,
    Hint,
    HintEvent,
    HintReading,
    curve_of,
    hinted,
    log_survival,
    resume_within,
)
from samovar.cache_tiers.policy.idle_sessions import (
    LATE_S,
    LATE_TIMES,
    SESSIONS_MAX,
    SPREAD_MAX,
    STAYS_S,
    HintRecord,
    IdleSessions,
)

HONEST, LIAR = b"honest..........", b"liar............"
CURVE = curve_of(np.full(BINS, 0.15))


def session(tenant: bytes, number: int) -> bytes:
    return tenant + number.to_bytes(16, "big")


def tells(
    record: HintRecord,
    owner: bytes,
    at_s: float,
    *,
    event: HintEvent | None = None,
    told_s: float | None = None,
    came_s: float | None,
) -> Hint:
    """A session's hint, and when it came back after that, if it did."""
    hint = record.told(Hint(owner, at_s, event, told_s))
    if came_s is not None:
        record.arrived(owner, at_s + came_s)
    record.check_integrity()
    return hint


def trained(came: Callable[[random.Random], float | None], *, rounds: int = 200) -> HintRecord:
    """A record of a tenant whose tools are told to take 60 s."""
    record, rng = HintRecord(), random.Random(0)
    for number in range(rounds):
        tells(record, session(HONEST, number), number * 1e5, told_s=60.0, came_s=came(rng))
    return record


def test_a_hint_is_read_as_such_hints_have_turned_out() -> None:
    exact = trained(lambda rng: 60.0 * math.exp(rng.gauss(0.0, 0.1))).reading(session(HONEST, 999), "return")
    vague = trained(lambda rng: 60.0 * math.exp(rng.gauss(0.0, 1.5))).reading(session(HONEST, 999), "return")
    never = trained(lambda rng: None).reading(session(HONEST, 999), "return")
    first = HintRecord().reading(session(HONEST, 0), "return")
    assert exact.trust > 0.9 > vague.trust > never.trust
    assert never.trust < 0.1
    assert exact.spread < first.spread < vague.spread <= SPREAD_MAX


@pytest.mark.parametrize(("error", "better"), [(0.5, -0.1), (1.0, 0.05), (1.5, 0.3)])
def test_a_duration_told_with_an_error_says_more_read_with_it(error: float, better: float) -> None:
    """Mean log likelihood of when sessions came, by the curves that their hints made.

    What was fixed before fits an error of .45, and that one only.
    """
    rng, record = random.Random(1), HintRecord()
    prior = curve_of(np.full(BINS, 0.3))
    losses: dict[str, list[float]] = {"fixed": [], "learned": [], "unheard": []}
    for number in range(600):
        owner, at_s = session(HONEST, number), number * 1e5
        came_s = math.exp(rng.gauss(math.log(60.0), 1.3))
        plain = Hint(owner, at_s, None, came_s * math.exp(rng.gauss(0.0, error)))
        curves = {"fixed": hinted(prior, 0.0, plain), "learned": hinted(prior, 0.0, record.told(plain))}
        record.arrived(owner, at_s + came_s)
        for name, curve in {**curves, "unheard": prior}.items():
            if number >= 200:
                losses[name].append(loss(curve, came_s))
    mean = {name: sum(each) / len(each) for name, each in losses.items()}
    assert mean["learned"] < mean["unheard"], mean
    assert mean["learned"] < mean["fixed"] - better, mean


def loss(curve: Curves, came_s: float) -> float:
    place = int(np.searchsorted(EDGES_S, came_s, side="right")) - 1
    survival = np.exp(curve.astype(np.float64))
    return -math.log(max(float(survival[place] - survival[place + 1]), 1e-9))


def test_a_lie_costs_the_liar_and_nobody_else() -> None:
    record = HintRecord()
    for number in range(60):
        tells(record, session(LIAR, number % 3), number * 1e4, event="typing", came_s=None)
        tells(record, session(HONEST, number % 3), number * 1e4 + 1, event="typing", came_s=8.0)
    record.told(Hint(session(HONEST, 9), 1e6))
    honest, liar = (record.reading(session(tenant, 1), "typing") for tenant in (HONEST, LIAR))
    assert liar.trust < 0.2 < 0.9 < honest.trust
    # Of a session that has said nothing yet the tenant's others say it.
    honest, liar = (record.reading(session(tenant, 77), "typing") for tenant in (HONEST, LIAR))
    assert liar.trust < 0.3 < 0.8 < honest.trust
    assert record.reading(session(LIAR, 1), "closed") == HintRecord().reading(session(LIAR, 1), "closed")


def test_within_a_tenant_it_costs_the_session_that_lied() -> None:
    record = HintRecord()
    for number in range(40):
        tells(record, session(HONEST, 1), number * 1e4, event="typing", came_s=None)
        tells(record, session(HONEST, 2 + number), number * 1e4 + 1, event="typing", came_s=8.0)
    liar, other = (record.reading(session(HONEST, one), "typing").trust for one in (1, 3))
    assert liar < 0.3 < other - 0.2


def test_a_hint_told_again_and_again_is_one_claim() -> None:
    record, owner = HintRecord(), session(LIAR, 1)
    for second in range(0, 200, 5):
        record.told(Hint(owner, float(second), "typing"))
    assert record.counts["typing", "false"] == 0
    record.told(Hint(owner, LATE_TIMES * 10.0 + LATE_S, "typing"))
    assert record.counts["typing", "false"] == 1
    assert record.counts["typing", "received"] == 41


@pytest.mark.parametrize(
    ("event", "came_s", "outcome"),
    [
        ("closed", 60.0, "false"),
        ("closed", STAYS_S + 1, "true"),
        ("hidden", 60.0, "false"),
        ("typing", 9.0, "true"),
        ("typing", 150.0, "false"),
        ("tool_finished", 2.0, "true"),
    ],
)
def test_what_came_true(event: HintEvent, came_s: float, outcome: str) -> None:
    record = HintRecord()
    tells(record, session(HONEST, 1), 100.0, event=event, came_s=came_s)
    assert record.stats() == {f"{event}:received": 1, f"{event}:{outcome}": 1}
    assert not record.open


def test_who_stays_away_after_saying_so_was_right() -> None:
    record = HintRecord()
    tells(record, session(HONEST, 1), 0.0, event="closed", came_s=None)
    tells(record, session(HONEST, 2), STAYS_S, event="typing", came_s=None)
    assert record.counts["closed", "true"] == 1


def test_the_begin_of_a_tool_claims_nothing() -> None:
    record = HintRecord()
    hint = tells(record, session(HONEST, 1), 0.0, event="tool_started", came_s=1.0)
    assert hint.reading is None
    assert record.stats() == {}


def test_closed_is_final_until_it_was_wrong_too_often() -> None:
    record = HintRecord()
    sure = record.told(Hint(session(HONEST, 0), 0.0, "closed"))
    assert (hinted(CURVE, 0.0, sure) == 0.0).all()
    for number in range(60):
        tells(record, session(LIAR, number), 1e4 * number, event="closed", came_s=30.0)
    doubted = record.told(Hint(session(LIAR, 99), 1e7, "closed"))
    likely, before = (resume_within(curve, 0.0, 60.0) for curve in (hinted(CURVE, 0.0, doubted), CURVE))
    assert 0.5 * before < likely < before


def test_hidden_makes_a_return_less_likely() -> None:
    hint = HintRecord().told(Hint(session(HONEST, 0), 0.0, "hidden"))
    assert resume_within(hinted(CURVE, 10.0, hint), 0.0, 60.0) < resume_within(CURVE, 10.0, 60.0)
    assert hinted(CURVE, 10.0, hint) == pytest.approx(hinted(CURVE, 10.0, Hint(b"", 0.0, "hidden")))


@pytest.mark.parametrize("trust", [0.0, 0.5, 0.99])
@pytest.mark.parametrize("spread", [0.05, 3.0])
@pytest.mark.parametrize("told_s", [0.0, 30.0, 1e9])
@pytest.mark.parametrize("hazard", [0.0, 0.2, 1.0])
def test_any_reading_makes_a_curve(trust: float, spread: float, told_s: float, hazard: float) -> None:
    hint = Hint(b"", 0.0, None, told_s, HintReading(trust, spread))
    curve = hinted(curve_of(np.full(BINS, hazard)), 5.0, hint)
    assert curve.shape == (EDGES,)
    assert curve.dtype == np.float32
    assert curve[0] == 0.0
    assert np.isfinite(curve).all()
    assert (np.diff(curve) <= 0.0).all()
    assert np.isfinite(log_survival(curve[None], 60.0)).all()


def test_a_hint_that_is_not_believed_changes_nothing_much() -> None:
    hint = Hint(b"", 0.0, "typing", None, HintReading(0.0, 0.25))
    assert hinted(CURVE, 0.0, hint) == pytest.approx(CURVE, abs=0.02)


def test_sessions_learn_from_their_turns_what_hints_are_worth() -> None:
    sessions = IdleSessions(10)
    for number in range(30):
        owner, at_s = session(HONEST, number % 5), 1e5 * number
        sessions.started(owner, at_s)
        sessions.ended(owner, at_s + 1, CURVE)
        assert sessions.hint(owner, "typing", None, at_s + 5)
        sessions.check_integrity()
    assert sessions.hints.counts["typing", "false"] >= 20
    owner = session(HONEST, 1)
    assert resume_within(sessions.curves[sessions.slot(owner)], 0.0, 20.0) < 0.6
    sessions.forget(owner)
    assert owner not in sessions.hints.open


def test_records_are_bounded() -> None:
    record = HintRecord()
    for number in range(SESSIONS_MAX + 50):
        record.told(Hint(session(number.to_bytes(16, "big"), 1), 0.0, "typing"))
        record.arrived(session(number.to_bytes(16, "big"), 1), 1.0)
        record.told(Hint(session(number.to_bytes(16, "big"), 1), 2.0, "typing"))
    record.check_integrity()
