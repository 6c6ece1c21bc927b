"""Scans the tiers at a node's start, and when a failed tier answers again.

A local tier is up once it is scanned; the node waits for that, but not for longer than it was told to, and
answers beside the scan from then on. S3 is used from the start and scanned in the background. A scan does not
take in what was cleared since it began, what nodes have marked in the tier itself, or what is recorded as
pending (`state.py`).
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from samovar.cache_tiers.blocks import TIERS, Address, BadRecord, Clear, TierError, TierName
from samovar.cache_tiers.catalog import ClearSet
from samovar.cache_tiers.media import GuardedTier, Scanned, Tier
from samovar.cache_tiers.node.state import NodeState
from samovar.configs.sections import TierSettings

logger = logging.getLogger(__name__)

MARKS_S_MAX = 30.0
"""So long a disk's records wait for what a bucket has marked: it may not answer."""


class TierScans:
    """Runs scans and rescans. `wall_clock`: Unix seconds, only for how long ago a record was used.

    A failed scan is retried after `breaker_open_s`; shared tiers are rescanned for other nodes' records
    every `s3.rescan_s`, and sooner if the last scan failed or left something unread: it may be cleared.
    """

    def __init__(self, state: NodeState, wall_clock: Callable[[], float], settings: TierSettings) -> None:
        self._state = state
        self._wall_clock = wall_clock
        self._retry_s = settings.breaker_open_s
        self._rescan_s = settings.s3.rescan_s
        self._rescan_at_s = state.clock() + self._rescan_s
        self._soon_s = self._retry_s  # until the next scan after one that was not whole; doubles
        self.unknown: set[TierName] = set(state.guards)
        """Tiers not scanned completely yet. Requires the state's lock."""
        self._clears_max = settings.tombstones_max
        self._cleared: dict[TierName, ClearSet] = {}  # since the scan in progress began
        self._again_s: dict[TierName, float] = {}
        self._listed_s: dict[TierName, float] = {}  # when the last one that read all began
        self._begun = 0  # listings of shared tiers: their numbers
        self._ended: dict[TierName, int] = {}  # the last of each tier that did not fail
        self._running: dict[TierName, threading.Thread] = {}
        self._starting = threading.Lock()  # many callers may request a rescan at once
        self._stopped = threading.Event()
        self._heard = threading.Event()
        """What a bucket has marked as cleared while this node was away is applied; or it did not answer."""
        if not any(guard.tier.is_shared for guard in state.guards.values()):
            self._heard.set()

    def start(self, wait_s: float = math.inf) -> None:
        """Scan the local tiers; what takes longer than `wait_s`, and shared ones, go on in the background."""
        ends_s = time.monotonic() + wait_s
        # Shared ones first: the others' records wait for what is marked there.
        for name, guard in sorted(self._state.guards.items(), key=lambda row: row[0] not in TIERS.shared):
            if name in TIERS.shared:
                guard.ready = True
                self._run(guard)
                threading.Thread(target=_warm, args=(guard,), name=f"warm-{name}", daemon=True).start()
            elif math.isinf(wait_s):
                self._scan(guard)
            else:
                self._run(guard)
        for name in () if math.isinf(wait_s) else self._state.guards.keys() - TIERS.shared:
            self._running[name].join(max(0.0, ends_s - time.monotonic()))

    def retry(self) -> None:
        """Retry failed scans in the background, one thread per tier."""
        for name, guard in self._state.guards.items():
            with self._state.lock:
                is_due = name in self.unknown and self._state.clock() >= self._again_s.get(name, 0.0)
            running = self._running.get(name)
            if is_due and (running is None or not running.is_alive()):
                self._run(guard)

    def rescan(self, *, now: bool) -> None:
        """Rescan shared tiers for other nodes' records, if it is due or `now`."""
        with self._state.lock:
            is_due = self._state.clock() >= self._rescan_at_s
        if now or is_due:
            self._rescan()

    def look(self, wait_s: float) -> None:
        """Rescan now, or wait for a scan that is running, at most `wait_s`."""
        ends_s = self._state.clock() + wait_s
        for thread in self._rescan():
            thread.join(max(0.0, ends_s - self._state.clock()))

    def listings(self) -> tuple[int, int]:
        """Return the number of the listing of shared tiers that began last, and of one that is taken in.

        What was put there before that one began is known; what it could not read comes with the next.
        """
        with self._state.lock:
            guards = self._state.guards.items()
            ended = [self._ended.get(name, 0) for name, guard in guards if guard.tier.is_shared]
            return self._begun, min(ended, default=0)

    def _rescan(self) -> list[threading.Thread]:
        """Return the threads scanning each shared tier that is up, running or new."""
        threads = []
        for name, guard in self._state.guards.items():
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

    def unlisted(self) -> tuple[TierName, ...]:
        """Return the shared tiers in their first scan; requires the state's lock."""
        return tuple(
            name
            for name in self.unknown
            if self._state.guards[name].tier.is_shared
            and name in self._running
            and self._running[name].is_alive()
        )

    def listed_ago_s(self, name: TierName) -> float | None:
        """Return the age of what is known of a shared tier; None: no scan has read all of it."""
        with self._state.lock:
            at_s = self._listed_s.get(name)
        return None if at_s is None else max(0.0, self._state.clock() - at_s)

    def stop(self, wait_s: float) -> None:
        """End scans at their next record; wait for those of local tiers, which are closed next."""
        self._stopped.set()
        self._heard.set()
        for name in self._running.keys() - TIERS.shared:
            self._running[name].join(wait_s)

    def join(self, seconds: float) -> None:
        """Wait for background scans."""
        for thread in list(self._running.values()):
            thread.join(seconds)

    def on_marks(self, heed: Callable[[Sequence[Clear]], None]) -> None:
        """Call `heed` with what scans find marked as cleared."""

        def heard(clears: Sequence[Clear]) -> None:
            heed(clears)
            self._heard.set()

        for guard in self._state.guards.values():
            guard.tier.on_marks(heard)

    def cleared(self, clear: Clear, *, is_marked: bool) -> None:
        """Keep running scans from taking in what is cleared; under the state's lock, with the clear itself.

        `is_marked`: the mark was found in a shared tier, and that tier's scan goes by it.
        """
        for name, clears in list(self._cleared.items()):
            if is_marked and self._state.guards[name].tier.is_shared:
                continue
            if clears.add(clear) is None:
                logger.warning("%s tier: too much was cleared during its scan", name)
                del self._cleared[name]  # the scan starts again

    def is_known(self, name: TierName, address: Address) -> bool:
        """Return whether this tier holds it according to the catalog."""
        with self._state.lock:
            return name in self._state.catalog.copies(address)

    def _run(self, guard: GuardedTier, scan: Callable[[], Iterator[Scanned]] | None = None) -> None:
        thread = threading.Thread(
            target=self._scan, args=(guard, scan), name=f"scan-{guard.name}", daemon=True
        )
        thread.start()  # first: where none can be started, there is none to wait for
        self._running[guard.name] = thread

    def _scan(self, guard: GuardedTier, scan: Callable[[], Iterator[Scanned]] | None = None) -> None:
        found, undeleted, tier, began_s = 0, 0, guard.tier, self._state.clock()
        with self._state.lock:
            self._begun += tier.is_shared
            number = self._begun
            since = self._cleared[guard.name] = ClearSet(self._clears_max)
            for clear, _ in self._state.pending.clears_of(guard.name):
                since.add(clear)  # it may be settled before this scan comes to what it is about
            # What a scan that failed had found may be bad by now, or gone. No store is made before one ends.
            is_repeated = guard.name in self._again_s and not tier.is_shared
            unseen = set(self._state.catalog.hottest(guard.name)) if is_repeated else set[Address]()
        try:
            if tier.take():
                self._state.taken()
                logger.info("%s tier: its directory was waited for and is ours now", guard.name)
            for scanned in (scan or guard.tier.scan)():
                if self._stopped.is_set():
                    return
                undeleted += not self._take_in(guard, scanned)
                unseen.discard(scanned.header.address)
                found += 1
            self._purge_quarantine(guard)
        except (TierError, BadRecord) as error:
            if tier.why_not_ours():  # no fault of the medium
                logger.debug("%s tier: %s", guard.name, error)
            else:
                logger.warning("%s tier: its contents are not known: %s", guard.name, error)
                guard.failed()
            with self._state.lock:
                self._again_s[guard.name] = self._state.clock() + self._retry_s
                if tier.is_shared:
                    self._rescan_later(is_whole=False)
            return
        finally:
            if tier.is_shared:
                self._heard.set()
            gone = tier.bad_found().gone
            with self._state.lock:
                self._cleared.pop(guard.name, None)
                self._forget(guard.name, gone)
        is_whole = not tier.is_shared or (not undeleted and self._settle(tier))
        with self._state.lock:
            self._forget(guard.name, unseen)
            self.unknown.discard(guard.name)
            if tier.is_shared:
                self._rescan_later(is_whole=is_whole)
                self._ended[guard.name] = number
                if is_whole:
                    self._listed_s[guard.name] = began_s
            else:
                self._state.pending.scanned(guard.name)
        if found and not self._heard.wait(MARKS_S_MAX):
            logger.warning("%s tier: served, though the bucket does not say what was cleared", guard.name)
        guard.ready = True
        logger.info("%s tier: %d records found", guard.name, found)

    def _forget(self, name: TierName, addresses: Iterable[Address]) -> None:
        """Forget what is not in a tier any more. Requires the state's lock."""
        for address in addresses:
            if (eviction := self._state.catalog.lose(address, name)) is not None:
                self._state.catalog.dropped(eviction)

    def _purge_quarantine(self, guard: GuardedTier) -> None:
        """Delete the bad records of tenants with a pending clear: what is bad is known now, too."""
        with self._state.lock:
            tenants = sorted({clear.tenant for clear, _ in self._state.pending.clears_of(guard.name)})
        for tenant in tenants:
            guard.tier.purge_quarantine(tenant)

    def _rescan_later(self, *, is_whole: bool) -> None:
        """Set when shared tiers are scanned next. Requires the state's lock."""
        again_s = self._rescan_s if is_whole else min(self._soon_s, self._rescan_s)
        self._soon_s = self._retry_s if is_whole else 2 * again_s
        self._rescan_at_s = self._state.clock() + again_s

    def _settle(self, tier: Tier) -> bool:
        """Drop old marks; return whether the last scan read all that is there, as far as is known."""
        try:
            return tier.settle()
        except TierError as error:
            logger.info("marks of clears are kept for longer: %s", error)
            return False

    def _take_in(self, guard: GuardedTier, scanned: Scanned) -> bool:
        """Add a scanned record; False: it was cleared, and its delete is pending. Raises `TierError`."""
        state, name, header = self._state, guard.name, scanned.header
        address = header.address
        with state.lock:
            since = self._cleared.get(name)
            if since is None:
                raise TierError("more was cleared during the scan than can be tracked")
            is_cleared = (
                scanned.is_cleared
                or state.pending.is_cleared(name, header)
                or since.covers(header.tenant, header.session)
            )
            is_writing = state.catalog.transfers.is_writing(name, address)
            if state.pending.has(name, address) and not is_writing:
                evictions = None
            else:
                evictions = state.catalog.adopt(name, scanned, self._wall_clock(), is_cleared=is_cleared)
        if evictions is None:
            return state.delete(name, address, is_clear=True)
        return not state.drop(evictions) or not is_cleared


def _warm(guard: GuardedTier) -> None:
    """Connect a tier to its server, on a thread of its own; a failure costs only the first use's time."""
    try:
        seconds = guard.tier.warm()
    except (TierError, BadRecord) as error:
        logger.info("%s tier: not warmed up: %s", guard.name, error)
        return
    if seconds is not None:
        guard.observe(0, seconds)


AGAIN_S = 5.0
NODES_MAX = 4096
"""Maximum remembered lost nodes; the oldest are dropped."""


class RescanCoalescer:
    """Decides when a silent node justifies a rescan of shared tiers, so that its data is not recomputed.

    One rescan serves all concurrent callers, and one that began after a node was lost is enough: nothing
    more is put there for it. A node that merely does not answer may continue, so rescans repeat for it, but
    not all the time. `look(seconds)`: rescans and waits so long at most; a rescan that takes longer counts
    once it has ended. `listings`: see `TierScans.listings`. `clock`: monotonic.
    """

    def __init__(
        self,
        look: Callable[[float], None],
        listings: Callable[[], tuple[int, int]],
        clock: Callable[[], float],
    ) -> None:
        self._look = look
        self._listings = listings
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: dict[str, None] = {}  # lost nodes whose remains are known; oldest first
        self._again_s: dict[str, float] = {}
        # Silent node, whether lost -> the listing that had begun by then, and when that was.
        self._since: dict[tuple[str, bool], tuple[int, float]] = {}

    def after(self, silent: Mapping[str, bool], wait_s: float) -> bool:
        """Rescan if one of these nodes justifies it. `silent`: node -> whether it is lost for good.

        Returns True if there was a rescan that ended in time: more may be known now.
        """
        now_s, (begun, _) = self._clock(), self._listings()
        with self._lock:
            unseen = [node for node in silent if node not in self._seen]
            due = [node for node in unseen if silent[node] or now_s >= self._again_s.get(node, now_s)]
            for node in due:
                since = self._since.get((node, silent[node]))
                # One that may have answered since then may have put more by now.
                if since is None or (not silent[node] and now_s - since[1] > AGAIN_S):
                    self._since[node, silent[node]] = begun, now_s
        due = self._unknown(due, silent, now_s)
        if not due:
            return False
        self._look(wait_s)
        return not self._unknown(due, silent, now_s)

    def _unknown(self, due: Sequence[str], silent: Mapping[str, bool], now_s: float) -> list[str]:
        """Settle the nodes for which a listing has ended that began since; return the others."""
        _, ended = self._listings()
        left = []
        with self._lock:
            for node in due:
                if ended <= self._since.get((node, silent[node]), (-1, 0.0))[0]:
                    left.append(node)
                    continue
                self._since.pop((node, silent[node]), None)
                if silent[node]:
                    self._seen[node] = None
                    self._again_s.pop(node, None)
                elif node not in self._seen:  # another caller may have found meanwhile that it is lost
                    self._again_s[node] = now_s + AGAIN_S
            books: tuple[dict[Any, Any], ...] = (self._seen, self._again_s, self._since)
            for book in books:
                while len(book) > NODES_MAX:
                    book.pop(next(iter(book)))
        return left

    def check_integrity(self) -> None:
        """Raise `AssertionError` if the accounting is inconsistent."""
        with self._lock:
            assert not self._seen.keys() & self._again_s.keys(), "a node is lost and is not"
            books = (self._seen, self._again_s, self._since)
            assert max([len(book) for book in books]) <= NODES_MAX, "too many nodes"
