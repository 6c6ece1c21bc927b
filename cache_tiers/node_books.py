"""What all parts of a node's cache tiers share: the lock, the books under it, and deleting for good.

The lock is held for book-keeping only, never while a medium is touched. Every record that has to go,
goes through `drop`: if the tier does not answer, the delete is owed, and the books say that its bytes are
still there, until it is paid.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from cache_tiers.directory import Directory
from cache_tiers.extent import Address, TierName
from cache_tiers.guarded_tier import GuardedTier
from cache_tiers.mover import Mover, Reach
from cache_tiers.owed import OwedDeletes
from cache_tiers.residency import Eviction
from cache_tiers.tier import BadRecord, TierError

logger = logging.getLogger("samovar.tiers")

DEBTS_A_TICK = 256


class NodeBooks:
    """`clock`: monotonic seconds. `delete_s_max`: how long one delete may take."""

    def __init__(
        self,
        guards: Mapping[TierName, GuardedTier],
        directory: Directory,
        mover: Mover,
        owed: OwedDeletes,
        *,
        reach: Reach,
        clock: Callable[[], float],
        delete_s_max: float,
    ) -> None:
        self.guards = guards
        self.directory = directory
        self.mover = mover
        self.owed = owed
        self.reach = reach
        self.clock = clock
        self.lock = threading.RLock()
        self._save_lock = threading.Lock()
        self.stores: Counter[str] = Counter()
        self.misses: Counter[str] = Counter()
        self._delete_s_max = delete_s_max
        # What the directory is told once an owed delete is paid.
        self._when_paid: dict[tuple[TierName, Address], Callable[[], None]] = {}

    def up(self) -> list[TierName]:
        """Tiers that may be read from now."""
        return [name for name, guard in self.guards.items() if guard.is_up]

    def drop(self, evictions: Iterable[Eviction], budget_s: float | None = None) -> set[TierName]:
        """Delete these; the tiers that did not do it, and owe it now. `budget_s`: for all together."""
        ends_s = None if budget_s is None else self.clock() + budget_s
        debtors: set[TierName] = set()
        for eviction in evictions:
            self.reach("dropping")
            self._count_eviction(eviction)
            left_s = self._delete_s_max if ends_s is None else ends_s - self.clock()
            if not self.delete(
                eviction.tier,
                eviction.address,
                lambda eviction=eviction: self.directory.dropped(eviction),  # type: ignore[misc]
                is_clear=eviction.reason == "cleared",
                deadline_s=min(left_s, self._delete_s_max),
            ):
                debtors.add(eviction.tier)
        return debtors

    def delete(
        self,
        tier: TierName,
        address: Address,
        when_gone: Callable[[], None],
        *,
        is_clear: bool,
        deadline_s: float | None = None,
    ) -> bool:
        """Delete a record, then `when_gone` (under the lock). False: it is owed now, and so is that."""
        try:
            if deadline_s is not None and deadline_s <= 0:
                raise TierError("no time left for it")
            self.guards[tier].delete(address, self._delete_s_max if deadline_s is None else deadline_s)
        except (TierError, BadRecord) as error:
            logger.info("%s tier owes the delete of %s: %s", tier, _prefix(address), error)
            with self.lock:
                self.owed.owe(tier, address, cleared=is_clear)
                if self.owed.owes(tier, address):  # else there was no room: it stays accounted for
                    self._when_paid[tier, address] = when_gone
            return False
        with self.lock:
            when_gone()
            self.owed.paid(tier, address)
            self._when_paid.pop((tier, address), None)
        return True

    def lost(self, address: Address, tier: TierName) -> None:
        """The tier says that this record is not there. Deleted all the same: it may just have come back."""
        with self.lock:
            eviction = self.directory.lose(address, tier)
        if eviction is not None:
            self.drop([eviction])

    def bad(self, address: Address, tier: TierName, kind: str) -> None:
        """This record is not what it should be: counted, never found again, kept for a look."""
        guard = self.guards.get(tier)
        if guard is None:
            return
        guard.count(f"bad:{kind}")
        logger.warning("%s tier: bad record %s (%s)", tier, _prefix(address), kind)
        with self.lock:
            eviction = self.directory.lose(address, tier)
        if eviction is None:  # somebody else found it first; what lies there now may be good
            return
        try:
            guard.quarantine(address, self._delete_s_max)
        except (TierError, BadRecord):
            self.drop([eviction])
            return
        with self.lock:
            self.directory.dropped(eviction)

    def pay(self) -> None:
        """Try again the deletes that are owed, of tiers that are up."""
        for name, guard in self.guards.items():
            if not guard.is_up:
                continue
            with self.lock:
                debts = list(self.owed.of(name))[:DEBTS_A_TICK]
            for address, is_clear in debts:
                with self.lock:  # what is being written is deleted by its writer
                    if self.mover.is_busy(address, name):
                        continue
                    when_gone = self._when_paid.get((name, address), _nothing)
                if not self.delete(name, address, when_gone, is_clear=is_clear):
                    break
        self.save_owed()

    def save_owed(self) -> bool:
        """Write down what is owed, if that changed. The file is written without the lock: disks hang."""
        with self._save_lock:
            with self.lock:
                text = self.owed.text()
            return self.owed.save(text)

    def check_integrity(self) -> None:
        """Raises AssertionError when the books are wrong."""
        with self.lock:
            self.directory.check_integrity()
            self.mover.check_integrity()
            self.owed.check_integrity()
            for key in self._when_paid:
                assert self.owed.owes(*key), "a debt is nowhere to be found"
        for guard in self.guards.values():
            guard.check_integrity()

    def _count_eviction(self, eviction: Eviction) -> None:
        if eviction.reason in ("room", "quota"):
            self.guards[eviction.tier].count("evicted_extents")


def _prefix(address: Address) -> str:
    """As much of a name as may be logged."""
    return address.extent_id[:4].hex()


def _nothing() -> None:
    """There is nobody to tell."""
