"""One tier behind its circuit breaker: every call ends by its deadline, and outcomes are counted."""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Literal, TypeVar

from samovar.cache_tiers.blocks import (
    Address,
    BadRecord,
    Bytes,
    Record,
    TierError,
    TierFull,
    TierMiss,
    TierName,
)
from samovar.cache_tiers.media.tier import Deadline, Tier
from samovar.cache_tiers.pricing import TierMeter, TierPrice

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

        After True, the caller must report `succeeded`, `failed` or `untried`.
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

    def untried(self) -> None:
        """Give back a trial that was not made: the next call may be it. Ignored unless half-open."""
        if self._state == "half-open":
            self._since_s = -math.inf

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


IDLE_S = 10.0


class CallExecutor:
    """Runs calls that cannot be cancelled, at most `threads` at a time.

    A call that was given up keeps its slot until it returns, so at most `threads` calls hang. Threads are
    started when needed, used again, and end when idle for `IDLE_S`. They are daemons, unlike those of
    `ThreadPoolExecutor`: a hanging call must not delay the end of the process. A future's callbacks run in
    the call's thread when its slot is free again, and may submit. Thread-safe.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._name = name
        self._threads_max = threads
        self._slots = threading.Semaphore(threads)
        # No `SimpleQueue`: where several threads wait, its `get` with a timeout may never end (CPython 3.11).
        self._changed = threading.Condition()
        self._jobs: deque[Callable[[], None]] = deque()
        self._waiting = 0  # threads without a job, those just started among them
        self._is_closed = False

    def submit(
        self, job: Callable[[], T], deadline: Deadline, admit: Callable[[], None] | None = None
    ) -> Future[T]:
        """Begin a call when a slot is free. `admit`: called then; what it raises is raised here.

        Raises `TierLate` if no slot is free in time; `TierError` if closed or if no thread can be started.
        """
        if not self._slots.acquire(timeout=deadline.left_s()):
            raise TierLate(f"{self._name}: all its threads are busy for {deadline.seconds:.3f} s")
        future: Future[T] = Future()
        try:
            if admit is not None:
                admit()
            with self._changed:
                if self._is_closed:
                    raise TierError(f"{self._name}: closed")
                if self._waiting == len(self._jobs):
                    threading.Thread(target=self._work, name=self._name, daemon=True).start()
                    self._waiting += 1
                self._jobs.append(partial(self._run, job, future))
                self._changed.notify()
        except RuntimeError as error:  # the process may be out of threads
            self._slots.release()
            raise TierError(f"{self._name}: {error}") from error
        except TierError:
            self._slots.release()
            raise
        return future

    def wait(self, future: Future[T], deadline: Deadline) -> T:
        """Return a call's result or raise its error. At its deadline it is given up; raises `TierLate`."""
        try:
            return future.result(deadline.left_s())
        except TimeoutError:  # also the call's own
            if not future.done() and deadline.give_up():
                raise TierLate(f"{self._name}: not done in {deadline.seconds:.3f} s") from None
            return future.result()  # if committed, only its last lines are left
        finally:
            del future  # its error holds this frame, and would hold the record until a collection

    def close(self) -> None:
        """Refuse new calls; does not wait for those in flight, which end on their own. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._jobs and not self._is_closed:
                    self._changed.wait(IDLE_S)
                self._waiting -= 1
                if not self._jobs:
                    return
                run = self._jobs.popleft()
            run()
            del run  # it holds the call's result
            with self._changed:
                if self._waiting == self._threads_max:
                    return
                self._waiting += 1

    def _run(self, job: Callable[[], T], future: Future[T]) -> None:
        try:
            value = job()
        except BaseException as error:  # noqa: BLE001 - any error belongs to the caller
            self._slots.release()
            future.set_exception(error)
        else:
            self._slots.release()
            future.set_result(value)
        finally:
            del future  # as in `wait`


class GuardedTier:
    """A tier with its breaker, price meter and counters.

    `threads`: how many calls can be in flight or hang at a time. `clock`: monotonic seconds. `ready`: the
    tier's scan is over.
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
        self._executor = CallExecutor(threads, f"tier-{tier.name}")
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
        if why := self.tier.why_not_ours():
            return f"off: {why}"
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

    def measured(self, price: TierPrice) -> None:
        """Take over a start's measurement: see `TierMeter.measured`."""
        with self._lock:
            self._meter.measured(price)

    def observe(self, nbytes: int, seconds: float) -> None:
        """Record the end-to-end seconds of a load."""
        with self._lock:
            self._meter.observe(nbytes, seconds)

    def read(
        self, address: Address, start: int, nbytes: int, deadline_s: float, room: Bytes | None = None
    ) -> Bytes:
        """Read as `Tier.read`, and never fewer bytes than wanted. Raises `TierError`, `BadRecord`.

        `room`: where the tier `takes_room`; after an error it may still be written to.
        """
        began_s, deadline = self._clock(), Deadline(deadline_s)
        read: Callable[..., Bytes] = self.tier.read if room is None else partial(self.tier.read, room=room)  # type: ignore[call-arg]
        try:
            data = self.call(lambda: read(address, start, nbytes, deadline=deadline), deadline)
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
        deadline = Deadline(deadline_s)
        try:
            self.call(lambda: self.tier.put(address, record, deadline=deadline), deadline, when_late)
        except TierDown:
            raise
        except TierError:
            self.count("write_errors")
            raise
        self.count("written_bytes", record.nbytes)

    def delete(
        self,
        address: Address,
        deadline_s: float,
        when_late: Callable[[], None] | None = None,
        *,
        unused_s: float = 0.0,
    ) -> None:
        """Delete as `Tier.delete`; `when_late`: see `call`; `unused_s`: see `Tier.is_shared`.

        Success is no evidence of health, since the extent may not be there.
        """
        delete: Callable[..., None] = self.tier.delete
        delete = partial(delete, address, unused_s) if unused_s else partial(delete, address)
        self.call(delete, Deadline(deadline_s), when_late, counts_as_health=False)

    def quarantine(self, address: Address, deadline_s: float, when_late: Callable[[], None]) -> None:
        """Put a bad record aside as `Tier.quarantine`; `when_late`: see `call`."""
        self.call(lambda: self.tier.quarantine(address), Deadline(deadline_s), when_late)
        self.count("quarantined")

    def purge_quarantine(self, tenant: bytes, deadline_s: float) -> None:
        """Delete as `Tier.purge_quarantine`; as there is mostly nothing, success is no evidence of health."""
        purge = partial(self.tier.purge_quarantine, tenant)
        self.call(purge, Deadline(deadline_s), counts_as_health=False)

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
            self.call(self.tier.probe, Deadline(deadline_s))
        except (TierError, BadRecord) as error:
            if not isinstance(error, TierDown):
                logger.info("%s tier: still failing: %s", self.name, error)
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
        deadline: Deadline,
        when_late: Callable[[], None] | None = None,
        *,
        counts_as_health: bool = True,
    ) -> T:
        """Run `operate()` in another thread and wait for it until the deadline.

        `counts_as_health`: its success shows that the tier is well; else it is not made as a trial. Raises
        what it raises (`TierError`, `BadRecord`), `TierDown`, or `TierLate`; after `TierLate`, `when_late` is
        called, from any thread, as soon as `operate` has ended (or will no longer begin).
        """
        admit = partial(self._admit, may_try=counts_as_health)
        try:
            future = self._executor.submit(partial(self._contained, operate), deadline, admit)
        except TierLate:
            if when_late is not None:
                when_late()
            raise
        except TierDown:
            raise
        except TierError as error:
            self._settle(error)
            raise
        try:
            value = self._executor.wait(future, deadline)
        except Exception as error:
            self._settle(error)
            if isinstance(error, TierLate) and when_late is not None:
                future.add_done_callback(lambda _: when_late())
            raise
        finally:
            del future  # as in `wait`
        if counts_as_health:
            self._settle(None)
        return value

    def _admit(self, *, may_try: bool) -> None:
        """Raise `TierDown` unless the breaker allows a call; its outcome has to be reported then."""
        with self._lock:
            if self._breaker.state != "closed" and not (may_try and self._breaker.allows()):
                raise TierDown(f"{self.name}: breaker open")

    def _contained(self, operate: Callable[[], T]) -> T:
        try:
            return operate()
        except (TierError, BadRecord):
            raise
        except Exception as error:  # a tier's bug is a fault of that tier
            logger.exception("%s tier raised an unexpected exception", self.name)
            raise TierError(f"{type(error).__name__} in the {self.name} tier") from error

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
