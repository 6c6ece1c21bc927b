"""Clears data for good: in the catalog at once, then recorded as pending, then deleted tier by tier.

A clear has to reach what the catalog holds, what is being written, what an unscanned tier holds, and what
other nodes (dead ones included) have put into a shared tier. The last is unknown here: the clear is marked
in the tier itself, and the tenant's part of it is listed and deleted.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

from samovar.cache_tiers.blocks import TIERS, BadRecord, Clear, TierError, TierName
from samovar.cache_tiers.catalog import Eviction
from samovar.cache_tiers.media import Deadline, GuardedTier, Tier
from samovar.cache_tiers.messages import Cleared
from samovar.cache_tiers.node.scan import TierScans
from samovar.cache_tiers.node.state import NodeState
from samovar.configs.sections import TierSettings

if TYPE_CHECKING:
    from samovar.cache_tiers.encryption import Keys

logger = logging.getLogger(__name__)

HEEDED_AT_ONCE = 256
"""Number of clears applied before the lock is released."""

PURGE_SHARE = 0.9
"""Share of the time left for a purge, so that a tier stops by itself and is not late, only unfinished."""

PURGE_BAD_S_MIN = 1.0
"""Time for a tier's bad records also where another tier has used up the time of the clear."""

_Pending = tuple[TierName, Clear, int | None]


class Media(Protocol):
    """`keys`: of encrypted records; None: there are none. `unopened`: tiers that this node cannot ask."""

    keys: Keys | None
    unopened: set[TierName]


class NodeClears:
    """Applies clears to all tiers. `forget` is called for every clear soon after, without the lock.

    A clear is not done before the node has started with what is unopened: it may hold what is cleared.
    """

    def __init__(
        self,
        state: NodeState,
        scans: TierScans,
        settings: TierSettings,
        forget: Callable[[Clear], None],
        media: Media,
    ) -> None:
        self._state = state
        self._keys = media.keys
        self._unopened = media.unopened
        self._scans = scans
        self._forget = forget
        self._clear_s_max = settings.load_s_max  # for all that one clear deletes
        self._under_way = 0
        self._retrying: threading.Thread | None = None
        self._stopped = threading.Event()
        scans.on_marks(self.heed)

    def clear(self, clear: Clear) -> Cleared:
        """Destroy keys, where there are any; clear in the catalog, then record it as pending, then delete."""
        state, clears = self._state, clear.each()
        ends_s = state.clock() + self._clear_s_max
        locked = self._destroy_keys(clears)
        pending: list[_Pending] = []
        with state.lock:
            self._under_way += 1
            evictions = [eviction for one in clears for eviction in self._forgotten(one, is_marked=False)]
            shared = {name for name, _, _ in self._shared()}
            # Another process's directory is nothing that this node could clear; should it become ours, its
            # scan heeds the clear.
            not_ours = state.not_ours()
            unreachable = (self._scans.unknown - shared - not_ours) | locked | self._unopened
            for name in _lasting(evictions) | self._scans.unknown | shared:
                numbers = [(name, one, state.pending.add_clear(name, one)) for one in clears]
                if any(number is None for _, _, number in numbers):
                    unreachable.add(name)  # too many clears are pending: no more can be promised
                pending += numbers
        for one in clears:
            self._forget(one)
        state.save_pending()
        unreachable |= self._mark(clears, ends_s)
        unreachable |= state.drop(evictions, budget_s=ends_s - state.clock())
        keeping = [name for name, guard in state.guards.items() if guard.tier.keeps_bad]
        unreachable |= self._purge_quarantines(keeping, clears, pending, ends_s)
        unreachable |= self._purge(clears, unreachable, ends_s)
        is_noted = self._settle(pending, unreachable | not_ours)
        if not is_noted:
            unreachable |= {eviction.tier for eviction in evictions}
        unreachable |= self._left_of(clear.tenant, is_noted=is_noted)
        is_noted &= not self._unopened  # nothing here goes on with it
        is_noted &= all(number is not None for _, _, number in pending)
        logger.info("cleared %d records of tenant %s", len(evictions), clear.tenant[:4].hex())
        return Cleared(
            extents=len({eviction.address for eviction in evictions}),
            nbytes=sum(eviction.nbytes for eviction in evictions),
            unreachable=tuple(name for name in TIERS if name in unreachable),
            is_noted=is_noted or not unreachable,
        )

    def _left_of(self, tenant: bytes, *, is_noted: bool) -> set[TierName]:
        """Return the tiers that still have something of a tenant to delete, also of earlier clears.

        What is being written is deleted by its writer, and what makes room by what needs it, if a restart
        would know of it, too.
        """
        state = self._state
        with state.lock:
            is_busy, has_failed = state.catalog.transfers.is_busy, state.pending.has_failed
            left = state.pending.cleared_of(tenant)
            return {name for name, at in left if not (is_noted and is_busy(name, at)) or has_failed(name, at)}

    def heed(self, clears: Sequence[Clear]) -> None:
        """Apply clears that other nodes have marked and this one missed, because it was down or is new."""
        for at in range(0, len(clears), HEEDED_AT_ONCE):
            self._heed(clears[at : at + HEEDED_AT_ONCE])

    def _heed(self, clears: Iterable[Clear]) -> None:
        state = self._state
        with state.lock:
            new = [one for one in clears if not state.catalog.clears.knows(one)]
            if not new:
                return
            self._under_way += 1
            evictions = [eviction for one in new for eviction in self._forgotten(one, is_marked=True)]
            shared = {name for name, _, _ in self._shared()}
            local = (_lasting(evictions) | self._scans.unknown) - shared
            pending = [(name, one, state.pending.add_clear(name, one)) for name in local for one in new]
        for one in new:
            self._forget(one)
        state.save_pending()
        unfinished = state.drop(evictions)
        # A shared tier's own listing deletes what is bad there, by the same marks.
        guards = state.guards.items()
        keeping = [name for name, guard in guards if guard.tier.keeps_bad and name not in shared]
        unfinished |= self._purge_quarantines(keeping, new, pending, state.clock() + self._clear_s_max)
        self._settle(pending, unfinished | self._scans.unknown)
        if evictions:
            logger.info("%d records are deleted that were cleared while this node was away", len(evictions))

    def _settle(self, pending: Iterable[_Pending], unfinished: set[TierName]) -> bool:
        """Settle what is deleted and save the rest as pending; return False if saving failed."""
        with self._state.lock:
            self._under_way -= 1
            for name, one, number in pending:
                if name not in unfinished and number is not None:
                    self._state.pending.settle_clear(name, one, number)
        return self._state.save_pending()

    def go_on(self) -> None:
        """Retry pending clears of shared tiers in the background."""
        if self._retrying is not None and self._retrying.is_alive():
            return
        self._purge_rest()
        shared = {name for name, _, _ in self._shared()}
        with self._state.lock:
            is_pending = any(self._state.pending.clears_of(name) for name in shared)
            for name in self._state.guards.keys() - shared - self._scans.unknown:
                self._drop_clears(name)
        if is_pending:
            self._retrying = threading.Thread(target=self._retry, name="clears", daemon=True)
            self._retrying.start()

    def join(self, seconds: float) -> None:
        """Wait for the background work."""
        if self._retrying is not None:
            self._retrying.join(seconds)

    def stop(self) -> None:
        self._stopped.set()

    def _forgotten(self, clear: Clear, *, is_marked: bool) -> list[Eviction]:
        """Clear in the catalog, under the lock; writes in flight are fenced, their deletes pending.

        So is what was evicted before: its session is not known any more, so all of the tenant's.
        """
        state = self._state
        evictions = state.catalog.clear(clear)
        self._scans.cleared(clear, is_marked=is_marked)
        for tier, address in state.catalog.transfers.unwanted(clear.tenant):
            state.pending.add(tier, address, cleared=True)
        return evictions

    def _drop_clears(self, name: TierName) -> None:
        """Drop the clears of a scanned tier without pending deletes. Requires the state's lock."""
        pending = self._state.pending
        is_unpurged = any(tier == name for tier, _ in self._state.unpurged)
        if self._under_way == 0 and pending.forgotten == 0 and not pending.of(name) and not is_unpurged:
            pending.scanned(name)

    def _destroy_keys(self, clears: Sequence[Clear]) -> set[TierName]:
        """Destroy the keys of encrypted records; return the tiers whose records may still be opened.

        Where the keys are kept it is gone on with.
        """
        if self._keys is None:
            return set()
        try:
            self._keys.destroy(clears)
        except TierError as error:
            logger.error("what was cleared can still be read: %s", error)
            return {name for name in self._state.guards if TIERS.kind(name).survives_process}
        return set()

    def _mark(self, clears: Sequence[Clear], ends_s: float) -> set[TierName]:
        """Mark the clears in shared tiers; return those that failed."""
        failed: set[TierName] = set()
        for name, guard, tier in self._shared():
            deadline = Deadline(ends_s - self._state.clock())
            try:
                guard.call(partial(tier.mark_cleared, clears, deadline), deadline)
            except (TierError, BadRecord) as error:
                logger.warning("%s tier: a clear could not be marked there yet: %s", name, error)
                failed.add(name)
        return failed

    def _purge(self, clears: Sequence[Clear], failed: set[TierName], ends_s: float) -> set[TierName]:
        """Delete a tenant's unknown records in shared tiers; return tiers where more is or may be left."""
        unfinished: set[TierName] = set()
        if clears[0].session is not None:
            return unfinished
        for name, guard, tier in self._shared():
            if name in failed:
                continue
            left_s = ends_s - self._state.clock()
            is_known = partial(self._scans.is_known, name)
            try:
                purge = partial(tier.purge, clears[0].tenant, is_known, Deadline(PURGE_SHARE * left_s))
                is_done = guard.call(purge, Deadline(left_s))
            except (TierError, BadRecord) as error:
                logger.warning("%s tier: a tenant's records are not deleted yet: %s", name, error)
                is_done = False
            if not is_done:
                unfinished.add(name)
        return unfinished

    def _retry(self) -> None:
        """Retry pending clears one after the other in a background thread, until one fails."""
        for name, guard, _ in self._shared():
            with self._state.lock:
                pending = self._state.pending.clears_of(name)
            for clear, number in pending:
                if self._stopped.is_set():
                    return
                ends_s = self._state.clock() + self._clear_s_max
                is_left = bool(self._mark([clear], ends_s) | self._purge([clear], set(), ends_s))
                if is_left or (guard.tier.keeps_bad and not self._purge_bad(name, clear.tenant, ends_s)):
                    if guard.is_up:  # one that always fails keeps none of the others
                        continue
                    break
                with self._state.lock:
                    self._state.pending.settle_clear(name, clear, number)
        self._state.save_pending()

    def _shared(self) -> list[tuple[TierName, GuardedTier, Tier]]:
        guards = self._state.guards.items()
        return [(name, guard, guard.tier) for name, guard in guards if guard.tier.is_shared]

    def _purge_quarantines(
        self, keeping: Iterable[TierName], clears: Sequence[Clear], pending: list[_Pending], ends_s: float
    ) -> set[TierName]:
        """Delete the bad records of those who were cleared, which hold their blocks too, from these tiers.

        Returns the tiers that failed. Those are gone on with, see `_purge_rest`, and are added to `pending`:
        what is bad is found again after a restart.
        """
        failed: set[TierName] = set()
        for name in keeping:
            left = deque(dict.fromkeys(clear.tenant for clear in clears))
            while left and self._purge_bad(name, left[0], ends_s):
                left.popleft()
            failed |= {name} if left else set()
            for tenant in left:
                self._state.leave_bad(name, tenant)
        with self._state.lock:
            for name in sorted(failed - {name for name, _, _ in pending}):
                pending += [(name, one, self._state.pending.add_clear(name, one)) for one in clears]
        return failed

    def _purge_bad(self, name: TierName, tenant: bytes, ends_s: float) -> bool:
        left_s = max(ends_s - self._state.clock(), PURGE_BAD_S_MIN)
        try:
            self._state.guards[name].purge_quarantine(tenant, left_s)
        except (TierError, BadRecord) as error:
            logger.warning("%s tier: bad records could not be deleted yet: %s", name, error)
            with self._state.lock:  # behind the others
                if self._state.unpurged.pop((name, tenant), "") is None:
                    self._state.unpurged[name, tenant] = None
            return False
        with self._state.lock:
            self._state.unpurged.pop((name, tenant), None)
        return True

    def _purge_rest(self) -> None:
        """Delete the bad records whose delete has failed, of each tier until one fails again."""
        with self._state.lock:
            left = list(self._state.unpurged)
        failed = {name for name, _ in left if not self._state.guards[name].is_up}
        for name, tenant in left:
            ends_s = self._state.clock() + self._clear_s_max
            if name not in failed and not self._purge_bad(name, tenant, ends_s):
                failed.add(name)


def _lasting(evictions: Iterable[Eviction]) -> set[TierName]:
    """Return the tiers for which a clear is recorded: a restart empties the others."""
    return {eviction.tier for eviction in evictions if TIERS.kind(eviction.tier).survives_process}
