"""The layout of a block: with one group what it always was, byte for byte; with more, runs of heads."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from samovar.cache_tiers.blocks.extent import ROOT, BlockShape, Bytes, Placement
from samovar.configs.settings import EngineSettings
from samovar.replicas.kv.block_io import page_io
from samovar.replicas.kv.copy_device import DONE
from samovar.replicas.kv.kv_pool import KvGeometry, KvPool
from samovar.replicas.messages import ModelRefused
from samovar.replicas.model.spec import ModelSpec
from samovar.replicas.offload.store import Origin, StoreRun, sealed_record
from samovar.replicas.start.build import kv_geometry, model_namespace

ONE = KvGeometry(layers=3, block_tokens=4, kv_heads=4, head_dim=8, dtype=torch.bfloat16)
TOKENS, PAGES = 7, [3, 1]


def digest(data: Bytes) -> str:
    return hashlib.sha256(data.tobytes()).hexdigest()


def written(geometry: KvGeometry) -> KvPool:
    """A pool in which `TOKENS` tokens have been written to `PAGES`, as the attention writes them."""
    pool = KvPool(geometry, 5, torch.device("cpu"))
    slots = (torch.tensor([3] * 4 + [1] * 3), torch.tensor([0, 1, 2, 3, 0, 1, 2]))
    heads = torch.arange(TOKENS * 4 * 8).view(TOKENS, 4, 8)
    for layer in range(geometry.layers):
        keys, values = (heads + layer * 7) % 251, (heads * 3 + layer * 5) % 241
        pool.layer(layer).write(slots, keys.to(geometry.dtype), values.to(geometry.dtype))
    return pool


def copied_out(pool: KvPool) -> Bytes:
    out = np.empty(len(PAGES) * pool.geometry.block_bytes, dtype=np.uint8)
    io = page_io(pool)
    io.begin_out(PAGES, out, io.mark()).wait()
    return out


def test_with_one_group_blocks_namespace_and_records_are_what_they_were_before_there_were_groups() -> None:
    """The digests were taken before `kv_groups` existed: what is stored since then must still be found."""
    spec = cast(ModelSpec, SimpleNamespace(fingerprint=bytes(range(32))))
    usual = replace(ONE, block_tokens=16)
    assert model_namespace(spec, usual).hex() == (
        "a7ccb95a1f06988b150777171563da01d5e2724832ef607e59f7851d2d09e0b2"
    )
    assert model_namespace(spec, replace(usual, dtype=torch.float32), "exact cpu").hex() == (
        "54ed34c1fdfa3926aac8838dac2dce5afc14df5afd5c1e4ba7301ed9d2097438"
    )
    assert ONE.record_shape == BlockShape(layers=3, layer_bytes=512, block_tokens=4)
    pool = written(ONE)
    assert digest(copied_out(pool)) == "024886b2f565c9d759ee3239aa3f60023c244c8341a1f6b0d371752e3aac5b94"
    pool.data[1, ..., 3, :, :] = 9  # left behind the last token
    keys = (bytes([1]) * 32, bytes([2]) * 32)
    origin = Origin(bytes(range(32)), b"t" * 16, b"s" * 16, Placement(), "i", 0, 1.5)
    run = StoreRun(0, keys, (4, 3))
    record, header = sealed_record(run, ROOT, PAGES, origin, ONE.record_shape, page_io(pool), DONE)
    payload = record[-header.payload_bytes :]
    assert digest(payload) == "024886b2f565c9d759ee3239aa3f60023c244c8341a1f6b0d371752e3aac5b94"
    assert record.nbytes == 7168


@pytest.mark.parametrize("groups", [2, 4])
def test_every_group_is_one_run_of_a_block_and_reads_as_it_was_written(groups: int) -> None:
    geometry = replace(ONE, groups=groups)
    pool, one = written(geometry), written(ONE)
    assert geometry.block_bytes == ONE.block_bytes
    assert geometry.record_shape == BlockShape(3 * groups, 512 // groups, 4)
    assert torch.equal(pool.gather(PAGES, TOKENS), one.gather(PAGES, TOKENS))
    heads = 4 // groups
    for group in range(groups):
        run = copied_out(pool).reshape(len(PAGES), groups, -1)[:, group]
        of_one = one.data[PAGES][..., group * heads : (group + 1) * heads, :]
        assert np.array_equal(run, of_one.reshape(len(PAGES), -1).view(torch.uint8).numpy())


@pytest.mark.parametrize("groups", [1, 2])
def test_a_layer_is_a_view_of_the_pool(groups: int) -> None:
    pool = written(replace(ONE, groups=groups))
    for part in (pool.layer(2).keys, pool.layer(2).values):
        assert part.untyped_storage().data_ptr() == pool.data.untyped_storage().data_ptr()
        assert part.shape == (5, 4, groups, 4 // groups, 8)
        assert part.stride(-1) == 1


def test_groups_that_do_not_divide_the_heads_are_refused_by_name() -> None:
    spec: Any = SimpleNamespace(layers=2, kv_heads=6, head_dim=8)
    with pytest.raises(ModelRefused, match=r"engine\.kv_groups.*1 or 2 or 3 or 6"):
        kv_geometry(EngineSettings(kv_groups=4), spec, torch.float32)
    assert kv_geometry(EngineSettings(kv_groups=3), spec, torch.float32).heads_per_group == 2
    with pytest.raises(ValueError, match="6 KV heads in 4 groups"):
        KvGeometry(2, 16, 6, 8, torch.float32, 4)
