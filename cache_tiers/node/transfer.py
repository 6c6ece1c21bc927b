"""Moves a record into a tier: reserve, copy, verify, commit; any failure is rolled back.

`TransferRunner` moves one record in the calling thread; what to move and when is decided in `store.py` and
`load.py`. Nothing is committed unverified, and nothing written stays unaccounted: see `_undo`.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from cache_tiers.blocks import (
    Address,
    BadRecord,
    Bytes,
    ExtentHeader,
    Record,
    TierError,
    TierFull,
    TierName,
    block_key,
    decode_header,
    good_blocks,
    header_bytes,
)
from cache_tiers.directory import Held, Move, Reservation, ReservationRefused, Source
from cache_tiers.media import TierDown, TierLate
from cache_tiers.node.state import NodeState

logger = logging.getLogger(__name__)

READ_BACK_EVERY = 16
"""Of the records written to a local tier, one in so many is read back whole, the others' header only."""

Reserve = Callable[[], Reservation | Held | ReservationRefused]


@dataclass(frozen=True, slots=True)
class TransferTicket:
    """A move with a reservation in its target; ends with `TransferRunner.carry` or `give_up`."""

    move: Move
    reservation: Reservation


def verified(record: Bytes, address: Address, nbytes: int) -> ExtentHeader:
    """Return a whole record's header if every byte is what was sealed under `address`.

    Raises `BadRecord`.
    """
    if record.nbytes != nbytes:
        raise BadRecord("truncated" if record.nbytes < nbytes else "oversized", f"{record.nbytes} bytes")
    header = decode_header(record, record_bytes=nbytes)
    if header.address != address:
        kind = "key" if header.namespace == address.namespace else "namespace"
        raise BadRecord(kind, "a record of another extent")
    payload = record[header_bytes(header.blocks, header.shape.layers) :]
    good = good_blocks(header, payload, 0)
    if good != header.blocks:
        raise BadRecord("checksum", f"block {good} of {header.blocks}")
    return header


class TransferRunner:
    """Moves one record per call, in the calling thread. `write_s_max`: how long one write may take."""

    def __init__(self, books: NodeState, write_s_max: float) -> None:
        self._books = books
        self._write_s_max = write_s_max
        self._writes = itertools.count(1)

    def book(
        self, address: Address, source: Source, target: TierName, reserve: Reserve
    ) -> TransferTicket | str:
        """Reserve room in `target`, or return why not: held, busy, down, or a `RefuseReason`."""
        books = self._books
        guard = books.guards.get(target)
        if guard is None or not guard.is_writable:
            return "down"
        with books.lock:
            if books.owed.owes(target, address):
                return "busy"
            move = books.mover.plan(address, source, target)
            if move is None:
                return "busy"
        books.reach("planned")
        with books.lock:
            reservation = reserve()
            if not isinstance(reservation, Reservation):
                books.mover.end(move)
                return "held" if isinstance(reservation, Held) else reservation.reason
            books.mover.reserved(move, reservation.generation)
        books.reach("reserved")
        return TransferTicket(move, reservation)

    def give_up(self, booking: TransferTicket) -> None:
        """Abandon a transfer of which nothing was written."""
        with self._books.lock:
            self._books.directory.abandon(booking.reservation)
            self._books.mover.end(booking.move)
        self._books.drop(booking.reservation.victims)

    def carry(
        self,
        booking: TransferTicket,
        obtain: Callable[[], tuple[Record, ExtentHeader]],
        *,
        is_last: bool = False,
    ) -> tuple[Record, ExtentHeader] | None:
        """Obtain the verified record, write it, commit it. None: fenced meanwhile, nothing is left.

        `is_last`: the source is dropped afterwards, so read it all back first. The booking is over
        afterwards in any case, unless `is_last`: then the caller must drop the source and call `end`. Raises
        what `obtain` raises, `TierError`, `BadRecord`.
        """
        books, move, reservation = self._books, booking.move, booking.reservation
        books.drop(reservation.victims)
        try:
            self._advance(booking, "copying")
            record, header = obtain()
        except BaseException:
            self.give_up(booking)
            raise
        self._write(booking, record, header)
        try:
            self._read_back(booking, header, whole=is_last)
        except (TierError, BadRecord) as error:
            if isinstance(error, BadRecord):
                books.guards[move.target].count(f"bad:{error.kind}")
            self._undo(booking)
            raise
        self._advance(booking, "verified")
        with books.lock:
            is_committed = books.directory.commit(reservation)
            if is_committed:
                books.mover.advance(move, "committed", reservation.generation)
                books.owed.paid(move.target, move.address)  # a clear that did not mean this one
        if not is_committed:
            self._undo(booking)
            return None
        books.reach("committed")
        if not is_last:
            self.end(booking)
        return record, header

    def end(self, booking: TransferTicket) -> None:
        """End the move."""
        with self._books.lock:
            self._books.mover.end(booking.move)

    def advance_to_dropping(self, booking: TransferTicket) -> None:
        """Advance the committed move to dropping its source. `NodeState.drop` is the fault point."""
        with self._books.lock:
            self._books.mover.advance(booking.move, "dropping", booking.reservation.generation)

    def _advance(self, booking: TransferTicket, state: str) -> None:
        assert state in ("copying", "verified")
        with self._books.lock:
            self._books.mover.advance(booking.move, state, booking.reservation.generation)  # type: ignore[arg-type]
        self._books.reach(state)

    def _write(self, booking: TransferTicket, record: Record, header: ExtentHeader) -> None:
        """Write the record; if there is no room after all, make some and retry once."""
        guard = self._books.guards[booking.move.target]
        for is_retry in (False, True):
            try:
                guard.put(
                    booking.move.address, record, self._write_s_max, when_late=lambda: self._undo(booking)
                )
                return
            except TierLate:
                raise  # `_undo` runs when the write ends: until then its bytes are accounted
            except TierDown:
                self.give_up(booking)
                raise
            except TierFull as error:
                if is_retry or not self._squeeze(booking, header):
                    logger.warning("%s tier: read-only from now on: %s", guard.name, error)
                    guard.read_only = True
                    self.give_up(booking)
                    raise
            except (TierError, BadRecord):
                self._undo(booking)
                raise

    def _read_back(self, booking: TransferTicket, header: ExtentHeader, *, whole: bool) -> None:
        """Check that the tier has what it was given; S3 has checked itself, memory does not rot."""
        move, nbytes = booking.move, booking.reservation.nbytes
        if move.target != "nvme":
            return
        guard = self._books.guards[move.target]
        if whole or next(self._writes) % READ_BACK_EVERY == 0:
            verified(guard.read(move.address, 0, nbytes, self._write_s_max), move.address, nbytes)
            return
        head_bytes = header_bytes(header.blocks, header.shape.layers)
        found = decode_header(guard.read(move.address, 0, head_bytes, self._write_s_max), record_bytes=nbytes)
        if found.address != move.address:
            raise BadRecord("key", "read back as another extent")

    def _squeeze(self, booking: TransferTicket, header: ExtentHeader) -> bool:
        """Evict as much again as is to be written, because the medium has less room than its budget.

        Reserves all that is accounted as free, and as much more, for an extent that will never exist.
        """
        books, tier = self._books, booking.move.target
        nbytes = booking.reservation.nbytes
        nobody = replace(header, keys=tuple(block_key(key, key, ()) for key in header.keys))
        with books.lock:
            free = max(books.guards[tier].bytes_max - books.directory.usage(tier).bytes_accounted, 0)
            room = books.directory.reserve(tier, nobody, free + nbytes, clear_seq=books.directory.clear_seq)
            if not isinstance(room, Reservation):
                return False
            books.directory.abandon(room)
        return bool(room.victims) and not books.drop(room.victims)

    def _undo(self, booking: TransferTicket) -> None:
        """Delete what may have been written; only then is its room free again."""
        move, reservation = booking.move, booking.reservation
        self._books.delete(
            move.target,
            move.address,
            lambda: self._books.directory.abandon(reservation),
            is_clear=False,
        )
        with self._books.lock:
            self._books.mover.end(move)
