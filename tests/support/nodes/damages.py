"""What may happen to a block's bytes: planted damages, each of which a checksum must see."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from samovar.cache_tiers.blocks.extent import BlockShape, Bytes
from samovar.cache_tiers.blocks.record import PIECE_BYTES, PIECE_WORDS, decode_header, header_bytes


def damages(payload: Bytes, shape: BlockShape, seed: int = 1) -> Iterator[tuple[str, Bytes]]:
    """Names of damages, and the payload of one or more blocks with each that changes it, all different."""
    seen = {payload.tobytes()}
    for name, damaged in _damages(payload, shape, seed):
        if (found := damaged.tobytes()) not in seen:
            seen.add(found)
            yield name, damaged


def _damages(payload: Bytes, shape: BlockShape, seed: int) -> Iterator[tuple[str, Bytes]]:
    yield from _flips(payload, shape)
    rng = np.random.default_rng(seed)
    for name, one, other, size in _swaps(len(payload), shape, rng):
        changed = payload.copy()
        changed[one : one + size], changed[other : other + size] = (
            payload[other : other + size],
            payload[one : one + size],
        )
        yield name, changed
    for name, start, size in (
        ("a piece is zeros", PIECE_BYTES, PIECE_BYTES),
        ("a sector is zeros", 512, 512),
        ("a layer is zeros", shape.layer_bytes, shape.layer_bytes),
        ("a block is zeros", 0, shape.block_bytes),
        ("it ends early", len(payload) - 700, 700),
    ):
        changed = payload.copy()
        changed[start : start + size] = 0
        yield name, changed
    yield "all is zeros", np.zeros_like(payload)
    yield "all is ones", np.full_like(payload, 255)
    yield "a byte is inserted", np.concatenate([payload[:1], payload[:-1]])
    yield "a word is inserted", np.concatenate([payload[:8], payload[:-8]])
    yield "all is inverted", ~payload
    yield from _pairs(payload, shape, rng)


def _flips(payload: Bytes, shape: BlockShape) -> Iterator[tuple[str, Bytes]]:
    """Every bit of the first word, of the words about a piece's end, and of a layer's last bytes."""
    places = [*range(8), *range(PIECE_BYTES - 8, PIECE_BYTES + 8)]
    places += [*range(shape.layer_bytes - 9, shape.layer_bytes), *range(len(payload) - 9, len(payload))]
    for at in dict.fromkeys(places):
        for bit in range(8):
            changed = payload.copy()
            changed[at] ^= 1 << bit
            yield f"bit {bit} of byte {at}", changed


def _swaps(size: int, shape: BlockShape, rng: np.random.Generator) -> Iterator[tuple[str, int, int, int]]:
    """Name, two places and a size."""
    for unit, name in ((4, "halves"), (8, "words"), (64, "lines"), (512, "sectors"), (PIECE_BYTES, "pieces")):
        for _ in range(6):
            one, other = sorted(rng.choice(size // unit, 2, replace=False).tolist())
            yield f"{name} {one} and {other} are swapped", one * unit, other * unit, unit
    yield "halves of a word are swapped", 0, 4, 4
    yield "words that share a key's number are swapped", 16, PIECE_WORDS * 8 + 16, 8
    yield "pieces side by side are swapped", 0, PIECE_BYTES, PIECE_BYTES
    yield "layers are swapped", 0, shape.layer_bytes, shape.layer_bytes
    if size >= 2 * shape.block_bytes:
        yield "blocks are swapped", 0, shape.block_bytes, shape.block_bytes


def _pairs(payload: Bytes, shape: BlockShape, rng: np.random.Generator) -> Iterator[tuple[str, Bytes]]:
    """One bit of two words, which a sum of words would not see where they go opposite ways."""
    for bit in range(64):
        for _ in range(4):
            one, other = rng.choice(shape.layer_bytes // 8, 2, replace=False).tolist()
            changed = payload.copy()
            for word in (one, other):
                changed[word * 8 + bit // 8] ^= 1 << bit % 8
            yield f"bit {bit} of words {one} and {other}", changed


def one_bit(record: Bytes) -> None:
    """Flip the smallest bit of a float32 in the first block of a record of five blocks, one layer."""
    record[header_bytes(5, 1) + 100] ^= 1


def wrong_blocks(record: Bytes) -> None:
    """Put each block's KV into the next one's place."""
    header = decode_header(record)
    payload = record[header_bytes(header.blocks, header.shape.layers) :]
    payload[:] = np.roll(payload, header.shape.block_bytes)
