"""Work for idle moments: it begins when no request is served, and is stopped as soon as one comes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from samovar.replicas.turns import FairQueue
from samovar.router.context.compaction.memory import Owner

logger = logging.getLogger(__name__)

TURN_S = 1.0
"""What a turn of a tenant is worth."""

JobOutcome = Literal["done", "nothing", "unlikely", "too_dear", "cancelled", "failed", "dropped"]
Work = Callable[[], Awaitable[JobOutcome]]


@dataclass(slots=True)
class _IdleJob:
    work: Work
    tries: int = 0


class IdleQueue:
    """Which work is next: tenants take turns, by the seconds that their work takes. Pure.

    Of a tenant one job a session, the session that ended last comes last. A job that was stopped goes behind
    the tenant's others, and is given up after `tries_max` attempts. Where there are too many, the oldest of
    the tenant that has the most goes.
    """

    def __init__(self, jobs_max: int, tries_max: int) -> None:
        self._jobs_max = jobs_max
        self._tries_max = tries_max
        self._jobs: dict[Owner, _IdleJob] = {}
        self._turns: FairQueue[str, Owner] = FairQueue(TURN_S)

    def __len__(self) -> int:
        return len(self._jobs)

    def offer(self, owner: Owner, work: Work) -> int:
        """Add the work of a session, in place of what it has; return how many were dropped for it."""
        self._put(owner, _IdleJob(work))
        dropped = 0
        while len(self._jobs) > self._jobs_max:
            (most, _), *_ = Counter(tenant for tenant, _ in self._jobs).most_common(1)
            self._remove(next(self._turns.of(most)))
            dropped += 1
        return dropped

    def take(self) -> tuple[Owner, _IdleJob]:
        """Return the next work, and count the attempt."""
        owner = self._turns.pick()
        assert owner is not None, "nothing is left to do"
        self._turns.take(owner)
        job = self._jobs.pop(owner)
        job.tries += 1
        return owner, job

    def spent(self, tenant: str, seconds: float) -> None:
        """Charge a tenant for what its work took."""
        self._turns.charge(tenant, seconds)

    def stopped(self, owner: Owner, job: _IdleJob) -> bool:
        """Put work back that was stopped, unless its session has newer; return whether it is tried again."""
        if owner in self._jobs or job.tries >= self._tries_max:
            return False
        self._put(owner, job)
        return True

    def drop(self, tenant: str, sessions: Collection[bytes] | None) -> None:
        """Drop the work of these sessions of a tenant, or of all (None)."""
        for owner in [one for one in self._jobs if one[0] == tenant]:
            if sessions is None or owner[1] in sessions:
                self._remove(owner)

    def _put(self, owner: Owner, job: _IdleJob) -> None:
        if owner in self._jobs:
            self._remove(owner)
        self._jobs[owner] = job
        self._turns.put(owner[0], owner, 0.0)

    def _remove(self, owner: Owner) -> None:
        del self._jobs[owner]
        self._turns.remove(owner)


class IdleWork:
    """Runs the queue on one event loop, one job at a time.

    `is_idle`: asked before each job, once nothing was in flight here for `idle_s`. `job_s_max`: a job that
    takes longer is stopped for good. `count`: called with every outcome.
    """

    def __init__(
        self,
        queue: IdleQueue,
        *,
        idle_s: float,
        job_s_max: float,
        is_idle: Callable[[], Awaitable[bool]],
        count: Callable[[JobOutcome], None],
    ) -> None:
        self.queue = queue
        self.outcomes: Counter[JobOutcome] = Counter()
        self._idle_s = idle_s
        self._job_s_max = job_s_max
        self._is_idle = is_idle
        self._count = count
        self._open = 0
        self._came = 0  # requests so far
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._runner: asyncio.Task[None] | None = None
        self._running: tuple[Owner, asyncio.Task[JobOutcome]] | None = None
        self._is_closed = False

    @contextmanager
    def demand(self) -> Iterator[None]:
        """Let no job run while a request is served."""
        self._open += 1
        self._came += 1
        self._quiet.clear()
        self._stop()
        try:
            yield
        finally:
            self._open -= 1
            if not self._open:
                self._quiet.set()

    def offer(self, owner: Owner, work: Work) -> None:
        """Have something done for a session in an idle moment."""
        if self._is_closed:
            return
        for _ in range(self.queue.offer(owner, work)):
            self._over("dropped")
        if self._runner is None or self._runner.done():
            self._runner = asyncio.get_running_loop().create_task(self._run())

    def drop(self, tenant: str, sessions: Collection[bytes] | None) -> None:
        """Drop the work of these sessions of a tenant, or of all (None), also what runs."""
        self.queue.drop(tenant, sessions)
        if self._running is not None:
            owner = self._running[0]
            if owner[0] == tenant and (sessions is None or owner[1] in sessions):
                self._stop()

    async def close(self) -> None:
        """Stop everything."""
        self._is_closed = True
        if self._runner is not None:
            self._runner.cancel()
            await asyncio.gather(self._runner, return_exceptions=True)
            self._runner = None

    def _stop(self) -> None:
        if self._running is not None:
            self._running[1].cancel()

    async def _run(self) -> None:
        while self.queue:
            await self._rest()
            if not self.queue or not self._quiet.is_set():
                continue
            if not await self._is_idle():
                await asyncio.sleep(self._idle_s)
                continue
            if not self.queue or not self._quiet.is_set():
                continue
            owner, job = self.queue.take()
            began_s = time.monotonic()
            outcome = await self._one(owner, job)
            self.queue.spent(owner[0], time.monotonic() - began_s)
            if outcome == "cancelled" and self.queue.stopped(owner, job):
                continue
            self._over(outcome)

    async def _rest(self) -> None:
        """Return once nothing was in flight for `idle_s`."""
        while True:
            await self._quiet.wait()
            came = self._came
            await asyncio.sleep(self._idle_s)
            if self._quiet.is_set() and came == self._came:
                return

    async def _one(self, owner: Owner, job: _IdleJob) -> JobOutcome:
        async def limited() -> JobOutcome:
            async with asyncio.timeout(self._job_s_max):
                return await job.work()

        task = asyncio.create_task(limited())
        self._running = (owner, task)
        try:
            await asyncio.wait([task])
            if task.cancelled():
                return "cancelled"
            error = task.exception()
            if error is not None:
                logger.warning("work for an idle moment failed: %s: %s", type(error).__name__, error)
                return "failed"
            return task.result()
        finally:
            self._running = None
            if not task.done():  # this loop is being stopped
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    def _over(self, outcome: JobOutcome) -> None:
        self.outcomes[outcome] += 1
        self._count(outcome)
