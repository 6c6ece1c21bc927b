"""The `s3` tier: one object per extent, read back after PutObject before it counts.

Works with AWS and with servers that speak its protocol. Single calls run in their caller's thread, within
boto3's time limits; `GuardedTier` bounds the wait for them, so that a bucket that is down, slow or lying is a
miss. A bucket's bytes are never trusted: the reader checks them (`blocks/record.py`), and `scan` checks
headers.
"""

from __future__ import annotations

import contextlib
import heapq
import logging
import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np

from samovar.cache_tiers.blocks import (
    HEADER_ALIGN,
    S3,
    Address,
    BadRecord,
    Bytes,
    Clear,
    ForeignRecord,
    Record,
    TenantRows,
    TierError,
    TierFull,
    TierMiss,
    TierName,
    session_of,
)
from samovar.cache_tiers.media.guard import CallExecutor
from samovar.cache_tiers.media.s3_client import SESSIONS_MAX, Listed, S3Error, S3Keys, S3Objects
from samovar.cache_tiers.media.tier import BadFound, Deadline, Scanned, Tier
from samovar.configs.sections import S3TierSettings

logger = logging.getLogger(__name__)


T = TypeVar("T")

PENDING_MAX = 1024
"""Maximum remembered deletes; the next scan finds any others."""

LISTING_LAG_S = 60.0
"""How long after a put a listing may still miss the object: not all servers list what they have at once."""


class S3Ledger:
    """Accounts bytes, quarantine and pending deletes of one bucket prefix, up to `bytes_max`.

    The accounts are never below what is there: bytes are counted before they are sent and removed after the
    delete, and a listing takes nothing away that it may not show yet. `clock`: monotonic seconds. Pure and
    not thread-safe.
    """

    def __init__(self, bytes_max: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._bytes_max = bytes_max
        self._clock = clock
        self._sizes: dict[Address, int] = {}
        self._sizes_bytes = 0
        self._bad: dict[Address, int] = {}
        self._unindexed_bytes = 0
        self._is_listed = False
        self._began_s = math.inf  # when the listing in progress began; infinite: there is none
        self._changed_s: dict[Address, float] = {}  # when, oldest first: what a listing may not show yet
        self._bad_changed_s: dict[Address, float] = {}  # as well, in quarantine
        self._pending: dict[Address, None] = {}

    @property
    def bytes_held(self) -> int:
        """Return the bytes of records, quarantine and unindexed objects.

        Raises `TierError` before the first listing.
        """
        if not self._is_listed:
            raise TierError("the bucket has not been listed yet")
        return self._bytes

    @property
    def pending(self) -> tuple[Address, ...]:
        """Return the records whose delete failed and that must not remain, oldest first."""
        return tuple(self._pending)

    @property
    def bad_count(self) -> int:
        """Return the number of objects in quarantine."""
        return len(self._bad)

    def bad_of(self, tenant: bytes) -> list[Address]:
        """Return the tenant's addresses whose bad records are kept for inspection."""
        return [address for address in self._bad if address.tenant == tenant]

    def size_of(self, address: Address) -> int | None:
        """Return the record's size, if known."""
        return self._sizes.get(address)

    def reserve(self, address: Address, nbytes: int) -> int | None:
        """Count a record before it is written; return its previous size. Raises `TierFull`."""
        before = self._sizes.get(address)
        if self._bytes - (before or 0) + nbytes > self._bytes_max:
            raise TierFull(f"{nbytes} bytes more than {self._bytes} of {self._bytes_max}")
        self.set(address, nbytes)
        return before

    def set(self, address: Address, nbytes: int | None) -> None:
        """Set the record's size; None: it is gone."""
        self._sizes_bytes -= self._sizes.pop(address, 0)
        if nbytes is not None:
            self._sizes[address] = nbytes
            self._sizes_bytes += nbytes
        self._note(self._changed_s, address)

    def gone(self, address: Address, asked_s: float = math.inf) -> None:
        """Count the record as gone, unless it changed since `asked_s`, when the server was asked."""
        if self._changed_s.get(address, -math.inf) < asked_s:
            self.set(address, None)
            self.settle(address)

    def add_pending(self, address: Address) -> None:
        """Remember a failed delete: the record counts, and is deleted when the tier works again."""
        self._pending[address] = None
        if len(self._pending) > PENDING_MAX:
            del self._pending[next(iter(self._pending))]

    def settle(self, address: Address) -> None:
        """Forget a pending delete: the record was deleted, or is wanted again."""
        self._pending.pop(address, None)

    def set_bad(self, address: Address, nbytes: int | None) -> None:
        """Set the size of a quarantined copy; None: there is none."""
        self._bad.pop(address, None)
        if nbytes is not None:
            self._bad[address] = nbytes
        self._note(self._bad_changed_s, address)

    def begin_listing(self) -> None:
        """Begin a listing: what is counted from here on is newer than the listing."""
        self._began_s = self._clock()

    def end_listing(
        self, listed: Mapping[Address, int], unindexed_bytes: int, bad: Mapping[Address, int]
    ) -> tuple[Address, ...]:
        """Replace the accounts by the listing, except for what it may not show yet.

        Returns the records that were there and are not any more; none where some are not indexed.
        """
        began_s, self._began_s = self._began_s, math.inf
        before, self._sizes = self._sizes, _newer(self._sizes, listed, self._changed_s, began_s)
        self._sizes_bytes = sum(self._sizes.values())
        self._unindexed_bytes = unindexed_bytes
        self._bad = _newer(self._bad, bad, self._bad_changed_s, began_s)
        self._is_listed = True
        return () if unindexed_bytes else tuple(address for address in before if address not in self._sizes)

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming the account that is wrong."""
        assert self._sizes_bytes == sum(self._sizes.values()), f"{self._sizes_bytes} bytes accounted"
        assert all(size >= 0 for size in self._sizes.values()), "a record of less than no bytes"
        assert len(self._pending) <= PENDING_MAX, f"{len(self._pending)} pending deletes"

    def _note(self, changed_s: dict[Address, float], address: Address) -> None:
        """Note a change, and forget those that a listing shows which is in progress or begins now."""
        now_s = self._clock()
        changed_s.pop(address, None)
        changed_s[address] = now_s
        old_s = min(now_s, self._began_s) - LISTING_LAG_S
        while changed_s[(oldest := next(iter(changed_s)))] < old_s:
            del changed_s[oldest]

    @property
    def _bytes(self) -> int:
        return self._sizes_bytes + self._unindexed_bytes + sum(self._bad.values())


def _newer(
    known: Mapping[Address, int],
    listed: Mapping[Address, int],
    changed_s: Mapping[Address, float],
    began_s: float,
) -> dict[Address, int]:
    """Return the listed sizes, but what is known of those that changed since the listing began.

    And of those put so shortly before that a listing may miss them. What was deleted shortly before and is
    listed counts: another node may have put it again.
    """
    late = {address for address, at_s in changed_s.items() if at_s >= began_s}
    young = {address for address, at_s in changed_s.items() if at_s >= began_s - LISTING_LAG_S}
    kept = {
        address: size
        for address, size in known.items()
        if address in late or (address in young and address not in listed)
    }
    return {address: size for address, size in listed.items() if address not in late} | kept


QUARANTINE_MAX = 64
"""Maximum bad objects kept for inspection; more are deleted at once."""

SCAN_FAILURES_MAX = 3
"""Number of unreadable headers in a row after which a scan gives up."""

DELETES_PER_PROBE = 64
PROBE_BYTES = 64
Pages = Callable[[str], Iterator[Listed]]
PROBE_OLD_S = 600.0
"""A probe's object that is older is what a failed probe has left. Where clocks differ, one may be deleted
while it is read back: that probe fails, and is tried again."""


BAD_SLACK_S = 600.0
"""A bad object that is newer than a mark by less counts as older: a listing that began before the mark may
have put it aside."""


class S3Quarantine:
    """Keeps bad objects for inspection, until their tenant or a session of it is cleared. Thread-safe.

    `ledger`, `lock`: the tier's, which counts them.
    """

    def __init__(
        self, objects: S3Objects, keys: S3Keys, ledger: S3Ledger, lock: AbstractContextManager[object]
    ) -> None:
        self._objects = objects
        self._keys = keys
        self._ledger = ledger
        self._lock = lock

    def put_aside(self, address: Address) -> None:
        """Copy a bad record for inspection, if there is room and the server can."""
        with self._lock:
            size = self._ledger.size_of(address) or 0
            if self._ledger.bad_count >= QUARANTINE_MAX:
                return
            self._ledger.set_bad(address, size)
        try:
            self._objects.copy(self._keys.record(address), self._keys.bad(address), self._objects.deadline())
        except TierError as error:
            logger.info("s3: a bad record is deleted without a copy: %s", error)
            if isinstance(error, TierMiss) or (isinstance(error, S3Error) and error.is_refusal):
                with self._lock:
                    self._ledger.set_bad(address, None)

    def purge(self, tenant: bytes, listed: Iterable[Listed]) -> int:
        """Delete a tenant's bad objects: known ones and `listed` ones. Raises `TierError`."""
        found = [self._keys.parse_bad(item.key) for item in listed]
        with self._lock:
            bad = dict.fromkeys(self._ledger.bad_of(tenant))
        bad |= dict.fromkeys(address for address in found if address is not None)
        for address in bad:
            self._delete(address)
        return len(bad)

    def judge(self, listed: Mapping[Address, float], cleared: Callable[[bytes], float]) -> set[bytes]:
        """Delete what its tenant has cleared since, and return the tenants of whom some is left.

        `listed`: when each was put; `cleared`: when a tenant or a session of it was, as of its latest mark.
        """
        left = set()
        for address, put_unix_s in listed.items():
            if put_unix_s > cleared(address.tenant) + BAD_SLACK_S:
                continue
            try:
                self._delete(address)
            except TierError as error:
                left.add(address.tenant)
                logger.info("s3: a bad record of who was cleared is not deleted yet: %s", error)
        return left

    def _delete(self, address: Address) -> None:
        self._objects.delete(self._keys.bad(address), self._objects.deadline())
        with self._lock:
            self._ledger.set_bad(address, None)


class S3Probes:
    """Tries whether a bucket works. `pages`: lists a key prefix; `wall_clock`: Unix seconds."""

    def __init__(
        self, objects: S3Objects, keys: S3Keys, pages: Pages, wall_clock: Callable[[], float]
    ) -> None:
        self._objects = objects
        self._keys = keys
        self._pages = pages
        self._wall_clock = wall_clock

    def run(self) -> None:
        """Put an object, read it back, delete it and what failed probes have left. Raises `TierError`."""
        key, deadline = self._keys.probes + secrets.token_hex(8), self._objects.deadline()
        data = secrets.token_bytes(PROBE_BYTES)
        self._objects.put(key, data, deadline, only_new=False)
        is_there = _is_there(self._objects, key, data, deadline)
        self._objects.delete(key, deadline)
        if not is_there:
            raise TierError("probe: other bytes were read back")
        for item in list(self._pages(self._keys.probes))[:DELETES_PER_PROBE]:
            if item.modified_unix_s < self._wall_clock() - PROBE_OLD_S:  # no book has it
                self._objects.delete(item.key, self._objects.deadline())


def _is_there(objects: S3Objects, key: str, data: bytes, deadline: Deadline) -> bool:
    try:
        found, total = objects.get(key, 0, len(data), deadline)
    except (TierMiss, BadRecord):
        return False
    return total == len(data) and np.array_equal(found, np.frombuffer(data, dtype=np.uint8))


def _put_at(objects: S3Objects, key: str) -> float:
    """Return when an object was put, -inf if it is not there. Raises `TierError`."""
    try:
        return objects.put_at(key, objects.deadline())
    except TierMiss:
        return -math.inf


class S3Tier(Tier):
    """Stores extents in one bucket. `wall_clock`: Unix seconds.

    Construction makes no network call; raises `ValueError` without a bucket.
    """

    name: TierName = S3.name
    is_shared = True
    keeps_bad = True

    def __init__(self, settings: S3TierSettings, wall_clock: Callable[[], float]) -> None:
        self._settings = settings
        self._wall_clock = wall_clock
        self._keys = S3Keys(settings.prefix)
        self._objects = S3Objects(settings)
        self._executor = CallExecutor(settings.connections, "s3-scan")  # reads and deletes many at once
        self._lock = threading.Lock()
        self._ledger = S3Ledger(settings.bytes_max)
        self._bad = S3Quarantine(self._objects, self._keys, self._ledger, self._lock)
        self._clears = S3Clears(self._objects, self._keys, self._pages, settings)
        self._probes = S3Probes(self._objects, self._keys, self._pages, wall_clock)
        self._unsettled: set[bytes] = set()  # tenants that the last listing did not judge in full
        self._unread = 0  # headers that the last listing could not read
        self._heed: Callable[[Sequence[Clear]], None] = _nobody_listens
        """Called by every scan with what is marked as cleared, before its records are yielded."""
        self._bad_found = BadFound()

    def put(self, address: Address, record: Record, *, deadline: Deadline) -> None:
        data = record.data.tobytes()  # boto3 requires bytes
        with self._lock:
            before = self._ledger.reserve(address, len(data))
        try:
            self._send(self._keys.record(address), data, deadline)
            if not deadline.commit():
                raise TierError("put: not within its deadline")
        except Exception as error:
            if isinstance(error, S3Error) and error.operation == "put" and error.is_refusal:
                with self._lock:
                    self._ledger.set(address, before)
            else:
                self._undo(address)
            raise
        with self._lock:
            self._ledger.settle(address)

    def read(self, address: Address, start: int, nbytes: int, *, deadline: Deadline) -> Bytes:
        key = self._keys.record(address)
        data, total = self._objects.get(key, start, nbytes, deadline)
        with self._lock:
            known = self._ledger.size_of(address)
        if known is not None and total != known:
            kind = "truncated" if total < known else "oversized"
            raise BadRecord(kind, f"an object of {total} bytes, {known} were put")
        return data

    def delete(self, address: Address, unused_s: float = 0.0) -> None:
        key = self._keys.record(address)
        if not (unused_s and _put_at(self._objects, key) > self._wall_clock() - unused_s):
            self._objects.delete(key, self._objects.deadline())
            self._is_gone(address)

    def quarantine(self, address: Address) -> None:
        self._bad.put_aside(address)
        self.delete(address)

    def scan(self) -> Iterator[Scanned]:
        return self.rescan(lambda _address: False)

    def warm(self) -> float | None:
        """Open connections (TLS, credentials) all at once, and measure a call on an open one."""
        count = min(self._settings.warm_connections, self._settings.connections)
        opened = [self._begin(self._knock) for _ in range(count)]
        for took_s in opened:
            took_s()
        return self._begin(self._knock)() if count else None

    def on_marks(self, heed: Callable[[Sequence[Clear]], None]) -> None:
        self._heed = heed

    def rescan(self, is_known: Callable[[Address], bool]) -> Iterator[Scanned]:
        """Scan like `scan`, but read only the headers of what is not known."""
        self._heed(self._clears.look())
        listed, doomed, bad = self._list()
        self._heed(self._clears.look())  # again: for clears that ended during the listing
        self._unsettled |= self._bad.judge(bad, self._clears.latest)
        newest: deque[tuple[Address, float]] = deque()
        for address, modified_unix_s in listed:
            if is_known(address):
                continue
            if self._clears.is_cleared(address.tenant, None, modified_unix_s):
                doomed.add(address.tenant)
            else:
                newest.append((address, modified_unix_s))
        yield from self._headers(newest)
        for tenant, at_unix_s in self._clears.whole.items():
            if tenant in doomed:
                self._purge(tenant, at_unix_s, is_known, Deadline(float("inf")))

    def mark_cleared(self, clears: Sequence[Clear], deadline: Deadline) -> None:
        """Mark as cleared: no later listing of this bucket takes it in. Raises `TierError`."""
        self._clears.mark(clears, deadline)

    def purge(self, tenant: bytes, is_known: Callable[[Address], bool], deadline: Deadline) -> bool:
        """Delete what a tenant had when last marked as cleared, except what `is_known`.

        Returns False if the time was up before all of it was seen, or no mark is. Raises `TierError`.
        """
        at_unix_s = self._clears.whole_at(tenant)
        return at_unix_s is not None and self._purge(tenant, at_unix_s, is_known, deadline)

    def is_marked(self, address: Address, session: bytes, deadline: Deadline) -> bool:
        put_unix_s = self._objects.put_at(self._keys.record(address), deadline)
        marks = self._pages(self._keys.clears_of(address.tenant), deadline)
        return self._clears.is_marked(address.tenant, session, put_unix_s, marks)

    def settle(self) -> bool:
        gone = self._clears.settle(self._unsettled)
        if gone:
            logger.info("s3: %d marks of clears have been judged by", gone)
        return not self._unread

    def purge_quarantine(self, tenant: bytes) -> int:
        """Delete the tenant's bad objects, other nodes' too; return how many. Raises `TierError`."""
        return self._bad.purge(tenant, self._pages(self._keys.quarantine_of(tenant)))

    def _headers(self, newest: deque[tuple[Address, float]]) -> Iterator[Scanned]:
        window: deque[tuple[Address, float, Callable[[], Scanned]]] = deque()
        failures = 0
        width = max(1, self._settings.connections // 2)  # so that reads and writes can continue meanwhile
        while newest or window:
            while newest and len(window) < width:
                (address, modified_unix_s), asked_s = newest.popleft(), time.monotonic()
                result = self._begin(partial(self._scanned, address, modified_unix_s))
                window.append((address, asked_s, result))
            address, asked_s, result = window.popleft()
            try:
                scanned = result()
            except TierMiss:
                self._is_gone(address, asked_s)
                continue
            except ForeignRecord:
                continue  # it is left alone: other nodes may have our setting not yet, or no longer
            except BadRecord as bad:
                self._found_bad(address, bad)
                continue
            except TierError as error:
                failures += 1
                self._unread += 1
                self._unsettled.add(address.tenant)
                logger.warning("s3: the header of an extent cannot be read: %s", error)
                if failures >= SCAN_FAILURES_MAX:
                    raise
                continue
            failures = 0
            yield scanned

    def bad_found(self) -> BadFound:
        with self._lock:
            gone = tuple(one for one in self._bad_found.gone if self._ledger.size_of(one) is None)
            return replace(self._bad_found.copy(), gone=gone)

    def touch(self, address: Address) -> None:
        """Do nothing: an object's time can only be set by rewriting it, which is not worth a request."""

    def bytes_held(self) -> int:
        """Return the bytes listed and put. Raises `TierError` before the first listing (`scan`)."""
        with self._lock:
            return self._ledger.bytes_held

    def probe(self) -> None:
        """Check that the tier works, and delete what earlier failures left behind."""
        self._probes.run()
        with self._lock:
            pending = self._ledger.pending[:DELETES_PER_PROBE]
        for address in pending:
            asked_s = time.monotonic()  # a put of it may be under way by now
            self._objects.delete(self._keys.record(address), self._objects.deadline())
            self._is_gone(address, asked_s)

    def close(self) -> None:
        """Close the tier; calls in flight end on their own, within boto3's time limits."""
        self._executor.close()
        self._objects.close()

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is inconsistent."""
        with self._lock:
            self._ledger.check_integrity()

    def _send(self, key: str, data: bytes, deadline: Deadline) -> None:
        """Put and read back; replaces an existing object unless it is the same."""
        was_new = self._objects.put(key, data, deadline, only_new=True)
        if _is_there(self._objects, key, data, deadline):
            return
        if not was_new:  # sealed by another node, or garbage: the directory will know this record
            self._objects.put(key, data, deadline, only_new=False)
            if _is_there(self._objects, key, data, deadline):
                return
        raise TierError("put: other bytes were read back")

    def _undo(self, address: Address) -> None:
        """Delete the object of a failed put: it must not stay."""
        try:
            self._objects.delete(self._keys.record(address), self._objects.deadline())
        except TierError as error:
            logger.warning("s3: a failed put may have left its object behind: %s", error)
            with self._lock:
                self._ledger.add_pending(address)
        else:
            self._is_gone(address)

    def _is_gone(self, address: Address, asked_s: float = math.inf) -> None:
        with self._lock:
            self._ledger.gone(address, asked_s)

    def _found_bad(self, address: Address, bad: BadRecord) -> None:
        with self._lock:
            self._bad_found.kinds[bad.kind] += 1
        logger.warning("s3: bad record %s put aside: %s", address.extent_id.hex()[:8], bad)
        try:
            self.quarantine(address)
        except TierError as error:
            logger.warning("s3: it cannot be put aside: %s", error)
            return
        with self._lock:
            self._bad_found.quarantined += 1

    def _purge(
        self, tenant: bytes, at_unix_s: float, is_known: Callable[[Address], bool], deadline: Deadline
    ) -> bool:
        """See `purge`. Raises a failure once the rest of its page is done."""
        width = max(1, self._settings.connections // 2)
        window: deque[tuple[Address | None, float, Callable[[], None]]] = deque()

        def settled(most: int) -> None:
            while len(window) > most:
                address, asked_s, result = window.popleft()
                result()
                if address is not None:
                    self._is_gone(address, asked_s)

        for prefix in (self._keys.records_of(tenant), self._keys.quarantine_of(tenant)):
            for item in self._pages(prefix):
                if deadline.left_s() == 0:
                    settled(0)
                    return False
                address = self._keys.parse(item.key)
                if item.modified_unix_s > at_unix_s + SLACK_S or (address and is_known(address)):
                    continue
                if address is None and self._keys.parse_bad(item.key) is None:
                    continue  # not ours: leave it alone
                asked_s = time.monotonic()
                window.append((address, asked_s, self._begin(partial(self._objects.delete, item.key))))
                settled(width - 1)
            settled(0)
        return True

    def _list(self) -> tuple[deque[tuple[Address, float]], set[bytes], dict[Address, float]]:
        """List the newest records, newest first, and update the ledger with everything in the bucket.

        Also returns the tenants that have older, unindexed records, and what is kept as bad, with its times.
        """
        self._unsettled, self._unread = set(), 0
        with self._lock:
            self._ledger.begin_listing()
        newest: list[tuple[float, str, int]] = []
        unindexed_bytes = 0
        for item in self._pages(self._keys.records):
            address = self._keys.parse(item.key)
            if address is None:
                continue  # not ours: leave it alone
            entry = (item.modified_unix_s, item.key, item.nbytes)
            if len(newest) < self._settings.index_objects_max:
                heapq.heappush(newest, entry)
                continue
            if newest:
                entry = heapq.heappushpop(newest, entry)
            unindexed_bytes += entry[2]
            older = self._keys.parse(entry[1])
            if older is not None:
                self._unsettled.add(older.tenant)
        bad = {
            address: item
            for item in self._pages(self._keys.quarantine)
            if (address := self._keys.parse_bad(item.key)) is not None
        }
        newest.sort(reverse=True)
        addressed = [(self._keys.parse(key), at_unix_s, size) for at_unix_s, key, size in newest]
        found = [(address, at_unix_s, size) for address, at_unix_s, size in addressed if address is not None]
        if unindexed_bytes:
            logger.warning("s3: %d bytes of older extents are not indexed, but count", unindexed_bytes)
        with self._lock:
            sizes = {address: size for address, _, size in found}
            spoiled = {address: item.nbytes for address, item in bad.items()}
            self._bad_found.gone = self._ledger.end_listing(sizes, unindexed_bytes, spoiled)
        times = {address: item.modified_unix_s for address, item in bad.items()}
        return deque((address, at_unix_s) for address, at_unix_s, _ in found), set(self._unsettled), times

    def _pages(self, prefix: str, deadline: Deadline | None = None) -> Iterator[Listed]:
        """List a prefix. `deadline`: of all pages together; None: each has its own."""
        token: str | None = None
        while True:
            objects, token = self._begin(partial(self._objects.page, prefix, token), deadline)()
            yield from objects
            if token is None:
                return

    def _knock(self, deadline: Deadline) -> float:
        """Ask for an object that is not there; return the seconds."""
        began_s = time.monotonic()
        with contextlib.suppress(TierMiss):
            self._objects.get(self._keys.probes + "warm", 0, 1, deadline)
        return time.monotonic() - began_s

    def _begin(self, operate: Callable[[Deadline], T], deadline: Deadline | None = None) -> Callable[[], T]:
        """Begin a call beside others; returns the function that waits for its result."""
        deadline = deadline or self._objects.deadline()
        future = self._executor.submit(partial(operate, deadline), deadline)
        return partial(self._executor.wait, future, deadline)

    def _scanned(self, address: Address, modified_unix_s: float, deadline: Deadline) -> Scanned:
        """Return the scanned header. Raises `BadRecord` unless the object is the record its key names."""
        key = self._keys.record(address)
        data, total = self._objects.get(key, 0, HEADER_ALIGN, deadline)
        length = self.format.read_header_bytes(data)
        if length > HEADER_ALIGN:
            data, total = self._objects.get(key, 0, length, deadline)
        header = self.format.decode_header(data, record_bytes=total)
        if header.address != address:
            is_same_place = (header.tenant, header.namespace) == (address.tenant, address.namespace)
            raise BadRecord("key" if is_same_place else "namespace", "of another extent than its key says")
        now_unix_s = self._wall_clock()
        is_cleared = self._clears.is_cleared(header.tenant, header.session, modified_unix_s)
        return Scanned(header, total, min(max(modified_unix_s, 0.0), now_unix_s), is_cleared)


def _nobody_listens(_clears: Sequence[Clear]) -> None:
    """Ignore marks; the default of `on_marks`."""


MARK = b"cleared\n"
SLACK_S = 1.0
"""Clock slack: servers report whole seconds and many servers serve one bucket.

What is newer than a mark by less than this counts as older.
"""

LOOKS_MAX = 32
"""Maximum number of remembered looks, which bound the age of marks from below."""


class S3Clears:
    """Marks what was cleared in the bucket itself, so that no node's later listing takes it in.

    A mark is a small object with its own key (`S3Keys`). What is older than it, by the bucket's own clock,
    was cleared; what is newer was put there afterwards. So nodes need not agree on the time, nor outlive each
    other. A mark is deleted when a whole listing has been judged by it, some time after it was put.

    Of one bucket prefix. `pages`: lists a key prefix. `clock`: monotonic seconds.

    `mark` is thread-safe; one thread at a time may `look`.
    """

    def __init__(
        self,
        objects: S3Objects,
        keys: S3Keys,
        pages: Pages,
        settings: S3TierSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._objects = objects
        self._keys = keys
        self._pages = pages
        self._settings = settings
        self._clock = clock
        self._sessions: TenantRows[float] = TenantRows(settings.clears_max)
        self._whole: dict[bytes, float] = {}
        self._wanted: dict[bytes, None] = {}  # tenants of `whole` that were cleared explicitly
        self._own: dict[bytes, float] = {}  # whole tenants marked here and not asked for since
        self._oldest_unix_s = float("inf")
        self._looks: deque[tuple[float, float]] = deque()  # when, and the time of the newest mark then

    def mark(self, clears: Sequence[Clear], deadline: Deadline) -> None:
        """Put marks for `clears`, all of one tenant, and read them back. Raises `TierError`."""
        sessions = [clear.session for clear in clears]
        for at in range(0, len(sessions), SESSIONS_MAX):
            key = self._keys.mark(clears[0].tenant, sessions[at : at + SESSIONS_MAX], secrets.token_hex(8))
            self._put(key, deadline)
            if None in sessions:
                self._own[clears[0].tenant] = self._objects.put_at(key, deadline)

    def look(self) -> list[Clear]:
        """List the marks and return what they clear. Raises `TierError`."""
        sessions: TenantRows[float] = TenantRows(self._settings.clears_max)
        whole: dict[bytes, float] = {}
        crowded: dict[bytes, float] = {}
        oldest_unix_s, newest_unix_s = float("inf"), -float("inf")
        now_s = self._clock()
        for item in self._pages(self._keys.clears):
            at_unix_s = item.modified_unix_s
            for clear in self._keys.parse_mark(item.key):
                oldest_unix_s, newest_unix_s = min(oldest_unix_s, at_unix_s), max(newest_unix_s, at_unix_s)
                if clear.session is None:
                    whole[clear.tenant] = max(whole.get(clear.tenant, at_unix_s), at_unix_s)
                    continue
                before = sessions.get(clear.tenant, clear.session)
                lost = sessions.put(clear.tenant, clear.session, max(before or at_unix_s, at_unix_s))
                if lost is not None:  # too many: clear the largest tenant as a whole
                    crowded[lost[0]] = max(crowded.get(lost[0], lost[1]), lost[1])
        self._wanted = dict.fromkeys(whole)
        for tenant, at_unix_s in crowded.items():
            whole[tenant] = max(whole.get(tenant, at_unix_s), at_unix_s)
        self._sessions, self._whole, self._oldest_unix_s = sessions, whole, oldest_unix_s
        self._looked(now_s, newest_unix_s)
        clears = [Clear(tenant) for tenant in self._wanted]
        return clears + [
            Clear(tenant, session) for tenant in sessions.tenants() for session in sessions.names(tenant)
        ]

    @property
    def whole(self) -> dict[bytes, float]:
        """Return the tenants cleared as a whole, as of the last look, and when."""
        return dict(self._whole)

    def whole_at(self, tenant: bytes) -> float | None:
        """Return when a tenant was last cleared as a whole: as just marked here, else as the bucket lists it.

        A listing may not show the newest mark yet. Raises `TierError`.
        """
        if (own_unix_s := self._own.pop(tenant, None)) is not None:
            return own_unix_s
        return self._newest(self._pages(self._keys.clears_of(tenant)), {Clear(tenant)})

    def is_marked(self, tenant: bytes, session: bytes, put_unix_s: float, marks: Iterable[Listed]) -> bool:
        """Return whether what was put then is cleared. `marks`: the tenant's, as they are listed."""
        at_unix_s = self._newest(marks, {Clear(tenant), Clear(tenant, session)})
        return at_unix_s is not None and put_unix_s <= at_unix_s + SLACK_S

    def _newest(self, marks: Iterable[Listed], clears: set[Clear]) -> float | None:
        """Return when the newest of the marks was put that mark one of `clears`."""
        fitting = (item for item in marks if not clears.isdisjoint(self._keys.parse_mark(item.key)))
        return max((item.modified_unix_s for item in fitting), default=None)

    def latest(self, tenant: bytes) -> float:
        """Return when, as of the last look, the tenant or a session of it was last cleared; -inf: never."""
        return max((*self._sessions.values(tenant), self._whole.get(tenant, -float("inf"))))

    def is_cleared(self, tenant: bytes, session: bytes | None, put_unix_s: float) -> bool:
        """Return whether it is cleared as of the last look; `session` None: the tenant as a whole."""
        times = [self._whole.get(tenant)]
        if session is not None:
            times.append(self._sessions.get(tenant, session_of(session)))
        return any(at_unix_s is not None and put_unix_s <= at_unix_s + SLACK_S for at_unix_s in times)

    def settle(self, unsettled: Collection[bytes]) -> int:
        """Delete old marks and return how many. Raises `TierError`.

        Precondition: the last look has judged everything except the tenants in `unsettled`.
        """
        before_unix_s = self._old_unix_s()
        if self._oldest_unix_s > before_unix_s:
            return 0
        gone = 0
        for item in self._pages(self._keys.clears):
            clears = self._keys.parse_mark(item.key)
            if clears and item.modified_unix_s <= before_unix_s and clears[0].tenant not in unsettled:
                self._objects.delete(item.key, self._objects.deadline())
                gone += 1
        return gone

    def _looked(self, now_s: float, newest_unix_s: float) -> None:
        """Remember this look: marks as old as its newest one are from before now."""
        keep_s = self._settings.clears_retention_s
        while len(self._looks) > 1 and self._looks[1][0] <= now_s - keep_s:
            self._looks.popleft()
        if not self._looks or now_s - self._looks[-1][0] >= keep_s / LOOKS_MAX:
            self._looks.append((now_s, newest_unix_s))

    def _old_unix_s(self) -> float:
        """Return the time up to which marks were seen `clears_retention_s` ago."""
        now_s = self._clock()
        seen = [newest for at_s, newest in self._looks if now_s - at_s >= self._settings.clears_retention_s]
        return max(seen, default=-float("inf"))

    def _put(self, key: str, deadline: Deadline) -> None:
        self._objects.put(key, MARK, deadline, only_new=False)
        try:
            found, total = self._objects.get(key, 0, len(MARK), deadline)
        except (TierMiss, BadRecord) as error:
            raise TierError(f"mark: not there: {error}") from None
        if total != len(MARK) or not np.array_equal(found, np.frombuffer(MARK, dtype=np.uint8)):
            raise TierError("mark: other bytes were read back")
