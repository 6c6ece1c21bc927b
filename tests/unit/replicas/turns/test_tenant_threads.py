"""Threads for work of several tenants: whose turn it is, what long work leaves to others, and bounds."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from functools import partial

import pytest

from samovar.replicas.turns import FairQueue, PlacesTaken, TenantThreads


class Clock:
    """Seconds that only work makes pass."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._lock = threading.Lock()

    def __call__(self) -> float:
        return self.now_s

    def takes(self, seconds: float) -> None:
        with self._lock:
            self.now_s += seconds


@pytest.fixture
def made() -> Iterator[Callable[..., TenantThreads]]:
    all_made: list[TenantThreads] = []

    def make(threads: int = 2, places: int = 64, **more: object) -> TenantThreads:
        all_made.append(TenantThreads("test", threads, places=places, **more))  # type: ignore[arg-type]
        return all_made[-1]

    yield make
    for one in all_made:
        one.check_integrity()
        one.close(wait=True)


def over(futures: list[Future[None]]) -> None:
    done, late = wait(futures, timeout=60)
    assert not late, f"{len(late)} of {len(done) + len(late)} are not over"
    for one in done:
        one.result()


@pytest.mark.guarantee("G10")
def test_short_work_finds_a_thread_beside_any_flood_of_long_work(made: Callable[..., TenantThreads]) -> None:
    """Eight long jobs of each of three tenants: none of them ends before bob's short one has."""
    threads, gate, ended = made(), threading.Event(), list[str]()

    def long() -> None:
        gate.wait(60)
        ended.append("long")

    flood = [
        threads.submit(tenant, long, is_long=True) for tenant in ("alice", "carol", "dave") for _ in range(8)
    ]
    threads.submit("bob", lambda: ended.append("bob")).result(60)
    assert ended == ["bob"]
    gate.set()
    over(flood)


def test_long_work_of_one_thread_is_done_too(made: Callable[..., TenantThreads]) -> None:
    threads = made(1)
    over([threads.submit("alice", threads.pass_on, is_long=True) for _ in range(5)])
    assert threads.is_idle


@pytest.mark.guarantee("G10")
def test_between_the_pieces_of_long_work_others_have_their_turns(made: Callable[..., TenantThreads]) -> None:
    """Bob's long work of three pieces waits for one piece of alice's before each of its own, not for all."""
    clock = Clock()
    threads, begin, order = made(clock=clock), threading.Event(), list[str]()

    def pieces(name: str, count: int) -> Callable[[], None]:
        def work() -> None:
            for _ in range(count):
                begin.wait(60)
                order.append(name)
                clock.takes(0.5)
                threads.pass_on()

        return work

    hers = [threads.submit("alice", pieces("a", 64), is_long=True) for _ in range(4)]
    his = threads.submit("bob", pieces("b", 3), is_long=True)
    begin.set()
    over([his])
    last = len(order) - 1 - order[::-1].index("b")
    assert order[:last].count("a") <= 4, order[:last]
    over(hers)
    assert order.count("a") == 4 * 64


def test_seconds_are_charged_when_they_are_known(made: Callable[..., TenantThreads]) -> None:
    """After one of alice's that took ten seconds, bob's hundred of .1 s go before her next."""
    clock = Clock()
    threads, gate, order = made(1, 256, clock=clock), threading.Event(), list[str]()

    def dear() -> None:
        gate.wait(60)
        clock.takes(4.0)
        order.append("a")

    def cheap() -> None:
        clock.takes(0.1)
        order.append("b")

    jobs = [threads.submit("alice", dear)]
    jobs += [threads.submit("bob", cheap) for _ in range(100)]
    jobs.append(threads.submit("alice", dear))
    gate.set()
    over(jobs)
    assert order[0] == "a"
    assert 35 <= order.index("a", 1) - 1 <= 41, "what she took, he gets"


def test_debts_are_forgotten_when_nobody_waits() -> None:
    queue: FairQueue[str, str] = FairQueue(1.0)
    queue.put("a", "a1", 0.0)
    queue.take("a1")
    queue.charge("a", 50.0)  # nobody waits
    queue.put("a", "a2", 0.0)
    queue.put("b", "b1", 0.0)
    assert queue.pick() == "a2"
    queue.take("a2")
    queue.charge("a", 50.0)  # bob does
    queue.put("a", "a3", 0.0)
    queue.check_integrity()
    for number in range(2, 40):
        queue.put("b", f"b{number}", 1.0)
    served = [queue.pick() for _ in range(1)]
    assert served == ["b1"]
    for _ in range(39):
        item = queue.pick()
        assert item is not None
        assert item[0] == "b"
        queue.take(item)
    assert queue.pick() == "a3", "alone she need not repay"
    queue.take("a3")
    queue.check_integrity()
    assert not queue._debts


def test_long_work_of_a_tenant_that_has_begun_is_bounded(made: Callable[..., TenantThreads]) -> None:
    """What has begun keeps its memory while others have their turns."""
    threads, most, begun = made(3), 0, set[int]()
    lock = threading.Lock()

    def work(number: int) -> None:
        nonlocal most
        for _ in range(20):
            with lock:
                begun.add(number)
                most = max(most, len(begun))
            threads.pass_on()
        with lock:
            begun.discard(number)

    over([threads.submit("alice", partial(work, number), is_long=True) for number in range(12)])
    assert most == 2


def test_places_are_bounded_for_all_and_for_each(made: Callable[..., TenantThreads]) -> None:
    threads, gate = made(places=8, tenant_share=0.5), threading.Event()
    jobs = [threads.submit("alice", gate.wait) for _ in range(4)]
    with pytest.raises(PlacesTaken) as refused:
        threads.submit("alice", gate.wait)
    assert refused.value.is_of_tenant
    jobs += [threads.submit("bob", gate.wait) for _ in range(4)]
    with pytest.raises(PlacesTaken) as refused:
        threads.submit("carol", gate.wait)
    assert not refused.value.is_of_tenant
    jobs.append(threads.submit("carol", gate.wait, must_run=True))
    jobs.pop(3).cancel()  # it leaves its place
    gate.set()
    wait(jobs, 60)
    assert threads.is_idle


def test_closing_ends_what_waits_for_its_next_piece(made: Callable[..., TenantThreads]) -> None:
    threads, gate, passed = made(1), threading.Event(), list[int]()

    def work() -> None:
        gate.wait(60)
        threads.pass_on()
        passed.append(1)

    jobs = [threads.submit(tenant, work, is_long=True) for tenant in ("alice", "bob")]
    threads.close()
    gate.set()
    assert not wait(jobs, 60).not_done
    assert not passed
    assert all(job.cancelled() or job.exception() is not None for job in jobs)


@pytest.mark.parametrize("seed", range(20))
def test_random_histories_run_each_job_once_and_leave_nothing(
    made: Callable[..., TenantThreads], seed: int
) -> None:
    rng, ran, lock = random.Random(seed), list[int](), threading.Lock()
    threads = made(rng.randint(1, 4), 1000)

    def job(number: int, pieces: int) -> Callable[[], None]:
        def work() -> None:
            for _ in range(pieces):
                threads.pass_on()
            with lock:
                ran.append(number)

        return work

    jobs = []
    for number in range(100):
        pieces = rng.choice([0, 0, 3])
        jobs.append(threads.submit(rng.choice("abc"), job(number, pieces), is_long=pieces > 0))
        threads.check_integrity()
    over(jobs)
    assert sorted(ran) == list(range(100))
    assert threads.is_idle
