"""In-flight reservations, pending deletes and pins, by (tier, extent); and the states of moves.

Each (extent, tier) has at most one such claim, with a unique generation: a late report finds no claim of
its generation and changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from cache_tiers.blocks import Address, TierName
from cache_tiers.directory.accounting import Ledger
from cache_tiers.directory.extents import HeldCopy, HeldExtent
from cache_tiers.directory.types import Eviction, EvictReason, Pin, Reservation


@dataclass(slots=True, eq=False)
class Booking:
    """A reservation in flight. `victims_bytes`: bytes of its victims that are not deleted yet."""

    reservation: Reservation
    extent: HeldExtent
    victims_bytes: int
    is_fenced: bool = False


@dataclass(frozen=True, slots=True)
class _Drop:
    """A record to delete, to make room for the reservation of that generation (0: for none)."""

    eviction: Eviction
    for_generation: int


class Reservations:
    """Claims of all tiers, and the single generation counter. Keeps the tiers' ledgers in step."""

    def __init__(self, ledgers: Mapping[TierName, Ledger]) -> None:
        self._ledgers = ledgers
        self._generation = 0
        self._bookings: dict[int, Booking] = {}
        self._drops: dict[int, _Drop] = {}
        self._busy: dict[tuple[TierName, Address], int] = {}  # generation of the booking or drop
        self._pins: Counter[int] = Counter()  # generation of the copy -> readers

    def __iter__(self) -> Iterator[Booking]:
        """Iterate over the reservations in flight, fenced ones included."""
        return iter(self._bookings.values())

    def next_generation(self) -> int:
        self._generation += 1
        return self._generation

    def is_busy(self, tier: TierName, address: Address) -> bool:
        return (tier, address) in self._busy

    def book(self, reservation: Reservation, extent: HeldExtent) -> None:
        """Register a reservation. Its victims were dropped for its generation before."""
        victims_bytes = sum(victim.nbytes for victim in reservation.victims)
        self._bookings[reservation.generation] = Booking(reservation, extent, victims_bytes)
        self._busy[reservation.tier, reservation.address] = reservation.generation
        tenant = reservation.address.tenant
        self._ledgers[reservation.tier].reserve(tenant, reservation.nbytes, victims_bytes)
        extent.bookings[reservation.tier] = reservation.generation

    def fence(self, extent: HeldExtent) -> None:
        """Fence what is in flight for a forgotten extent: it must not be committed."""
        for generation in extent.bookings.values():
            self._bookings[generation].is_fenced = True
        extent.bookings.clear()

    def end(self, reservation: Reservation, *, is_held: bool) -> Booking | None:
        """End a claim: its record is held, or is not there. None: ended before, or fenced."""
        booking = self._bookings.get(reservation.generation)
        if booking is None or (is_held and booking.is_fenced):
            return None
        mine = booking.reservation
        del self._bookings[mine.generation]
        del self._busy[mine.tier, mine.address]
        if not booking.is_fenced:
            del booking.extent.bookings[mine.tier]
        ledger = self._ledgers[mine.tier]
        ledger.end(mine.address.tenant, mine.nbytes, booking.victims_bytes, is_held=is_held)
        return booking

    def drop(self, eviction: Eviction, for_generation: int = 0) -> Eviction:
        """Register a record to delete. The ledger counts its bytes as dropping already."""
        self._drops[eviction.generation] = _Drop(eviction, for_generation)
        self._busy[eviction.tier, eviction.address] = eviction.generation
        return eviction

    def drop_stranger(self, tier: TierName, address: Address, nbytes: int, reason: EvictReason) -> Eviction:
        """Register a record to delete that was never held here."""
        self._ledgers[tier].dropping += nbytes
        return self.drop(Eviction(tier, address, nbytes, self.next_generation(), reason))

    def dropped(self, eviction: Eviction) -> None:
        """Free the bytes of a deleted record. No-op if that was reported before."""
        drop = self._drops.pop(eviction.generation, None)
        if drop is None:
            return
        mine = drop.eviction
        del self._busy[mine.tier, mine.address]
        ledger = self._ledgers[mine.tier]
        ledger.dropping -= mine.nbytes
        booking = self._bookings.get(drop.for_generation)
        if booking is not None:
            before = booking.victims_bytes
            booking.victims_bytes -= mine.nbytes
            ledger.victim_dropped(booking.reservation.nbytes, before, booking.victims_bytes)

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

    def check_integrity(self, copies: Mapping[tuple[TierName, Address], HeldCopy]) -> None:
        """Raise `AssertionError` naming what is wrong. `copies`: all that are held."""
        busy: dict[tuple[TierName, Address], int] = {}
        for generation, booking in self._bookings.items():
            mine = booking.reservation
            assert mine.generation == generation, "a reservation is filed under another generation"
            assert (mine.tier, mine.address) not in busy, "an extent is reserved twice in a tier"
            busy[mine.tier, mine.address] = generation
            in_flight = booking.extent.bookings.get(mine.tier) == generation
            assert in_flight != booking.is_fenced, "an extent and its reservation disagree"
        for generation, drop in self._drops.items():
            mine_drop = drop.eviction
            assert mine_drop.generation == generation, "an eviction is filed under another generation"
            assert (mine_drop.tier, mine_drop.address) not in busy, "a record is deleted and something else"
            busy[mine_drop.tier, mine_drop.address] = generation
        assert self._busy == busy, "an extent is busy without a claim, or has one and is not"
        assert not busy.keys() & copies.keys(), "an extent is held and claimed in the same tier"
        generations = [*busy.values(), *(copy.generation for copy in copies.values())]
        assert len(set(generations)) == len(generations), "a generation is used twice"
        assert max(generations, default=0) <= self._generation, "a generation comes from the future"
        assert all(readers > 0 for readers in self._pins.values()), "a pin without a reader"
        for tier, ledger in self._ledgers.items():
            self._check_ledger(tier, ledger)

    def _check_ledger(self, tier: TierName, ledger: Ledger) -> None:
        bookings = [booking for booking in self._bookings.values() if booking.reservation.tier == tier]
        drops = [drop for drop in self._drops.values() if drop.eviction.tier == tier]
        reserved = sum(booking.reservation.nbytes for booking in bookings)
        assert ledger.reserved == reserved, f"{tier}: bytes reserved are wrong"
        dropping = sum(drop.eviction.nbytes for drop in drops)
        assert ledger.dropping == dropping, f"{tier}: bytes that are being deleted are wrong"
        victims: Counter[int] = Counter()
        for drop in drops:
            victims[drop.for_generation] += drop.eviction.nbytes
        for booking in bookings:
            found = victims[booking.reservation.generation]
            assert booking.victims_bytes == found, f"{tier}: a reservation's victims are wrong"
        promised = sum(min(booking.reservation.nbytes, booking.victims_bytes) for booking in bookings)
        assert ledger.promised == promised, f"{tier}: bytes promised are wrong"


State = Literal["planned", "reserved", "copying", "verified", "committed", "dropping", "done", "failed"]
Source = TierName | Literal["replica", "peer"]

NEXT: dict[State, tuple[State, ...]] = {
    "planned": ("reserved", "failed"),
    "reserved": ("copying", "failed"),
    "copying": ("verified", "failed"),
    "verified": ("committed", "failed"),
    "committed": ("dropping", "done"),
    "dropping": ("done",),
    "done": (),
    "failed": (),
}

Reach = Callable[[str], None]
"""Called with every state reached, before the next step. A fault point: may not return."""


def no_fault(_state: str) -> None:
    """Ignore the state: the `Reach` of a node without fault injection."""


@dataclass(frozen=True, slots=True)
class Move:
    """One extent in flight to one tier. `number` is never reused."""

    number: int
    address: Address
    source: Source
    target: TierName


class StaleMove(Exception):
    """The move was given up or is over: what it copied must not be published."""


@dataclass(slots=True)
class _Progress:
    move: Move
    state: State = "planned"
    generation: int | None = None


class TransferTable:
    """At most `moves_max` moves in flight, at most one for each (extent, target tier).

    A move is planned -> reserved -> copying -> verified -> committed [-> dropping its source] -> done, or
    fails at any point before it is committed. It is fenced by the generation of its reservation: a move
    that was given up cannot continue, however late its bytes arrive. Pure bookkeeping without a lock: the
    holder of the `Move` moves the bytes.
    """

    def __init__(self, moves_max: int) -> None:
        self._moves_max = moves_max
        self._under_way: dict[tuple[Address, TierName], _Progress] = {}
        self._last_number = 0
        self.reached: Counter[str] = Counter()
        """`"cpu>nvme:committed"` -> how many moves got there."""

    def __len__(self) -> int:
        return len(self._under_way)

    def is_busy(self, address: Address, target: TierName) -> bool:
        return (address, target) in self._under_way

    def under_way(self) -> list[Move]:
        """Return all moves that are not over."""
        return [progress.move for progress in self._under_way.values()]

    def state(self, move: Move) -> State | None:
        """Return the move's state, None if it is over."""
        progress = self._under_way.get((move.address, move.target))
        return progress.state if progress is not None and progress.move == move else None

    def plan(self, address: Address, source: Source, target: TierName) -> Move | None:
        """Plan a move. None: the extent is in flight there already, or there are too many moves."""
        if self.is_busy(address, target) or len(self._under_way) >= self._moves_max:
            return None
        self._last_number += 1
        move = Move(self._last_number, address, source, target)
        self._under_way[address, target] = _Progress(move)
        self._count(move, "planned")
        return move

    def reserved(self, move: Move, generation: int) -> None:
        """Record the reservation's `generation`. Raises `StaleMove`, or `ValueError` if not planned."""
        self._step(move, "reserved").generation = generation

    def advance(self, move: Move, state: State, generation: int) -> None:
        """Enter the next state.

        Raises `StaleMove` if the move is over or `generation` is not its reservation's, `ValueError` if
        that state does not come next.
        """
        progress = self._under_way.get((move.address, move.target))
        if progress is None or progress.move != move or progress.generation != generation:
            raise StaleMove(f"move {move.number} with generation {generation} is over")
        self._step(move, state)

    def end(self, move: Move) -> None:
        """End a move: done if it was committed, else failed. No-op if it is over already."""
        state = self.state(move)
        if state is not None:
            self._step(move, "done" if state in ("committed", "dropping") else "failed")

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is wrong."""
        assert len(self._under_way) <= self._moves_max, "too many moves"
        for (address, target), progress in self._under_way.items():
            move = progress.move
            assert (move.address, move.target) == (address, target), "a move under another's name"
            assert progress.state not in ("done", "failed"), "a move that is over was left behind"
            assert (progress.generation is None) == (progress.state == "planned"), "state and fence differ"
        started = sum(count for name, count in self.reached.items() if name.endswith(":planned"))
        over = sum(count for name, count in self.reached.items() if name.endswith((":done", ":failed")))
        assert started - over == len(self._under_way), "moves got lost"

    def _step(self, move: Move, state: State) -> _Progress:
        progress = self._under_way.get((move.address, move.target))
        if progress is None or progress.move != move:
            raise StaleMove(f"move {move.number} is over")
        if state not in NEXT[progress.state]:
            raise ValueError(f"{state} does not come after {progress.state}")
        progress.state = state
        self._count(move, state)
        if state in ("done", "failed"):
            del self._under_way[move.address, move.target]
        return progress

    def _count(self, move: Move, state: State) -> None:
        self.reached[f"{move.source}>{move.target}:{state}"] += 1
