"""Measures a medium's read speed with one record of random bytes: for `samovar doctor`, without a service.

What a load takes is measured by the replica that loads (`replicas/start/measure.py` `Roads`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from statistics import median

import numpy as np

from samovar.cache_tiers.blocks import (
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
from samovar.cache_tiers.blocks import record as codec
from samovar.cache_tiers.media.tier import Deadline, Tier
from samovar.cache_tiers.pricing import moving_seconds

RESERVED_NAMESPACE = b"\xff" * KEY_BYTES
"""Namespace of records to measure with, used by no model; what a crash leaves of them may be deleted."""

SMALL_BYTES = 4096
NOISE_BYTES = 1 << 20
"""Random bytes are drawn once and repeated: drawing takes longer than storing."""

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
    header, record = random_record(BlockShape(layers=1, layer_bytes=nbytes, block_tokens=1), 1)
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
    return max(latency_s, 1e-9), (record.nbytes - SMALL_BYTES) / moving_seconds(latency_s, whole_s)


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


def random_record(
    shape: BlockShape, blocks: int, *, tenant: bytes = bytes(TAG_BYTES), ttl_s: float = 0.0
) -> tuple[ExtentHeader, Record]:
    """Build a record of random bytes (incompressible) under random keys (no clash between nodes)."""
    data = np.empty(codec.record_bytes(blocks, shape), dtype=np.uint8)
    noise = np.random.default_rng().integers(0, 256, NOISE_BYTES, dtype=np.uint8)
    for at in range(codec.header_bytes(blocks, shape.layers), data.nbytes, NOISE_BYTES):
        data[at : at + NOISE_BYTES] = noise[: data.nbytes - at]
    header = codec.seal(
        data,
        namespace=RESERVED_NAMESPACE,
        tenant=tenant,
        session=tenant,
        shape=shape,
        parent=ROOT,
        first_block=0,
        keys=[os.urandom(KEY_BYTES) for _ in range(blocks)],
        token_counts=[shape.block_tokens] * blocks,
        placement=Placement(min_ttl_s=0.0, ttl_s=ttl_s),
        created_unix_s=time.time(),
    )
    return header, Record(data)


def _delete(tier: Tier, address: Address) -> bool:
    try:
        tier.delete(address)
    except TierError:
        return False
    return True
