"""A few threads for work of several tenants: deficit round robin, bounded places, and long work in pieces.

The only pool that works on what tenants send (`tests/unit/repository/test_executors.py` lists the others,
each with its reason). A tenant waits for its turns, not for another's queue:

- Tenants take turns by cost: what a piece of work says it costs, or the seconds that it took, which are
  charged when they are known.
- Work that may take long says so (`is_long`). It has one thread less than there are, so that short work finds
  one. A tenant has no more of it begun than that, either: what is begun keeps its memory while it waits.
- Long work calls `pass_on` between its pieces: others whose turn it is go first.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any, TypeVar

from samovar.replicas.turns.fair_queue import FairQueue

Result = TypeVar("Result")

QUANTUM_S = 0.05
"""What a turn is worth where work is charged by its seconds."""


class PlacesTaken(Exception):
    """Too much work waits. `is_of_tenant`: of this tenant; others may still come."""

    def __init__(self, is_of_tenant: bool) -> None:
        super().__init__("the tenant's places are taken" if is_of_tenant else "all places are taken")
        self.is_of_tenant = is_of_tenant


class _TenantJob:
    """A piece of work, the future of its result, and what wakes it up where it has passed its thread on."""

    def __init__(self, tenant: str, work: Callable[[], Any], is_long: bool) -> None:
        self.tenant = tenant
        self.work = work
        self.is_long = is_long
        self.future: Future[Any] = Future()
        self.is_begun = False
        self.has_thread = False
        self.since_s = 0.0  # when it got that
        self.goes_on = threading.Event()


class TenantThreads:
    """Runs work of tenants in threads. Thread-safe.

    `threads`: how much runs at once. `places`: how much may wait or run, `tenant_share` of it for one tenant.
    `quantum`: what a turn is worth, in the unit of `cost`; None: in seconds, charged afterwards.
    """

    def __init__(
        self,
        name: str,
        threads: int,
        *,
        places: int,
        tenant_share: float = 1.0,
        quantum: float | None = None,
        weights: Mapping[str, float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._threads = threads
        self._long_max = max(1, threads - 1)
        self._places = places
        self._tenant_places = max(1, math.ceil(tenant_share * places))
        self._is_timed = quantum is None
        self._clock = clock
        # What has passed its thread on still has one of these; `_threads` of them run.
        self._pool = ThreadPoolExecutor(threads + places, thread_name_prefix=name)
        self._waiting: FairQueue[str, _TenantJob] = FairQueue(quantum or QUANTUM_S, weights)
        self._open: Counter[str] = Counter()  # by tenant: what waits or runs
        self._begun: Counter[str] = Counter()  # of it, long work that has begun and is not over
        self._running = 0
        self._running_long = 0
        self._lock = threading.Lock()
        self._here = threading.local()
        self._is_closed = False

    async def run(
        self,
        tenant: str,
        work: Callable[[], Result],
        *,
        cost: float = 0.0,
        is_long: bool = False,
        must_run: bool = False,
    ) -> Result:
        """Return what `work` returns. Raises `PlacesTaken`, unless it `must_run`."""
        return await asyncio.wrap_future(
            self.submit(tenant, work, cost=cost, is_long=is_long, must_run=must_run)
        )

    def submit(
        self,
        tenant: str,
        work: Callable[[], Result],
        *,
        cost: float = 0.0,
        is_long: bool = False,
        must_run: bool = False,
    ) -> Future[Result]:
        """Queue `work`; one that is cancelled before its turn is not run. Raises as `run` does."""
        job = _TenantJob(tenant, work, is_long)
        with self._lock:
            if self._is_closed:
                raise RuntimeError("these threads are closed")
            if not must_run and self._open.total() >= self._places:
                raise PlacesTaken(is_of_tenant=False)
            if not must_run and self._open[tenant] >= self._tenant_places:
                raise PlacesTaken(is_of_tenant=True)
            self._open[tenant] += 1
            self._waiting.put(tenant, job, cost)
        job.future.add_done_callback(lambda future: self._cancelled(job) if future.cancelled() else None)
        self._hand_out()
        return job.future

    @property
    def is_idle(self) -> bool:
        """Whether no work waits or runs."""
        return not self._open

    def waiting(self, tenant: str) -> int:
        """Return how much of a tenant's work waits or runs."""
        return self._open[tenant]

    def pass_on(self) -> None:
        """Let others go first whose turn it is; called by long work, between its pieces."""
        job: _TenantJob | None = getattr(self._here, "job", None)
        if job is None:  # not in one of these threads
            return
        with self._lock:
            if self._is_closed:
                raise CancelledError("these threads are closed")
            self._rest(job)
            job.goes_on.clear()
            self._waiting.put(job.tenant, job, 0.0)
        self._hand_out()
        job.goes_on.wait()
        if not job.has_thread:
            raise CancelledError("these threads are closed")

    def _hand_out(self) -> None:
        """Give free threads to those whose turn it is."""
        with self._lock:
            while (job := self._next()) is not None:
                self._pool.submit(self._work, job)

    def _next(self) -> _TenantJob | None:
        """Return the next job that has not begun; wake up those before it that have. Requires the lock."""
        while self._running < self._threads and not self._is_closed:
            job = self._waiting.pick(self._may_run)
            if job is None:
                return None
            self._waiting.take(job)
            job.has_thread, job.since_s = True, self._clock()
            self._running += 1
            self._running_long += job.is_long
            if not job.is_begun:
                job.is_begun = True
                self._begun[job.tenant] += job.is_long
                return job
            job.goes_on.set()
        return None

    def _may_run(self, job: _TenantJob) -> bool:
        if not job.is_long:
            return True
        is_one_more = not job.is_begun and self._begun[job.tenant] >= self._long_max
        return self._running_long < self._long_max and not is_one_more

    def _work(self, job: _TenantJob | None) -> None:
        """Do a job, and the next ones, in one of the threads."""
        while job is not None:
            self._here.job = job
            result, fault = None, None
            is_wanted = job.future.set_running_or_notify_cancel()
            if is_wanted:
                try:
                    result = job.work()
                except BaseException as error:  # noqa: BLE001 - passed on to the waiter
                    fault = error
            self._here.job = None
            with self._lock:
                if job.has_thread:
                    self._rest(job)
                self._begun[job.tenant] -= job.is_long
                if is_wanted:
                    self._leave(job)
            if fault is not None:
                job.future.set_exception(fault)
            elif is_wanted:
                job.future.set_result(result)
            del result, fault
            with self._lock:
                job = self._next()

    def _rest(self, job: _TenantJob) -> None:
        """Take a job's thread from it, and charge its tenant. Requires the lock."""
        job.has_thread = False
        self._running -= 1
        self._running_long -= job.is_long
        if self._is_timed:
            self._waiting.charge(job.tenant, self._clock() - job.since_s)

    def _leave(self, job: _TenantJob) -> None:
        """Give up a job's place. Requires the lock."""
        self._open[job.tenant] -= 1
        if not self._open[job.tenant]:
            del self._open[job.tenant]

    def _cancelled(self, job: _TenantJob) -> None:
        with self._lock:
            self._leave(job)
            is_waiting = job in self._waiting
            if is_waiting:
                self._waiting.remove(job)
        if is_waiting:  # no thread will tell those who wait for it by `concurrent.futures.wait`
            job.future.set_running_or_notify_cancel()

    def close(self, *, wait: bool = False) -> None:
        """Stop the threads: work that waits is dropped. `wait`: until what runs is over."""
        with self._lock:
            self._is_closed = True
            dropped = list(self._waiting)
        for job in dropped:
            if job.is_begun:
                job.goes_on.set()
            else:
                job.future.cancel()
        self._pool.shutdown(wait=wait)

    def check_integrity(self) -> None:
        """Raise `AssertionError` if the state is inconsistent."""
        with self._lock:
            self._waiting.check_integrity()
            assert all(count > 0 for count in self._open.values()), self._open
            assert 0 <= self._running_long <= self._running <= self._threads, "more runs than threads"
            assert self._running_long <= self._long_max, "long work holds all threads"
            assert len(self._waiting) <= self._open.total(), "work waits without a waiting request"
