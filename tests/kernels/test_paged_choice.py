"""The comparison at a replica's start, and the writing of K and V, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from samovar.replicas.forward import attention_triton
from samovar.replicas.forward.attention import AttentionForm
from samovar.replicas.forward.attention_choice import compare
from samovar.replicas.forward.attention_triton import TritonPaged, Unserved, write_rows
from samovar.replicas.kv.kv_pool import KvGeometry, KvPool
from tests.kernels.paged import CPU, LONG_AND_SHORT, SMALL, PagedCase, Shape

INT8 = {"head_dim": 64, "is_int8": True}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        Shape(),
        Shape(head_dim=80, kv_heads=6, kv_groups=2, block_tokens=64),
        Shape(**INT8),
        Shape(kv_heads=4, kv_groups=2, **INT8),
    ],
)
def test_k_and_v_are_written_as_on_cpu_to_the_byte(shape: Shape, dtype: torch.dtype) -> None:
    geometry = KvGeometry(
        2, shape.block_tokens, shape.kv_heads, shape.head_dim, dtype, shape.kv_groups, shape.is_int8
    )
    by_torch, by_kernel = KvPool(geometry, 6, CPU), KvPool(geometry, 6, CPU)
    generator = torch.Generator().manual_seed(3)
    rows = 41
    slots = 1 + torch.randperm(5 * shape.block_tokens - 1, generator=generator)[:rows].to(torch.int32)
    keys, values = torch.randn(2, shape.kv_heads, rows, shape.head_dim, generator=generator)
    keys[:, 3] = 0
    keys[:, 5] *= 1e-4
    values[:, 7] = torch.linspace(-127, 127, shape.head_dim).round() / 2  # halves, to be rounded to even
    keys, values = keys.to(dtype).transpose(0, 1), values.to(dtype).transpose(0, 1).contiguous()
    places = slots.long() // shape.block_tokens, slots.long() % shape.block_tokens
    by_torch.layer(1).write(places, keys, values)
    write_rows(by_kernel.layer(1), slots, keys, values)
    assert torch.equal(by_kernel.page_bytes, by_torch.page_bytes)
    assert by_kernel.page_bytes.any()


def kernel(made: type[TritonPaged], group: int) -> TritonPaged:
    return made(SMALL, processors=1, group=group, kv_heads=2)


@pytest.mark.parametrize("is_int8", [False, True])
def test_a_right_kernel_passes_the_comparison(is_int8: bool) -> None:
    pool = KvPool(KvGeometry(1, 16, 2, 64, torch.float32, is_int8=is_int8), 5, CPU)
    forms = [AttentionForm(0.125), AttentionForm(0.125, 20, 4.0, torch.zeros(4))]
    compare(kernel(TritonPaged, 2), pool, forms)


class OneKeyShort(TritonPaged):
    """Its decodes do not see their own token."""

    def prepare(self, inputs: attention_triton.StepInputs) -> attention_triton.PagedPlan:
        plan = super().prepare(inputs)
        inputs.spans[0, 2] -= 1
        return plan


class WrongPlace(TritonPaged):
    def write(self, layer_kv, keys, values, meta):  # type: ignore[no-untyped-def]
        super().write(layer_kv, keys.roll(1, 0), values, meta)


@pytest.mark.parametrize(
    ("wrong", "why"), [(OneKeyShort, "differs by"), (WrongPlace, "stores other K and V")]
)
def test_a_wrong_kernel_is_found_at_the_start(wrong: type[TritonPaged], why: str) -> None:
    pool = KvPool(KvGeometry(1, 16, 2, 64, torch.float32), 7, CPU)
    with pytest.raises(Unserved, match=why):
        compare(kernel(wrong, 1), pool, [AttentionForm(0.125)])


@pytest.mark.parametrize("shape", [Shape(), Shape(group=7), Shape(group=3, **INT8)], ids=str)
def test_a_padded_step_is_the_same_step_to_the_bit(shape: Shape) -> None:
    """As graphs have it: decodes beside chunks, some in runs and some not, the rest of the places empty."""
    case = PagedCase(shape, LONG_AND_SHORT)
    found, expected = case.attend_padded()
    rows = len(expected)
    assert torch.equal(found[:rows], expected)
    assert (found[rows:] == 0).all()
    assert (expected.double() - case.reference()).abs().max() <= 1e-5
