"""How much of a step's keys each program of the attention kernel reads: none much more than another.

Counted from the lists that the kernel works through, by its own arithmetic.
"""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
import torch

from samovar.replicas.forward.attention_triton import TritonPaged, tile_shapes
from samovar.replicas.forward.inputs import SPLIT_KEYS_MIN, SPLITS_MAX, StepPacker, TileWork
from samovar.replicas.scheduling.sequence import bare_sequence
from samovar.replicas.scheduling.step import Chunk

CPU = torch.device("cpu")
PROCESSORS, GROUP, BLOCK = 132, 4, 64


def kernel_of(kv_heads: int) -> TritonPaged:
    return TritonPaged(tile_shapes(90, 128, 2, GROUP), processors=PROCESSORS, group=GROUP, kv_heads=kv_heads)


def decodes_of(contexts: list[int], kernel: TritonPaged) -> TileWork:
    chunks = [
        Chunk(bare_sequence([0] * context, [1] * -(-context // BLOCK)), context - 1, 1)
        for context in contexts
    ]
    work = StepPacker(CPU, BLOCK, tiling=kernel.tiling).pack(chunks).decodes
    assert work is not None
    return work


def reads_of(contexts: list[int], kernel: TritonPaged) -> list[int]:
    """Keys that each program of one KV head reads; all are read, and none twice."""
    work, block = decodes_of(contexts, kernel), tile_shapes(90, 128, 2, GROUP)[0].keys
    reads, covered = [], Counter[int]()
    for tile, run in work.items.tolist():
        segment, _, _, runs = work.tiles[tile].tolist()
        keys = contexts[segment]
        length = math.ceil(math.ceil(keys / block) / runs) * block
        read = max(0, min(keys, (run + 1) * length) - run * length)
        covered[segment] += read
        reads.append(read)
    assert [covered[segment] for segment in range(len(contexts))] == contexts
    return reads


def fair_share(contexts: list[int], kernel: TritonPaged) -> float:
    """Keys that each of the programs would read that the device runs at a time, and no less than pays."""
    assert kernel.tiling is not None
    return max(sum(contexts) / kernel.tiling.decodes, SPLIT_KEYS_MIN)


MIXES = {
    "one long among 31 short": [65_536] + [1024] * 31,
    "one long among 127 short": [131_072] + [500] * 127,
    "two long among 62": [32_768, 131_072] + [2000] * 62,
    "one alone": [65_536],
    "all equal": [8192] * 32,
}


@pytest.mark.parametrize("kv_heads", [8, 4])
@pytest.mark.parametrize("mix", MIXES)
def test_no_program_reads_more_than_twice_its_share(mix: str, kv_heads: int) -> None:
    contexts = MIXES[mix]
    kernel = kernel_of(kv_heads)
    assert max(reads_of(contexts, kernel)) <= 2 * fair_share(contexts, kernel)


def test_no_program_reads_more_than_twice_its_share_in_random_mixes() -> None:
    rng = random.Random(7)
    kernel = kernel_of(8)
    for _ in range(60):
        longest = rng.choice([500, 4000, 30_000, 131_072])
        contexts = [
            max(1, int(longest * rng.random() ** rng.choice([1, 4, 12])))
            for _ in range(rng.choice([1, 7, 32, 128]))
        ]
        assert max(reads_of(contexts, kernel)) <= 2 * fair_share(contexts, kernel), contexts


def test_where_there_are_few_kv_heads_the_merge_bounds_the_runs() -> None:
    """More runs of a tile than `SPLITS_MAX` are not merged: stated, not hidden."""
    contexts = [131_072] + [1000] * 31
    reads = reads_of(contexts, kernel_of(1))
    assert max(reads) <= 131_072 / SPLITS_MAX + 64
