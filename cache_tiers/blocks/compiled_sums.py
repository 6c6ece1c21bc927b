"""Calls the compiled checksums of `layer_sums.cpp`: all of an extent's in one call, without Python's lock."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np

from samovar.cache_tiers.blocks.extent import BlockShape, Bytes, Checksums
from samovar.cache_tiers.blocks.record import PIECE_BYTES, STEP, Words, plain_sums
from samovar.configs.compiled import SUMS, NotCompiled, compiled_library, load_library

THREAD_BYTES_MIN = 4 * 1024 * 1024
"""What a thread computes takes ten times as long as starting it."""


def sums_library(folder: Path, wait_s: float) -> Path:
    """Return the compiled library, from the folder if it is there. Raises `NotCompiled`."""
    return compiled_library(SUMS, folder, wait_s=wait_s)


class CompiledSums:
    """The library, loaded. `threads`: at most, for one call. Raises `NotCompiled`."""

    def __init__(self, library: Path, threads: int) -> None:
        self._sums: Any = load_library(library).samovar_layer_sums
        sizes, address = ctypes.c_long, ctypes.c_void_p
        self._sums.argtypes = [address, sizes, sizes, sizes, address, address, sizes]
        self._sums.restype = None
        self._threads = threads
        self._prove()

    def __call__(self, payload: Bytes, seeds: Words, shape: BlockShape, sums: Checksums) -> None:
        """Compute `sums`, u64 `[blocks, layers]`; `seeds`: u64 `[blocks]`. All are in one run."""
        threads = max(1, min(self._threads, payload.nbytes // THREAD_BYTES_MIN))
        self._sums(
            payload.ctypes.data,
            len(seeds),
            shape.layers,
            shape.layer_bytes,
            seeds.ctypes.data,
            sums.ctypes.data,
            threads,
        )

    def _prove(self) -> None:
        """Compare it with numpy: what it seals is read on other machines."""
        shape = BlockShape(2, PIECE_BYTES + 13, 1)
        payload = np.arange(2 * shape.block_bytes, dtype=np.uint32).astype(np.uint8)
        seeds = np.array([1, STEP], np.uint64)
        found, expected = np.empty((2, 2), np.uint64), np.empty((2, 2), np.uint64)
        self(payload, seeds, shape, found)
        plain_sums(payload, seeds, shape, expected)
        if not np.array_equal(found, expected):
            raise NotCompiled("the compiled checksums have other bits")
