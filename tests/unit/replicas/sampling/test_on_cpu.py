"""What numpy finds in rows on a CPU is what torch finds, bit for bit: the first of equals, NaN before all."""

from __future__ import annotations

import math

import pytest
import torch

from samovar.replicas.sampling.draws import _greatest, greedy_of

VOCAB = 1000


def rows(kind: str) -> torch.Tensor:
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(3))
    match kind:
        case "equals":
            logits = logits.round()
        case "all equal":
            logits.zero_()
        case "infinite":
            logits[0, 7] = logits[0, 9] = math.inf
            logits[1] = -math.inf
            logits[2, ::2] = -math.inf
        case "not numbers":
            logits[1, 999] = logits[1, 5] = math.nan
            logits[3] = math.nan
            logits[4, 0], logits[4, 1] = math.inf, math.nan
    return logits


@pytest.mark.parametrize("kind", ["any", "equals", "all equal", "infinite", "not numbers"])
def test_the_best_token_of_each_row_is_torchs(kind: str) -> None:
    logits = rows(kind)
    best = logits.argmax(dim=-1, keepdim=True)
    assert greedy_of(logits).tolist() == [best[:, 0].tolist(), logits.isnan().any(dim=-1).int().tolist()]


def test_rows_that_lie_apart_are_read_where_they_are() -> None:
    logits = rows("any")
    assert greedy_of(logits[::2]).tolist()[0] == logits[::2].argmax(dim=-1).tolist()


@pytest.mark.parametrize("count", [1, 2, 64, VOCAB - 1, VOCAB])
def test_the_greatest_keys_are_torchs(count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    keys = torch.stack([torch.randperm(VOCAB, generator=generator) for _ in range(4)]) * 2**33 - 2**40
    assert torch.equal(_greatest(keys, count), keys.topk(count, dim=-1).values)
