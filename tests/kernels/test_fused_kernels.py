"""The fused step's kernels in Triton's interpreter, against the same by torch; and faults planted in each."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from samovar.replicas.forward.attention_triton import write_rows
from samovar.replicas.forward.fused import kernels, step
from samovar.replicas.kv.kv_pool import KvGeometry, KvPool
from tests.kernels.paged import CPU, planted
from tests.support.engines.fused_reference import FusedReference

pytestmark = pytest.mark.usefixtures("poisoned")

ROWS, HIDDEN, INNER, EPS = 5, 96, 1100, 1e-2
ERROR_MAX = {torch.float32: 1e-6, torch.float16: 2e-3}
"""As `KernelCase.error` tells it; a fault has to be five times as large."""


@dataclass(frozen=True)
class Shape:
    group: int = 3
    kv_heads: int = 4
    kv_groups: int = 2
    head_dim: int = 80
    dtype: torch.dtype = torch.float32
    has_norms: bool = True
    uses_rope: bool = True
    is_int8: bool = False


class KernelCase:
    """What a layer launches, on a pool of NaN; slots in several pages, the trash page's among them."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        generator = torch.Generator().manual_seed(5)

        def random(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=generator).to(shape.dtype)

        self.rows, self.more, self.weight = random(ROWS, HIDDEN), random(ROWS, HIDDEN), random(HIDDEN)
        self.heads = random(ROWS, (shape.group + 2) * shape.kv_heads, shape.head_dim)
        self.rotation = random(ROWS, shape.head_dim // 2), random(ROWS, shape.head_dim // 2)
        norms = (random(shape.head_dim), random(shape.head_dim)) if shape.has_norms else (None, None)
        self.layer = Mock(q_norm=norms[0], k_norm=norms[1], uses_rope=shape.uses_rope)
        self.plain = Mock(q_heads=shape.group * shape.kv_heads, kv_heads=shape.kv_heads, norm_eps=EPS)
        self.gate_up = random(ROWS, 2 * INNER)
        self.slots = torch.tensor([16 * 2 + 15, 16 * 2, 16 * 3 + 7, 16 * 1 + 8, 3], dtype=torch.int32)

    def pool(self) -> KvPool:
        shape = self.shape
        pool = KvPool(
            KvGeometry(
                2, 16, shape.kv_heads, shape.head_dim, shape.dtype, shape.kv_groups, is_int8=shape.is_int8
            ),
            6,
            CPU,
        )
        pool.page_bytes.fill_(0xFF)
        return pool

    def computed(self) -> tuple[list[torch.Tensor], KvPool]:
        pool = self.pool()
        turned = step.rotate_write(
            self.plain, self.layer, self.heads, self.rotation, self.slots, pool.layer(1)
        )
        found = [
            step.norm(self.rows, self.weight, EPS),
            *step.add_norm(self.rows, self.more, 0.22, self.weight, EPS),
            *turned,
            step.silu_times(self.gate_up),
        ]
        return found, pool

    def error(self, monkeypatch: pytest.MonkeyPatch) -> float:
        """Return the largest error of any result: relative to it, or in 16 bits the share of other numbers.

        What lies in pages must be what `write_rows` writes of the same key heads, to the bit.
        """
        before = [one.clone() for one in (self.rows, self.more, self.heads, self.gate_up)]
        found, pool = self.computed()
        assert all(map(torch.equal, before, (self.rows, self.more, self.heads, self.gate_up)))
        with monkeypatch.context() as patch:
            patch.setattr(step, "_kernels", FusedReference)
            truth, _ = self.computed()
        same = self.pool()
        value = self.heads[:, -self.shape.kv_heads :]
        write_rows(same.layer(1), self.slots, found[4], value)
        if not torch.equal(pool.page_bytes, same.page_bytes):
            return math.inf
        if self.shape.dtype == torch.float16:
            errors = [(one != other).double().mean().item() for one, other in zip(found, truth, strict=True)]
        else:
            errors = [((a - b).norm() / b.norm()).item() for a, b in zip(found, truth, strict=True)]
        return math.inf if any(map(math.isnan, errors)) else max(errors)


F16, F32 = Shape(dtype=torch.float16), Shape()
PLAIN = [
    Shape(has_norms=False),
    Shape(has_norms=False, uses_rope=False, is_int8=True),
    Shape(uses_rope=False),
    Shape(group=1, head_dim=16, kv_heads=2, kv_groups=1),
    Shape(head_dim=64, is_int8=True),
    Shape(head_dim=128, dtype=torch.float16, is_int8=True),
]


@pytest.mark.parametrize("shape", [F32, F16, *PLAIN], ids=str)
def test_each_kernel_computes_what_torch_does_and_stores_what_is_stored_elsewhere(
    shape: Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert KernelCase(shape).error(monkeypatch) <= ERROR_MAX[shape.dtype]


FAULTS = {
    "sum: the other part is not multiplied": ("tl.float32) * multiplier", "tl.float32)", F32),
    "sum: it is not rounded before it is added": ("row + added.to(DTYPE)", "row + added", F16),
    "sum: another row's": ("tl.load(more + places", "tl.load(more + numbers", F32),
    "sum: the norm is of the row before": ("row = row.to(tl.float32)\n", "pass\n", F16),
    "norm: without its epsilon": ("/ HIDDEN + eps", "/ HIDDEN", F32),
    "norm: the mean of a whole block": ("/ HIDDEN + eps", "/ BLOCK + eps", F32),
    "norm: one number too many": ("is_there = numbers < HIDDEN", "is_there = numbers <= HIDDEN", F32),
    "norm: the last number is left out": ("numbers < HIDDEN", "numbers < HIDDEN - 1", F32),
    "norm: not rounded before its weight": (").to(DTYPE).to(tl.float32)\n", ")\n", F16),
    "heads: without the epsilon": ("/ HEAD_DIM + eps", "/ HEAD_DIM", F32),
    "heads: the others have their own weight": ("weight + across", "weight + dims", F32),
    "rotation: the other way": ("// 2, -sines, sines)", "// 2, sines, -sines)", F32),
    "rotation: by the neighbour": ("(dims + HEAD_DIM // 2) % HEAD_DIM", "(dims + 1) % HEAD_DIM", F32),
    "rotation: of another row": ("places = row * (HEAD_DIM // 2)", "places = 0 * row", F32),
    "query: a group's last head": ("(in_group < GROUP)", "(in_group < GROUP - 1)", F32),
    "key: normed as a query": ("_turned(of_keys, k_norm", "_turned(of_keys, q_norm", F32),
    "slot: the next one": ("slot % BLOCK_TOKENS", "(slot + 1) % BLOCK_TOKENS", F32),
    "page: the next one": ("slot // BLOCK_TOKENS)", "slot // BLOCK_TOKENS + 1)", F32),
    "page: K and V the other way round": ("(keys, key_scales,", "(values, key_scales,", F32),
    "page: K before it is rotated": (
        "scale_place, turned,",
        "scale_place, tl.load(of_keys + dims[None, :], mask=is_there, other=0.0),",
        F32,
    ),
    "value: it is K": ("of_keys + KV_HEADS * HEAD_DIM +", "of_keys +", F32),
    "head: its group's other one": ("one % HEADS_PER_GROUP", "(one + 1) % HEADS_PER_GROUP", F32),
    "int8: all heads have one scale": (
        "+ head * scale_head_stride",
        "+ 0 * scale_head_stride",
        Shape(head_dim=64, is_int8=True),
    ),
    "silu: the gate twice": ("gate_up + places + INNER", "gate_up + places", F32),
    "silu: not rounded before the product": ("tl.exp(-gate))).to(DTYPE)", "tl.exp(-gate)))", F16),
    "silu: the last number is left out": ("numbers < INNER", "numbers < INNER - 1", F32),
    "silu: the first row of all": ("places = row * (2 * INNER)", "places = 0 * row", F32),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find, put, shape = FAULTS[fault]
    module = planted(kernels, find, put, tmp_path)
    monkeypatch.setattr(step, "_kernels", lambda: module)
    assert not KernelCase(shape).error(monkeypatch) <= 5 * ERROR_MAX[shape.dtype]
