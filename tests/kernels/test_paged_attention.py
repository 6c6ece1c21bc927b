"""The attention kernel in Triton's interpreter, against attention in float64."""

from __future__ import annotations

import pytest
import torch

from samovar.replicas.forward.attention import AttentionForm
from samovar.replicas.forward.attention_triton import tile_shapes
from tests.kernels.paged import FEW, MIXED, PagedCase, Shape

pytestmark = pytest.mark.usefixtures("poisoned")

TOLERANCES = {torch.float32: 1e-6, torch.float16: 1e-3}

SHAPES = [
    Shape(group=1, head_dim=64, block_tokens=16),
    Shape(group=3, head_dim=80, block_tokens=16, splits=8, kv_groups=2),
    Shape(group=4, head_dim=128, block_tokens=64),
    Shape(group=7, head_dim=64, block_tokens=64, splits=8),
    Shape(group=4, head_dim=80, block_tokens=64, splits=8, dtype=torch.float16),
    Shape(group=1, head_dim=128, block_tokens=16, dtype=torch.float16),
    Shape(group=7, head_dim=80, block_tokens=16, kv_groups=2, is_int8=True),
    Shape(group=3, head_dim=128, block_tokens=64, splits=8, is_int8=True),
    Shape(group=4, head_dim=64, block_tokens=16, splits=8, is_int8=True, dtype=torch.float16),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_prompts_chunks_and_decodes_in_one_step(shape: Shape) -> None:
    """Shuffled page tables, old pages full of NaN, and padding rows."""
    steps = MIXED if shape.splits == 1 else FEW
    assert PagedCase(shape, steps, rows_multiple=4).error() <= TOLERANCES[shape.dtype]


@pytest.mark.parametrize("splits", [1, 8])
@pytest.mark.parametrize(
    ("window", "softcap", "sinks"),
    [(33, None, False), (None, 5.0, False), (20, None, True), (17, 3.0, True)],
)
def test_windows_soft_caps_and_sinks(
    splits: int, window: int | None, softcap: float | None, sinks: bool
) -> None:
    shape = Shape(splits=splits, group=3, head_dim=64)
    scores = torch.linspace(-2, 2, 6) if sinks else None
    form = AttentionForm(0.4, window, softcap, scores)
    assert PagedCase(shape, FEW).error(form) <= (1e-6 if softcap is None else 4e-6)


@pytest.mark.parametrize("capability", [80, 90])
def test_the_tiles_that_are_served(capability: int) -> None:
    shape = Shape(head_dim=128, dtype=torch.float16, kv_heads=1)
    case = PagedCase(shape, ((300, 1), (150, 70)), shapes=tile_shapes(capability, 128, 2, 4))
    assert case.error() <= 1e-3
