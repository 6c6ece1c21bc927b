"""The kernel of checksums in Triton's interpreter: the bits of the record's own, of blocks in pages."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from samovar.cache_tiers.blocks.extent import BlockShape, Bytes
from samovar.cache_tiers.blocks.record import PIECE_BYTES, plain_sums
from samovar.replicas.kv import page_sums
from tests.kernels.paged import planted
from tests.support.nodes.damages import damages

M64 = 2**64 - 1
SEEDS = (0, 7, M64, 2**63 + 12345)
SHAPES = [
    BlockShape(1, 8, 16),
    BlockShape(3, 512, 16),
    BlockShape(2, PIECE_BYTES, 16),
    BlockShape(2, PIECE_BYTES + 8, 16),
    BlockShape(4, 12288, 16),
    BlockShape(3, 5 * PIECE_BYTES - 16, 16),
    BlockShape(2, 65536, 16),
]


def truth(blocks: Bytes, shape: BlockShape) -> np.ndarray:
    sums = np.zeros((len(SEEDS), shape.layers), np.uint64)
    plain_sums(blocks, np.array(SEEDS, np.uint64), shape, sums)
    return sums


def on_device(blocks: Bytes, shape: BlockShape, kernels: ModuleType = page_sums) -> np.ndarray:
    """Of blocks in pages that lie anywhere in a pool, full of other bytes elsewhere."""
    rng = np.random.default_rng(3)
    pages = rng.integers(0, 256, (2 * len(SEEDS) + 1, shape.block_bytes), dtype=np.uint8)
    numbers = rng.permutation(len(pages))[: len(SEEDS)]
    pages[numbers] = blocks.reshape(len(SEEDS), -1)
    seeds = torch.from_numpy(np.array(SEEDS, np.uint64).view(np.int64))
    found: torch.Tensor = kernels.page_sums(torch.from_numpy(pages), torch.from_numpy(numbers), seeds, shape)
    return found.numpy().view(np.uint64)


def random_blocks(shape: BlockShape) -> Bytes:
    return np.random.default_rng(5).integers(0, 256, len(SEEDS) * shape.block_bytes, dtype=np.uint8)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_they_are_the_records_own(shape: BlockShape) -> None:
    size = len(SEEDS) * shape.block_bytes
    for blocks in (random_blocks(shape), np.zeros(size, np.uint8), np.full(size, 255, np.uint8)):
        assert np.array_equal(on_device(blocks, shape), truth(blocks, shape))


def test_g5_each_damage_is_seen_and_blamed_on_its_layers() -> None:
    shape = BlockShape(3, PIECE_BYTES + 1032, 16)
    blocks = random_blocks(shape)
    sealed = truth(blocks, shape)
    for name, damaged in list(damages(blocks, shape))[::7]:
        changed = (damaged != blocks).reshape(len(SEEDS), shape.layers, -1).any(axis=2)
        assert np.array_equal(on_device(damaged, shape) != sealed, changed), name


def test_pages_that_are_not_these_blocks_are_refused() -> None:
    numbers = torch.zeros(1, dtype=torch.int64)
    for shape in (BlockShape(1, 12, 16), BlockShape(2, 16, 16)):
        with pytest.raises(ValueError, match="bytes for blocks"):
            page_sums.page_sums(torch.zeros((3, 12), dtype=torch.uint8), numbers, numbers, shape)


FAULTS = {
    "the last piece": ("range(0, layer_words,", "range(0, layer_words - PIECE_WORDS,"),
    "behind the end": ("tl.where(is_there, _products(words, first_keys), 0)", "_products(words, first_keys)"),
    "pieces without places": ("(begins // PIECE_WORDS + 1)", "(begins * 0 + 1)"),
    "layers without places": ("(layer.to(tl.uint64) << 32)", "(layer.to(tl.uint64) >> 32)"),
    "one product": ("_products(words, second_keys)", "_products(words, first_keys)"),
    "another page": ("tl.load(numbers + block)", "tl.load(numbers)"),
    "halves that are not keyed": ("+ (keys >> 32).to(tl.uint32)", "+ (keys >> 63).to(tl.uint32)"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(fault: str, tmp_path: Path) -> None:
    find, put = FAULTS[fault]
    assert Path(page_sums.__file__).read_text().count(find) == 1
    module = planted(page_sums, find, put, tmp_path)
    shape = BlockShape(3, 5 * PIECE_BYTES - 16, 16)
    blocks = random_blocks(shape)
    assert not np.array_equal(on_device(blocks, shape, module), truth(blocks, shape))
