"""One tier behind its breaker: deadlines, threads, what counts as a failure."""

from __future__ import annotations

import threading

import pytest

from cache_tiers.blocks.record import BadRecord, Record, TierError, TierFull, TierMiss
from cache_tiers.media.guard import Breaker, GuardedTier, TierDown, TierLate
from cache_tiers.media.memory import HeapTier
from cache_tiers.pricing.meters import TierMeter
from tests.unit.node_harness import FakeClock, sample

ADDRESS = sample(1).header.address
RECORD = Record(sample(1).record)


def guarded(threads: int = 2, bytes_max: int = 10**6) -> tuple[GuardedTier, FakeClock]:
    clock = FakeClock()
    guard = GuardedTier(
        HeapTier(bytes_max),
        bytes_max=bytes_max,
        breaker=Breaker(2, 1.0, 10.0, clock),
        meter=TierMeter(1e-3, 1e9, clock=clock),
        threads=threads,
        clock=clock,
    )
    guard.ready = True
    return guard, clock


def failing() -> None:
    raise TierError("no")


def never() -> None:
    raise AssertionError("there was nothing late")


def test_answers_do_not_open_the_breaker() -> None:
    guard, _ = guarded(bytes_max=10)
    for _ in range(5):
        with pytest.raises(TierMiss):
            guard.read(ADDRESS, 0, 1, 1.0)
        with pytest.raises(TierFull):
            guard.put(ADDRESS, RECORD, 1.0, never)
    assert guard.state == "up"
    assert guard.counts == {"write_errors": 5}


def test_failures_open_it_and_then_it_is_not_asked() -> None:
    guard, clock = guarded()
    for _ in range(2):
        with pytest.raises(TierError):
            guard.call(failing, 1.0)
    assert (guard.state, guard.is_up, guard.price().is_up) == ("open", False, False)
    with pytest.raises(TierDown):
        guard.call(never, 1.0)
    assert not guard.probe(1.0)
    clock.now_s += 1.5
    assert guard.probe(1.0)
    assert guard.state == "up"
    guard.check_integrity()


def test_a_short_read_is_no_read() -> None:
    guard, _ = guarded()
    guard.put(ADDRESS, RECORD, 1.0, never)
    guard.tier.read = lambda *_args, **_kwargs: RECORD.data[:5]  # type: ignore[method-assign]
    with pytest.raises(BadRecord, match="truncated"):
        guard.read(ADDRESS, 0, 6, 1.0)


def test_a_bug_of_a_tier_is_a_fault_of_that_tier(caplog: pytest.LogCaptureFixture) -> None:
    guard, _ = guarded()
    with pytest.raises(TierError, match="ZeroDivisionError"):
        guard.call(lambda: 1 // 0, 1.0)
    assert "unexpected exception" in caplog.text


def test_f08_no_more_threads_than_allowed_and_late_ones_are_heard_of() -> None:
    guard, _ = guarded(threads=1)
    gate, late = threading.Event(), threading.Semaphore(0)
    with pytest.raises(TierLate):
        guard.call(lambda: gate.wait(30), 0.02, late.release)
    assert not late.acquire(blocking=False)  # it is still going on
    with pytest.raises(TierLate, match="busy"):
        guard.call(never, 0.02, late.release)
    assert late.acquire(timeout=10)  # never begun: at once
    gate.set()
    assert late.acquire(timeout=10)
    assert guard.call(lambda: 7, 10.0) == 7
    guard.check_integrity()


def test_f07_deletes_that_find_nothing_do_not_hide_writes_that_fail() -> None:
    """After each failed write what may be left of it is deleted, and that goes well where nothing is."""
    guard, _ = guarded()
    with pytest.raises(TierError):
        guard.call(failing, 1.0)
    guard.delete(ADDRESS, 1.0)
    with pytest.raises(TierError):
        guard.call(failing, 1.0)
    assert guard.state == "open"


def test_a_tier_whose_last_call_failed_is_tried_and_its_price_forgiven_when_it_is_well() -> None:
    guard, _ = guarded()
    first = guard.price().seconds(1)
    with pytest.raises(TierError):
        guard.call(failing, 1.0)
    guard._meter.observe_failure(5.0)
    assert guard.state == "up"
    assert guard.price().seconds(1) > 1.0
    assert guard.probe(1.0)
    assert guard.price().seconds(1) < 2 * first
