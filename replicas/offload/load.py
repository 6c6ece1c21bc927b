"""Fetches records and verifies them before use: the right blocks, whole and unchanged.

Runs on worker threads. No part of a fetched record is trusted: header, namespace, every block key and every
block's checksum are compared with what was requested (laws L1-L5, L7).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from cache_tiers.blocks import (
    BadRecord,
    BlockShape,
    Bytes,
    LoadSource,
    bad_layers,
    check_belongs,
    decode_header,
    good_blocks,
    header_bytes,
)
from cache_tiers.messages import Fetch, Fetched, FetchFailed

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Suspect:
    """Slots `[start, end)` of a prompt that came from a tier; call `condemn` if they are wrong."""

    start: int
    end: int
    condemn: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Expected:
    """What a fetch must return: blocks with these keys and token counts, from `first_block` on."""

    namespace: bytes
    shape: BlockShape
    first_block: int
    keys: tuple[bytes, ...]
    token_counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoadedBlocks:
    """The verified result of a fetch.

    `payload`: u8 `[good * block_bytes]`, may be read-only. `bad`: why there are no more good blocks. `tier`:
    its source, if not the requested tier. `is_kept`: see `Fetched`.
    """

    payload: Bytes
    good: int
    arrived_s: float
    bad: str | None = None
    tier: LoadSource | None = None
    is_kept: bool = False


def unpack(data: Bytes, first: int, offset: int, expected: Expected) -> tuple[Bytes, int]:
    """Return (payload of the good leading blocks, their number) of a fetched record. Raises `BadRecord`.

    `data`: header, then the payload of the extent's blocks from `first` on; `offset`: the first requested
    block of the extent.
    """
    header = decode_header(data)
    shape, blocks = expected.shape, len(expected.keys)
    check_belongs(header, expected.namespace, shape, offset, expected.first_block, expected.keys)
    if header.token_counts[offset : offset + blocks] != expected.token_counts:
        raise BadRecord("key", "blocks of other token counts than were asked for")
    start = header_bytes(header.blocks, shape.layers) + (offset - first) * shape.block_bytes
    end = start + blocks * shape.block_bytes
    if first > offset or data.nbytes < end:
        raise BadRecord("truncated", f"{data.nbytes} bytes where {end} were to come")
    payload = data[start:end]
    good = good_blocks(header, payload, offset)
    if good < blocks:
        layers = ", ".join(map(str, bad_layers(header, payload, offset + good, offset)))
        logger.error("block %d of an extent of %d is not what was sealed: layers %s", good, blocks, layers)
    return payload[: good * shape.block_bytes], good


def load(
    fetch_now: Callable[[Fetch], Fetched | FetchFailed],
    fetch: Fetch,
    expected: Expected,
    clock: Callable[[], float],
) -> LoadedBlocks | FetchFailed:
    """Fetch and verify. `LoadedBlocks.arrived_s` is the clock's time after both."""
    reply = fetch_now(fetch)
    if isinstance(reply, FetchFailed):
        return reply
    assert reply.data is not None, "a link hands out bytes, not references"
    try:
        payload, good = unpack(reply.data, reply.first, fetch.offset, expected)
    except BadRecord as bad:
        return LoadedBlocks(reply.data[:0], 0, clock(), bad.kind, reply.tier)
    bad_kind = "checksum" if good < len(expected.keys) else None
    return LoadedBlocks(payload, good, clock(), bad_kind, reply.tier, reply.is_kept)
