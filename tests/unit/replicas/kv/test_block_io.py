"""Bytes of blocks between pages and host memory: the same bytes, of the right pages, in any dtype."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from samovar.replicas.kv.block_io import PageRun, page_io, page_runs
from samovar.replicas.kv.kv_pool import KvGeometry, KvPool


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_blocks_leave_and_come_back_in_other_pages_bit_for_bit(dtype: torch.dtype) -> None:
    geometry = KvGeometry(layers=2, block_tokens=16, kv_heads=2, head_dim=8, dtype=dtype)
    pool = KvPool(geometry, 9, torch.device("cpu"))
    pool.data[:] = torch.randn(pool.data.shape).to(dtype)
    before = pool.data.clone()
    io = page_io(pool)
    out = np.empty(3 * geometry.block_bytes, dtype=np.uint8)
    assert io.begin_out([5, 1, 7], out, io.mark()).done()
    out.flags.writeable = False  # as what comes from the object store
    assert io.begin_in(out, [2, 3, 8], io.mark()).done()
    assert torch.equal(pool.data[[2, 3, 8]], before[[5, 1, 7]])
    untouched = [0, 1, 4, 5, 6, 7]
    assert torch.equal(pool.data[untouched], before[untouched])


@pytest.mark.parametrize(
    ("pages", "runs"),
    [
        ([], []),
        ([4], [(0, 4, 1)]),
        ([4, 5, 6], [(0, 4, 3)]),
        ([6, 5, 4], [(0, 6, 1), (1, 5, 1), (2, 4, 1)]),
        ([1, 2, 9, 3, 4], [(0, 1, 2), (2, 9, 1), (3, 3, 2)]),
    ],
)
def test_adjacent_pages_are_one_copy(pages: list[int], runs: list[tuple[int, int, int]]) -> None:
    assert list(page_runs(pages)) == [PageRun(*run) for run in runs]


@pytest.mark.parametrize("groups", [1, 2])
def test_a_gathered_layer_is_what_the_whole_gather_has(groups: int) -> None:
    geometry = KvGeometry(3, 4, 2, 8, torch.float32, groups)
    pool = KvPool(geometry, 6, torch.device("cpu"))
    pool.data[:] = torch.randn(pool.data.shape)
    pages = [4, 2, 5]
    whole = pool.gather(pages, 11)
    for layer in range(3):
        assert torch.equal(pool.gather_layer(layer, pages, 3, 11), whole[layer][:, 3:])


def test_slots_behind_the_last_token_are_blanked_in_every_layer() -> None:
    geometry = KvGeometry(layers=2, block_tokens=4, kv_heads=6, head_dim=2, dtype=torch.float16, groups=3)
    block = np.full(geometry.block_bytes, 7, dtype=np.uint8)
    geometry.blank_behind(block, 3)
    slots = block.reshape(3, 2, 2, 4, 8)
    assert (slots[:, :, :, :3] == 7).all()
    assert (slots[:, :, :, 3:] == 0).all()
