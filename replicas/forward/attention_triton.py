"""The attention backend of GPUs: one Triton kernel for prefill, chunks and decode, in place on the paged pool.

What is launched for a step is planned here, in plain Python: tiles of rows, splits of keys, shapes of tiles. The
kernels are in `paged_kernels.py`, which is imported when a `TritonPaged` is made: triton comes with torch's
CUDA builds only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as Listing
from dataclasses import dataclass
from typing import Any

import torch

from replicas.forward.attention import AttentionForm, PackedBatch, Segment
from replicas.kv import KvGeometry, LayerKv

SPLITS_MAX = 64
SPLIT_KEYS_MIN = 256
"""Fewer keys than this are not worth a split: merging takes longer."""
GROUP_MAX = 64
HEAD_DIM_MAX = 256
SM_MIN = 80


class Unserved(Exception):
    """The kernel does not compute this model's attention here; the text says why."""


@dataclass(frozen=True, slots=True)
class TileShape:
    """What one program computes: `rows` (of a KV head's query heads) times `keys` at a time.

    `resident`: programs that a multiprocessor runs at a time; more splits than fill it gain nothing.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    resident: int


_SHAPES = {
    # (capability from, head_dim up to, bytes of an element): decode, prefill
    (90, 64, 2): (TileShape(16, 128, 4, 3, 3), TileShape(128, 64, 8, 3, 2)),
    (90, 128, 2): (TileShape(16, 64, 4, 3, 4), TileShape(128, 64, 8, 2, 1)),
    (90, 256, 2): (TileShape(16, 32, 4, 3, 3), TileShape(64, 32, 4, 2, 1)),
    (80, 64, 2): (TileShape(16, 64, 4, 3, 4), TileShape(64, 64, 4, 2, 2)),
    (80, 128, 2): (TileShape(16, 64, 4, 2, 3), TileShape(64, 32, 4, 2, 2)),
    (80, 256, 2): (TileShape(16, 32, 4, 2, 2), TileShape(32, 32, 4, 2, 1)),
    (80, 128, 4): (TileShape(16, 32, 4, 1, 2), TileShape(32, 32, 4, 1, 2)),
    (80, 256, 4): (TileShape(16, 16, 4, 1, 1), TileShape(16, 16, 4, 1, 1)),
}
"""Chosen from what ptxas says of registers and shared memory (`make test-kernels`), not by timing."""


def tile_shapes(capability: int, head_dim: int, itemsize: int, group: int) -> tuple[TileShape, TileShape]:
    """Return the shapes of decode and prefill tiles. `capability`: 90 for 9.0; `group`: query heads a KV head.

    Raises `Unserved` if there is none.
    """
    if group > GROUP_MAX or head_dim > HEAD_DIM_MAX or capability < SM_MIN:
        raise Unserved(f"no tile for {group} query heads a KV head of {head_dim} on sm_{capability}")
    decode, prefill = next(
        shapes
        for (sm, dim, size), shapes in _SHAPES.items()
        if capability >= sm and head_dim <= dim and itemsize == size
    )
    least = 1 << (group - 1).bit_length()  # a tile holds at least one row
    decode, prefill = (
        shape if shape.rows >= least else replace(shape, rows=least) for shape in (decode, prefill)
    )
    return decode, prefill
