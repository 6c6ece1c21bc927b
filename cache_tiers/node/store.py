"""Writes: records that replicas offer, write-behind copies, demotion of cold extents, flush.

An offer is decided at once and carried out later by workers; when they fall behind, offers are refused and
copies dropped, so that storing never slows a request down. A record is called for through `CallFor`.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from samovar.cache_tiers.blocks import (
    TIERS,
    TOP_TIER,
    Address,
    BadRecord,
    ExtentHeader,
    Placement,
    Record,
    TierError,
    TierMiss,
    TierName,
    header_bytes,
)
from samovar.cache_tiers.catalog import Transfer
from samovar.cache_tiers.messages import StoreRequest
from samovar.cache_tiers.node.state import NodeState
from samovar.cache_tiers.node.transfer import TransferRunner, verified
from samovar.cache_tiers.policy import SINK_SHARE, IdleSessions
from samovar.configs.sections import TierSettings

logger = logging.getLogger(__name__)


Ended = Callable[[bool], None]
"""Called with whether the copy is there now, from the worker's thread, without the lock."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A queued copy of an extent into `target`.

    `sinks_from`: this tier's copy is dropped when the target has it, if it was not used meanwhile.
    `is_guess`: a prefetch, not done while requests wait for a load. `if_worth`: only if its sessions are
    likely enough to resume, or there is nothing better to do. `ended`: see `Ended`.
    """

    address: Address
    target: TierName
    sinks_from: TierName | None
    last_used_s: float
    is_guess: bool = False
    if_worth: bool = False
    ended: Ended | None = None

    @property
    def key(self) -> tuple[Address, TierName]:
        return self.address, self.target


class CopyQueue:
    """Copies waiting for a worker: needed ones first, then guesses; each (extent, target) once.

    Pure; its owner holds the lock. `copies_max`: copies that may wait.
    """

    def __init__(self, copies_max: int) -> None:
        self._copies_max = copies_max
        self._needed: OrderedDict[tuple[Address, TierName], Copy] = OrderedDict()
        self._guesses: OrderedDict[tuple[Address, TierName], Copy] = OrderedDict()

    def __len__(self) -> int:
        return len(self._needed) + len(self._guesses)

    @property
    def is_full(self) -> bool:
        return len(self) >= self._copies_max

    def __contains__(self, key: tuple[Address, TierName]) -> bool:
        return key in self._needed or key in self._guesses

    def add(self, copy: Copy, *, is_urgent: bool) -> None:
        """Queue a copy, ahead of its kind if it `is_urgent`. Raises `ValueError` if full or queued."""
        if self.is_full or copy.key in self:
            raise ValueError("the copy cannot be queued")
        into = self._guesses if copy.is_guess else self._needed
        into[copy.key] = copy
        if is_urgent:
            into.move_to_end(copy.key, last=False)

    def has_next(self, *, may_guess: bool) -> bool:
        return bool(self._needed or (may_guess and self._guesses))

    def take(self, *, may_guess: bool) -> Copy | None:
        """Return the next copy; guesses only if it `may_guess`."""
        if self._needed:
            return self._needed.popitem(last=False)[1]
        if may_guess and self._guesses:
            return self._guesses.popitem(last=False)[1]
        return None

    def cancel_guess(self, address: Address, target: TierName) -> bool:
        """Cancel a guess without calling its `ended`; False if it is not waiting (any more)."""
        return self._guesses.pop((address, target), None) is not None

    def clear(self) -> None:
        self._needed.clear()
        self._guesses.clear()

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is inconsistent."""
        assert len(self) <= self._copies_max, "too many copies wait"
        assert not self._needed.keys() & self._guesses.keys(), "a copy waits twice"
        for key, copy in [*self._needed.items(), *self._guesses.items()]:
            assert key == copy.key, "a copy that waits is not known"


CallFor = Callable[[object, int], Record]
"""(source, ticket) -> the sealed record, within `store_s_max`. Blocks; raises `TierError`."""

QUIET_S = 0.1
"""So long after a fetch a load is taken to go on: of what main memory holds only a reference is fetched."""


@dataclass(frozen=True, slots=True)
class _Store:
    """An accepted offer."""

    offer: StoreRequest
    source: object
    transfer: Transfer


class NodeStores:
    """Queues and carries out stores and copies. `call_for`: see `CallFor`.

    `incarnation`: whose offers are accepted. `sessions`: what is known of the extents' owners, guarded by the
    state's lock; `session_clock`: theirs.
    """

    def __init__(
        self,
        state: NodeState,
        runner: TransferRunner,
        settings: TierSettings,
        *,
        call_for: CallFor,
        incarnation: str,
        sessions: IdleSessions,
        session_clock: Callable[[], float],
    ) -> None:
        self._state = state
        self._runner = runner
        self._call_for = call_for
        self._incarnation = incarnation
        self._sessions = sessions
        self._session_clock = session_clock
        self._copied_min = settings.policy.copied_probability_min
        self._store_queue_max = settings.store_queue_max
        self._read_s_max = settings.load_s_max
        self._stores: deque[_Store] = deque()
        self._copies = CopyQueue(settings.transfer_queue_max)
        # A lower tier takes a worker for a quarter of a second an extent, main memory for a hundredth.
        self._copying, self._copying_max = 0, max(1, settings.io_threads // 2)
        self._reserving = 0  # offers between the queue check and their place in it
        self._stopped = threading.Event()

    def __len__(self) -> int:
        return len(self._stores) + len(self._copies)

    def offer(self, offer: StoreRequest, source: object) -> str:
        """Return the outcome, see `StoreReply`. Reserves room, evicting for it, but touches no medium."""
        outcome = self._offered(offer, source)
        with self._state.lock:
            self._state.stores[outcome] += 1
        return outcome

    def copy(
        self,
        address: Address,
        target: TierName,
        *,
        sinks_from: TierName | None = None,
        is_urgent: bool = False,
        is_guess: bool = False,
        if_worth: bool = False,
        ended: Ended | None = None,
    ) -> bool:
        """Queue a copy of an extent into `target`, ahead of all others if it `is_urgent`.

        Returns False if it cannot be, is in flight already, or too much is waiting; `ended` is not called
        then.
        """
        state = self._state
        with state.lock:
            info = state.catalog.info(address)
            if info is None or target in info.tiers or target not in state.guards:
                return False
            if (address, target) in self._copies or state.catalog.transfers.is_writing(target, address):
                return False
            copy = Copy(address, target, sinks_from, info.last_used_s, is_guess, if_worth, ended)
            if if_worth and not self._is_worth(copy):
                return False
            if self._copies.is_full:
                state.stores["copy dropped:queue"] += 1
                return False
            self._copies.add(copy, is_urgent=is_urgent)
            self._state.work.notify()
            return True

    def cancel_guess(self, address: Address, target: TierName) -> bool:
        """Cancel a guess; False if it is done or being done."""
        with self._state.lock:
            return self._copies.cancel_guess(address, target)

    @property
    def has_stores(self) -> bool:
        """Return whether offered records wait."""
        return bool(self._stores)

    def copy_now(self, address: Address, target: TierName) -> bool:
        """Copy an extent into `target` in this thread; return whether it is there now."""
        return self._do_copy(Copy(address, target, None, 0.0))

    def sink(self) -> None:
        """Queue copies that demote the coldest extents of nearly full tiers to the next working tier."""
        for tier in TIERS:
            target = self._below(tier)
            if target is None or tier not in self._state.guards:
                continue
            with self._state.lock:
                cold = self._state.catalog.sinking(tier, target, SINK_SHARE)
            for address in cold:
                self.copy(address, target, sinks_from=tier, if_worth=True)

    def work(self) -> bool:
        """Carry out the next waiting task in this thread; False if none waits."""
        with self._state.lock:
            task: _Store | Copy | None = None
            if self._stores:
                task = self._stores.popleft()
            elif self._may_copy():
                task = self._copies.take(may_guess=not self._state.fetches)
                self._copying += task is not None
        if task is None:
            return False
        if isinstance(task, _Store):
            self._do_store(task)
            return True
        try:
            self._copy(task)
        finally:
            with self._state.work:
                self._copying -= 1
                self._state.work.notify()
        return True

    def _copy(self, task: Copy) -> None:
        if task.if_worth and not self._is_worth(task):
            with self._state.lock:
                self._state.stores["copy dropped:unlikely"] += 1
            return
        is_there = False
        try:
            is_there = self._do_copy(task)
        finally:
            if task.ended is not None:
                task.ended(is_there)

    def work_until_stopped(self) -> None:
        """Run a worker until it is stopped."""
        while True:
            with self._state.work:
                self._state.work.wait_for(self._is_called, QUIET_S if len(self._copies) else None)
                if self._stopped.is_set():
                    return
            try:
                self.work()
            except Exception:  # logged; one record's failure must not end the worker
                logger.exception("a store or a copy failed with an unexpected error")

    def _is_called(self) -> bool:
        if self._stopped.is_set() or self._stores:
            return True
        return self._may_copy() and self._copies.has_next(may_guess=not self._state.fetches)

    def _may_copy(self) -> bool:
        """Return whether one more copy may be made now: one at a time beside loads, and never by all workers.

        Who waits for a load or a store waits for main memory, not for a disk.
        """
        state = self._state
        is_busy = state.fetches > 0 or bool(self._stores) or state.clock() < state.fetched_s + QUIET_S
        return self._copying < (1 if is_busy else self._copying_max)

    def stop(self) -> None:
        """Stop the workers after their current task; waiting tasks are dropped."""
        with self._state.work:
            self._stopped.set()
            dropped = list(self._stores)
            self._stores.clear()
            self._copies.clear()
            self._state.work.notify_all()
        for store in dropped:
            self._runner.abort(store.transfer)

    def flush(self, deadline_s: float) -> dict[str, int]:
        """Save what only main memory holds, most recently used first, for at most `deadline_s` seconds.

        Returns extents by outcome: written, failed, left.
        """
        clock = self._state.clock
        ends_s = clock() + deadline_s
        done = {"written": 0, "failed": 0, "left": 0}
        while clock() < ends_s and self.work():
            pass
        target = self._below(TOP_TIER)
        if target is None or TOP_TIER not in self._state.guards:
            return done
        with self._state.lock:
            extents = self._state.catalog.usage(TOP_TIER).extents
            cold = self._state.catalog.sinking(TOP_TIER, target, 0.0, extents_max=max(extents, 1))
        for address in reversed(cold):
            if clock() >= ends_s:
                done["left"] += 1
                continue
            done["written" if self.copy_now(address, target) else "failed"] += 1
        return done

    def check_integrity(self) -> None:
        """Raise `AssertionError` if the queues are inconsistent."""
        with self._state.lock:
            assert len(self._stores) <= self._store_queue_max, "too many stores wait"
            self._copies.check_integrity()
            for store in self._stores:
                state = store.transfer.state
                assert state == "reserved", f"a store that waits is {state}"

    def _offered(self, offer: StoreRequest, source: object) -> str:
        state, header = self._state, offer.header
        if offer.incarnation != self._incarnation:
            return "refused:incarnation"
        if offer.nbytes != header_bytes(header.blocks, header.shape.layers) + header.payload_bytes:
            return "refused:size"
        address = header.address
        with state.lock:
            if self._stopped.is_set() or len(self._stores) + self._reserving >= self._store_queue_max:
                return "refused:queue"
            if any(tier in state.up() for tier in state.catalog.copies(address)):
                state.catalog.touch(address)
                self._copy_behind(address, header.placement)
                return "held"
            self._reserving += 1
        try:
            transfer = self._reserve(offer)
            if isinstance(transfer, str):
                return "held" if transfer == "held" else f"refused:{transfer}"
        finally:
            with state.lock:
                self._reserving -= 1
        with self._state.work:
            if not self._stopped.is_set():
                self._stores.append(_Store(offer, source, transfer))
                self._state.work.notify()
                return "taken"
        self._runner.abort(transfer)
        return "refused:queue"

    def _reserve(self, offer: StoreRequest, after: TierName | None = None) -> Transfer | str:
        """Reserve room in the first tier that has some, `placement.first` before all; else return why not.

        `after`: only tiers after it in that order.
        """
        header, reason = offer.header, "down"
        order = sorted(TIERS, key=lambda tier: (tier != header.placement.first, TIERS.index(tier)))
        if after is not None:
            order = order[order.index(after) + 1 :]
        for tier in order:
            if not header.placement.allows(tier) or tier not in self._state.guards:
                continue
            found = self._runner.reserve(
                header,
                offer.nbytes,
                "replica",
                tier,
                clear_seq=offer.clear_seq,
                recompute_s=offer.recompute_s,
            )
            if isinstance(found, Transfer):
                return found
            if found in ("held", "busy", "tombstone", "differs"):
                return found
            reason = found if found != "down" else reason
        return reason

    def _do_store(self, store: _Store) -> None:
        offer, outcome, transfer = store.offer, "", store.transfer
        called: list[tuple[Record, ExtentHeader]] = []

        def obtain() -> tuple[Record, ExtentHeader]:
            if not called:
                record = self._call_for(store.source, offer.ticket)
                called.append((record, _as_offered(record, offer)))
            return called[0]

        while True:
            try:
                stored = self._runner.run(transfer, obtain)
                outcome = "stored" if stored is not None else "failed:fenced"
                break
            except BadRecord as error:
                outcome = f"failed:{error.kind}"
                if not called:
                    logger.warning("a replica handed over a bad record: %s", error)
                    break
            except TierError as error:
                outcome = "failed:write" if called else "failed:call"
                logger.info("a store failed: %s", error)
                if not called:
                    break
            another = self._reserve(offer, after=transfer.tier)
            if isinstance(another, str):
                break
            transfer = another
        with self._state.lock:
            self._state.stores[outcome] += 1
        if outcome == "stored":
            self._copy_behind(offer.header.address, offer.header.placement)

    def _do_copy(self, copy: Copy) -> bool:
        """Copy an extent; False if it cannot be: nothing changed (or a bad source was found)."""
        state, address = self._state, copy.address
        with state.lock:
            sources = [tier for tier in state.catalog.copies(address) if state.guards[tier].is_up]
            if copy.sinks_from is not None:  # this copy has to make room, not another
                sources = [tier for tier in sources if tier == copy.sinks_from]
            pin = state.catalog.pin(address, sources[0]) if sources else None
        if pin is None:
            return False
        try:
            transfer = self._runner.reserve_copy(pin, copy.target)
            if isinstance(transfer, str):
                return transfer == "held"
            copied = self._runner.run(
                transfer,
                lambda: self._from(address, pin.tier, pin.nbytes),
                is_last=copy.sinks_from is not None,
            )
        except (TierError, BadRecord) as error:
            logger.info("a copy %s -> %s failed: %s", pin.tier, copy.target, error)
            return False
        finally:
            with state.lock:
                state.catalog.unpin(pin)
        if copied is not None and copy.sinks_from is not None:
            self._drop_source(transfer, copy, pin.tier)
        return copied is not None

    def _drop_source(self, transfer: Transfer, copy: Copy, source: TierName) -> None:
        state = self._state
        with state.lock:
            info = state.catalog.info(copy.address)
            is_cold = info is not None and info.last_used_s <= copy.last_used_s
            is_safe = info is not None and copy.target in info.tiers
            eviction = state.catalog.lose(copy.address, source) if is_cold and is_safe else None
        if eviction is not None:
            self._runner.drop_source(transfer, eviction)
        self._runner.end(transfer)

    def _from(self, address: Address, tier: TierName, nbytes: int) -> tuple[Record, ExtentHeader]:
        """Return the whole record, verified; a source found bad or gone is forgotten on the way."""
        try:
            data = self._state.guards[tier].read(address, 0, nbytes, self._read_s_max)
            return Record(data), verified(data, address, nbytes)
        except BadRecord as error:
            self._state.bad(address, tier, error.kind)
            raise
        except TierMiss:
            self._state.lost(address, tier)
            raise

    def _copy_behind(self, address: Address, placement: Placement) -> None:
        for tier in placement.write_behind:
            if placement.allows(tier):
                self.copy(address, tier, if_worth=True)

    def _is_worth(self, copy: Copy) -> bool:
        """Return whether a copy `if_worth` may be done now: it could take time and room from others."""
        state = self._state
        with state.lock:
            info = state.catalog.info(copy.address)
            if info is None:
                return True
            owners = [copy.address.tenant + session for session in info.sessions]
            if not self._sessions.are_unlikely(owners, self._session_clock(), self._copied_min):
                return True
            used = state.catalog.usage(copy.target).bytes_accounted + info.nbytes
            has_room = used <= SINK_SHARE * state.guards[copy.target].bytes_max
            return has_room and not len(self) and not state.fetches

    def _below(self, tier: TierName) -> TierName | None:
        """Return the next lower tier that is writable now."""
        for lower in TIERS[TIERS.index(tier) + 1 :]:
            guard = self._state.guards.get(lower)
            if guard is not None and guard.is_writable:
                return lower
        return None


def _as_offered(record: Record, offer: StoreRequest) -> ExtentHeader:
    """Return the record's header if all of it is verified and it is the very one that was offered."""
    header = verified(record.data, offer.header.address, offer.nbytes)
    if _essence(header) != _essence(offer.header):
        raise BadRecord("header", "not the header that was offered")
    return header


def _essence(header: ExtentHeader) -> Sequence[object]:
    return (
        header.namespace, header.tenant, header.session, header.shape, header.parent, header.first_block,
        header.keys, header.token_counts, header.checksums.tobytes(), header.placement, header.created_unix_s,
    )  # fmt: skip
