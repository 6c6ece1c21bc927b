"""The breaker: when it opens, for how long, and who gets the one trial."""

from __future__ import annotations

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from samovar.cache_tiers.media.guard import Breaker
from tests.support.amounts import examples
from tests.support.clock import Clock


def _open(breaker: Breaker, failures: int = 3) -> None:
    for _ in range(failures):
        assert breaker.state == "closed"
        breaker.failed()
        breaker.check_integrity()
    assert breaker.state == "open"


def _breaker(clock: Clock) -> Breaker:
    return Breaker(3, 2.0, 60.0, clock)


@pytest.mark.guarantee("G9")
def test_it_opens_after_failures_in_a_row() -> None:
    breaker = _breaker(Clock())
    for _ in range(5):
        breaker.failed()
        breaker.failed()
        assert breaker.allows()
        breaker.succeeded()
        breaker.check_integrity()
    assert breaker.opened == 0
    _open(breaker)
    assert not breaker.allows()
    assert breaker.opened == 1


def test_one_trial_closes_it() -> None:
    clock = Clock()
    breaker = _breaker(clock)
    _open(breaker)
    clock.now_s += 1.999
    assert not breaker.allows()
    clock.now_s += 0.001
    assert breaker.state == "open"
    assert breaker.allows()
    assert breaker.state == "half-open"
    assert not breaker.allows()  # one trial only
    breaker.succeeded()
    breaker.check_integrity()
    assert breaker.state == "closed"
    assert breaker.allows()
    _open(breaker)  # again a whole row of failures, and the first wait
    clock.now_s += 2.0
    assert breaker.allows()


def test_each_trial_that_fails_doubles_the_wait_up_to_the_longest() -> None:
    clock = Clock()
    breaker = _breaker(clock)
    _open(breaker)
    for wait_s in (2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0):
        clock.now_s += wait_s - 0.001
        assert not breaker.allows()
        clock.now_s += 0.001
        assert breaker.allows()
        breaker.failed()
        breaker.check_integrity()
        assert breaker.state == "open"
    assert breaker.opened == 8
    clock.now_s += 60.0
    assert breaker.allows()
    breaker.succeeded()
    breaker.check_integrity()
    _open(breaker)
    clock.now_s += 2.0  # all is forgotten: the first wait
    assert breaker.allows()


def test_a_trial_that_is_never_heard_of_does_not_block_for_ever() -> None:
    clock = Clock()
    breaker = _breaker(clock)
    _open(breaker)
    clock.now_s += 2.0
    assert breaker.allows()
    clock.now_s += 1.999
    assert not breaker.allows()
    clock.now_s += 0.001
    assert breaker.allows()
    breaker.check_integrity()


def test_a_trial_that_was_not_made_is_given_back() -> None:
    clock = Clock()
    breaker = _breaker(clock)
    breaker.untried()
    assert breaker.state == "closed"
    _open(breaker)
    clock.now_s += 1.0
    breaker.untried()
    assert not breaker.allows(), "there was none"
    clock.now_s += 1.0
    assert breaker.allows()
    breaker.untried()
    assert breaker.allows()
    assert not breaker.allows()
    breaker.check_integrity()


def test_late_news_while_open_changes_nothing() -> None:
    clock = Clock()
    breaker = _breaker(clock)
    _open(breaker)
    clock.now_s += 1.5
    breaker.failed()
    breaker.succeeded()
    assert breaker.state == "open"
    clock.now_s += 0.5
    assert breaker.allows()
    breaker.check_integrity()


def test_f26_a_clock_that_jumps_back_keeps_it_open_no_longer_than_once_more() -> None:
    clock = Clock()
    breaker = _breaker(clock)
    _open(breaker)
    clock.now_s -= 3600.0
    assert not breaker.allows()
    clock.now_s += 2.0
    assert breaker.allows()
    clock.now_s -= 3600.0  # and again, with the trial under way
    assert not breaker.allows()
    clock.now_s += 2.0
    assert breaker.allows()
    breaker.check_integrity()


def test_a_longest_wait_below_the_first_holds() -> None:
    clock = Clock()
    breaker = Breaker(1, 10.0, 1.0, clock)
    _open(breaker, 1)
    clock.now_s += 1.0
    assert breaker.allows()
    breaker.check_integrity()


@pytest.mark.parametrize(
    ("failures_max", "open_s", "open_s_max"),
    [(0, 1.0, 1.0), (1, 0.0, 1.0), (1, 1.0, 0.0), (1, math.nan, 1.0), (1, 1.0, math.nan)],
)
def test_nonsense_is_refused(failures_max: int, open_s: float, open_s_max: float) -> None:
    with pytest.raises(ValueError, match="no breaker"):
        Breaker(failures_max, open_s, open_s_max, Clock())


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("_failures", 3, "and not open"),
        ("_open_s", 61.0, "open for"),
        ("_open_s", 4.0, "it remembers"),
        ("_state", "open", "never opened"),
    ],
)
def test_a_corrupt_breaker_is_noticed(field: str, value: object, named: str) -> None:
    breaker = _breaker(Clock())
    setattr(breaker, field, value)
    with pytest.raises(AssertionError, match=named):
        breaker.check_integrity()


class BreakerMachine(RuleBasedStateMachine):
    """Whatever happens: an open breaker is tried again `open_s_max` later, and once at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.breaker = _breaker(self.clock)
        self.in_a_row = 0

    @rule(seconds=st.sampled_from([-3600.0, -1.0, 0.5, 2.0, 30.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now_s += seconds

    @rule()
    def fail(self) -> None:
        was = self.breaker.state
        self.breaker.failed()
        self.in_a_row += 1
        assert was == "closed" or self.breaker.state == "open"

    @rule()
    def succeed(self) -> None:
        was = self.breaker.state
        self.breaker.succeeded()
        self.in_a_row = 0
        assert self.breaker.state == ("open" if was == "open" else "closed")

    @rule()
    def give_back(self) -> None:
        was = self.breaker.state
        self.breaker.untried()
        assert self.breaker.state == was
        assert was != "half-open" or self.breaker.allows()

    @rule()
    def ask(self) -> None:
        was = self.breaker.state
        if self.breaker.allows():
            assert self.breaker.state == ("closed" if was == "closed" else "half-open")
            assert was == "closed" or not self.breaker.allows()

    @rule()
    def ask_much_later(self) -> None:
        self.breaker.allows()  # it sees the time, should that have jumped back
        self.clock.now_s += 60.0
        assert self.breaker.allows()

    @invariant()
    def sound(self) -> None:
        self.breaker.check_integrity()
        assert self.breaker.state != "closed" or self.in_a_row < 3


TestBreakerMachine = BreakerMachine.TestCase
TestBreakerMachine.settings = settings(
    max_examples=examples(100), stateful_step_count=30, deadline=None, derandomize=True
)
