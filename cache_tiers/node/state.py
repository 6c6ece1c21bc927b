"""The shared state of a node's tiers: the lock, the accounting under it, and deletes.

The lock is held for accounting only, never while a medium is touched. Every delete goes through `drop`: if
the tier does not answer, the delete is pending, and its bytes stay accounted until it is done.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samovar.cache_tiers.blocks import (
    KEY_BYTES,
    TAG_BYTES,
    TIERS,
    Address,
    BadRecord,
    Clear,
    ExtentHeader,
    TierError,
    TierName,
)
from samovar.cache_tiers.catalog import Catalog, ClearSet, Eviction, Reach
from samovar.cache_tiers.media import GuardedTier, Syscalls, TierLate
from samovar.configs.atomic_file import atomic_write
from samovar.configs.json_text import parse_json
from samovar.configs.sections import TIER_NAME

logger = logging.getLogger(__name__)

BAD = ".bad"


def put_aside(path: Path) -> Path | None:
    """Rename an unreadable file to `.bad` (mode 0600, replacing an older one); return the new path.

    It is kept for inspection, and out of the way of the next start. None if it cannot be renamed; never
    raises. A directory, link or pipe is renamed as it is: only a file of ours gets another mode.
    """
    bad = path.with_suffix(BAD)
    try:
        path.rename(bad)
    except OSError as error:
        logger.error("%s cannot be put aside: %s", path.name, error.strerror)
        return None
    with suppress(OSError):  # not a file, or not ours: its mode is none of our business
        fd = os.open(bad, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            os.fchmod(fd, 0o600)
        finally:
            os.close(fd)
    return bad


VERSION = 1


@dataclass(slots=True)
class _Delete:
    """A pending delete. `is_cleared`: it is written down. `when_gone`: tells the catalog."""

    is_cleared: bool
    when_gone: Callable[[], None] | None


class PendingDeletes:
    """Deletes that a tier has not done yet, because it did not answer or was not scanned.

    Cleared data must not return with the tier or after a restart: such clears are written down (JSON, never
    pickle) before the first record is deleted, and the deletes that failed before the clear is answered.
    Other deletes, of evicted records, are remembered in this process only. Not thread-safe. At most
    `deletes_max` deletes, and as many clears per tier. `path`: file of the clears; None: not written. A file
    that cannot be read is put aside (`.bad`) and ignored: see `read_failed`.
    """

    def __init__(self, path: Path | None, deletes_max: int, calls: Syscalls | None = None) -> None:
        self._path = path
        self._calls = calls or Syscalls()
        self._deletes_max = deletes_max
        self._deletes: dict[tuple[TierName, Address], _Delete] = {}
        self._clears = {tier: ClearSet(deletes_max) for tier in TIERS}
        self._elsewhere: dict[str, list[list[Any]]] = {"deletes": [], "clears": []}
        """Rows of tiers that this process was not given: they wait, as written, until it is given them."""
        self._written: str | None = ""  # None: not known
        self.not_ours: frozenset[TierName] = frozenset()
        """Tiers whose directory, where this is kept, is waited for: their clears are kept here until then."""
        self.forgotten = 0
        """Deletes without room: their records stay until the next start's scan."""
        self.read_failed = False
        if path is not None:
            self._load(path)

    def open(self, path: Path) -> None:
        """Keep this in `path` from now on, and take in what its former owner has written down there."""
        former = PendingDeletes(path, self._deletes_max, self._calls)
        for tier, address in former._deletes:
            self.add(tier, address, cleared=True)
        for tier in TIERS:
            for clear in former._clears[tier]:
                self.add_clear(tier, clear)
        for what, rows in former._elsewhere.items():
            self._elsewhere[what] += rows
        self._path, self._written, self.not_ours = path, former._written, frozenset()
        self.read_failed |= former.read_failed

    def __len__(self) -> int:
        return len(self._deletes) + sum(map(len, self._clears.values()))

    def add(
        self,
        tier: TierName,
        address: Address,
        *,
        cleared: bool,
        when_gone: Callable[[], None] | None = None,
    ) -> None:
        """Add a delete, behind all others: one that always fails keeps none from being tried.

        `cleared`: it was cleared; otherwise it merely takes up room.
        """
        delete = self._deletes.pop((tier, address), None)
        if delete is None and len(self._deletes) >= self._deletes_max and not self._make_room(cleared):
            self.forgotten += 1  # the bytes of its record stay accounted
        elif delete is None:
            self._deletes[tier, address] = _Delete(cleared, when_gone)
        else:
            delete.is_cleared |= cleared
            delete.when_gone = when_gone or delete.when_gone
            self._deletes[tier, address] = delete

    def add_clear(self, tier: TierName, clear: Clear) -> int | None:
        """Add a clear of `tier`: what its scan finds of it is deleted.

        Returns the number for `settle_clear`; None: no room.
        """
        number = self._clears[tier].add(clear)
        self.forgotten += number is None
        return number

    def settle_clear(self, tier: TierName, clear: Clear, number: int) -> None:
        """Settle a clear of which nothing is left; no effect if it was cleared again since."""
        self._clears[tier].discard(clear, number)

    def clears_of(self, tier: TierName) -> list[tuple[Clear, int]]:
        """Return the pending clears of `tier`, with the numbers for `settle_clear`."""
        return [(clear, self._clears[tier].number(clear)) for clear in self._clears[tier]]

    def has(self, tier: TierName, address: Address) -> bool:
        return (tier, address) in self._deletes

    def has_failed(self, tier: TierName, address: Address) -> bool:
        """Return whether a delete was tried, and is to be tried again."""
        delete = self._deletes.get((tier, address))
        return delete is not None and delete.when_gone is not None

    def is_cleared(self, tier: TierName, header: ExtentHeader) -> bool:
        """Return whether an extent found by the scan of `tier` was cleared."""
        return self._clears[tier].covers(header.tenant, header.session)

    def of(self, tier: TierName) -> list[Address]:
        """Return a tier's pending deletes, oldest first."""
        return [address for name, address in self._deletes if name == tier]

    def cleared_of(self, tenant: bytes) -> list[tuple[TierName, Address]]:
        """Return the pending deletes of what was cleared of a tenant."""
        return [key for key, one in self._deletes.items() if one.is_cleared and key[1].tenant == tenant]

    def settle(self, tier: TierName, address: Address) -> None:
        """Settle a delete and tell the catalog; no effect if it is not pending."""
        delete = self._deletes.pop((tier, address), None)
        if delete is not None and delete.when_gone is not None:
            delete.when_gone()

    def scanned(self, tier: TierName) -> None:
        """Drop the clears of `tier`: all that it holds is known now."""
        self._clears[tier] = ClearSet(self._deletes_max)

    def save(self, text: str) -> bool:
        """Write `text` to disk if it changed; return False on failure.

        Does not touch the deletes, so it needs no lock on them; one call at a time.
        """
        if self._path is None:
            return not text
        if text == self._written:
            return True
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            atomic_write(self._path, text.encode("ascii"), calls=self._calls)
        except OSError as error:
            logger.error("pending deletes could not be saved: %s", error)
            self._written = None  # the new text may be there, and not be flushed
            return False
        self._written = text
        return True

    def check_integrity(self) -> None:
        """Raise `AssertionError` if the accounting is inconsistent."""
        assert len(self._deletes) <= self._deletes_max, "too many pending deletes"
        for clears in self._clears.values():
            clears.check_integrity()

    def _make_room(self, cleared: bool) -> bool:
        """Make room for a clear by giving up a delete that only takes up room."""
        if not cleared:
            return False
        for name, delete in self._deletes.items():
            if not delete.is_cleared:
                del self._deletes[name]
                self.forgotten += 1
                return True
        return False

    def text(self) -> str:
        """Return the cleared data that is still there, as it is written down."""
        deletes = [
            [tier, address.tenant.hex(), address.namespace.hex(), address.extent_id.hex()]
            for (tier, address), delete in self._deletes.items()
            if delete.is_cleared
        ]
        clears = [
            [tier, clear.tenant.hex(), None if clear.session is None else clear.session.hex()]
            for tier, clears_of_tier in self._clears.items()
            if tier not in self.not_ours
            for clear in clears_of_tier
        ]
        deletes = sorted(deletes) + self._elsewhere["deletes"]  # in no order, so that no retry rewrites them
        clears += self._elsewhere["clears"]
        if not deletes and not clears:
            return ""
        return json.dumps({"version": VERSION, "deletes": deletes, "clears": clears})

    def _load(self, path: Path) -> None:
        try:
            text = path.read_text(encoding="ascii")
            if not text:
                return
            self._parse(parse_json(text))
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            logger.error("saved pending deletes cannot be read (%s): the file is put aside", error)
            self._deletes, self.read_failed = {}, True
            self._elsewhere = {"deletes": [], "clears": []}
            for tier in TIERS:
                self.scanned(tier)
            put_aside(path)
            return
        self._written = text

    def _parse(self, document: Any) -> None:
        """Parse the document. Raises `ValueError` for anything but what `text` writes."""
        if not isinstance(document, dict) or document.get("version") != VERSION:
            raise ValueError("not a valid list of pending deletes")
        rows, clears = document.get("deletes"), document.get("clears")
        if not isinstance(rows, list) or not isinstance(clears, list):
            raise ValueError("a list is missing")
        for row in self._here(rows, "deletes"):
            tier, tenant, namespace, extent_id = _row(row, 4)
            address = Address(
                _digest(tenant, TAG_BYTES), _digest(namespace, KEY_BYTES), _digest(extent_id, KEY_BYTES)
            )
            self._deletes[_tier(tier), address] = _Delete(True, None)
        for row in self._here(clears, "clears"):
            tier, tenant, session = _row(row, 3)
            clear = Clear(
                _digest(tenant, TAG_BYTES), None if session is None else _digest(session, TAG_BYTES)
            )
            self.add_clear(_tier(tier), clear)

    def _here(self, rows: list[Any], kind: str) -> Iterator[Any]:
        """Yield the rows but those of a tier that may have a name, and is not among this process' tiers."""
        for row in rows:
            name = row[0] if isinstance(row, list) and row else None
            waits = isinstance(name, str) and re.fullmatch(TIER_NAME, name) and name not in TIERS
            if waits and len(self._elsewhere[kind]) < self._deletes_max:
                self._elsewhere[kind].append(row)
            else:
                yield row


def _row(row: Any, length: int) -> list[Any]:
    if not isinstance(row, list) or len(row) != length:
        raise ValueError("a row of another length")
    return row


def _tier(name: Any) -> TierName:
    if name not in TIERS:
        raise ValueError("not a known tier")
    found: TierName = name
    return found


def _digest(text: Any, length: int) -> bytes:
    if not isinstance(text, str) or len(text) != 2 * length:
        raise ValueError("a digest of another length")
    return bytes.fromhex(text)


DELETES_A_TICK = 256
UNPURGED_MAX = 10_000


class NodeState:
    """Guards, catalog and pending deletes of one node, with their lock.

    `clock`: monotonic seconds. `delete_s_max`: how long one delete may take. `late_pending_path`: file of
    the pending deletes in a directory that is waited for.
    """

    def __init__(
        self,
        guards: Mapping[TierName, GuardedTier],
        catalog: Catalog,
        pending: PendingDeletes,
        *,
        reach: Reach,
        clock: Callable[[], float],
        delete_s_max: float,
        late_pending_path: Path | None = None,
    ) -> None:
        self.guards = guards
        self.catalog = catalog
        self.pending = pending
        self.reach = reach
        self.clock = clock
        self.lock = threading.RLock()
        self.work = threading.Condition(self.lock)
        """Notified when a worker of `NodeStores` may have something to do."""
        self.fetches = 0
        """Loads of replicas in flight: as long as there are any, no guess is begun."""
        self.fetched_s = -math.inf  # when the latest fetch ended
        self._save_lock = threading.Lock()
        self.stores: Counter[str] = Counter()
        self.misses: Counter[str] = Counter()
        self.unpurged: dict[tuple[TierName, bytes], None] = {}
        """Tiers and tenants whose bad records are still to be deleted: `NodeClears` goes on with them."""
        self._deleting: set[tuple[TierName, Address]] = set()
        self._delete_s_max = delete_s_max
        self._late_pending_path = late_pending_path
        self.pending.not_ours = self.not_ours()

    def not_ours(self) -> frozenset[TierName]:
        """Return the tiers whose medium another process holds."""
        return frozenset(name for name, guard in self.guards.items() if guard.tier.why_not_ours())

    def taken(self) -> None:
        """Take in what is pending in a directory that has become ours, before it is scanned."""
        with self._save_lock, self.lock:  # else a text of before is written over what is taken in
            if self._late_pending_path is not None:
                self.pending.open(self._late_pending_path)
                self._late_pending_path = None
        self.save_pending()

    def up(self) -> list[TierName]:
        """Return the tiers that may be read from now."""
        return [name for name, guard in self.guards.items() if guard.is_up]

    def drop(self, evictions: Iterable[Eviction], budget_s: float | None = None) -> set[TierName]:
        """Delete evicted records; return the tiers where some are pending. `budget_s`: for all together."""
        ends_s = None if budget_s is None else self.clock() + budget_s
        unfinished: set[TierName] = set()
        for eviction in evictions:
            with self.lock:
                if not self._is_dropping(eviction.tier, eviction.address):
                    continue  # it was deleted for this transfer before, and may be stored again
            self.reach("dropping")
            self._count_eviction(eviction)
            left_s = self._delete_s_max if ends_s is None else ends_s - self.clock()
            if eviction.unused_s and self.guards[eviction.tier].tier.is_shared:
                self._expire(eviction, min(left_s, self._delete_s_max))
            elif not self.delete(
                eviction.tier,
                eviction.address,
                lambda eviction=eviction: self.catalog.dropped(eviction),  # type: ignore[misc]
                is_clear=eviction.reason == "cleared",
                deadline_s=min(left_s, self._delete_s_max),
            ):
                unfinished.add(eviction.tier)
        return unfinished

    def delete(
        self,
        tier: TierName,
        address: Address,
        when_gone: Callable[[], None] | None = None,
        *,
        is_clear: bool = False,
        deadline_s: float | None = None,
    ) -> bool:
        """Delete a record, then call `when_gone` (under the lock); False: both are pending.

        Without `when_gone` it is one that is pending, and is left alone if it is not any more. A record is
        deleted by one thread at a time, and not while it is written: else a delete could end after another
        one has let the address be stored again.
        """
        is_late = False

        def ended() -> None:
            with self.lock:
                self._deleting.discard((tier, address))

        with self.lock:
            if when_gone is None and not self._is_due(tier, address):
                return not self.pending.has(tier, address)
            if (tier, address) in self._deleting:
                self.pending.add(tier, address, cleared=is_clear, when_gone=when_gone)
                return False
            self._deleting.add((tier, address))
        is_gone = False
        try:
            if deadline_s is not None and deadline_s <= 0:
                raise TierError("no time left for it")
            left_s = self._delete_s_max if deadline_s is None else deadline_s
            self.guards[tier].delete(address, left_s, when_late=ended)
            is_gone = True
        except (TierError, BadRecord) as error:
            is_late = isinstance(error, TierLate)  # until it has ended, nothing else is to be there
            logger.info("%s tier: the delete of %s is pending: %s", tier, _prefix(address), error)
        finally:
            with self.lock:
                if not is_late:
                    ended()
                if not is_gone:
                    self.pending.add(tier, address, cleared=is_clear, when_gone=when_gone)
                else:
                    if when_gone is not None:
                        when_gone()
                    self.pending.settle(tier, address)
        return is_gone

    def _expire(self, eviction: Eviction, left_s: float) -> None:
        """Forget a record of a shared tier, and delete it there unless another node has used it since.

        If that fails it is not pending: it is taken in again by a rescan, and expires again.
        """

        def over() -> None:
            with self.lock:
                self.catalog.dropped(eviction)

        guard, address = self.guards[eviction.tier], eviction.address
        try:
            if left_s <= 0:
                raise TierError("no time left for it")
            guard.delete(address, left_s, when_late=over, unused_s=eviction.unused_s)
        except TierLate:
            return  # `over` is called when it ends: a delete beside it could hit what is stored after that
        except (TierError, BadRecord) as error:
            logger.info("%s tier: %s has expired and may be there: %s", guard.name, _prefix(address), error)
        over()

    def lost(self, address: Address, tier: TierName, budget_s: float | None = None) -> None:
        """Handle a record missing from its tier; deletes it anyway, as it may just have come back."""
        with self.lock:
            eviction = self.catalog.lose(address, tier)
        if eviction is not None:
            self.drop([eviction], budget_s)

    def bad(self, address: Address, tier: TierName, kind: str, budget_s: float | None = None) -> None:
        """Handle a bad record: count it, never find it again, keep it for inspection.

        `budget_s`: how long the caller waits for the tier; what is not done by then is pending, or goes on.
        """
        guard = self.guards.get(tier)
        if guard is None:
            return
        guard.count(f"bad:{kind}")
        logger.warning("%s tier: bad record %s (%s)", tier, _prefix(address), kind)
        with self.lock:
            eviction, clears = self.catalog.lose(address, tier), self.catalog.clears.seq
        if eviction is None:  # already handled; what lies there now may be good
            return
        most_s = self._delete_s_max if budget_s is None else min(budget_s, self._delete_s_max)
        ends_s = self.clock() + most_s

        def undo() -> None:
            self._purge_again(guard, address, clears, ends_s)
            self.drop([eviction], ends_s - self.clock())

        try:
            if most_s <= 0:
                raise TierError("no time left for it")
            guard.quarantine(address, most_s, when_late=undo)
        except TierLate:
            return  # `undo` runs when it ends: a delete beside it could hit what is stored after that
        except (TierError, BadRecord):
            undo()
            return
        if not self._purge_again(guard, address, clears, ends_s):
            self.drop([eviction], ends_s - self.clock())
            return
        with self.lock:
            self.catalog.dropped(eviction)

    def _purge_again(self, guard: GuardedTier, address: Address, clears: int, ends_s: float) -> bool:
        """Delete bad records if there was a clear since, which did not know of all; False: it goes on.

        Of a disk also after a restart: the delete of `address` takes what is bad there, and is written down.
        """
        if self.catalog.clears.seq == clears or not guard.tier.keeps_bad:
            return True
        left_s = ends_s - self.clock()
        try:
            if left_s <= 0:
                raise TierError("no time left for it")
            guard.purge_quarantine(address.tenant, left_s)
        except (TierError, BadRecord):
            self.leave_bad(guard.name, address.tenant)
            with self.lock:
                self.pending.add(guard.name, address, cleared=True)
            return False
        return True

    def leave_bad(self, tier: TierName, tenant: bytes) -> None:
        """Remember that bad records of a tenant are still to be deleted; without room it is counted."""
        with self.lock:
            if len(self.unpurged) < UNPURGED_MAX:
                self.unpurged[tier, tenant] = None
            else:
                self.pending.forgotten += 1

    def retry_deletes(self) -> None:
        """Retry the pending deletes of tiers that are up."""
        for name, guard in self.guards.items():
            if not guard.is_up:
                continue
            with self.lock:
                addresses = self.pending.of(name)[:DELETES_A_TICK]
            for address in addresses:
                with self.lock:
                    is_due = self._is_due(name, address)
                if is_due and not self.delete(name, address):
                    break
        self.save_pending()

    def _is_dropping(self, tier: TierName, address: Address) -> bool:
        transfers = self.catalog.transfers
        return transfers.is_busy(tier, address) and not transfers.is_writing(tier, address)

    def _is_due(self, tier: TierName, address: Address) -> bool:
        """Return whether a delete is pending that no one is at: what is written is deleted by its writer."""
        is_others = (tier, address) in self._deleting or self.catalog.transfers.is_writing(tier, address)
        return self.pending.has(tier, address) and not is_others

    def save_pending(self) -> bool:
        """Write down what is pending, if it changed; without the lock, because disks hang."""
        with self._save_lock:
            with self.lock:
                text = self.pending.text()
            return self.pending.save(text)

    def check_integrity(self) -> None:
        """Raise `AssertionError` if the accounting is inconsistent."""
        with self.lock:
            self.catalog.check_integrity()
            self.pending.check_integrity()
            assert self.fetches >= 0, f"{self.fetches} fetches"
        for guard in self.guards.values():
            guard.check_integrity()

    def _count_eviction(self, eviction: Eviction) -> None:
        if eviction.reason in ("room", "quota"):
            self.guards[eviction.tier].count("evicted_extents")


def _prefix(address: Address) -> str:
    """Return as much of an extent's name as may be logged."""
    return address.extent_id[:4].hex()
