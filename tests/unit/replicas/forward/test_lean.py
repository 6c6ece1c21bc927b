"""The lean step's weights: packed where torch can, and held once. What it computes is the laws' matter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from samovar.replicas.forward import lean
from samovar.replicas.forward.attention import EXACT_ROWS, GatherSdpa
from samovar.replicas.forward.lean import LeanForward, LeanModel, can_pack
from samovar.replicas.forward.plain import plain_model
from samovar.replicas.kv.kv_pool import KvGeometry, KvPool
from tests.unit.replicas.forward.test_plain import made

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])


def held(model: Any) -> int:
    """The bytes that a model's parameters have memory for."""
    storages = {one.untyped_storage() for one in model.parameters()}
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def no_op(*_: object) -> None:
    raise RuntimeError("planted: not in this build")


@DTYPES
def test_what_is_packed_loses_its_own_memory(dtype: torch.dtype) -> None:
    if not can_pack(dtype):
        pytest.skip("torch packs nothing here")
    model = made("llama").to(dtype)
    plain = plain_model(model)
    kept = [plain.embedding, plain.final_norm]
    kept += [one for layer in plain.layers for one in (layer.input_norm, layer.mlp_norm)]
    before = held(model)
    assert LeanModel(plain).is_packed
    assert held(model) == sum(one.nbytes for one in kept) < before / 2


def test_a_head_of_its_own_is_packed_and_a_tied_one_stays_the_embedding() -> None:
    for family, is_tied in (("llama", True), ("mistral", False)):
        plain = plain_model(made(family).to(torch.bfloat16))
        assert plain.is_tied == is_tied
        packed = LeanModel(plain)
        rows = torch.randn(4, 64).to(torch.bfloat16)
        assert torch.isfinite(packed.head(rows)).all()
        embedded = F.embedding(torch.tensor([3]), packed.numbers.embedding)
        assert torch.isfinite(embedded).all()


@DTYPES
@pytest.mark.parametrize("bias", [False, True])
def test_packed_and_unpacked_matrices_agree(dtype: torch.dtype, bias: bool) -> None:
    if not can_pack(dtype):
        pytest.skip("torch packs nothing here")
    packed, unpacked = (
        LeanModel(plain_model(made("llama", bias=bias).to(dtype)), packs=packs) for packs in (True, False)
    )
    assert not unpacked.is_packed
    rows = torch.randn(12, 64).to(dtype)
    for ours, theirs in zip(packed.layers, unpacked.layers, strict=True):
        for name in ("qkv", "out", "gate_up"):
            found, truth = (getattr(layer, name)(rows) for layer in (ours, theirs))
            torch.testing.assert_close(
                found, truth, rtol=2e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-2
            )


def test_a_build_of_torch_that_packs_nothing_is_served_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lean._Packed, "__init__", no_op)
    assert not can_pack(torch.bfloat16)
    assert not LeanModel(plain_model(made("llama").to(torch.bfloat16))).is_packed
    assert not can_pack(torch.float16)


@pytest.mark.parametrize(("exact", "rows"), [(True, EXACT_ROWS), (False, 1)])
def test_exact_mode_pads_the_rows(exact: bool, rows: int) -> None:
    packed = LeanModel(plain_model(made("llama")))
    pool = KvPool(KvGeometry(2, 16, 2, 16, torch.float32), 4, torch.device("cpu"))
    forward = LeanForward(packed, pool, GatherSdpa(exact, torch.float32), exact=exact)
    assert forward.rows_multiple == rows
