"""What takes a tier's bytes: copies held, ranked by value; transfers into it, deletes under way, pins of
reads.

A place (tier, extent) is claimed by at most one transfer or delete, and each has a generation that is never
used again: a late report finds that its claim has ended and changes nothing. The accounting of a tier knows
nothing of chains; the caller says which copies are pinned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from samovar.cache_tiers.blocks import TIERS, Address, TierName
from samovar.cache_tiers.catalog.index import HeldCopy, HeldExtent
from samovar.cache_tiers.catalog.types import Eviction, EvictReason, Pin, TierUsage
from samovar.cache_tiers.forecast import SessionKey
from samovar.cache_tiers.policy import IdleSessions, Residence, ResidencyPolicy, ValueQueue
from samovar.configs.sections import PolicySettings


class Ledger:
    """Byte counts of one tier of `budget` bytes: held, reserved, evicted but not yet deleted; per tenant.

    Pure arithmetic. A reservation that evicts deletes its victims before it writes, so the two are never
    in the tier together: `promised` is what would otherwise be counted twice.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.held = 0
        self.reserved = 0
        self.dropping = 0
        self.promised = 0
        self.tenants: Counter[bytes] = Counter()  # tenant -> held + reserved

    @property
    def accounted(self) -> int:
        """Return an upper bound of the bytes in the tier now."""
        return self.held + self.reserved + self.dropping

    @property
    def charged(self) -> int:
        """Return the most bytes that can be in the tier if every reservation is used as agreed."""
        return self.accounted - self.promised

    def reserve(self, tenant: bytes, nbytes: int, victims_bytes: int) -> None:
        self.reserved += nbytes
        self.promised += min(nbytes, victims_bytes)
        self.tenants[tenant] += nbytes

    def victim_dropped(self, nbytes: int, before: int, after: int) -> None:
        """Record that of a live reservation's victims, `before` bytes were undeleted and now `after` are.

        `nbytes`: size of that reservation.
        """
        self.promised += min(nbytes, after) - min(nbytes, before)

    def end(self, tenant: bytes, nbytes: int, victims_bytes: int, *, is_held: bool) -> None:
        """End a reservation of `nbytes`: it became a copy, or was given back.

        `victims_bytes`: bytes of its victims that are not deleted yet.
        """
        self.reserved -= nbytes
        self.promised -= min(nbytes, victims_bytes)
        if is_held:
            self.held += nbytes
        else:
            self._less(tenant, nbytes)

    def adopt(self, tenant: bytes, nbytes: int) -> None:
        self.held += nbytes
        self.tenants[tenant] += nbytes

    def evict(self, tenant: bytes, nbytes: int) -> None:
        self.held -= nbytes
        self.dropping += nbytes
        self._less(tenant, nbytes)

    def _less(self, tenant: bytes, nbytes: int) -> None:
        self.tenants[tenant] -= nbytes
        if not self.tenants[tenant]:
            del self.tenants[tenant]

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is wrong."""
        for name in ("held", "reserved", "dropping", "promised"):
            assert getattr(self, name) >= 0, f"{name} is {getattr(self, name)}"
        assert self.held + self.reserved <= self.budget, "more is held and reserved than the budget allows"
        assert self.held + self.reserved == self.tenants.total(), "the tenants' bytes are not the tier's"
        assert all(nbytes > 0 for nbytes in self.tenants.values()), "a tenant without bytes is remembered"


class TierAccounting:
    """Budget, copies and victims of one tier. `sessions`: the copies' owners, see `HeldCopy.owners`."""

    def __init__(
        self,
        tier: TierName,
        budget: int,
        policy: ResidencyPolicy,
        sessions: IdleSessions,
        settings: PolicySettings,
    ) -> None:
        self.tier = tier
        self.ledger = Ledger(budget)
        self._policy = policy
        self._sessions = sessions
        self._rerank_s = settings.rerank_s
        self._queue = self._new_queue()
        self._tenant_queues: dict[bytes, ValueQueue[HeldCopy]] = {}
        self._residence = Residence(settings.horizon_s_min, settings.residence_s_max)
        self._blocks = 0
        self._tokens = 0

    def usage(self) -> TierUsage:
        return TierUsage(self.ledger.accounted, len(self._queue), self._blocks, self._tokens)

    def add(self, copy: HeldCopy) -> None:
        """Add a committed copy. Its bytes are in the ledger already."""
        for queue in (self._queue, self._queue_of(copy)):
            queue.add(copy)
        self._blocks += copy.extent.blocks
        self._tokens += copy.extent.tokens

    def evict(self, copy: HeldCopy, now_s: float) -> None:
        """Remove a copy from those held; its bytes count until they are deleted."""
        tenant = copy.extent.address.tenant
        self._queue.discard(copy)
        self._tenant_queues[tenant].discard(copy)
        if not len(self._tenant_queues[tenant]):
            del self._tenant_queues[tenant]
        self._blocks -= copy.extent.blocks
        self._tokens -= copy.extent.tokens
        self.ledger.evict(tenant, copy.nbytes)
        self._residence.went(copy.nbytes, now_s)

    def requeue(self, copy: HeldCopy) -> None:
        """Re-queue a copy whose sessions changed, or that became clean or is clean no longer."""
        for queue in (self._queue, self._queue_of(copy)):
            queue.requeue(copy)

    def changed(self, session: SessionKey, tenant: bytes) -> None:
        """Tell the queues that what is known about a session changed."""
        self._queue.changed(session)
        if tenant in self._tenant_queues:
            self._tenant_queues[tenant].changed(session)

    def horizon_s(self, now_s: float) -> float:
        """Return how far ahead this tier looks: the residence time of what it holds."""
        return self._residence.horizon_s(self.ledger.held, now_s)

    def make_room(
        self,
        tenant: bytes,
        nbytes: int,
        tenant_bytes_max: int,
        now_s: float,
        may_go: Callable[[HeldCopy], bool],
        *,
        is_there: bool = False,
    ) -> tuple[list[HeldCopy], list[HeldCopy]] | Literal["quota", "full"]:
        """Choose the victims for `nbytes` of `tenant`: (its own over its share, others). Changes nothing.

        `is_there`: the record is in the tier already, so only the budget counts, not pending deletes.
        O((victims + those that `may_go` rejects) log n), and occasionally a scan of all sessions.
        """
        own: list[HeldCopy] | None = []
        over = self.ledger.tenants[tenant] + nbytes - tenant_bytes_max
        if over > 0 and tenant_bytes_max < self.ledger.budget:
            queue = self._tenant_queues.get(tenant)
            own = self._choose(queue, over, now_s, may_go) if queue is not None else None
        if own is None:
            return "quota"
        in_use = self.ledger.held + self.ledger.reserved if is_there else self.ledger.charged
        short = in_use + nbytes - self.ledger.budget - sum(copy.nbytes for copy in own)
        others: list[HeldCopy] | None = []
        if short > 0:
            gone = set(own)
            others = self._choose(self._queue, short, now_s, lambda copy: copy not in gone and may_go(copy))
        return "full" if others is None else (own, others)

    def _choose(
        self, queue: ValueQueue[HeldCopy], nbytes: int, now_s: float, may_go: Callable[[HeldCopy], bool]
    ) -> list[HeldCopy] | None:
        """Return a queue's first copies to evict, `nbytes` or more; None if too few may go."""
        horizon_s = self.horizon_s(now_s)
        taken: list[HeldCopy] = []
        chosen: list[HeldCopy] = []
        freed = 0
        try:
            while freed < nbytes:
                copy = queue.take(now_s, horizon_s)
                if copy is None:
                    return None
                taken.append(copy)
                if may_go(copy):
                    chosen.append(copy)
                    freed += copy.nbytes
        finally:
            for copy in taken:
                queue.add(copy)
        return chosen

    def order(self, copies: Sequence[HeldCopy], now_s: float) -> list[HeldCopy]:
        """Return any copies, held here or not, in eviction order (first to go first)."""
        return self._queue.order(copies, now_s, self.horizon_s(now_s))

    def all_in_order(self, now_s: float) -> list[HeldCopy]:
        """Return all copies in eviction order. Scans everything."""
        return self.order(list(self._queue), now_s)

    def coldest(self, used_share: float, copies_max: int, now_s: float) -> list[HeldCopy]:
        """Return at most `copies_max` of what would be evicted first, to use `used_share` of the budget.

        Where room will soon have to be made, re-rank a part of many copies, so that a store need not.
        """
        nbytes = self.ledger.held + self.ledger.reserved - int(used_share * self.ledger.budget)
        found: list[HeldCopy] = []
        horizon_s = self.horizon_s(now_s)
        if nbytes > 0:
            self._queue.refresh(now_s, horizon_s)
        while nbytes > 0 and len(found) < copies_max:
            copy = self._queue.take(now_s, horizon_s)
            if copy is None:
                break
            found.append(copy)
            nbytes -= copy.nbytes
        for copy in found:
            self._queue.add(copy)
        return found

    def check_integrity(self, copies: Collection[HeldCopy]) -> None:
        """Raise `AssertionError` unless the books match exactly these copies."""
        self.ledger.check_integrity()
        self._queue.check_integrity(copies)
        assert self.ledger.held == sum(copy.nbytes for copy in copies), f"{self.tier}: bytes held are wrong"
        assert self._blocks == sum(copy.extent.blocks for copy in copies), f"{self.tier}: blocks are wrong"
        assert self._tokens == sum(copy.extent.tokens for copy in copies), f"{self.tier}: tokens are wrong"
        tenants = {copy.extent.address.tenant for copy in copies}
        assert self._tenant_queues.keys() == tenants, f"{self.tier}: queues of other tenants than those held"
        for tenant, queue in self._tenant_queues.items():
            queue.check_integrity([copy for copy in copies if copy.extent.address.tenant == tenant])

    def _queue_of(self, copy: HeldCopy) -> ValueQueue[HeldCopy]:
        tenant = copy.extent.address.tenant
        if tenant not in self._tenant_queues:
            self._tenant_queues[tenant] = self._new_queue()
        return self._tenant_queues[tenant]

    def _new_queue(self) -> ValueQueue[HeldCopy]:
        return ValueQueue(self._sessions, self._policy, self._rerank_s)


State = Literal["reserved", "copying", "verified", "committed", "dropping", "done", "failed"]
Source = TierName | Literal["replica", "peer"]
Place = tuple[TierName, Address]

NEXT: dict[State, tuple[State, ...]] = {
    "reserved": ("copying", "failed"),
    "copying": ("verified", "failed"),
    "verified": ("committed", "failed"),
    "committed": ("dropping", "done"),
    "dropping": ("done",),
    "done": (),
    "failed": (),
}

Reach = Callable[[str], None]
"""Called with `planned` (asked for) and then every state reached, before the next step.

A fault point: may not return."""


def no_fault(_state: str) -> None:
    """Ignore the state: the `Reach` of a node without fault injection."""


@dataclass(slots=True, eq=False)
class Transfer:
    """One extent on its way into `tier`, with room for its record there. Changed only by its table.

    First delete all `victims` (report each to `Catalog.dropped`), then write: in that order the tier never
    exceeds its budget. Its room is a copy's once it is committed; if it fails, it is free again when nothing
    of the record is left there (`Catalog.abandon`).
    """

    generation: int
    source: Source
    tier: TierName
    extent: HeldExtent
    nbytes: int
    victims: tuple[Eviction, ...] = ()
    state: State = "reserved"
    is_fenced: bool = False  # its extent was forgotten: must not be committed
    victims_bytes: int = 0  # of the victims that are not deleted yet

    @property
    def address(self) -> Address:
        return self.extent.address


class StaleTransfer(Exception):
    """The transfer is over: what it copied must not be published."""


@dataclass(frozen=True, slots=True)
class _Drop:
    """A record to delete, and the transfer that needs its room."""

    eviction: Eviction
    transfer: Transfer | None


class TransferTable:
    """All claims of a node's tiers, and their generations; at most `transfers_max` transfers at a time.

    Keeps the tiers' ledgers in step. Pure bookkeeping without a lock: the holder of a `Transfer` moves the
    bytes.
    """

    def __init__(self, ledgers: Mapping[TierName, Ledger], transfers_max: int) -> None:
        self._ledgers = ledgers
        self._transfers_max = transfers_max
        self._generation = 0
        self._claims: dict[Place, Transfer | _Drop] = {}
        self._under_way: set[Transfer] = set()
        self._pins: Counter[int] = Counter()  # generation of the copy -> readers
        self.reached: Counter[str] = Counter()
        """`"cpu>nvme:committed"` -> how many transfers got there; `planned`: were asked for."""

    def __len__(self) -> int:
        return len(self._under_way)

    @property
    def is_full(self) -> bool:
        return len(self) >= self._transfers_max

    def unwanted(self, tenant: bytes) -> list[Place]:
        """Return where a tenant has what its fenced transfers leave, or what was evicted, not by a clear."""
        return [
            place
            for place, claim in self._claims.items()
            if place[1].tenant == tenant
            and (claim.is_fenced if isinstance(claim, Transfer) else claim.eviction.reason != "cleared")
        ]

    def into_tiers(self, extent: HeldExtent) -> list[Transfer]:
        """Return the transfers of an extent that hold room and are not fenced."""
        claims = (self._claims.get((tier, extent.address)) for tier in TIERS)
        return [claim for claim in claims if isinstance(claim, Transfer) and not claim.is_fenced]

    def is_busy(self, tier: TierName, address: Address) -> bool:
        """Return whether the record is being moved into, or deleted from, this tier."""
        return (tier, address) in self._claims

    def is_writing(self, tier: TierName, address: Address) -> bool:
        """Return whether a transfer that is not over moves the record into this tier."""
        claim = self._claims.get((tier, address))
        return isinstance(claim, Transfer) and claim in self._under_way

    def next_generation(self) -> int:
        self._generation += 1
        return self._generation

    def reserve(self, transfer: Transfer, victims: tuple[Eviction, ...]) -> None:
        """Add a transfer. Its victims were dropped for it before."""
        transfer.victims = victims
        transfer.victims_bytes = sum(victim.nbytes for victim in victims)
        self._claims[transfer.tier, transfer.address] = transfer
        self._under_way.add(transfer)
        self._ledgers[transfer.tier].reserve(transfer.address.tenant, transfer.nbytes, transfer.victims_bytes)
        self._count(transfer.source, transfer.tier, "planned", "reserved")

    def refused(self, source: Source, tier: TierName) -> None:
        """Count a transfer that was asked for, and got no room."""
        self._count(source, tier, "planned", "failed")

    def advance(self, transfer: Transfer, state: State) -> None:
        """Enter the next state. Raises `StaleTransfer` if it is over, `ValueError` if that is not next."""
        if transfer not in self._under_way:
            raise StaleTransfer(f"transfer {transfer.generation} is over")
        if state not in NEXT[transfer.state]:
            raise ValueError(f"{state} does not come after {transfer.state}")
        transfer.state = state
        self._count(transfer.source, transfer.tier, state)
        if not NEXT[state]:
            self._under_way.remove(transfer)

    def commit(self, transfer: Transfer) -> bool:
        """Turn a verified transfer's room into a copy's. False: committed before, over, or fenced."""
        if transfer not in self._under_way or not self._has_room(transfer) or transfer.is_fenced:
            return False
        self.advance(transfer, "committed")
        self._leave(transfer, is_held=True)
        return True

    def end(self, transfer: Transfer) -> None:
        """End a transfer: done if it was committed, else failed. No-op if it is over already."""
        if transfer in self._under_way:
            self.advance(transfer, "done" if "done" in NEXT[transfer.state] else "failed")

    def abandon(self, transfer: Transfer) -> bool:
        """End a transfer of which nothing is left in its tier, and free its room. False: it has none."""
        if not self._has_room(transfer):
            return False
        self.end(transfer)
        self._leave(transfer, is_held=False)
        return True

    def fence(self, extent: HeldExtent) -> None:
        """Fence what is in flight for a forgotten extent: it must not be committed."""
        for transfer in self.into_tiers(extent):
            transfer.is_fenced = True

    def drop(self, eviction: Eviction, transfer: Transfer | None = None) -> Eviction:
        """Add a record to delete, to make room for `transfer`. The ledger counts it as dropping already."""
        self._claims[eviction.tier, eviction.address] = _Drop(eviction, transfer)
        return eviction

    def drop_stranger(self, tier: TierName, address: Address, nbytes: int, reason: EvictReason) -> Eviction:
        """Add a record to delete that was never held here."""
        self._ledgers[tier].dropping += nbytes
        return self.drop(Eviction(tier, address, nbytes, self.next_generation(), reason))

    def dropped(self, eviction: Eviction) -> None:
        """Free the bytes of a deleted record. No-op if that was reported before."""
        drop = self._claims.get((eviction.tier, eviction.address))
        if not isinstance(drop, _Drop) or drop.eviction.generation != eviction.generation:
            return
        del self._claims[eviction.tier, eviction.address]
        ledger, transfer = self._ledgers[eviction.tier], drop.transfer
        ledger.dropping -= drop.eviction.nbytes
        if transfer is not None and self._has_room(transfer):
            before = transfer.victims_bytes
            transfer.victims_bytes -= drop.eviction.nbytes
            ledger.victim_dropped(transfer.nbytes, before, transfer.victims_bytes)

    def is_pinned(self, copy: HeldCopy) -> bool:
        return copy.generation in self._pins

    def pin(self, copy: HeldCopy) -> Pin:
        self._pins[copy.generation] += 1
        return Pin(copy.tier, copy.extent.address, copy.nbytes, copy.generation)

    def unpin(self, pin: Pin) -> None:
        """Release a pin. Raises `ValueError` if the copy is not, or no longer, pinned."""
        if pin.generation not in self._pins:
            raise ValueError("a copy was unpinned more often than it was pinned")
        self._pins[pin.generation] -= 1
        if not self._pins[pin.generation]:
            del self._pins[pin.generation]

    def check_integrity(
        self, copies: Mapping[Place, HeldCopy], extent_at: Callable[[Address], HeldExtent | None]
    ) -> None:
        """Raise `AssertionError` naming what is wrong. `copies`: all that are held. `extent_at`: as known."""
        assert len(self) <= self._transfers_max, "too many transfers"
        for (tier, address), claim in self._claims.items():
            mine = claim if isinstance(claim, Transfer) else claim.eviction
            assert (mine.tier, mine.address) == (tier, address), "a claim is filed under another place"
        for transfer in self._under_way:
            assert NEXT[transfer.state], "a transfer that is over was left behind"
            has_room = "failed" in NEXT[transfer.state]
            assert self._has_room(transfer) == has_room, "a transfer's state and its room disagree"
        for transfer in self._with_room():
            is_known = extent_at(transfer.address) is transfer.extent
            assert transfer.is_fenced or is_known, "a transfer's extent is forgotten"
            is_over = transfer not in self._under_way
            assert is_over == (transfer.state == "failed"), "room is kept for a transfer that needs none"
        assert not self._claims.keys() & copies.keys(), "an extent is held and claimed in the same tier"
        claims = (claim if isinstance(claim, Transfer) else claim.eviction for claim in self._claims.values())
        generations = [claim.generation for claim in (*claims, *copies.values())]
        assert len(set(generations)) == len(generations), "a generation is used twice"
        assert max(generations, default=0) <= self._generation, "a generation comes from the future"
        started = sum(count for name, count in self.reached.items() if name.endswith(":planned"))
        over = sum(count for name, count in self.reached.items() if name.endswith((":done", ":failed")))
        assert started - over == len(self), "transfers got lost"
        assert all(readers > 0 for readers in self._pins.values()), "a pin without a reader"
        for tier, ledger in self._ledgers.items():
            self._check_ledger(tier, ledger)

    def _check_ledger(self, tier: TierName, ledger: Ledger) -> None:
        transfers = [transfer for transfer in self._with_room() if transfer.tier == tier]
        drops = [claim for (at, _), claim in self._claims.items() if at == tier and isinstance(claim, _Drop)]
        reserved = sum(transfer.nbytes for transfer in transfers)
        assert ledger.reserved == reserved, f"{tier}: bytes reserved are wrong"
        dropping = sum(drop.eviction.nbytes for drop in drops)
        assert ledger.dropping == dropping, f"{tier}: bytes that are being deleted are wrong"
        for transfer in transfers:
            found = sum(drop.eviction.nbytes for drop in drops if drop.transfer is transfer)
            assert transfer.victims_bytes == found, f"{tier}: a transfer's victims are wrong"
        promised = sum(min(transfer.nbytes, transfer.victims_bytes) for transfer in transfers)
        assert ledger.promised == promised, f"{tier}: bytes promised are wrong"

    def _with_room(self) -> Iterator[Transfer]:
        """Yield the transfers that hold room: fenced and failed ones included, committed ones not."""
        return (claim for claim in self._claims.values() if isinstance(claim, Transfer))

    def _has_room(self, transfer: Transfer) -> bool:
        return self._claims.get((transfer.tier, transfer.address)) is transfer

    def _leave(self, transfer: Transfer, *, is_held: bool) -> None:
        """Give a transfer's room to its copy, or free it."""
        del self._claims[transfer.tier, transfer.address]
        ledger, tenant = self._ledgers[transfer.tier], transfer.address.tenant
        ledger.end(tenant, transfer.nbytes, transfer.victims_bytes, is_held=is_held)

    def _count(self, source: Source, tier: TierName, *steps: str) -> None:
        for step in steps:
            self.reached[f"{source}>{tier}:{step}"] += 1
