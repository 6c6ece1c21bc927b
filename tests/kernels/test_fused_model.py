"""Whole models by the fused step, in Triton's interpreter, beside transformers' modules and the lean step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from samovar.replicas.forward.attention import GatherSdpa
from samovar.replicas.forward.forward import TransformersForward
from samovar.replicas.forward.fused import FusedForward
from samovar.replicas.forward.lean import LeanForward, LeanModel
from samovar.replicas.forward.plain import plain_model
from samovar.replicas.start.step_choice import compare_fused
from tests.kernels.fused import MEMBERS, TOKENS, FusedCase, off, served
from tests.kernels.paged import CPU

TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3}
"""Of all logits of a step, relative to them."""


@pytest.mark.parametrize(("family", "more"), dict(MEMBERS).items(), ids=dict(MEMBERS))
def test_logits_are_those_of_the_modules_and_of_the_lean_step(family: str, more: dict[str, Any]) -> None:
    """A prompt, a chunk behind a context, decodes beside them and alone, padded; NaN in all other slots.

    Of each family the last member: with a bias or a window where it may have one.
    """
    model = served(family, **more)
    case, sdpa = FusedCase(model), GatherSdpa(False, torch.float32)
    truth, pool = case.run(lambda pool: TransformersForward(model, pool, sdpa, exact=False), sdpa)
    kernel, plain = case.kernel(), plain_model(model)
    found, ours = case.run(lambda pool: FusedForward(plain, pool, kernel), kernel)
    assert off(found, truth) <= TOLERANCES[torch.float32]
    for name, tokens in TOKENS.items():
        stored, theirs = (one.gather(case.sequences[name].pages, tokens) for one in (ours, pool))
        torch.testing.assert_close(stored, theirs, atol=1e-3, rtol=1e-3)
    lean, _ = case.run(lambda pool: LeanForward(LeanModel(plain), pool, sdpa, exact=False), sdpa)
    assert off(found, lean) <= TOLERANCES[torch.float32]


@pytest.mark.parametrize("is_int8", [False, True], ids=["as computed", "int8"])
@pytest.mark.parametrize("family", ["granite", "qwen3"])
def test_it_rounds_where_the_modules_round(family: str, is_int8: bool) -> None:
    """In float16, on the same attention: what is left is the order of sums."""
    model = served(family, torch.float16)
    case, sdpa = FusedCase(model, is_int8=is_int8, dtype=torch.float16), GatherSdpa(False, torch.float16)
    truth, pool = case.run(lambda pool: TransformersForward(model, pool, sdpa, exact=False), sdpa)
    plain = plain_model(model)
    found, ours = case.run(lambda pool: FusedForward(plain, pool, sdpa), sdpa)
    assert off(found, truth) <= TOLERANCES[torch.float16]
    stored, theirs = (one.gather_layer(0, case.sequences["b"].pages, 0, TOKENS["b"]) for one in (ours, pool))
    assert (stored == theirs).float().mean() > 0.99, "the first layer's K and V, but for the last bit"


def test_the_comparison_at_start_takes_the_kernels() -> None:
    model = served("llama")
    compare_fused(model, plain_model(model), FusedCase(model, is_int8=True).geometry, CPU)
