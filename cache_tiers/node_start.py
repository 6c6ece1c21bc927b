"""Finding out what the tiers hold when a node starts, or when a tier that was away answers again.

Local tiers are looked through before the node answers: until then they are not up. S3 is used from the
start and looked through in the background. What was cleared in the meantime is not taken in.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol, runtime_checkable

from cache_tiers.extent import Address, TierName
from cache_tiers.faults import FaultyTier
from cache_tiers.guarded_tier import GuardedTier
from cache_tiers.node_books import NodeBooks
from cache_tiers.tier import BadRecord, Scanned, TierError

logger = logging.getLogger("samovar.tiers")

IN_BACKGROUND: tuple[TierName, ...] = ("s3",)


@runtime_checkable
class Rescans(Protocol):
    """A tier in which other nodes put records, too."""

    def rescan(self, is_known: Callable[[Address], bool]) -> Iterator[Scanned]:
        """As `Tier.scan`, of what is not known."""


class TierScans:
    """`wall_clock`: unix seconds, only for how long ago a record was used. `retry_s`: after a failed scan.

    `rescan_s`: between two looks at what other nodes have put into a tier that nodes share.
    """

    def __init__(
        self, books: NodeBooks, wall_clock: Callable[[], float], *, retry_s: float, rescan_s: float
    ) -> None:
        self._books = books
        self._wall_clock = wall_clock
        self._retry_s = retry_s
        self._rescan_s = rescan_s
        self._rescan_at_s = books.clock() + rescan_s
        self.unknown: set[TierName] = set(books.guards)
        """Tiers that were not looked through to the end yet. Under the books' lock."""
        self._again_s: dict[TierName, float] = {}
        self._running: dict[TierName, threading.Thread] = {}
        self._starting = threading.Lock()  # a look may be wanted by many at once
        self._stopped = threading.Event()

    def start(self) -> None:
        """Returns when the local tiers are known (or failed)."""
        for name, guard in self._books.guards.items():
            if name in IN_BACKGROUND:
                guard.ready = True
                self._run(guard)
            else:
                self._scan(guard)

    def retry(self) -> None:
        """In the background, one thread a tier."""
        for name, guard in self._books.guards.items():
            with self._books.lock:
                is_due = name in self.unknown and self._books.clock() >= self._again_s.get(name, 0.0)
            running = self._running.get(name)
            if is_due and (running is None or not running.is_alive()):
                self._run(guard)

    def rescan(self, *, now: bool) -> None:
        """Look for what other nodes have put into shared tiers: if it is time to, or `now`."""
        clock_s = self._books.clock()
        if not now and clock_s < self._rescan_at_s:
            return
        self._rescan_at_s = clock_s + self._rescan_s
        self._rescan()

    def look(self, wait_s: float) -> bool:
        """The same now, and wait for it; True when all that others have put there is known by then."""
        ends_s = self._books.clock() + wait_s
        threads = self._rescan()
        for thread in threads:
            thread.join(max(0.0, ends_s - self._books.clock()))
        return bool(threads) and not any(thread.is_alive() for thread in threads)

    def _rescan(self) -> list[threading.Thread]:
        """A scan of each shared tier that is up: one that runs, or a new one."""
        threads = []
        for name, guard in self._books.guards.items():
            tier = guard.tier.inner if isinstance(guard.tier, FaultyTier) else guard.tier
            if not isinstance(tier, Rescans) or not guard.is_up:
                continue
            with self._starting:
                running = self._running.get(name)
                if (running is None or not running.is_alive()) and name not in self.unknown:
                    self._run(guard, partial(tier.rescan, partial(self._is_known, name)))
                thread = self._running.get(name)
                if thread is not None and (thread.is_alive() or name not in self.unknown):
                    threads.append(thread)
        return threads

    def stop(self) -> None:
        """Scans end at the next record; nobody waits for them."""
        self._stopped.set()

    def join(self, seconds: float) -> None:
        """Wait for scans that run in the background."""
        for thread in list(self._running.values()):
            thread.join(seconds)

    def _is_known(self, name: TierName, address: Address) -> bool:
        with self._books.lock:
            return name in self._books.directory.copies(address)

    def _run(self, guard: GuardedTier, scan: Callable[[], Iterator[Scanned]] | None = None) -> None:
        thread = threading.Thread(
            target=self._scan, args=(guard, scan), name=f"scan-{guard.name}", daemon=True
        )
        self._running[guard.name] = thread
        thread.start()

    def _scan(self, guard: GuardedTier, scan: Callable[[], Iterator[Scanned]] | None = None) -> None:
        found = 0
        try:
            for scanned in (scan or guard.tier.scan)():
                if self._stopped.is_set():
                    return
                self._take_in(guard, scanned)
                found += 1
        except (TierError, BadRecord) as error:
            logger.warning("%s tier: what it holds is not known: %s", guard.name, error)
            guard.failed()
            with self._books.lock:
                self._again_s[guard.name] = self._books.clock() + self._retry_s
            return
        with self._books.lock:
            self.unknown.discard(guard.name)
            self._books.owed.scanned(guard.name)
        guard.ready = True
        logger.info("%s tier: %d records found", guard.name, found)

    def _take_in(self, guard: GuardedTier, scanned: Scanned) -> None:
        books, name, address = self._books, guard.name, scanned.header.address
        with books.lock:
            is_unwanted = books.owed.owes(name, address) or books.owed.is_cleared(name, scanned.header)
            if is_unwanted and not books.mover.is_busy(address, name):
                evictions = None
            else:  # clear_seq 0: whatever was cleared since this node began stays cleared
                evictions = books.directory.adopt(name, scanned, self._wall_clock(), clear_seq=0)
        if evictions is None:
            books.delete(name, address, _nobody_to_tell, is_clear=True)
        else:
            books.drop(evictions)


def _nobody_to_tell() -> None:
    """Nobody's books know of the record."""
