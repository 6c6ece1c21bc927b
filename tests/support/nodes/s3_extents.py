"""Extents with random payloads, for tests of tiers."""

from __future__ import annotations

import hashlib

import numpy as np

from samovar.cache_tiers.blocks.extent import ROOT, BlockShape, ExtentHeader, Placement
from samovar.cache_tiers.blocks.record import Record, header_bytes, seal

SHAPE = BlockShape(layers=2, layer_bytes=512, block_tokens=16)
NAMESPACE = hashlib.sha256(b"namespace").digest()
TENANT = b"tenant-of-16-byt"


def sealed(
    seed: int,
    *,
    blocks: int = 3,
    namespace: bytes = NAMESPACE,
    tenant: bytes = TENANT,
    shape: BlockShape = SHAPE,
    created_unix_s: float = 1000.0,
) -> tuple[ExtentHeader, Record]:
    """The same seed gives the same blocks."""
    data = np.zeros(header_bytes(blocks, shape.layers) + blocks * shape.block_bytes, dtype=np.uint8)
    payload = np.random.default_rng(seed).integers(0, 256, blocks * shape.block_bytes, dtype=np.uint8)
    data[-payload.nbytes :] = payload
    header = seal(
        data,
        namespace=namespace,
        tenant=tenant,
        session=b"session-16-bytes",
        shape=shape,
        parent=ROOT,
        first_block=0,
        keys=[hashlib.sha256(f"{seed}/{number}".encode()).digest() for number in range(blocks)],
        token_counts=[shape.block_tokens] * blocks,
        placement=Placement(),
        created_unix_s=created_unix_s,
    )
    data.flags.writeable = False
    return header, Record(data)
