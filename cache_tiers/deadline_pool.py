"""A few threads for calls that cannot be cut off: who waits gives up at the deadline, the thread goes on.

boto3 has time limits for a connect and for each read, none for a whole call. A call that was given up ends
on its own by those limits; until then it keeps its place, so that a dead server holds `workers` threads
and not one more: when all places are kept like that, the next call fails at once. This module
knows nothing of what the calls do.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from cache_tiers.tier import TierError

T = TypeVar("T")


class Call:
    """What a job may ask about its own deadline. `ends_s`: monotonic."""

    def __init__(self, ends_s: float, lock: threading.Condition) -> None:
        self.ends_s = ends_s
        self.given_up = False
        self.settled = False  # ended, or committed: the one who waits does not give up any more
        self._lock = lock

    def check(self) -> None:
        """Raises `TierError` when nobody waits any more. To be called between steps of a job."""
        if self.given_up or time.monotonic() >= self.ends_s:
            raise TierError("not within its deadline")

    def commit(self) -> bool:
        """The job succeeded, as its last step: True when somebody takes the result, whatever the clock says.

        False: given up, the job has to undo what it did.
        """
        with self._lock:
            self.settled = not self.given_up
            return self.settled


class Pending(Generic[T]):
    """A call under way."""

    def __init__(self, pool: DeadlinePool, job: Callable[[Call], T], call: Call) -> None:
        self._pool = pool
        self._job = job
        self._result: T | None = None
        self._error: BaseException | None = None
        self.call = call
        self.done = threading.Event()

    def run(self) -> None:
        try:
            self._result = self._job(self.call)
        except BaseException as error:  # noqa: BLE001 - whatever it is belongs to the one who waits
            self._error = error
        self._pool.ended(self.call)
        self.done.set()

    def result(self) -> T:
        """What the job returns or raises; `TierError` when that does not come before the deadline."""
        if not self.done.wait(max(0.0, self.call.ends_s - time.monotonic())):
            self._pool.give_up(self.call)
            self.done.wait()  # settled: only its last lines are left
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]  # a job without an error has a result


class DeadlinePool:
    """At most `workers` calls at the same time. Any thread may call. Threads are made when needed."""

    def __init__(self, workers: int, name: str) -> None:
        self._workers = workers
        self._name = name
        self._lock = threading.Condition()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = 0
        self._busy = 0
        self._stuck = 0
        self._is_closed = False

    @property
    def busy(self) -> int:
        """Calls under way, those that were given up included."""
        return self._busy

    @property
    def stuck(self) -> int:
        """Calls that were given up and have not ended."""
        return self._stuck

    def start(self, job: Callable[[Call], T], deadline_s: float) -> Pending[T]:
        """Begin a call; waits for a place. Raises `TierError`: none in time, all stuck, closed."""
        ends_s = time.monotonic() + deadline_s
        with self._lock:
            while self._busy >= self._workers and not self._is_closed:
                if self._stuck >= self._workers:
                    raise TierError(f"all {self._workers} connections hang")
                left_s = ends_s - time.monotonic()
                if left_s <= 0:
                    raise TierError("no connection was free in time")
                self._lock.wait(left_s)
            if self._is_closed:
                raise TierError("closed")
            self._busy += 1
            if self._threads < self._busy:
                # Daemons: a call that hangs must not hold up the end of the process.
                threading.Thread(target=self._work, name=self._name, daemon=True).start()
                self._threads += 1
            pending = Pending(self, job, Call(ends_s, self._lock))
            self._jobs.put(pending.run)
        return pending

    def run(self, job: Callable[[Call], T], deadline_s: float) -> T:
        """`start` and wait."""
        return self.start(job, deadline_s).result()

    def give_up(self, call: Call) -> None:
        """For `Pending`: raises `TierError` unless the call is settled."""
        with self._lock:
            if call.settled:
                return
            call.given_up = True
            self._stuck += 1
            self._lock.notify_all()  # who waits for a place may see now that all are stuck
        raise TierError("not within its deadline")

    def ended(self, call: Call) -> None:
        """For `Pending`: the call's place is free."""
        with self._lock:
            call.settled = True
            self._busy -= 1
            self._stuck -= call.given_up
            self._lock.notify_all()

    def close(self) -> None:
        """No more calls. Those under way end on their own; nobody waits for them here."""
        with self._lock:
            self._is_closed = True
            for _ in range(self._threads):
                self._jobs.put(None)
            self._lock.notify_all()

    def check_integrity(self) -> None:
        """Raises `AssertionError` naming the count that is wrong."""
        with self._lock:
            assert 0 <= self._stuck <= self._busy, f"{self._stuck} of {self._busy} calls are stuck"
            assert self._busy <= self._threads, f"{self._busy} calls on {self._threads} threads"
            assert self._threads <= self._workers, f"{self._threads} threads, at most {self._workers}"

    def _work(self) -> None:
        while (run := self._jobs.get()) is not None:
            run()
