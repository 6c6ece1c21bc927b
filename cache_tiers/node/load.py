"""Loads an extent for a replica, promoting it to main memory if all of it was read.

Data handed out is verified by the replica itself; data promoted to main memory is verified here. A fetch
ends by its deadline; any failure is a miss. A tier may hand out a reference instead of the bytes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from samovar.cache_tiers.blocks import (
    TAG_BYTES,
    TOP_TIER,
    Address,
    BadRecord,
    Bytes,
    ExtentHeader,
    Record,
    TierError,
    TierMiss,
    TierName,
    header_bytes,
    record_bytes,
)
from samovar.cache_tiers.directory import ExtentInfo, Pin
from samovar.cache_tiers.media import RESERVED_NAMESPACE, TierDown, TierLate, random_record
from samovar.cache_tiers.messages import Fetch, Fetched, FetchFailed, SampleRequest
from samovar.cache_tiers.node.state import NodeState
from samovar.cache_tiers.node.transfer import TransferRunner, verified

logger = logging.getLogger(__name__)

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

    def fetch(self, fetch: Fetch) -> Fetched | FetchFailed:
        """Return the blocks from the requested tier or, failing that, from another one."""
        state = self._state
        with state.lock:
            if state.fetches >= self._fetch_max:
                return self._failed(fetch, "refused", f"{state.fetches} fetches are under way")
            state.fetches += 1
        try:
            return self._fetch(fetch)
        finally:
            with state.work:
                state.fetches -= 1
                state.fetched_s = state.clock()
                if not state.fetches:
                    state.work.notify()  # guesses may go on

    def _fetch(self, fetch: Fetch) -> Fetched | FetchFailed:
        ends_s = self._state.clock() + fetch.deadline_s
        address = Address(fetch.tenant, fetch.namespace, fetch.extent_id)
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
            info = state.directory.info(address)
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

    def _fetch_here(self, fetch: Fetch, address: Address, ends_s: float) -> Fetched | FetchFailed:
        state, clock = self._state, self._state.clock
        with state.lock:
            info = state.directory.info(address)
            if info is not None and not 0 <= fetch.offset < fetch.offset + fetch.blocks <= info.blocks:
                return self._failed(fetch, "gone", f"blocks of an extent of {info.blocks}")
            tiers = state.directory.copies(address)
            state.directory.touch(address)
        reason, message = "gone", ""
        spoilt: Fetched | None = None
        first = fetch.tier
        if info is not None and TOP_TIER in tiers and fetch.blocks >= PROMOTE_SHARE * info.blocks:
            first = TOP_TIER  # promoted since the lookup
        for tier in sorted(tiers, key=lambda tier: tier != first):
            try:
                return self._fetch_from(fetch, address, tier, ends_s)
            except TierMiss:
                state.lost(address, tier)
            except BadRecord as error:
                state.bad(address, tier, error.kind)
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

    def _fetch_from(self, fetch: Fetch, address: Address, tier: TierName, ends_s: float) -> Fetched:
        """Fetch from one tier. Raises `TierError`, `BadRecord`."""
        state = self._state
        guard = state.guards[tier]
        if not guard.is_up:
            raise TierDown(f"{tier} is down")
        with state.lock:
            pin = state.directory.pin(address, tier)
            info = state.directory.info(address)
        if pin is None or info is None:
            raise TierMiss("gone meanwhile")
        try:
            fetched = self._read(fetch, pin, info, ends_s)
        finally:
            with state.lock:
                state.directory.unpin(pin)
        if fetch.namespace != RESERVED_NAMESPACE:  # no request has asked for samples
            guard.count("hits_blocks", fetch.blocks)
        guard.tier.touch(address)
        return replace(fetched, tier=tier)

    def _read(self, fetch: Fetch, pin: Pin, info: ExtentInfo, ends_s: float) -> Fetched:
        guard, address = self._state.guards[pin.tier], pin.address
        if (ref := guard.tier.ref(address)) is not None:
            return Fetched(0, ref=[ref])

        def read(start: int, nbytes: int) -> Bytes:
            return guard.read(address, start, nbytes, ends_s - self._state.clock())

        if pin.tier == TOP_TIER:
            return Fetched(0, read(0, pin.nbytes))
        if fetch.blocks >= PROMOTE_SHARE * info.blocks:
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
        """Promote a whole record that was just read; None if it did not get into main memory.

        Raises `BadRecord` if it is not what its source should hold.
        """
        state, address = self._state, pin.address
        transfer = self._runner.reserve_copy(pin, TOP_TIER)
        if isinstance(transfer, str):
            return None

        def obtain() -> tuple[Record, ExtentHeader]:
            return Record(data), verified(data, address, pin.nbytes)

        try:
            if self._runner.run(transfer, obtain) is None:
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
            used = self._state.directory.usage(ask.tier).bytes_accounted
        if used + ask.count * nbytes > guard.bytes_max:
            return ()
        headers = []
        try:
            for _ in range(ask.count):
                header, record = random_record(
                    ask.shape, ask.blocks, tenant=SAMPLES_TENANT, ttl_s=SAMPLE_S_MAX
                )
                with self._state.lock:
                    clear_seq = self._state.directory.clears.seq
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
                copies = self._state.directory.copies(address)
                lost = [self._state.directory.lose(address, tier) for tier in copies]
            self._state.drop([eviction for eviction in lost if eviction is not None])
