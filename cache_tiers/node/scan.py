"""Finding out what the tiers hold when a node starts, or when a tier that was away answers again.

Local tiers are looked through before the node answers: until then they are not up. S3 is used from the
start and looked through in the background. What was cleared since a scan began is not taken in by it, nor
what nodes have marked in the tier itself, nor what is written down as owed (`state.py`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from cache_tiers.blocks import Address, BadRecord, Clear, TierError, TierName
from cache_tiers.directory import ClearSet
from cache_tiers.media import GuardedTier, Scanned, Tier
from cache_tiers.node.state import NodeState
from configs.sections import TierSettings

logger = logging.getLogger(__name__)

IN_BACKGROUND: tuple[TierName, ...] = ("s3",)


class TierScans:
    """`wall_clock`: unix seconds, only for how long ago a record was used.

    A scan that failed is tried again after `breaker_open_s`; `s3.rescan_s` lie between two looks at what
    other nodes have put into a tier that nodes share.
    """

    def __init__(self, books: NodeState, wall_clock: Callable[[], float], settings: TierSettings) -> None:
        self._books = books
        self._wall_clock = wall_clock
        self._retry_s = settings.breaker_open_s
        self._rescan_s = settings.s3.rescan_s
        self._rescan_at_s = books.clock() + self._rescan_s
        self.unknown: set[TierName] = set(books.guards)
        """Tiers that were not looked through to the end yet. Under the books' lock."""
        self._clears_max = settings.tombstones_max
        self._cleared: dict[TierName, ClearSet] = {}  # since the scan began that is under way
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
            tier = guard.tier
            if not tier.is_shared or not guard.is_up:
                continue
            with self._starting:
                running = self._running.get(name)
                if (running is None or not running.is_alive()) and name not in self.unknown:
                    self._run(guard, partial(tier.rescan, partial(self.is_known, name)))
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

    def on_marks(self, heed: Callable[[Sequence[Clear]], None]) -> None:
        """Call `heed` with what scans find marked as cleared."""
        for guard in self._books.guards.values():
            guard.tier.on_marks(heed)

    def cleared(self, clear: Clear, *, is_marked: bool) -> None:
        """Under the books' lock, with the clear itself: scans under way do not take it in.

        `is_marked`: where nodes share a tier it was found marked, and its scan goes by that.
        """
        for name, clears in list(self._cleared.items()):
            if is_marked and self._books.guards[name].tier.is_shared:
                continue
            if clears.add(clear) is None:
                logger.warning("%s tier: too much is cleared while it is looked through", name)
                del self._cleared[name]  # the scan begins anew

    def is_known(self, name: TierName, address: Address) -> bool:
        """Does this tier hold it, as far as the books know?"""
        with self._books.lock:
            return name in self._books.directory.copies(address)

    def _run(self, guard: GuardedTier, scan: Callable[[], Iterator[Scanned]] | None = None) -> None:
        thread = threading.Thread(
            target=self._scan, args=(guard, scan), name=f"scan-{guard.name}", daemon=True
        )
        self._running[guard.name] = thread
        thread.start()

    def _scan(self, guard: GuardedTier, scan: Callable[[], Iterator[Scanned]] | None = None) -> None:
        found, owing, tier = 0, 0, guard.tier
        with self._books.lock:
            self._cleared[guard.name] = ClearSet(self._clears_max)
        try:
            for scanned in (scan or guard.tier.scan)():
                if self._stopped.is_set():
                    return
                owing += not self._take_in(guard, scanned)
                found += 1
        except (TierError, BadRecord) as error:
            logger.warning("%s tier: what it holds is not known: %s", guard.name, error)
            guard.failed()
            with self._books.lock:
                self._again_s[guard.name] = self._books.clock() + self._retry_s
            return
        finally:
            with self._books.lock:
                self._cleared.pop(guard.name, None)
        if tier.is_shared and not owing:
            self._settle(tier)
        with self._books.lock:
            self.unknown.discard(guard.name)
            if not tier.is_shared:
                self._books.owed.scanned(guard.name)
        guard.ready = True
        logger.info("%s tier: %d records found", guard.name, found)

    def _settle(self, tier: Tier) -> None:
        try:
            tier.settle()
        except TierError as error:
            logger.info("marks of clears stay a while longer: %s", error)

    def _take_in(self, guard: GuardedTier, scanned: Scanned) -> bool:
        """False: it was cleared, and the tier owes its delete. Raises `TierError`."""
        books, name, header = self._books, guard.name, scanned.header
        address = header.address
        with books.lock:
            since = self._cleared.get(name)
            if since is None:
                raise TierError("more was cleared meanwhile than can be remembered")
            is_cleared = (
                scanned.is_cleared
                or books.owed.is_cleared(name, header)
                or since.covers(header.tenant, header.session)
            )
            if books.owed.owes(name, address) and not books.mover.is_busy(address, name):
                evictions = None
            else:
                evictions = books.directory.adopt(name, scanned, self._wall_clock(), is_cleared=is_cleared)
        if evictions is None:
            return books.delete(name, address, _nobody_to_tell, is_clear=True)
        return not books.drop(evictions) or not is_cleared


def _nobody_to_tell() -> None:
    """Nobody's books know of the record."""


# When a node falls silent, what it has put into shared tiers is worth a look before others compute it again.
#
# One look serves all who ask meanwhile, and after a node is lost one is enough: nobody puts anything there
# for it any more. A node that only does not answer may go on, so it is looked for again, but not all the
# time. Decides; does not know what a look is.

AGAIN_S = 5.0
NODES_MAX = 4096
"""Lost nodes that are remembered, the latest."""


class RescanCoalescer:
    """`look`: looks, and waits so many seconds at most; True when all was seen. `clock`: monotonic."""

    def __init__(self, look: Callable[[float], bool], clock: Callable[[], float]) -> None:
        self._look = look
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: dict[str, None] = {}  # lost nodes, what they left is known; oldest first
        self._again_s: dict[str, float] = {}

    def after(self, silent: Mapping[str, bool], wait_s: float) -> bool:
        """Look if one of these nodes gives a reason to. `silent`: node -> is it lost for good?

        True when there was a look, and it was over in time: what is known may be more now.
        """
        now_s = self._clock()
        with self._lock:
            unseen = [node for node in silent if node not in self._seen]
            due = [node for node in unseen if silent[node] or now_s >= self._again_s.get(node, now_s)]
        if not due or not self._look(wait_s):
            return False
        with self._lock:
            for node in due:
                if silent[node]:
                    self._seen[node] = None
                    self._again_s.pop(node, None)
                else:
                    self._again_s[node] = now_s + AGAIN_S
            for book in (self._seen, self._again_s):
                while len(book) > NODES_MAX:
                    book.pop(next(iter(book)))
        return True

    def check_integrity(self) -> None:
        """Raises AssertionError when the books are wrong."""
        with self._lock:
            assert not self._seen.keys() & self._again_s.keys(), "a node is lost and is not"
            assert max(len(self._seen), len(self._again_s)) <= NODES_MAX, "too many nodes"
