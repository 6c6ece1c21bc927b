"""Moves a record into a tier: reserve, copy, verify, commit; any failure is rolled back.

`TransferRunner` moves one record in the calling thread; what to move and when is decided in `store.py` and
`load.py`. Nothing is committed unverified, and nothing written stays unaccounted: see `_undo`.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from functools import partial
from typing import Literal

from samovar.cache_tiers.blocks import (
    TIERS,
    Address,
    BadRecord,
    Bytes,
    ExtentHeader,
    Record,
    TierError,
    TierFull,
    TierName,
    bad_layers,
    decode_header,
    good_blocks,
    header_bytes,
)
from samovar.cache_tiers.directory import Eviction, Held, Pin, ReservationRefused, Source, Transfer
from samovar.cache_tiers.media import TierDown, TierLate
from samovar.cache_tiers.node.state import NodeState

logger = logging.getLogger(__name__)

READ_BACK_EVERY = 16
"""Of the records written to a local tier, one in so many is read back whole, the others' header only."""


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
        layers = ", ".join(map(str, bad_layers(header, payload, good)))
        raise BadRecord("checksum", f"block {good} of {header.blocks}, layers {layers}")
    return header


class TransferRunner:
    """Moves one record per call, in the calling thread. `write_s_max`: how long one write may take."""

    def __init__(self, state: NodeState, write_s_max: float) -> None:
        self._state = state
        self._write_s_max = write_s_max
        self._writes = itertools.count(1)

    def reserve(
        self,
        header: ExtentHeader,
        nbytes: int,
        source: Source,
        target: TierName,
        *,
        clear_seq: int,
        recompute_s: float = 0.0,
    ) -> Transfer | str:
        """Reserve room for a record in `target`, or return why not: held, busy, down, or a `RefuseReason`.

        The transfer ends with `run` or `abort`. See `Directory.reserve`.
        """
        ask = partial(
            self._state.directory.reserve,
            target,
            header,
            nbytes,
            clear_seq=clear_seq,
            recompute_s=recompute_s,
        )
        return self._reserve(header.address, source, target, ask)

    def reserve_copy(self, pin: Pin, target: TierName) -> Transfer | str:
        """Reserve room in `target` for a copy of what is pinned; else as `reserve`."""
        ask = partial(self._state.directory.reserve_copy, target, pin.address)
        return self._reserve(pin.address, pin.tier, target, ask)

    def _reserve(
        self,
        address: Address,
        source: Source,
        target: TierName,
        ask: Callable[..., Transfer | Held | ReservationRefused],
    ) -> Transfer | str:
        state = self._state
        guard = state.guards.get(target)
        if guard is None or not guard.is_writable:
            return "down"
        state.reach("planned")
        with state.lock:
            if state.pending.has(target, address):
                return "busy"
            answer = ask(source=source)
            if not isinstance(answer, Transfer):
                state.directory.transfers.refused(source, target)
                return "held" if isinstance(answer, Held) else answer.reason
        state.reach("reserved")
        return answer

    def abort(self, transfer: Transfer) -> None:
        """Abandon a transfer of which nothing was written."""
        with self._state.lock:
            self._state.directory.abandon(transfer)
        self._state.drop(transfer.victims)

    def run(
        self,
        transfer: Transfer,
        obtain: Callable[[], tuple[Record, ExtentHeader]],
        *,
        is_last: bool = False,
    ) -> tuple[Record, ExtentHeader] | None:
        """Obtain the verified record, write it, commit it. None: fenced meanwhile, nothing is left.

        `is_last`: the source is dropped afterwards, so read it all back first. The transfer is over
        afterwards in any case, unless `is_last`: then the caller must drop the source and call `end`. Raises
        what `obtain` raises, `TierError`, `BadRecord`.
        """
        state = self._state
        state.drop(transfer.victims)
        try:
            self._advance(transfer, "copying")
            record, header = obtain()
        except BaseException:
            self.abort(transfer)
            raise
        self._write(transfer, record)
        try:
            self._read_back(transfer, header, whole=is_last)
        except (TierError, BadRecord) as error:
            if isinstance(error, BadRecord):
                state.guards[transfer.tier].count(f"bad:{error.kind}")
            self._undo(transfer)
            raise
        self._advance(transfer, "verified")
        with state.lock:
            is_committed = state.directory.commit(transfer)
        if not is_committed:
            self._undo(transfer)
            return None
        state.reach("committed")
        if not is_last:
            self.end(transfer)
        return record, header

    def drop_source(self, transfer: Transfer, eviction: Eviction) -> None:
        """Delete the source of a committed transfer. `NodeState.drop` is the fault point."""
        with self._state.lock:
            self._state.directory.transfers.advance(transfer, "dropping")
        self._state.drop([eviction])

    def end(self, transfer: Transfer) -> None:
        """End the transfer."""
        with self._state.lock:
            self._state.directory.transfers.end(transfer)

    def _advance(self, transfer: Transfer, state: Literal["copying", "verified"]) -> None:
        with self._state.lock:
            self._state.directory.transfers.advance(transfer, state)
        self._state.reach(state)

    def _write(self, transfer: Transfer, record: Record) -> None:
        """Write the record; if there is no room after all, make some and retry once."""
        guard = self._state.guards[transfer.tier]
        for is_retry in (False, True):
            try:
                guard.put(transfer.address, record, self._write_s_max, when_late=lambda: self._undo(transfer))
                return
            except TierLate:
                raise  # `_undo` runs when the write ends: until then its bytes are accounted
            except TierDown:
                self.abort(transfer)
                raise
            except TierFull as error:
                if is_retry or not self._squeeze(transfer):
                    logger.warning("%s tier: read-only from now on: %s", guard.name, error)
                    guard.read_only = True
                    self.abort(transfer)
                    raise
            except (TierError, BadRecord):
                self._undo(transfer)
                raise

    def _read_back(self, transfer: Transfer, header: ExtentHeader, *, whole: bool) -> None:
        """Check that the tier has what it was given, if its kind has `verify_writes`."""
        address, nbytes = transfer.address, transfer.nbytes
        if not TIERS.kind(transfer.tier).verify_writes:
            return
        guard = self._state.guards[transfer.tier]
        if whole or next(self._writes) % READ_BACK_EVERY == 0:
            verified(guard.read(address, 0, nbytes, self._write_s_max), address, nbytes)
            return
        head_bytes = header_bytes(header.blocks, header.shape.layers)
        found = decode_header(guard.read(address, 0, head_bytes, self._write_s_max), record_bytes=nbytes)
        if found.address != address:
            raise BadRecord("key", "read back as another extent")

    def _squeeze(self, transfer: Transfer) -> bool:
        """Evict as much again as is to be written, because the medium has less room than its budget."""
        state = self._state
        with state.lock:
            victims = state.directory.squeeze(transfer.tier, transfer.address.tenant, transfer.nbytes)
        return bool(victims) and not state.drop(victims)

    def _undo(self, transfer: Transfer) -> None:
        """Delete what may have been written; only then is its room free again."""
        state = self._state
        state.delete(transfer.tier, transfer.address, lambda: state.directory.abandon(transfer))
        self.end(transfer)
