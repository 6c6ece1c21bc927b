"""One tier behind its breaker: every call ends by its deadline, and what comes of it is counted.

A call runs in a thread of its own, of which a tier has only so many: when the medium hangs, the caller
goes on at the deadline, the call ends by itself some day, and no more pile up behind it than that.
Knows nothing of which extents exist.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from typing import Generic, TypeVar

from cache_tiers.breaker import Breaker
from cache_tiers.cost import TierMeter
from cache_tiers.extent import Address, Bytes, TierName
from cache_tiers.messages import TierPrice
from cache_tiers.tier import BadRecord, Record, Tier, TierError, TierFull, TierMiss

logger = logging.getLogger("samovar.tiers")

T = TypeVar("T")


class TierDown(TierError):
    """Its breaker is open: it was not even asked."""


class TierLate(TierError):
    """Not done by the deadline. If the call was begun, it is still going on."""


class _Pending(Generic[T]):
    """A call that one thread makes and another waits for, and may give up waiting for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._given_up = False
        self.value: T | None = None
        self.error: Exception | None = None

    def end(self) -> bool:
        """True when somebody waits for it still."""
        with self._lock:
            self._ended.set()
            return not self._given_up

    def wait(self, seconds: float) -> bool:
        """True when it ended in time; else it is given up."""
        if self._ended.wait(max(seconds, 0.0)):
            return True
        with self._lock:
            self._given_up = not self._ended.is_set()
            return not self._given_up


class GuardedTier:
    """`threads`: calls under way at most. `clock`: monotonic seconds. `ready`: its scan is over."""

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
        """May it be read from? Half-open it is not: its trial is `probe`, not somebody's request."""
        with self._lock:
            return self.ready and self._breaker.state == "closed"

    @property
    def is_writable(self) -> bool:
        return self.is_up and not self.read_only

    @property
    def state(self) -> str:
        """As in `TierStats.state`."""
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
        """Since the start: read_bytes, written_bytes, read_errors, write_errors, hits_blocks, ..."""
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
        """A load took that long, from end to end."""
        with self._lock:
            self._meter.observe(nbytes, seconds)

    def read(self, address: Address, start: int, nbytes: int, deadline_s: float) -> Bytes:
        """As `Tier.read`, and never fewer bytes than wanted. Raises `TierError`, `BadRecord`."""
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
        """As `Tier.put`. After `TierLate` the write goes on; `when_late` is called when it is over."""
        try:
            self.call(lambda: self.tier.put(address, record, deadline_s=deadline_s), deadline_s, when_late)
        except TierDown:
            raise
        except TierError:
            self.count("write_errors")
            raise
        self.count("written_bytes", record.nbytes)

    def delete(self, address: Address, deadline_s: float) -> None:
        """As `Tier.delete`. That nothing is there to be deleted says nothing about the tier's health."""
        self.call(lambda: self.tier.delete(address), deadline_s, is_evidence=False)

    def quarantine(self, address: Address, deadline_s: float) -> None:
        self.call(lambda: self.tier.quarantine(address), deadline_s)
        self.count("quarantined")

    def probe(self, deadline_s: float) -> bool:
        """Try it, if it is time to: is it well? Closes the breaker, ends read-only.

        A tier whose last call failed is tried as well: dear as that has made it, nobody else might.
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
        """Something failed that did not go through `call` (a scan)."""
        self._settle(TierError("scan"))

    def check_integrity(self) -> None:
        """Raises AssertionError when something is wrong."""
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
        """`operate()`, in another thread, until `deadline_s` from now.

        `is_evidence`: its success shows that the tier is well.
        Raises what it raises (`TierError`, `BadRecord`), `TierDown`, or `TierLate`; in the last case
        `when_late` is called, from any thread, as soon as `operate` is over (or will not begin any more).
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
        except RuntimeError as error:  # the process may have no more threads
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
        """What a call's outcome says about the tier: a miss, no room, bad bytes are answers, too."""
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
