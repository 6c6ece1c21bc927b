"""Moves a record: into a tier, and to a replica that loads it.

`TransferRunner` moves one record into a tier in the calling thread: reserve, copy, verify, commit; any
failure is rolled back. What to move and when is decided in `store.py` and here. Nothing is committed
unverified, and nothing written stays unaccounted: see `_undo`.

`NodeReads` loads an extent for a replica, promoting it to main memory if all of it was read. Data handed out
is verified by the replica itself; data promoted to main memory is verified here. A fetch ends by its
deadline; any failure is a miss. A tier may hand out a reference instead of the bytes.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Literal

import numpy as np

from samovar.cache_tiers.blocks import (
    TAG_BYTES,
    TIERS,
    TOP_TIER,
    Address,
    BadRecord,
    Bytes,
    ExtentHeader,
    Record,
    TierError,
    TierFull,
    TierMiss,
    TierName,
    bad_layers,
    decode_header,
    good_blocks,
    header_bytes,
    record_bytes,
)
from samovar.cache_tiers.catalog import (
    Eviction,
    ExtentInfo,
    Held,
    Pin,
    ReservationRefused,
    Source,
    Transfer,
)
from samovar.cache_tiers.media import RESERVED_NAMESPACE, TierDown, TierLate, random_record
from samovar.cache_tiers.messages import Fetch, Fetched, FetchFailed, SampleRequest
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

        The transfer ends with `run` or `abort`. See `Catalog.reserve`.
        """
        ask = partial(
            self._state.catalog.reserve,
            target,
            header,
            nbytes,
            clear_seq=clear_seq,
            recompute_s=recompute_s,
        )
        return self._reserve(header.address, source, target, ask)

    def reserve_copy(self, pin: Pin, target: TierName) -> Transfer | str:
        """Reserve room in `target` for a copy of what is pinned; else as `reserve`."""
        ask = partial(self._state.catalog.reserve_copy, target, pin.address)
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
                state.catalog.transfers.refused(source, target)
                return "held" if isinstance(answer, Held) else answer.reason
        state.reach("reserved")
        return answer

    def abort(self, transfer: Transfer, ends_s: float = math.inf) -> None:
        """Abandon a transfer of which nothing was written; what is not deleted by `ends_s` is pending."""
        with self._state.lock:
            self._state.catalog.abandon(transfer)
        self._state.drop(transfer.victims, ends_s - self._state.clock())

    def run(
        self,
        transfer: Transfer,
        obtain: Callable[[], tuple[Record, ExtentHeader]],
        *,
        is_last: bool = False,
        within_s: float = math.inf,
    ) -> tuple[Record, ExtentHeader] | None:
        """Obtain the verified record, write it, commit it. None: fenced meanwhile, nothing is left.

        `is_last`: the source is dropped afterwards, so read it all back first. The transfer is over
        afterwards in any case, unless `is_last`: then the caller must drop the source and call `end`.
        `within_s`: for all that touches a medium, where a request waits for it. Raises what `obtain` raises,
        `TierError`, `BadRecord`.
        """
        state = self._state
        ends_s = state.clock() + within_s
        state.drop(transfer.victims, budget_s=within_s)
        try:
            self._advance(transfer, "copying")
            record, header = obtain()
        except BaseException:
            self.abort(transfer, ends_s)
            raise
        self._write(transfer, record, ends_s)
        try:
            self._read_back(transfer, header, ends_s, whole=is_last)
        except (TierError, BadRecord) as error:
            if isinstance(error, BadRecord):
                state.guards[transfer.tier].count(f"bad:{error.kind}")
            self._undo(transfer, ends_s)
            raise
        self._advance(transfer, "verified")
        with state.lock:
            is_committed = state.catalog.commit(transfer)
        if not is_committed:
            self._undo(transfer, ends_s)
            return None
        state.reach("committed")
        if not is_last:
            self.end(transfer)
        return record, header

    def drop_source(self, transfer: Transfer, eviction: Eviction) -> None:
        """Delete the source of a committed transfer. `NodeState.drop` is the fault point."""
        with self._state.lock:
            self._state.catalog.transfers.advance(transfer, "dropping")
        self._state.drop([eviction])

    def end(self, transfer: Transfer) -> None:
        """End the transfer."""
        with self._state.lock:
            self._state.catalog.transfers.end(transfer)

    def _advance(self, transfer: Transfer, state: Literal["copying", "verified"]) -> None:
        with self._state.lock:
            self._state.catalog.transfers.advance(transfer, state)
        self._state.reach(state)

    def _write(self, transfer: Transfer, record: Record, ends_s: float) -> None:
        """Write the record; if there is no room after all, make some and retry once."""
        guard = self._state.guards[transfer.tier]
        undo = partial(self._undo, transfer, ends_s)
        for is_retry in (False, True):
            left_s = min(self._write_s_max, max(0.0, ends_s - self._state.clock()))
            try:
                guard.put(transfer.address, record, left_s, when_late=undo)
                return
            except TierLate:
                raise  # `_undo` runs when the write ends: until then its bytes are accounted
            except TierDown:  # the first of two attempts may have left a name, see below
                (self._undo if is_retry else self.abort)(transfer, ends_s)
                raise
            except TierFull as error:
                if not is_retry and self._squeeze(transfer, ends_s):
                    continue
                if self._state.clock() < ends_s:  # else there was no time to make room
                    logger.warning("%s tier: read-only from now on: %s", guard.name, error)
                    guard.read_only = True
                self._undo(transfer, ends_s)  # a name that could not be flushed, nor removed, is there
                raise
            except (TierError, BadRecord):
                self._undo(transfer, ends_s)
                raise

    def _read_back(self, transfer: Transfer, header: ExtentHeader, ends_s: float, *, whole: bool) -> None:
        """Check that the tier has what it was given, if its kind has `verify_writes`."""
        address, nbytes = transfer.address, transfer.nbytes
        if not TIERS.kind(transfer.tier).verify_writes:
            return
        guard = self._state.guards[transfer.tier]
        left_s = min(self._write_s_max, max(0.0, ends_s - self._state.clock()))
        if whole or next(self._writes) % READ_BACK_EVERY == 0:
            verified(guard.read(address, 0, nbytes, left_s), address, nbytes)
            return
        head_bytes = header_bytes(header.blocks, header.shape.layers)
        found = decode_header(guard.read(address, 0, head_bytes, left_s), record_bytes=nbytes)
        if found.address != address:
            raise BadRecord("key", "read back as another extent")

    def _squeeze(self, transfer: Transfer, ends_s: float) -> bool:
        """Evict as much again as is to be written, because the medium has less room than its budget."""
        state = self._state
        with state.lock:
            victims = state.catalog.squeeze(transfer.tier, transfer.address.tenant, transfer.nbytes)
        return bool(victims) and not state.drop(victims, ends_s - state.clock())

    def _undo(self, transfer: Transfer, ends_s: float) -> None:
        """Delete what may have been written; only then is its room free again. Without time it is pending."""
        state = self._state
        gone = partial(state.catalog.abandon, transfer)
        left_s = None if math.isinf(ends_s) else max(0.0, ends_s - state.clock())
        state.delete(transfer.tier, transfer.address, gone, deadline_s=left_s)
        self.end(transfer)


PROMOTE_SHARE = 0.5
"""Share of an extent from which a fetch reads all of it and promotes it.

The rest is often only the turn's tail, which the next turn has stored again: without this, hardly anything
would be promoted.
"""


FromPeer = Callable[[Address, str, float], Fetched | FetchFailed | None]
"""(address, node, deadline) -> the whole record; None: a tier of this node has it."""


class _Spoilt(BadRecord):
    """A whole record of which some block is not what was sealed: those in front of it may be good."""

    def __init__(self, error: BadRecord, data: Bytes) -> None:
        super().__init__(error.kind, str(error))
        self.data = data


class LentRoom:
    """Memory that a caller lends for one fetch: u8, whole pages. Given away once.

    A read that was late may still write there: what another tier has must not come to the same place.
    """

    def __init__(self, data: Bytes) -> None:
        self._data: Bytes | None = data

    def taken(self, nbytes: int) -> Bytes | None:
        """Return the memory if it has `nbytes` bytes and is still there."""
        data = self._data
        if data is None or data.nbytes < nbytes:
            return None
        self._data = None
        return data


class NodeReads:
    """Serves fetches; at most `fetch_max` in flight, more are refused."""

    def __init__(
        self, state: NodeState, runner: TransferRunner, *, fetch_max: int, from_peer: FromPeer
    ) -> None:
        self._state = state
        self._runner = runner
        self._from_peer = from_peer
        self._fetch_max = fetch_max
        self._reading: dict[Address, threading.Event] = {}  # whole records on their way to main memory

    def fetch(self, fetch: Fetch, room: LentRoom | None = None) -> Fetched | FetchFailed:
        """Return the blocks from the requested tier or, failing that, from another one.

        `room`: what a tier of this node alone has is read into it, and not promoted: it is there for the
        next time as well, and main memory is for what is expected.
        """
        state = self._state
        with state.lock:
            if state.fetches >= self._fetch_max:
                return self._failed(fetch, "refused", f"{state.fetches} fetches are under way")
            state.fetches += 1
        try:
            return self._fetch(fetch, room)
        finally:
            with state.work:
                state.fetches -= 1
                state.fetched_s = state.clock()
                if not state.fetches:
                    state.work.notify()  # guesses may go on

    def _fetch(self, fetch: Fetch, room: LentRoom | None) -> Fetched | FetchFailed:
        ends_s = self._state.clock() + fetch.deadline_s
        address = Address(fetch.tenant, fetch.namespace, fetch.extent_id)
        guard = self._state.guards.get(fetch.tier)
        if room is not None and guard is not None and guard.tier.takes_room:  # it is not promoted
            return self._fetch_here(fetch, address, ends_s, room)
        with self._read_once(fetch, address, ends_s):
            return self._fetch_once(fetch, address, ends_s)

    @contextmanager
    def _read_once(self, fetch: Fetch, address: Address, ends_s: float) -> Iterator[None]:
        """Wait for a fetch that already reads the same record: then main memory has it.

        Replicas that start sub-agents of one session at once want the same extents. Waits once: where main
        memory has no room for it, everyone reads it.
        """
        state = self._state
        with state.lock:
            info = state.catalog.info(address)
            is_promoted = info is None or fetch.blocks >= PROMOTE_SHARE * info.blocks
            is_below = fetch.tier != TOP_TIER and (info is None or TOP_TIER not in info.tiers)
            joins = TOP_TIER in state.guards and is_below and is_promoted
            other = self._reading.get(address) if joins else None
            own = threading.Event() if joins and other is None else None
            if own is not None:
                self._reading[address] = own
        if other is not None:
            other.wait(max(0.0, ends_s - state.clock()))
        try:
            yield
        finally:
            if own is not None:
                with state.lock:
                    del self._reading[address]
                own.set()

    def _fetch_once(self, fetch: Fetch, address: Address, ends_s: float) -> Fetched | FetchFailed:
        if fetch.tier == "peer":
            came = self._from_peer(address, fetch.node, ends_s)
            if isinstance(came, FetchFailed):
                return self._failed(fetch, came.reason, came.message)
            if came is not None:
                return came
        return self._fetch_here(fetch, address, ends_s)

    def _fetch_here(
        self, fetch: Fetch, address: Address, ends_s: float, room: LentRoom | None = None
    ) -> Fetched | FetchFailed:
        state, clock = self._state, self._state.clock
        with state.lock:
            info = state.catalog.info(address)
            if info is not None and not 0 <= fetch.offset < fetch.offset + fetch.blocks <= info.blocks:
                return self._failed(fetch, "gone", f"blocks of an extent of {info.blocks}")
            tiers = state.catalog.copies(address)
            state.catalog.touch(address)
        reason, message = "gone", ""
        spoilt: Fetched | None = None
        first = fetch.tier
        if info is not None and TOP_TIER in tiers and fetch.blocks >= PROMOTE_SHARE * info.blocks:
            first = TOP_TIER  # promoted since the lookup
        for tier in sorted(tiers, key=lambda tier: tier != first):
            try:
                return self._fetch_from(fetch, address, tier, ends_s, room)
            except TierMiss:
                state.lost(address, tier, ends_s - clock())
            except BadRecord as error:
                state.bad(address, tier, error.kind, ends_s - clock())
                if isinstance(error, _Spoilt) and spoilt is None:
                    spoilt = Fetched(0, error.data, tier=tier)
                reason, message = "error", str(error)
            except TierDown as error:
                reason, message = "down", str(error)
            except TierLate as error:
                reason, message = "timeout", str(error)
            except TierError as error:
                reason, message = "error", str(error)
            if clock() >= ends_s:
                break
        # No other tier has it whole: the replica takes the blocks in front of the first bad one.
        return spoilt or self._failed(fetch, reason, message)

    def _fetch_from(
        self, fetch: Fetch, address: Address, tier: TierName, ends_s: float, room: LentRoom | None
    ) -> Fetched:
        """Fetch from one tier. Raises `TierError`, `BadRecord`."""
        state = self._state
        guard = state.guards[tier]
        if not guard.is_up:
            raise TierDown(f"{tier} is down")
        with state.lock:
            pin = state.catalog.pin(address, tier)
            info = state.catalog.info(address)
        if pin is None or info is None:
            raise TierMiss("gone meanwhile")
        try:
            fetched = self._read(fetch, pin, info, ends_s, room)
        finally:
            with state.lock:
                state.catalog.unpin(pin)
        if fetch.namespace != RESERVED_NAMESPACE:  # no request has asked for samples
            guard.count("hits_blocks", fetch.blocks)
        guard.tier.touch(address)
        return replace(fetched, tier=tier)

    def _read(
        self, fetch: Fetch, pin: Pin, info: ExtentInfo, ends_s: float, room: LentRoom | None
    ) -> Fetched:
        guard, address = self._state.guards[pin.tier], pin.address
        if (ref := guard.tier.ref(address)) is not None:
            return Fetched(0, ref=[ref])

        def read(start: int, nbytes: int) -> Bytes:
            return guard.read(address, start, nbytes, ends_s - self._state.clock())

        if pin.tier == TOP_TIER:
            return Fetched(0, read(0, pin.nbytes))
        if fetch.blocks >= PROMOTE_SHARE * info.blocks:
            place = room.taken(pin.nbytes) if room is not None and guard.tier.takes_room else None
            if place is not None:
                data = guard.read(address, 0, pin.nbytes, ends_s - self._state.clock(), place)
                return Fetched(0, data, is_placed=True)
            data = read(0, pin.nbytes)
            try:
                return self._promoted(pin, data, ends_s) or Fetched(0, data)
            except BadRecord as error:
                if error.kind == "checksum":
                    raise _Spoilt(error, data) from error
                raise
        head = header_bytes(info.blocks, info.shape.layers)
        payload = fetch.blocks * info.shape.block_bytes
        if fetch.offset == 0:
            return Fetched(0, read(0, head + payload))
        parts = read(0, head), read(head + fetch.offset * info.shape.block_bytes, payload)
        return Fetched(fetch.offset, np.concatenate(parts))

    def _promoted(self, pin: Pin, data: Bytes, ends_s: float) -> Fetched | None:
        """Promote a whole record that was just read; None if it did not get into main memory by `ends_s`.

        Raises `BadRecord` if it is not what its source should hold.
        """
        state, address = self._state, pin.address
        within_s = ends_s - state.clock()
        transfer = self._runner.reserve_copy(pin, TOP_TIER) if within_s > 0 else "late"
        if isinstance(transfer, str):
            return None

        def obtain() -> tuple[Record, ExtentHeader]:
            return Record(data), verified(data, address, pin.nbytes)

        try:
            if self._runner.run(transfer, obtain, within_s=within_s) is None:
                return None
            ref = state.guards[TOP_TIER].tier.ref(address)
            return None if ref is None else Fetched(0, ref=[ref])
        except TierError as error:
            logger.info("a promotion from %s failed: %s", pin.tier, error)
            return None

    def _failed(self, fetch: Fetch, reason: str, message: str) -> FetchFailed:
        with self._state.lock:
            self._state.misses[reason] += fetch.blocks
        return FetchFailed(reason, message)


SAMPLES_TENANT = b"\xff" * TAG_BYTES
"""Of samples: no tenant has this tag."""
SAMPLE_S_MAX = 60.0
"""What a replica that died in the middle of measuring has left expires then."""


class NodeSamples:
    """Puts samples into a tier as stores are put there, and takes them away."""

    def __init__(self, state: NodeState, runner: TransferRunner) -> None:
        self._state = state
        self._runner = runner

    def put(self, ask: SampleRequest) -> tuple[ExtentHeader, ...]:
        """Return the headers of `ask.count` records that are in the tier now; none if there is no room.

        Nothing is evicted for them. What the system keeps of a file in memory is dropped: a load after a
        restart comes from the disk.
        """
        guard = self._state.guards.get(ask.tier)
        nbytes = record_bytes(ask.blocks, ask.shape)
        if guard is None or not guard.is_writable:
            return ()
        with self._state.lock:
            used = self._state.catalog.usage(ask.tier).bytes_accounted
        if used + ask.count * nbytes > guard.bytes_max:
            return ()
        headers = []
        try:
            for _ in range(ask.count):
                header, record = random_record(
                    ask.shape, ask.blocks, tenant=SAMPLES_TENANT, ttl_s=SAMPLE_S_MAX
                )
                with self._state.lock:
                    clear_seq = self._state.catalog.clears.seq
                transfer = self._runner.reserve(header, nbytes, "replica", ask.tier, clear_seq=clear_seq)
                if isinstance(transfer, str):
                    logger.info("nothing to measure the %s tier with: %s", ask.tier, transfer)
                    break
                headers.append(header)
                self._runner.run(transfer, lambda made=(record, header): made)  # type: ignore[misc]
                guard.tier.drop_cache(header.address)
        except (TierError, BadRecord) as error:
            logger.info("nothing to measure the %s tier with: %s", ask.tier, error)
        if len(headers) == ask.count:
            return tuple(headers)
        self.drop(headers)
        return ()

    def drop(self, headers: Sequence[ExtentHeader]) -> None:
        """Delete samples from every tier that has them by now."""
        for header in headers:
            address: Address = header.address
            with self._state.lock:
                copies = self._state.catalog.copies(address)
                lost = [self._state.catalog.lose(address, tier) for tier in copies]
            self._state.drop([eviction for eviction in lost if eviction is not None])
