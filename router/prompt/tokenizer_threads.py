"""The tokenizer threads and their fair queue: tenants take turns, by bytes of text."""

from __future__ import annotations

import asyncio
import math
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from configs.settings import LimitsSettings
from replicas.fair_queue import FairQueue
from router.openai import TooManyRequests

Result = TypeVar("Result")


class _Job:
    """A piece of work and the future of its result."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work = work
        self.future: Future[Any] = Future()


class TokenizerThreads:
    """Bounded tokenizer work for one event loop.

    `tenant_share`: share of the waiting places that one tenant may have.
    """

    def __init__(self, limits: LimitsSettings, tenant_share: float = 1.0) -> None:
        self._limits = limits
        self._places = limits.tokenizer_threads + limits.tokenizer_queue_max
        self._tenant_places = max(1, math.ceil(tenant_share * self._places))
        self._pool = ThreadPoolExecutor(limits.tokenizer_threads, thread_name_prefix="tokenizer")
        self._waiting: FairQueue[str, _Job] = FairQueue(limits.tokenizer_quantum_bytes, limits.tenant_weights)
        self._open: Counter[str] = Counter()
        self._lock = threading.Lock()

    async def run(self, tenant: str, works: Sequence[tuple[Callable[[], Result], int]]) -> list[Result]:
        """Run `works` (each with the bytes of its text) one after the other; return their results.

        Raises `TooManyRequests` before the first of them if too many wait.
        """
        results: list[Result] = []
        for number, (work, nbytes) in enumerate(works):
            # Queued one by one: a request of many long prompts holds a thread for one prompt at a time.
            job = self._begin(tenant, work, nbytes, is_new=number == 0)
            results.append(await asyncio.wrap_future(job.future))
        return results

    @property
    def is_idle(self) -> bool:
        """Whether no work waits or runs."""
        return not self._open

    def _begin(self, tenant: str, work: Callable[[], Any], nbytes: int, *, is_new: bool) -> _Job:
        job = _Job(work)
        with self._lock:
            if is_new:
                self._refuse_too_many(tenant)
            self._open[tenant] += 1
            self._waiting.put(tenant, job, nbytes)
        job.future.add_done_callback(partial(self._left, tenant, job))  # also on cancellation
        self._pool.submit(self._work)
        return job

    def _refuse_too_many(self, tenant: str) -> None:
        retry_after_s, why = self._limits.retry_after_s, None
        if self._open.total() >= self._places:
            why = "Too many prompts wait for the tokenizer (limits.tokenizer_queue_max)."
        elif self._open[tenant] >= self._tenant_places:
            why = "Too many prompts of this API key wait for the tokenizer (limits.tenant_share)."
        if why is not None:
            raise TooManyRequests(f"{why} Try again later.", retry_after_s, code="tokenizer_queue_full")

    def _work(self) -> None:
        """Run the next job, in one of the threads."""
        with self._lock:
            job = self._waiting.pick()
            if job is None:  # it was cancelled
                return
            self._waiting.take(job)
        if not job.future.set_running_or_notify_cancel():
            return
        try:
            result = job.work()
        except BaseException as error:  # noqa: BLE001 - passed on to the waiter
            job.future.set_exception(error)
        else:
            job.future.set_result(result)

    def _left(self, tenant: str, job: _Job, _: Future[Any]) -> None:
        with self._lock:
            self._open[tenant] -= 1
            if not self._open[tenant]:
                del self._open[tenant]
            if job in self._waiting:
                self._waiting.remove(job)

    def close(self) -> None:
        """Stop the threads. Work that has not started is dropped."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def check_integrity(self) -> None:
        """Raise `AssertionError` if the state is inconsistent."""
        with self._lock:
            self._waiting.check_integrity()
            assert all(count > 0 for count in self._open.values()), self._open
            assert len(self._waiting) <= self._open.total(), "work waits without a waiting request"
