"""Computes the checksums of a record's layers on a GPU, of blocks where they lie: in pages.

The same bits as `cache_tiers/blocks/record.py`, which defines them. A program computes one layer of one
block, some pieces at a time; both sets of keys stay in its registers. Offsets of pages are int64: a pool has
more than 2^31 bytes.

Imported where triton is. No load takes it yet: docs/adr/020-checksums-of-pieces.md.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from samovar.cache_tiers.blocks import BlockShape
from samovar.cache_tiers.blocks import record as definition

PIECES = 4
"""A program's at a time: 16 KiB, and 32 registers of each of 128 threads."""
WARPS = 4
_STEP = tl.constexpr(definition.STEP)
# Triton reads no tuples of a module.
_SHIFT_1, _FACTOR_1 = map(tl.constexpr, definition.MIX[0])
_SHIFT_2, _FACTOR_2 = map(tl.constexpr, definition.MIX[1])
_SHIFT_3 = tl.constexpr(definition.MIX[2][0])


def page_sums(
    pages: torch.Tensor, numbers: torch.Tensor, seeds: torch.Tensor, shape: BlockShape
) -> torch.Tensor:
    """Return the checksums, int64 `[blocks, layers]` (bits of u64), of the blocks in these pages.

    `pages`: u8 `[pages, block_bytes]`; `numbers`: of the blocks' pages, int64 `[blocks]`; `seeds`: the first
    8 bytes of the blocks' keys, int64 `[blocks]`. All on one device, on its current stream; nothing waits.
    Raises `ValueError` if a layer is not whole words.
    """
    if shape.layer_bytes % definition.WORD_BYTES or pages.shape[1] != shape.block_bytes:
        raise ValueError(f"pages of {pages.shape[1]} bytes for blocks of {shape} in whole words")
    sums = torch.empty((len(numbers), shape.layers), dtype=torch.int64, device=pages.device)
    layer_words = shape.layer_bytes // definition.WORD_BYTES
    sums_of_layers[(len(numbers), shape.layers)](
        sums,
        pages.view(torch.int64),
        numbers,
        seeds,
        _keys_on(pages.device),
        layer_words,
        LAYERS=shape.layers,
        WORD_BYTES=definition.WORD_BYTES,
        PIECE_WORDS=definition.PIECE_WORDS,
        PIECES=PIECES,
        num_warps=WARPS,
    )
    return sums


@cache
def _keys_on(device: torch.device) -> torch.Tensor:
    return torch.from_numpy(definition.piece_keys().reshape(-1).view("<i8")).to(device)


@triton.jit
def _mixed(word):
    word = (word ^ (word >> _SHIFT_1)) * _FACTOR_1
    word = (word ^ (word >> _SHIFT_2)) * _FACTOR_2
    return word ^ (word >> _SHIFT_3)


@triton.jit
def _products(words, keys):
    """Multiply the keyed halves of words, 32 bits by 32; int64, as sums are."""
    low = words.to(tl.uint32) + keys.to(tl.uint32)
    high = (words >> 32).to(tl.uint32) + (keys >> 32).to(tl.uint32)
    return (low.to(tl.uint64) * high.to(tl.uint64)).to(tl.int64, bitcast=True)


@triton.jit
def sums_of_layers(
    sums,
    pages,
    numbers,
    seeds,
    keys,
    layer_words,
    LAYERS: tl.constexpr,
    WORD_BYTES: tl.constexpr,
    PIECE_WORDS: tl.constexpr,
    PIECES: tl.constexpr,
):
    block, layer = tl.program_id(0), tl.program_id(1)
    page = tl.load(numbers + block).to(tl.int64)
    base = pages + (page * LAYERS + layer) * layer_words
    size = layer_words.to(tl.uint64) * WORD_BYTES
    seed = tl.load(seeds + block).to(tl.uint64, bitcast=True)
    seed = _mixed(seed ^ _mixed((layer.to(tl.uint64) << 32) | size))
    places = tl.arange(0, PIECE_WORDS)
    first_keys = tl.load(keys + places).to(tl.uint64, bitcast=True)[None, :]
    second_keys = tl.load(keys + PIECE_WORDS + places).to(tl.uint64, bitcast=True)[None, :]
    total = tl.zeros((PIECES,), tl.uint64)
    for start in range(0, layer_words, PIECES * PIECE_WORDS):
        begins = start + tl.arange(0, PIECES) * PIECE_WORDS
        at = begins[:, None] + places[None, :]
        is_there = at < layer_words
        words = tl.load(base + at, mask=is_there, other=0).to(tl.uint64, bitcast=True)
        first = tl.sum(tl.where(is_there, _products(words, first_keys), 0), 1)
        second = tl.sum(tl.where(is_there, _products(words, second_keys), 0), 1)
        tag = seed + (begins // PIECE_WORDS + 1).to(tl.uint64) * _STEP
        folded = _mixed(first.to(tl.uint64, bitcast=True) ^ tag)
        folded = _mixed(folded + second.to(tl.uint64, bitcast=True))
        total += tl.where(begins < layer_words, folded, 0)
    total = tl.sum(total.to(tl.int64, bitcast=True), 0)
    tl.store(sums + block * LAYERS + layer, total)
