"""Measures a medium's read speed with one record of random bytes: for `samovar doctor`, without a service.

What a load takes is measured by the replica that loads (`replicas/measure.py` `Roads`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from statistics import median

import numpy as np

from cache_tiers.blocks import (
    KEY_BYTES,
    ROOT,
    TAG_BYTES,
    Address,
    BadRecord,
    BlockShape,
    ExtentHeader,
    Placement,
    Record,
    TierError,
)
from cache_tiers.blocks import record as codec
from cache_tiers.media.tier import Deadline, Tier

RESERVED_NAMESPACE = b"\xff" * KEY_BYTES
"""Namespace of the measuring records, used by no model; what a crash leaves of them may be deleted."""

SMALL_BYTES = 4096

DropCache = Callable[[Address], None]


def measure_tier(
    tier: Tier,
    nbytes: int,
    repeats: int,
    clock: Callable[[], float],
    *,
    budget_s: float = 5.0,
    drop_cache: DropCache | None = None,
) -> tuple[float, float] | None:
    """Return `(latency_s, bytes_per_s)` of reads: medians of up to `repeats` small and whole reads.

    Puts a record with a payload of `nbytes` (at least `SMALL_BYTES`), reads it and deletes it; blocks for
    about `budget_s`, within which one read of each kind has to end. Returns None if it does not, if the tier
    fails, or if it returns other bytes than it was given. `clock`: monotonic seconds. `drop_cache` is called
    before each read, so that a file comes from the disk and not from memory. Raises `ValueError` if `nbytes`
    or `repeats` is too small, and whatever `drop_cache` raises.
    """
    if nbytes < SMALL_BYTES or repeats < 1:
        raise ValueError(f"nothing to measure with: {nbytes} bytes, {repeats} repeats")
    end_s = clock() + budget_s
    header, record = _random_record(nbytes)
    try:
        tier.put(header.address, record, deadline=Deadline(budget_s))
        small, whole = _read_times(tier, header.address, record, repeats, clock, end_s, drop_cache)
    except (TierError, BadRecord):
        small, whole = [], []
    finally:
        was_deleted = _delete(tier, header.address)
    if not small or not whole or not was_deleted:
        return None
    latency_s, whole_s = median(small), median(whole)
    # On a fast medium the difference is lost in noise; a tenth of the whole bounds the claimed bandwidth.
    moving_s = max(whole_s - latency_s, whole_s / 10, 1e-9)
    return max(latency_s, 1e-9), (record.nbytes - SMALL_BYTES) / moving_s


def _read_times(
    tier: Tier,
    address: Address,
    record: Record,
    repeats: int,
    clock: Callable[[], float],
    end_s: float,
    drop_cache: DropCache | None,
) -> tuple[list[float], list[float]]:
    """Return the seconds of the small and the whole reads that ended in time and were correct."""
    small: list[float] = []
    whole: list[float] = []
    for _ in range(repeats):
        for nbytes, times in ((SMALL_BYTES, small), (record.nbytes, whole)):
            if drop_cache is not None:
                drop_cache(address)
            begun_s = clock()
            if begun_s >= end_s:
                return small, whole
            data = tier.read(address, 0, nbytes, deadline=Deadline(end_s - begun_s))
            ended_s = clock()
            is_same = np.array_equal(data, record.data[:nbytes])
            if not is_same:
                raise BadRecord("checksum", "read other bytes than were put")
            if ended_s <= end_s:
                times.append(max(ended_s - begun_s, 0.0))
    return small, whole


def _random_record(nbytes: int) -> tuple[ExtentHeader, Record]:
    """Build a record of random bytes (incompressible) under a random key (no clash between nodes)."""
    data = np.empty(codec.header_bytes(1, 1) + nbytes, dtype=np.uint8)
    data[-nbytes:] = np.random.default_rng().integers(0, 256, nbytes, dtype=np.uint8)
    header = codec.seal(
        data,
        namespace=RESERVED_NAMESPACE,
        tenant=bytes(TAG_BYTES),
        session=bytes(TAG_BYTES),
        shape=BlockShape(layers=1, layer_bytes=nbytes, block_tokens=1),
        parent=ROOT,
        first_block=0,
        keys=[os.urandom(KEY_BYTES)],
        token_counts=[1],
        placement=Placement(min_ttl_s=0.0, ttl_s=0.0),
        created_unix_s=0.0,
    )
    return header, Record(data)


def _delete(tier: Tier, address: Address) -> bool:
    try:
        tier.delete(address)
    except TierError:
        return False
    return True
