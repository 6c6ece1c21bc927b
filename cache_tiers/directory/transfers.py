"""Transfers of extents into tiers, deletes that are under way, and pins of copies being read.

A place (tier, extent) is claimed by at most one transfer or delete, and each has a generation that is never
used again: a late report finds that its claim has ended and changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from samovar.cache_tiers.blocks import TIERS, Address, TierName
from samovar.cache_tiers.directory.accounting import Ledger
from samovar.cache_tiers.directory.extents import HeldCopy, HeldExtent
from samovar.cache_tiers.directory.types import Eviction, EvictReason, Pin

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

    First delete all `victims` (report each to `Directory.dropped`), then write: in that order the tier never
    exceeds its budget. Its room is a copy's once it is committed; if it fails, it is free again when nothing
    of the record is left there (`Directory.abandon`).
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

    def with_room(self) -> Iterator[Transfer]:
        """Yield the transfers that hold room: fenced and failed ones included, committed ones not."""
        return (claim for claim in self._claims.values() if isinstance(claim, Transfer))

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

    def check_integrity(self, copies: Mapping[Place, HeldCopy]) -> None:
        """Raise `AssertionError` naming what is wrong. `copies`: all that are held."""
        assert len(self) <= self._transfers_max, "too many transfers"
        for (tier, address), claim in self._claims.items():
            mine = claim if isinstance(claim, Transfer) else claim.eviction
            assert (mine.tier, mine.address) == (tier, address), "a claim is filed under another place"
        for transfer in self._under_way:
            assert NEXT[transfer.state], "a transfer that is over was left behind"
            has_room = "failed" in NEXT[transfer.state]
            assert self._has_room(transfer) == has_room, "a transfer's state and its room disagree"
        for transfer in self.with_room():
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
        transfers = [transfer for transfer in self.with_room() if transfer.tier == tier]
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
