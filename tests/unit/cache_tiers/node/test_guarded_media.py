"""One tier behind its breaker: deadlines, the threads of its calls, what counts as a failure."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import pytest

from samovar.cache_tiers.blocks.record import BadRecord, Record, TierError, TierFull, TierMiss
from samovar.cache_tiers.media.guard import Breaker, CallExecutor, GuardedTier, TierDown, TierLate
from samovar.cache_tiers.media.memory import HeapTier
from samovar.cache_tiers.media.tier import Deadline
from samovar.cache_tiers.pricing.meters import TierMeter, TierPrice
from tests.support.clock import Clock
from tests.support.nodes.node_harness import sample

T = TypeVar("T")
ADDRESS = sample(1).header.address
RECORD = Record(sample(1).record)


def guarded(threads: int = 2, bytes_max: int = 10**6) -> tuple[GuardedTier, Clock]:
    clock = Clock()
    guard = GuardedTier(
        HeapTier(bytes_max),
        bytes_max=bytes_max,
        breaker=Breaker(2, 1.0, 10.0, clock),
        meter=TierMeter(TierPrice(1e-3, 1e9), clock=clock),
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
            guard.call(failing, Deadline(1.0))
    assert (guard.state, guard.is_up, guard.price().is_up) == ("open", False, False)
    with pytest.raises(TierDown):
        guard.call(never, Deadline(1.0))
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
        guard.call(lambda: 1 // 0, Deadline(1.0))
    assert "unexpected exception" in caplog.text


def test_f08_no_more_threads_than_allowed_and_late_ones_are_heard_of() -> None:
    guard, _ = guarded(threads=1)
    gate, late = threading.Event(), threading.Semaphore(0)
    with pytest.raises(TierLate):
        guard.call(lambda: gate.wait(30), Deadline(0.02), late.release)
    assert not late.acquire(blocking=False)  # it is still going on
    with pytest.raises(TierLate, match="busy"):
        guard.call(never, Deadline(0.02), late.release)
    assert late.acquire(timeout=10)  # never begun: at once
    gate.set()
    assert late.acquire(timeout=10)
    assert guard.call(lambda: 7, Deadline(10.0)) == 7
    guard.check_integrity()


def test_f07_deletes_that_find_nothing_do_not_hide_writes_that_fail() -> None:
    """After each failed write what may be left of it is deleted, and that goes well where nothing is."""
    guard, _ = guarded()
    with pytest.raises(TierError):
        guard.call(failing, Deadline(1.0))
    guard.delete(ADDRESS, 1.0)
    with pytest.raises(TierError):
        guard.call(failing, Deadline(1.0))
    assert guard.state == "open"


def test_a_tier_whose_last_call_failed_is_tried_and_its_price_forgiven_when_it_is_well() -> None:
    guard, _ = guarded()
    first = guard.price().seconds(1)
    with pytest.raises(TierError):
        guard.call(failing, Deadline(1.0))
    guard._meter.observe_failure(5.0)
    assert guard.state == "up"
    assert guard.price().seconds(1) > 1.0
    assert guard.probe(1.0)
    assert guard.price().seconds(1) < 2 * first


@pytest.fixture
def executor() -> Iterator[CallExecutor]:
    made = CallExecutor(2, "calls-test")
    yield made
    made.close()


def run(executor: CallExecutor, job: Callable[[], T], seconds: float = 10.0) -> T:
    deadline = Deadline(seconds)
    return executor.wait(executor.submit(job, deadline), deadline)


def threads_of_test() -> int:
    return sum(thread.name == "calls-test" for thread in threading.enumerate())


def test_results_and_errors_come_through(executor: CallExecutor) -> None:
    assert run(executor, lambda: 5) == 5

    def timeout() -> None:
        raise TimeoutError("the job's own")

    with pytest.raises(TimeoutError, match="the job's own"):
        run(executor, timeout)


def test_threads_are_used_again(executor: CallExecutor) -> None:
    seen = {run(executor, threading.get_ident) for _ in range(100)}
    assert len(seen) <= 2


def wait_for_threads_to_end() -> None:
    ends_s = time.monotonic() + 60
    while threads_of_test():
        assert time.monotonic() < ends_s, "a thread waits for ever"
        time.sleep(0.001)  # they need the interpreter to end


def test_idle_threads_end_and_lose_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samovar.cache_tiers.media.guard.IDLE_S", 0.001)
    executor, switch_s = CallExecutor(8, "calls-test"), sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # orders of steps that a loaded machine has
    try:
        with ThreadPoolExecutor(8) as callers:
            for _ in range(30):
                assert list(callers.map(lambda n: run(executor, lambda: n), range(100))) == list(range(100))
                wait_for_threads_to_end()
    finally:
        sys.setswitchinterval(switch_s)
        executor.close()


def test_a_closed_executor_ends_its_idle_threads(executor: CallExecutor) -> None:
    futures = [executor.submit(partial(time.sleep, 0.01), Deadline(10)) for _ in range(2)]
    executor.close()
    wait_for_threads_to_end()
    assert all(future.done() for future in futures)


def test_f08_who_waits_gives_up_and_no_thread_is_added(executor: CallExecutor) -> None:
    go = threading.Event()
    for _ in range(2):
        with pytest.raises(TierLate, match="not done"):
            run(executor, go.wait, 0.02)
    for _ in range(20):
        with pytest.raises(TierLate, match="busy"):
            run(executor, lambda: None, 0.01)
    assert threads_of_test() == 2
    go.set()
    assert run(executor, lambda: "again") == "again"


def test_a_place_is_waited_for_until_the_deadline(executor: CallExecutor) -> None:
    go = threading.Event()
    futures = [executor.submit(go.wait, Deadline(10)) for _ in range(2)]
    with pytest.raises(TierLate, match="busy"):
        run(executor, lambda: None, 0.05)
    threading.Timer(0.05, go.set).start()
    assert run(executor, lambda: 1) == 1
    assert all(future.result(10) for future in futures)


def test_a_late_call_learns_that_it_was_given_up(executor: CallExecutor) -> None:
    go, deadline = threading.Event(), Deadline(0.02)
    outcome: Future[tuple[bool, str]] = Future()

    def job() -> None:
        deadline.check()
        go.wait()
        try:
            deadline.check()
        except TierError as error:
            outcome.set_result((deadline.commit(), str(error)))

    with pytest.raises(TierLate):
        executor.wait(executor.submit(job, deadline), deadline)
    go.set()
    assert outcome.result(10) == (False, "the deadline has passed")


def test_what_was_committed_is_waited_for(executor: CallExecutor) -> None:
    """Else the call would take itself for done, and its caller for failed."""
    committed, go, deadline = threading.Event(), threading.Event(), Deadline(0.02)

    def job() -> str:
        assert deadline.commit()
        committed.set()
        go.wait()
        return "done"

    future = executor.submit(job, deadline)
    assert committed.wait(10)
    threading.Timer(0.1, go.set).start()
    assert executor.wait(future, deadline) == "done"


def test_what_follows_a_late_call_may_call_again() -> None:
    """The delete after a late write, where one thread is all there is."""
    guard, _ = guarded(threads=1)
    gate, deleted = threading.Event(), threading.Event()

    def undo() -> None:
        guard.delete(ADDRESS, 10.0)
        deleted.set()

    with pytest.raises(TierLate):
        guard.call(partial(gate.wait, 30), Deadline(0.02), undo)
    gate.set()
    assert deleted.wait(10)


def test_closed(executor: CallExecutor) -> None:
    go = threading.Event()
    run(executor, lambda: None)
    deadline = Deadline(10)
    future = executor.submit(go.wait, deadline)
    executor.close()
    with pytest.raises(TierError, match="closed"):
        run(executor, lambda: None)
    go.set()
    assert executor.wait(future, deadline)


HANGS = """
import threading
import time
from samovar.cache_tiers.media.guard import CallExecutor
from samovar.cache_tiers.media.tier import Deadline
begun = threading.Event()
CallExecutor(1, "hangs").submit(lambda: (begun.set(), threading.Event().wait()), Deadline(10))
assert begun.wait(10)
"""


def test_f08_a_hanging_call_does_not_keep_the_process_alive() -> None:
    """Such as a read from a network file system that is gone."""
    subprocess.run([sys.executable, "-c", HANGS], check=True, timeout=60)
