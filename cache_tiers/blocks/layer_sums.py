"""Computes the checksums of a record's layers: 64 bits of each layer of each block, of independent pieces.

All of them at once, in one call that does not hold the interpreter, where `layer_sums.cpp` is compiled; else
by numpy, and on a GPU by a kernel (`replicas/kv/page_sums.py`): the same bits. Part of the record's format
since version 3, so it never changes.

A word is 64 bits, little endian, `low` and `high` its halves; a layer's last word is filled up with zeros. A
piece is 512 words, the last one of a layer what is left. `mix(z)` is SplitMix64's last step; `step` is
0x9e3779b97f4a7c15; `key[i] = mix((i + 1) * step)`, i < 1024, halves likewise. All sums are modulo 2^64, those
of halves modulo 2^32::

    first   = sum over words i of (low[i] + key.low[i]) * (high[i] + key.high[i])
    second  = the same with key[i + 512]
    seed    = mix(the block key's first 8 bytes ^ mix(layer << 32 | layer_bytes))
    of piece p = mix(mix(first ^ (seed + (p + 1) * step)) + second)
    checksum   = sum over pieces

`first` and `second` are NH (Black et al., UMAC, CRYPTO 1999) with two sets of keys: two pieces that differ,
whatever the difference, agree in both for one in 2^64 sets of keys, and no two that differ in half a word
alone do. What is folded behind them tells pieces, layers, blocks and sizes apart. The keys are known to all:
like the rest of a record, this is against accidents.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from samovar.cache_tiers.blocks.extent import BlockShape, Bytes, Checksums

if TYPE_CHECKING:
    from samovar.configs.settings import Settings

logger = logging.getLogger(__name__)

WORD_BYTES = 8
PIECE_WORDS = 512
PIECE_BYTES = PIECE_WORDS * WORD_BYTES
STEP = 0x9E3779B97F4A7C15
MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))
"""Of a mixing step: by how much a word is shifted, and what the two are multiplied by."""

BATCH_BYTES = 1024 * 1024
"""How much numpy computes at a time: its steps in between are several times as large."""

Words = npt.NDArray[np.uint64]


def layer_sums(payload: Bytes, keys: Sequence[bytes], shape: BlockShape) -> Checksums:
    """Return the checksums, u64 `[blocks, layers]`, of the blocks with these `keys`.

    `payload`: u8 `[blocks * block_bytes]`, in one run. Raises `ValueError` if it is not.
    """
    blocks = len(keys)
    if payload.dtype != np.uint8 or payload.shape != (blocks * shape.block_bytes,):
        raise ValueError(f"{payload.dtype} of {payload.shape} for {blocks} blocks of {shape}")
    if not payload.flags.c_contiguous:
        raise ValueError("the blocks are not in one run")
    seeds = np.frombuffer(b"".join(key[:WORD_BYTES] for key in keys), "<u8")
    sums = np.empty((blocks, shape.layers), np.uint64)
    _here[0](payload, seeds, shape, sums)
    return sums


class SumsSetup(NamedTuple):
    """Where a process finds the compiled library, and how it uses it.

    `wait_s`: what one call of the compiler may take. `threads_max`: for one extent, and no more than half of
    the cores.
    """

    folder: Path
    wait_s: float
    threads_max: int

    @staticmethod
    def of(settings: Settings) -> SumsSetup:
        """Read it from the settings."""
        wait_s, threads_max = settings.engine.native_build_s_max, settings.tiers.check_threads
        return SumsSetup(settings.native_dir, wait_s, threads_max)


class Sums(Protocol):
    """Computes `sums`, u64 `[blocks, layers]`, of a payload; `seeds`: u64 `[blocks]`."""

    def __call__(self, payload: Bytes, seeds: Words, shape: BlockShape, sums: Checksums) -> None: ...


def compile_sums(setup: SumsSetup) -> Path | None:
    """Have this process compute checksums by the compiled library, which is returned.

    It is compiled if it is not there yet. Where that cannot be, numpy goes on, and the log says why.
    """
    from samovar.cache_tiers.blocks import (
        compiled_sums,  # here, as most processes have records of others only
    )
    from samovar.configs.compiled import NotCompiled

    threads = max(1, min(setup.threads_max, len(os.sched_getaffinity(0)) // 2))
    try:
        library = compiled_sums.sums_library(setup.folder, setup.wait_s)
        _here[0] = compiled_sums.CompiledSums(library, threads)
    except NotCompiled as why:
        logger.warning("checksums are computed by numpy, ten times as slowly: %s", why)
        return None
    return library


def plain_sums(payload: Bytes, seeds: Words, shape: BlockShape, sums: Checksums) -> None:
    """Compute `sums`, u64 `[blocks, layers]`, by numpy."""
    size = shape.layer_bytes
    places = np.arange(shape.layers, dtype=np.uint64) << np.uint64(32) | np.uint64(size)
    of_rows = mixed(seeds[:, None] ^ mixed(places)[None, :]).ravel()
    rows, out = payload.reshape(-1, size), sums.reshape(-1)
    batch = max(1, BATCH_BYTES // size)
    for start in range(0, len(rows), batch):
        part = slice(start, start + batch)
        out[part] = _sums_of_rows(rows[part], of_rows[part])


_here: list[Sums] = [plain_sums]
"""How this process computes them: one way."""


def mixed(words: Words) -> Words:
    """Return SplitMix64's last step of each word."""
    for shift, factor in MIX:
        words = (words ^ words >> np.uint64(shift)) * np.uint64(factor)
    return words


@cache
def piece_keys() -> npt.NDArray[np.uint32]:
    """Return the keys' halves, u32 `[2, PIECE_WORDS, 2]`: of both sums, of each word, low and high."""
    keys = mixed(np.arange(1, 2 * PIECE_WORDS + 1, dtype=np.uint64) * np.uint64(STEP))
    return keys.astype("<u8").view("<u4").reshape(2, PIECE_WORDS, 2)


def _sums_of_rows(rows: Bytes, seeds: Words) -> Words:
    """Return the checksums of layers, u8 `[rows, layer_bytes]`; `seeds`: u64 `[rows]`."""
    count, size = rows.shape
    if size % WORD_BYTES:
        rows = np.pad(rows, ((0, 0), (0, -size % WORD_BYTES)))
    halves = rows.view("<u4").reshape(count, -1, 2)
    whole = halves.shape[1] // PIECE_WORDS * PIECE_WORDS
    parts = [halves[:, :whole].reshape(count, -1, PIECE_WORDS, 2), halves[:, None, whole:]]
    first, second = (np.concatenate([_nh(part, keys) for part in parts], axis=1) for keys in piece_keys())
    pieces = -(-size // PIECE_BYTES)
    numbers = np.arange(1, pieces + 1, dtype=np.uint64) * np.uint64(STEP)
    tagged = first[:, :pieces] ^ (seeds[:, None] + numbers)
    sums: Words = mixed(mixed(tagged) + second[:, :pieces]).sum(axis=1, dtype=np.uint64)
    return sums


def _nh(halves: npt.NDArray[np.uint32], keys: npt.NDArray[np.uint32]) -> Words:
    """Return u64 `[rows, pieces]` of u32 `[rows, pieces, words, 2]`."""
    keyed = (halves + keys[: halves.shape[2]]).astype(np.uint64)
    sums: Words = (keyed[..., 0] * keyed[..., 1]).sum(axis=2, dtype=np.uint64)
    return sums
