"""Guesses: their budget, who gets one, how they are judged, and the meter that stops them."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import settings as runs
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from samovar.cache_tiers.blocks.extent import MARKS_MAX, kept_blocks, marks_of
from samovar.cache_tiers.forecast.turns import BINS, Curves, curve_of
from samovar.cache_tiers.policy.idle_sessions import IdleSessions
from samovar.cache_tiers.policy.prefetcher import ByteBudget, Guess, Prefetcher, PrefetchGate, PrefetchRegret
from samovar.configs.sections import PrefetchSettings
from tests.support.amounts import examples
from tests.support.constants import tuned

SOON: Curves = curve_of(np.full(BINS, 0.5))
NEVER: Curves = curve_of(np.zeros(BINS))


def prefetcher(seed: int = 0, **settings: object) -> Prefetcher:
    given = {"by_hazard": True, "bytes_per_s_max": 1000, "inflight_bytes_max": 1000, **settings}
    fixed = {"burst_s": 2.0, "accuracy_window": 10, "holdout_share": 0.0}
    fixed |= {name: given.pop(name) for name in PrefetchSettings.fixed() if name in given}
    return Prefetcher(tuned(PrefetchSettings.model_validate(given), **fixed), seed=seed)


def idle(count: int, curve: Curves = SOON, now_s: float = 0.0) -> IdleSessions:
    sessions = IdleSessions(count + 8)
    for session in range(count):
        sessions.ended(session, now_s, curve)
    return sessions


def by_hazard(
    ours: Prefetcher, sessions: IdleSessions, now_s: float, below: int = 100, **more: object
) -> list[Guess]:
    given = {"lead_s": 30.0, "room_bytes": 10**9, **more}
    return ours.by_hazard(sessions, lambda _: below, now_s, **given)  # type: ignore[arg-type]


def test_the_likely_get_a_guess_and_the_unlikely_the_running_and_the_absent_do_not() -> None:
    ours, sessions = prefetcher(), idle(3)
    sessions.ended("never", 0.0, NEVER)
    sessions.started(1, 1.0)
    guesses = by_hazard(ours, sessions, 2.0)
    assert [guess.session for guess in guesses] == [0, 2]
    assert all(guess.why == "hazard" and guess.nbytes == 100 for guess in guesses)
    assert by_hazard(ours, sessions, 2.0) == [], "once each"
    assert by_hazard(ours, idle(0), 2.0) == []
    ours.check_integrity()


def test_the_likeliest_come_first() -> None:
    sessions = IdleSessions(8)
    for session, hazard in enumerate((0.2, 0.6, 0.4)):
        sessions.ended(session, 0.0, curve_of(np.full(BINS, hazard)))
    guesses = by_hazard(prefetcher(), sessions, 0.0)
    assert [guess.session for guess in guesses] == [1, 2, 0]
    assert guesses[0].probability > guesses[1].probability > guesses[2].probability


def test_f30_a_storm_stays_within_the_bytes_in_flight_and_the_budget() -> None:
    """10,000 sessions are predicted at once."""
    ours, sessions = prefetcher(bytes_per_s_max=500, burst_s=1.0, inflight_bytes_max=300), idle(10_000)
    moved, at_once = 0, 0
    for second in range(20):
        guesses = by_hazard(ours, sessions, float(second))
        at_once = max(at_once, ours.moving_bytes)
        assert ours.moving_bytes <= 300
        assert not by_hazard(ours, sessions, float(second), is_demand_busy=True), "demand first"
        for guess in guesses:
            moved += guess.nbytes
            ours.arrived(guess.session, guess.nbytes, float(second))
        ours.check_integrity()
    assert at_once == 300
    assert moved <= 500 * 1.0 + 500 * 20


def test_hints_and_queued_requests_pass_the_meter_and_the_budget_but_not_the_bound_in_bytes() -> None:
    ours = prefetcher(bytes_per_s_max=0, inflight_bytes_max=500)
    assert ours.ask("hint", "a", 400) == 400
    assert ours.ask("queue", "b", 400) == 100, "what is left"
    assert ours.ask("queue", "c", 400) == 0
    ours.arrived("a", 400, 0.0)
    assert ours.ask("queue", "c", 400) == 400
    ours.failed("b", 100, 0.0)
    assert ours.moving_bytes == 400
    assert ours.cancel("c", 0.0) == 400
    assert ours.stats().started == {"hint": 400, "queue": 500}
    assert prefetcher(at_hint=False).ask("hint", "a", 1) == 0
    assert prefetcher(at_queue=False).ask("queue", "a", 1) == 0
    ours.check_integrity()


def test_demand_and_switches_stop_guesses() -> None:
    sessions = idle(1)
    assert by_hazard(prefetcher(by_hazard=False), sessions, 0.0) == []
    assert by_hazard(Prefetcher(tuned(PrefetchSettings(), holdout_share=0.0)), sessions, 0.0) == [], (
        "off by default"
    )
    assert by_hazard(prefetcher(), sessions, 0.0, is_demand_busy=True) == []
    assert by_hazard(prefetcher(bytes_per_s_max=0), sessions, 0.0) == [], "no budget, no guesses"
    assert prefetcher(at_pause=False).at_pause("a", 10, 0.0, room_bytes=9) is None
    assert prefetcher().at_pause("a", 10, 0.0, is_demand_busy=True, room_bytes=9) is None
    assert prefetcher().at_pause("a", 10, 0.0, room_bytes=0) is None
    guess = prefetcher().at_pause("a", 10, 0.0, room_bytes=4)
    assert guess is not None
    assert guess.nbytes == 4, "the chain's beginning"


def test_nothing_is_evicted_for_a_guess() -> None:
    assert by_hazard(prefetcher(), idle(1), 0.0, room_bytes=0) == []
    guesses = by_hazard(prefetcher(), idle(3), 0.0, room_bytes=130)
    assert [guess.nbytes for guess in guesses] == [100, 30]


def test_a_long_session_comes_up_in_chunks_and_starves_nobody() -> None:
    ours, sessions = prefetcher(bytes_per_s_max=100, burst_s=2.0), idle(1)
    below = {0: 500}
    brought = []
    for second in range(10):
        for guess in ours.by_hazard(
            sessions, lambda _: below[0], float(second), lead_s=30.0, room_bytes=10**9
        ):
            brought.append((second, guess.nbytes))
            below[0] -= guess.nbytes
            ours.arrived(0, guess.nbytes, float(second))
    assert brought == [(0, 200), (2, 200), (3, 100)]
    assert ours.returned(0, 11.0, up_bytes=500, asked_bytes=500) == 0
    assert ours.stats().used == 500
    assert ours.stats().guesses == 1


@pytest.mark.parametrize(
    ("how", "used", "late", "wasted"),
    [
        ("returned", 100, 0, 0),
        ("returned in the middle", 40, 60, 0),
        ("pushed out", 0, 0, 100),
        ("partly pushed out, then returned", 70, 0, 30),
        ("closed", 0, 0, 100),
        ("another prompt", 0, 0, 100),
    ],
)
def test_what_becomes_of_a_guess(how: str, used: int, late: int, wasted: int) -> None:
    ours = prefetcher()
    (guess,) = by_hazard(ours, idle(1), 0.0)
    ours.arrived(0, 40 if how == "returned in the middle" else 100, 1.0)
    if how in ("pushed out", "partly pushed out, then returned"):
        ours.left(0, 100 if how == "pushed out" else 30, 2.0)
    if how == "closed":
        ours.cancel(0, 2.0)
    elif how == "another prompt":
        ours.returned(0, 3.0, up_bytes=0, asked_bytes=100, used_bytes=0)
    elif how != "pushed out":
        assert ours.returned(0, 3.0, up_bytes=100, asked_bytes=100) == late
    stats = ours.stats()
    assert (stats.used, stats.late, stats.wasted, stats.moving) == (used, late, wasted, 0)
    assert stats.precision == used / 100
    assert guess.nbytes == 100
    ours.check_integrity()


def test_what_failed_gives_its_budget_back_and_is_not_judged() -> None:
    ours = prefetcher(bytes_per_s_max=50, burst_s=2.0)
    assert len(by_hazard(ours, idle(2), 0.0)) == 1
    ours.failed(0, 100, 0.0)
    assert ours.stats().precision is None
    guesses = by_hazard(ours, idle(2), 0.0)
    assert [guess.session for guess in guesses] == [1], "the first was tried in this pause"
    late = ours.returned(1, 0.0, up_bytes=0, asked_bytes=100)
    assert late == 100
    assert not by_hazard(ours, idle(3), 0.0), "what was called off may have moved"
    ours.unmoved(late)
    assert len(by_hazard(ours, idle(3), 0.0)) == 1


def play(ours: Prefetcher, turns: int, useful: bool, first: int = 0) -> int:
    """Sessions that pause, are guessed for, and come back or not; how many guesses there were."""
    guesses = 0
    for session in range(first, first + turns):
        now_s = 10.0 * session
        sessions = IdleSessions(4)
        sessions.ended(session, now_s, SOON)
        below = 100
        for guess in by_hazard(ours, sessions, now_s, below):
            guesses += 1
            below = 0 if useful else 100
            ours.arrived(session, guess.nbytes, now_s)
            if not useful:
                ours.left(session, guess.nbytes, now_s + 1)
        assert not by_hazard(ours, sessions, now_s + 2, below), "one question a pause"
        if useful:
            ours.returned(session, now_s + 3, up_bytes=100, asked_bytes=100)
    ours.check_integrity()
    return guesses


def test_the_waste_meter_switches_off_probes_and_comes_back() -> None:
    ours = prefetcher(probe_share=0.05)
    assert play(ours, 10, useful=False) == 10
    assert not ours.stats().is_on["hazard"]
    assert ours.stats().is_on["pause"], "each kind is judged alone"
    fooled = play(ours, 400, useful=False, first=10)
    assert 5 <= fooled <= 40, "only probes: 5 %"
    assert play(ours, 2000, useful=True, first=410) > 1000, "the probes were useful: on again"
    assert ours.stats().is_on["hazard"]
    stopped = prefetcher(probe_share=0.0)
    play(stopped, 10, useful=False)
    assert play(stopped, 500, useful=True, first=10) == 0


def test_nothing_is_guessed_for_the_hold_out_which_is_always_the_same() -> None:
    ours, again, other = (prefetcher(seed, holdout_share=0.2) for seed in (3, 3, 4))
    names = [b"%04d" % number for number in range(2000)]
    held_out = {name for name in names if ours.is_held_out(name)}
    assert held_out == {name for name in names if again.is_held_out(name)}
    assert held_out != {name for name in names if other.is_held_out(name)}
    assert 300 < len(held_out) < 500
    sessions = IdleSessions(2000)
    for name in held_out:
        sessions.ended(name, 0.0, SOON)
        assert ours.at_pause(name, 10, 0.0, room_bytes=100) is None
    assert by_hazard(ours, sessions, 0.0) == []
    assert ours.ask("hint", min(held_out), 10) == 10, "who has announced himself is no guess"


def test_regret_is_measured_on_the_hold_out() -> None:
    ours = prefetcher(holdout_share=0.5)
    held_out = next(name for name in range(100) if ours.is_held_out(name))
    guessed = next(name for name in range(100) if not ours.is_held_out(name))
    assert ours.stats().regret_demand is None
    ours.returned(guessed, 0.0, up_bytes=80, asked_bytes=100)
    ours.at_pause(held_out, 60, 0.0, room_bytes=1000, stays_s=10.0)
    ours.returned(held_out, 5.0, up_bytes=40, asked_bytes=100)
    stats = ours.stats()
    assert stats.regret_demand == pytest.approx(0.4 - 0.8)
    assert stats.regret_pause == pytest.approx(1.0 - 0.8), "40 and the 60 that a prefetch at pause brings"
    late = PrefetchRegret(1)
    late.paused("a", 60, 10.0)
    late.paused("b", 60, 10.0)
    late.returned("a", 0, 100, 5.0, is_held_out=True)  # forgotten: one only
    late.returned("b", 0, 100, 11.0, is_held_out=True)  # pushed out by then
    late.returned("c", 0, 100, 11.0, is_held_out=False)
    late.returned("d", 0, 0, 11.0, is_held_out=False)
    assert late.against_pause == 0.0
    late.check_integrity()


def test_guesses_never_judged_count_as_wasted_in_the_end() -> None:
    ours = prefetcher(pending_max=2, inflight_bytes_max=10**6)
    for session in range(4):
        guess = ours.at_pause(session, 100, 0.0, room_bytes=1000)
        if guess is not None:
            ours.arrived(session, 100, 0.0)
        ours.check_integrity()
    assert ours.stats().wasted == 200
    still = prefetcher(pending_max=1)
    assert still.at_pause(0, 10, 0.0, room_bytes=100) is not None
    assert still.at_pause(1, 10, 0.0, room_bytes=100) is None, "the one there is still moves"


def test_the_meter_needs_evidence() -> None:
    meter = PrefetchGate(accuracy_min=0.5, guesses=3, probe_share=0.0, rng=random.Random(0))
    for used in (0, 0):
        meter.judged(used, 10)
        assert meter.is_on
    meter.judged(10, 0)  # nothing moved
    assert meter.is_on
    meter.judged(4, 10)
    assert [meter.is_on, meter.allows()] == [False, False]
    meter.judged(30, 10)  # not more than all
    meter.judged(10, 10)
    assert meter.is_on
    assert meter.switched == 2
    meter.check_integrity()
    meter._used += 1
    with pytest.raises(AssertionError):
        meter.check_integrity()


def test_the_budget_flows_and_is_bounded() -> None:
    budget = ByteBudget(100, 2.0)
    assert budget.saved(0.0) == 200
    budget.spend(150, 0.0)
    assert budget.saved(1.0) == 150
    assert budget.saved(0.5) == 150, "a clock that went back"
    assert budget.saved(99.0) == 200
    budget.give_back(500)
    assert budget.saved(99.0) == 200
    with pytest.raises(ValueError, match="more than"):
        budget.spend(201, 99.0)


def test_check_integrity_fires() -> None:
    ours = prefetcher()
    by_hazard(ours, idle(1), 0.0)
    ours._moving += 1
    with pytest.raises(AssertionError, match="being prefetched now"):
        ours.check_integrity()


@pytest.mark.parametrize("blocks", [0, 1, 5, 16, 17, 1000])
def test_marks_tell_how_much_of_a_chain_was_kept(blocks: int) -> None:
    rng = random.Random(blocks)
    keys = [rng.randbytes(32) for _ in range(blocks)]
    marks = marks_of(keys)
    assert len(marks.blocks) == min(blocks, MARKS_MAX)
    assert kept_blocks(marks, b"".join(keys)) == blocks
    assert kept_blocks(marks, b"".join([*keys, rng.randbytes(32)])) == blocks
    for kept in {0, blocks // 3, blocks - 1} - {-1}:
        other = [*keys[:kept], *(rng.randbytes(32) for _ in range(blocks))]
        found = kept_blocks(marks, b"".join(other))
        assert found <= kept
        assert kept - found <= blocks / MARKS_MAX + 1


class Storms(RuleBasedStateMachine):
    """Whatever happens in whatever order: bounded in flight, in budget, and nothing is counted twice."""

    @initialize(seed=st.integers(0, 5), holdout=st.sampled_from([0.0, 0.3]))
    def begin(self, seed: int, holdout: float) -> None:
        self.ours = prefetcher(seed, holdout_share=holdout, pending_max=8, accuracy_window=3, probe_share=0.2)
        self.now_s = 0.0
        self.sessions = IdleSessions(20)
        self.moved = 0  # on the budget, less what was given back
        self.on_way: dict[int, int] = {}

    @rule(session=st.integers(0, 19), curve=st.sampled_from([SOON, NEVER]), below=st.integers(0, 3000))
    def pause(self, session: int, curve: Curves, below: int) -> None:
        self.sessions.ended(session, self.now_s, curve)
        guess = self.ours.at_pause(session, below, self.now_s, room_bytes=2000)
        if guess is not None:
            self._began([guess])

    @rule(below=st.integers(0, 3000), room=st.integers(0, 3000))
    def guess(self, below: int, room: int) -> None:
        self._began(by_hazard(self.ours, self.sessions, self.now_s, below, room_bytes=room))

    @rule(session=st.integers(0, 19), nbytes=st.integers(0, 2000))
    def hint(self, session: int, nbytes: int) -> None:
        self.on_way[session] = self.on_way.get(session, 0) + self.ours.ask("hint", session, nbytes)

    @rule(session=st.integers(0, 19), nbytes=st.integers(1, 3000), how=st.sampled_from(["arrived", "left"]))
    def goes_on(self, session: int, nbytes: int, how: str) -> None:
        getattr(self.ours, how)(session, nbytes, self.now_s)

    @rule(session=st.integers(0, 19), used=st.integers(0, 3000))
    def returns(self, session: int, used: int) -> None:
        self.ours.returned(session, self.now_s, up_bytes=used, asked_bytes=3000, used_bytes=used)
        self.sessions.started(session, self.now_s)

    @rule(session=st.integers(0, 19))
    def closes(self, session: int) -> None:
        self.ours.cancel(session, self.now_s)
        self.sessions.forget(session)

    @rule(seconds=st.floats(-1, 5))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    def _began(self, guesses: list[Guess]) -> None:
        for guess in guesses:
            assert guess.nbytes > 0
            assert not self.ours.is_held_out(guess.session)
            self.moved += guess.nbytes

    @invariant()
    def is_bounded(self) -> None:
        self.ours.check_integrity()
        stats = self.ours.stats()
        guessed = stats.started.get("pause", 0) + stats.started.get("hazard", 0)
        assert guessed == self.moved
        assert stats.used + stats.late + stats.wasted <= guessed
        assert self.moved <= 2000 + 1000 * 6 * 60, "the burst, and what flowed"


Storms.TestCase.settings = runs(
    derandomize=True, deadline=None, max_examples=examples(40), stateful_step_count=50
)
TestStorms = Storms.TestCase
