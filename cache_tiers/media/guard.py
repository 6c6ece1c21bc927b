"""One tier behind its circuit breaker: every call ends by its deadline, and outcomes are counted."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Generic, Literal, TypeVar

from cache_tiers.blocks import Address, BadRecord, Bytes, Record, TierError, TierFull, TierMiss, TierName
from cache_tiers.media.tier import Tier
from cache_tiers.pricing import TierMeter, TierPrice

logger = logging.getLogger(__name__)


BreakerState = Literal["closed", "open", "half-open"]


class Breaker:
    """Circuit breaker: pauses calls to a tier after `failures_max` failures in a row.

    States: closed -> (`failures_max` failures in a row) open -> (after a while) half-open, which allows one
    trial. The trial's success closes it, its failure opens it for twice as long, up to `open_s_max`. A trial
    without an outcome for that long is given up and another one is allowed. `clock` is monotonic, in
    seconds; if it jumps back anyway, the wait restarts from there. Not thread-safe: the caller locks and
    reports outcomes. pybreaker and purgatory wait equally long after each trial, by the wall clock.
    """

    def __init__(
        self, failures_max: int, open_s: float, open_s_max: float, clock: Callable[[], float]
    ) -> None:
        """Raise `ValueError` unless `failures_max` is at least 1 and the times are positive."""
        if failures_max < 1 or not open_s > 0 or not open_s_max > 0:
            raise ValueError(f"no breaker of {failures_max} failures, {open_s} s, {open_s_max} s")
        self._failures_max = failures_max
        self._open_s_first = min(open_s, open_s_max)
        self._open_s_max = open_s_max
        self._clock = clock
        self._state: BreakerState = "closed"
        self._failures = 0
        self._open_s = self._open_s_first
        self._since_s = 0.0
        self._opened = 0

    @property
    def state(self) -> BreakerState:
        """Return the state; an open breaker stays open until `allows` lets a trial through."""
        return self._state

    @property
    def opened(self) -> int:
        """Return how often it opened since its start."""
        return self._opened

    def allows(self) -> bool:
        """Return whether the tier may be called now; in half-open, True makes that call the trial.

        After True, the caller must report `succeeded` or `failed`.
        """
        if self._state == "closed":
            return True
        now_s = self._clock()
        self._since_s = min(self._since_s, now_s)
        if now_s - self._since_s < self._open_s:
            return False
        self._state = "half-open"
        self._since_s = now_s
        return True

    def succeeded(self) -> None:
        """Record an answered call (a miss is an answer); ignored while open: it is a late one."""
        if self._state == "open":
            return
        self._state = "closed"
        self._failures = 0
        self._open_s = self._open_s_first

    def failed(self) -> None:
        """Record a failed call; ignored while open: a late failure does not prolong the wait."""
        if self._state == "open":
            return
        self._failures += 1
        if self._state == "half-open":
            self._open_s = min(2 * self._open_s, self._open_s_max)
        elif self._failures < self._failures_max:
            return
        self._state = "open"
        self._since_s = self._clock()
        self._failures = 0
        self._opened += 1

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is inconsistent."""
        assert 0 <= self._failures < self._failures_max, f"{self._failures} failures and not open"
        assert self._state == "closed" or self._failures == 0, f"{self._failures} failures in {self._state}"
        assert self._open_s_first <= self._open_s <= self._open_s_max, f"open for {self._open_s} s"
        assert self._state != "closed" or self._open_s == self._open_s_first, "closed, yet it remembers"
        assert self._state == "closed" or self._opened > 0, f"{self._state}, yet it never opened"


T = TypeVar("T")


class TierDown(TierError):
    """Raised when the breaker is open: the tier was not called."""


class TierLate(TierError):
    """Raised when a call missed its deadline; if it was begun, it is still running."""


class _Pending(Generic[T]):
    """A call that one thread makes while another waits for it, until it gives up."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._given_up = False
        self.value: T | None = None
        self.error: Exception | None = None

    def end(self) -> bool:
        """Mark the call as ended; return True if the caller still waits for it."""
        with self._lock:
            self._ended.set()
            return not self._given_up

    def wait(self, seconds: float) -> bool:
        """Return True if the call ended in time; otherwise give it up."""
        if self._ended.wait(max(seconds, 0.0)):
            return True
        with self._lock:
            self._given_up = not self._ended.is_set()
            return not self._given_up


class GuardedTier:
    """A tier with its breaker, price meter and counters.

    A call runs in its own thread. A timed-out call keeps its slot until it returns; at most `threads` can be
    in flight or hang. `clock`: monotonic seconds. `ready`: the tier's scan is over.
    """

    def __init__(
        self,
        tier: Tier,
        *,
        bytes_max: int,
        breaker: Breaker,
        meter: TierMeter,
        threads: int,
        clock: Callable[[], float],
    ) -> None:
        self.tier = tier
        self.name: TierName = tier.name
        self.bytes_max = bytes_max
        self.ready = False
        self.read_only = False
        self._is_suspect = False  # its last call failed
        self._breaker = breaker
        self._meter = meter
        self._clock = clock
        self._lock = threading.Lock()
        self._threads = threading.Semaphore(threads)
        self._counts: Counter[str] = Counter()

    @property
    def is_up(self) -> bool:
        """Return whether it may be read from; not while half-open: the trial is `probe`, not a request."""
        with self._lock:
            return self.ready and self._breaker.state == "closed"

    @property
    def is_writable(self) -> bool:
        return self.is_up and not self.read_only

    @property
    def state(self) -> str:
        """Return the state as in `TierStats.state`."""
        with self._lock:
            if self._breaker.state != "closed" or not self.ready:
                return "open"
        return "read-only" if self.read_only else "up"

    @property
    def opened(self) -> int:
        with self._lock:
            return self._breaker.opened

    @property
    def counts(self) -> dict[str, int]:
        """Return the counts since start.

        Keys: read_bytes, written_bytes, read_errors, write_errors, hits_blocks, ...
        """
        with self._lock:
            return dict(self._counts)

    def count(self, what: str, n: int = 1) -> None:
        with self._lock:
            self._counts[what] += n

    def price(self) -> TierPrice:
        is_up = self.is_up
        with self._lock:
            return self._meter.price(is_up)

    def observe(self, nbytes: int, seconds: float) -> None:
        """Record the end-to-end seconds of a load."""
        with self._lock:
            self._meter.observe(nbytes, seconds)

    def read(self, address: Address, start: int, nbytes: int, deadline_s: float) -> Bytes:
        """Read as `Tier.read`, and never fewer bytes than wanted. Raises `TierError`, `BadRecord`."""
        began_s = self._clock()
        try:
            data = self.call(
                lambda: self.tier.read(address, start, nbytes, deadline_s=deadline_s), deadline_s
            )
        except (TierMiss, TierDown):
            raise
        except TierError:
            with self._lock:
                self._counts["read_errors"] += 1
                self._meter.observe_failure(self._clock() - began_s)
            raise
        if data.nbytes != nbytes:
            raise BadRecord("truncated", f"{data.nbytes} bytes were read, {nbytes} were wanted")
        self.count("read_bytes", nbytes)
        return data

    def put(self, address: Address, record: Record, deadline_s: float, when_late: Callable[[], None]) -> None:
        """Write as `Tier.put`; after `TierLate` the write continues; `when_late` is called at its end."""
        try:
            self.call(lambda: self.tier.put(address, record, deadline_s=deadline_s), deadline_s, when_late)
        except TierDown:
            raise
        except TierError:
            self.count("write_errors")
            raise
        self.count("written_bytes", record.nbytes)

    def delete(self, address: Address, deadline_s: float) -> None:
        """Delete as `Tier.delete`; success is no evidence of health, since the extent may not be there."""
        self.call(lambda: self.tier.delete(address), deadline_s, is_evidence=False)

    def quarantine(self, address: Address, deadline_s: float) -> None:
        self.call(lambda: self.tier.quarantine(address), deadline_s)
        self.count("quarantined")

    def probe(self, deadline_s: float) -> bool:
        """Try the tier if a trial is due and return whether it is well; closes the breaker, ends read-only.

        A tier whose last call failed is tried as well: the failure raised its price, so that requests may
        avoid it.
        """
        with self._lock:
            is_suspect = self._is_suspect
        if not self.ready or (self.is_writable and not is_suspect):
            return self.is_writable
        try:
            self.call(self.tier.probe, deadline_s)
        except (TierError, BadRecord) as error:
            if not isinstance(error, TierDown):
                logger.info("%s tier: still not well: %s", self.name, error)
            return False
        self.read_only = False
        with self._lock:
            self._meter.forgive()
        return self.is_up

    def failed(self) -> None:
        """Record a failure that did not go through `call` (a scan)."""
        self._settle(TierError("scan"))

    def check_integrity(self) -> None:
        """Raise `AssertionError` if something is inconsistent."""
        with self._lock:
            self._breaker.check_integrity()
            self._meter.check_integrity()

    def call(
        self,
        operate: Callable[[], T],
        deadline_s: float,
        when_late: Callable[[], None] | None = None,
        *,
        is_evidence: bool = True,
    ) -> T:
        """Run `operate()` in another thread, waiting at most `deadline_s` seconds.

        `is_evidence`: its success shows that the tier is well. Raises what it raises (`TierError`,
        `BadRecord`), `TierDown`, or `TierLate`; after `TierLate`, `when_late` is called, from any thread, as
        soon as `operate` has ended (or will no longer begin).
        """
        began_s = self._clock()
        if not self._threads.acquire(timeout=max(deadline_s, 0.0)):
            if when_late is not None:
                when_late()
            raise TierLate(f"{self.name}: all its threads are busy for {deadline_s:.3f} s")
        with self._lock:
            allowed = self._breaker.allows()
        if not allowed:
            self._threads.release()
            raise TierDown(f"{self.name}: breaker open")
        pending: _Pending[T] = _Pending()
        run = threading.Thread(
            target=self._run, args=(operate, pending, when_late), name=f"tier-{self.name}", daemon=True
        )
        try:
            run.start()
        except RuntimeError as error:  # the process may be out of threads
            self._threads.release()
            self._settle(TierError("no thread"))
            raise TierError(f"{self.name}: {error}") from error
        if not pending.wait(deadline_s - (self._clock() - began_s)):
            late = TierLate(f"{self.name}: not done in {deadline_s:.3f} s")
            self._settle(late)
            raise late
        if is_evidence or pending.error is not None:
            self._settle(pending.error)
        if pending.error is not None:
            raise pending.error
        return pending.value  # type: ignore[return-value]  # set, when there is no error

    def _run(
        self, operate: Callable[[], T], pending: _Pending[T], when_late: Callable[[], None] | None
    ) -> None:
        try:
            pending.value = operate()
        except (TierError, BadRecord) as error:
            pending.error = error
        except Exception as error:  # a tier's bug is a fault of that tier (G9)
            logger.exception("%s tier raised what it must not raise", self.name)
            pending.error = TierError(f"{type(error).__name__} in the {self.name} tier")
        finally:
            self._threads.release()
            if not pending.end() and when_late is not None:
                when_late()

    def _settle(self, error: Exception | None) -> None:
        """Report a call's outcome to the breaker; a miss, no room and bad bytes count as answers."""
        with self._lock:
            before = self._breaker.state
            if error is None or isinstance(error, TierMiss | TierFull | BadRecord):
                self._breaker.succeeded()
                self._is_suspect = False
            else:
                self._breaker.failed()
                self._is_suspect = True
            after = self._breaker.state
        if before != after:
            logger.warning("%s tier: breaker %s -> %s (%s)", self.name, before, after, error)


class Call:
    """A job's view of its own deadline. `ends_s`: monotonic."""

    def __init__(self, ends_s: float, lock: threading.Condition) -> None:
        self.ends_s = ends_s
        self.given_up = False
        self.settled = False  # ended or committed: the caller no longer gives up
        self._lock = lock

    def check(self) -> None:
        """Raise `TierError` if given up or out of time; to be called between steps of a job."""
        if self.given_up or time.monotonic() >= self.ends_s:
            raise TierError("not within its deadline")

    def commit(self) -> bool:
        """Settle the job as its last step; return True if the result will be taken.

        True holds whatever the clock says. False: given up, and the job has to undo what it did.
        """
        with self._lock:
            self.settled = not self.given_up
            return self.settled


class Pending(Generic[T]):
    """A call in flight."""

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
        except BaseException as error:  # noqa: BLE001 - any error belongs to the caller
            self._error = error
        self._pool.ended(self.call)
        self.done.set()

    def result(self) -> T:
        """Return the job's result or raise its error. Raises `TierError` if late."""
        if not self.done.wait(max(0.0, self.call.ends_s - time.monotonic())):
            self._pool.give_up(self.call)
            self.done.wait()  # settled: only its last lines are left
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]  # a job without an error has a result


class DeadlinePool:
    """A pool of threads for calls that cannot be cancelled: at most `workers` at the same time.

    boto3 limits a connect and each read, but not a whole call. A call that was given up ends on its own by
    those limits and keeps its slot until then, so a dead server holds at most `workers` threads; when all of
    them hang, the next call fails at once. Thread-safe. Threads are created when needed.
    """

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
        """Return the calls in flight, including those given up."""
        return self._busy

    @property
    def stuck(self) -> int:
        """Return the calls given up that have not ended."""
        return self._stuck

    def start(self, job: Callable[[Call], T], deadline_s: float) -> Pending[T]:
        """Begin a call after waiting for a slot.

        Raises `TierError` if there is none in time, all are stuck, or the pool is closed.
        """
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
                # Daemons: a hanging call must not delay the end of the process.
                threading.Thread(target=self._work, name=self._name, daemon=True).start()
                self._threads += 1
            pending = Pending(self, job, Call(ends_s, self._lock))
            self._jobs.put(pending.run)
        return pending

    def run(self, job: Callable[[Call], T], deadline_s: float) -> T:
        """Start a call and wait for its result."""
        return self.start(job, deadline_s).result()

    def give_up(self, call: Call) -> None:
        """Give up a call, for `Pending`; raises `TierError` unless the call is settled."""
        with self._lock:
            if call.settled:
                return
            call.given_up = True
            self._stuck += 1
            self._lock.notify_all()  # callers waiting for a slot may find all stuck
        raise TierError("not within its deadline")

    def ended(self, call: Call) -> None:
        """Free the call's slot, for `Pending`."""
        with self._lock:
            call.settled = True
            self._busy -= 1
            self._stuck -= call.given_up
            self._lock.notify_all()

    def close(self) -> None:
        """Refuse new calls; does not wait for those in flight, which end on their own."""
        with self._lock:
            self._is_closed = True
            for _ in range(self._threads):
                self._jobs.put(None)
            self._lock.notify_all()

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming the count that is wrong."""
        with self._lock:
            assert 0 <= self._stuck <= self._busy, f"{self._stuck} of {self._busy} calls are stuck"
            assert self._busy <= self._threads, f"{self._busy} calls on {self._threads} threads"
            assert self._threads <= self._workers, f"{self._threads} threads, at most {self._workers}"

    def _work(self) -> None:
        while (run := self._jobs.get()) is not None:
            run()
