"""Tokens drawn as a device draws them, all rows by the same launches: those that each row alone gives.

The same tensors, on a CPU. The row-wise sampler sorts each row and adds in float64, in the order of the sort.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from samovar.replicas.sampling import draws, sampler
from samovar.replicas.sampling.draws import PREFIX, nucleus_of
from samovar.replicas.sampling.sampler import NotNumbers, Sampler
from samovar.replicas.scheduling.sequence import Sequence
from tests.support.engines import rowwise_sampler
from tests.support.engines.launches import Launches
from tests.support.engines.rowwise_sampler import sample_row
from tests.support.engines.sampled_batches import EOS, KINDS, LARGE, differences, sequence_of


@pytest.fixture(autouse=True)
def _on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws, "_is_on_host", lambda tensor: False)

    def never(*_: object) -> None:
        raise AssertionError("a whole row was asked for")

    monkeypatch.setattr(draws, "_draw_whole", never)


def top_p_of(rng: random.Random, **given: Any) -> dict[str, Any]:
    return {"top_p": rng.choice([1e-9, 0.1, 0.5, 0.9, 0.99, 0.9999]), **given}


@pytest.mark.parametrize("kind", KINDS)
def test_a_thousand_rows_of_each_kind_are_what_each_row_alone_gives(kind: str) -> None:
    assert differences(random.Random(kind), KINDS[kind], 1000) == 0


@pytest.mark.parametrize("way", [name for name in KINDS if name not in ("top_p", "logprobs")])
def test_top_p_beside_any_other_way(way: str) -> None:
    rng = random.Random(way)
    assert differences(rng, lambda rng, vocab: KINDS[way](rng, vocab) | top_p_of(rng), 500) == 0


@pytest.mark.parametrize("u", [0.0, 5e-324, 2**-53, 1 - 2**-52, 1 - 2**-53])
@pytest.mark.parametrize("with_top_p", [True, False])
def test_the_ends_of_the_interval(u: float, with_top_p: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of no mass are never drawn, nor is one behind the last."""
    monkeypatch.setattr(sampler, "uniform", lambda *_: u)
    monkeypatch.setattr(rowwise_sampler, "uniform", lambda *_: u)
    made = top_p_of if with_top_p else lambda rng: KINDS["temperature"](rng, LARGE)
    assert differences(random.Random(2), lambda rng, vocab: made(rng), 500) == 0


@pytest.mark.parametrize("kind", ["equal", "few values", "halves", "one", "spread", "tiny and equal"])
@pytest.mark.parametrize("vocab", [2, PREFIX, LARGE])
def test_the_nucleus_is_that_of_a_sorted_row(kind: str, vocab: int) -> None:
    """Also where it ends exactly at a token, or among many that are equal; in rows that are cut elsewhere."""
    generator, rows = torch.Generator().manual_seed(vocab), 40
    made = {
        "equal": torch.ones(rows, vocab),
        "few values": torch.randint(1, 4, (rows, vocab), generator=generator).float(),
        "halves": 2.0 ** -torch.randint(0, 9, (rows, vocab), generator=generator),
        "one": torch.zeros(rows, vocab).index_fill_(1, torch.tensor([vocab - 1]), 1.0),
        "spread": (torch.randn((rows, vocab), generator=generator) * 5).exp(),
        "tiny and equal": (torch.rand((rows, vocab), generator=generator) < 0.5).float() * 1e-3 + 1e-30,
    }[kind]
    probabilities = made / made.sum(dim=-1, keepdim=True)
    top_p = torch.tensor([0.0, 5e-324, 1e-9, 0.25, 0.5, 0.75, 0.9, 1 - 1e-6] * 5, dtype=torch.float64)
    found = nucleus_of(probabilities.clone(), top_p)
    for row, part, share in zip(probabilities, found, top_p.tolist(), strict=True):
        ordered, order = row.sort(descending=True, stable=True)
        before = ordered.double().cumsum(dim=-1) - ordered
        limit = share * float(ordered.double().sum())
        clear = (before - limit).abs() > 1e-12
        clear[0] = True
        kept = before < limit
        kept[0] = True
        expected = torch.zeros_like(row).index_put_((order,), ordered * kept)
        if kind in ("equal", "halves") or clear.all():  # sums without rounding, or far from the cut
            assert torch.equal(part, expected)
        else:
            assert torch.equal(part[order[clear]], expected[order[clear]])


def test_logits_that_are_no_numbers_spoil_their_own_row_only() -> None:
    rng, logits = random.Random(4), torch.randn(6, LARGE) * 0.3
    logits[1, 77] = torch.nan
    logits[3] = -torch.nan
    logits[4, 5] = torch.inf
    picks = [(row, sequence_of(rng, torch.randn(LARGE), top_p_of(rng))) for row in range(6)]
    for (row, one), given in zip(picks, Sampler(EOS).sample(logits, picks), strict=True):
        if row in (1, 3):
            assert isinstance(given, NotNumbers)
        else:
            assert given == sample_row(logits[row], one, EOS)


def step_of(rows: int, scale: float, **params: Any) -> tuple[torch.Tensor, list[tuple[int, Sequence]]]:
    torch.manual_seed(0)
    logits = torch.randn(rows, LARGE) * scale
    return logits, [(row, sequence_of(random.Random(row), logits[row], dict(params))) for row in range(rows)]


def launches_of(rows: int, scale: float, **params: Any) -> Launches:
    logits, picks = step_of(rows, scale, **params)
    one = Sampler(EOS)
    with Launches() as launches:
        one.sample(logits, picks)
    return launches


@pytest.mark.parametrize("params", [{}, {"top_p": 0.9}, {"top_p": 0.9, "top_k": 2000, "min_p": 1e-6}])
def test_a_draw_is_as_many_launches_whatever_the_rows_hold(params: dict[str, Any]) -> None:
    """None of them is a wait; what comes back comes in the one transfer of the step."""
    counts = {
        (rows, scale): launches_of(rows, scale, **params) for rows in (1, 8, 32) for scale in (1e-3, 0.3, 9.0)
    }
    assert not any(one.waits for one in counts.values())
    assert len({one.kernels for one in counts.values()}) == 1
    assert counts[32, 0.3].kernels <= 64


def test_tokens_that_are_cut_are_not_all_added_up_in_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device adds to one place one number after the other: 128,000 would take longer than all the rest."""
    sound, most = vars(draws)["_sums"], list[int]()

    def watched(places: torch.Tensor, masses: torch.Tensor) -> torch.Tensor:
        most.append(max(int(row.bincount().max()) for row in places))
        return sound(places, masses)

    monkeypatch.setattr(draws, "_sums", watched)
    logits, picks = step_of(3, 3.0, top_p=0.95, top_k=20)
    Sampler(EOS).sample(logits, picks)
    assert len(most) == 2
    assert max(most) <= 3
