"""What a step launches on a GPU: at most 12 kernels a layer where the fused step serves, and no wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest
import torch

from bench.kernel_counts import EXPERTS, FAMILIES, STEPS, Counts, count_family, count_step, counting
from samovar.replicas.forward import PLAIN_TYPES, StepInputs
from samovar.replicas.forward.attention_triton import TritonPaged
from tests.support.engines.tiny_models import Family

KERNELS_MAX = 12
"""Of a layer: 8, and one or two each for attention of decodes and of other rows."""
MIXTURE_KERNELS_MAX = 40
STEP_KERNELS_MAX = 20
"""Besides the layers."""


@pytest.mark.parametrize("family", sorted(PLAIN_TYPES))
def test_a_layer_of_a_dense_plain_family_is_at_most_12_kernels(family: Family) -> None:
    found = count_family(family, STEPS)
    for name in STEPS:
        before, after = found["modules", name], found["fused", name]
        assert after.layer.kernels <= KERNELS_MAX, name
        assert after.step.kernels - 2 * after.layer.kernels <= STEP_KERNELS_MAX, name
        assert (after.step.waits, after.step.uploads) == (0, 0), name
        assert before.layer.kernels >= 2.8 * after.layer.kernels, name
    assert found["fused", "1 decodes"].layer.kernels == 8 + 2
    assert found["fused", "128 decodes"].layer.kernels == 8 + 1


@pytest.mark.parametrize("family", EXPERTS)
def test_a_layer_of_a_mixture_is_at_most_40_kernels(family: Family) -> None:
    """Split attention included; chunks beside decodes are attended by launches of their own."""
    found = count_family(family, STEPS)
    for name in STEPS:
        after = found["modules, grouped", name]
        assert after.layer.kernels <= MIXTURE_KERNELS_MAX + 2 * (", " in name), name
        assert (after.step.waits, after.step.uploads) == (0, 0), name
        assert found["modules", name].layer.waits >= 4


def test_all_plain_families_are_counted_and_another_keeps_its_modules() -> None:
    assert set(FAMILIES) >= PLAIN_TYPES
    found = count_family("gemma2", {"8 decodes": STEPS["8 decodes"]})
    assert set(found) == {("modules", "8 decodes")}
    assert found["modules", "8 decodes"].step.waits == 0


class Played:
    """A way to compute a step that does one thing."""

    name, rows_multiple = "played", 1

    def __init__(self, play: Callable[[torch.Tensor], object]) -> None:
        self._play = play

    def hidden(self, inputs: StepInputs, wanted: torch.Tensor | None = None) -> torch.Tensor:
        self._play(inputs.positions)
        return inputs.positions

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor, count: int) -> torch.Tensor:
        return hidden


@pytest.mark.parametrize(
    ("play", "found"),
    [
        (lambda rows: rows.view(1, -1)[:, 0], Counts()),
        (lambda rows: torch.empty_like(rows), Counts()),
        (lambda rows: rows + 1, Counts(1)),
        (lambda rows: rows[None].float().matmul(rows[:, None].float()), Counts(3)),
        (lambda rows: rows.tolist(), Counts(waits=1)),
        (lambda rows: rows.max().item(), Counts(1, 1)),
        (lambda rows: bool(rows.sum()), Counts(1, 1)),
        (lambda rows: torch.nonzero(rows), Counts(1, 1)),
        (lambda rows: rows[rows > 0], Counts(2, 1)),
        (lambda rows: torch.tensor([1.0, 2.0]), Counts(1, uploads=1)),
    ],
)
def test_what_is_launched_waited_for_and_uploaded_is_seen(
    play: Callable[[torch.Tensor], object], found: Counts
) -> None:
    backend = cast(TritonPaged, type("Untiled", (), {"tiling": None}))
    assert count_step(Played(play), backend, [(3, 1)] * 2) == found


def test_a_launch_of_triton_is_seen() -> None:
    from samovar.replicas.forward.fused import step

    counts = Counts()
    with counting(counts):
        step.silu_times(torch.zeros(3, 8))
    assert counts == Counts(2)  # the zeros, too
