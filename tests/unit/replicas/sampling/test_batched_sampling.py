"""Tokens sampled in batches, against the row-wise sampler that they replace: equal, bit for bit, on CPU."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from samovar.replicas.messages import Sampled
from samovar.replicas.sampling import draws, sampler
from samovar.replicas.sampling.draws import packed, unpacked, upload
from samovar.replicas.sampling.sampler import NotNumbers, Sampler
from tests.support.engines import rowwise_sampler
from tests.support.engines.rowwise_sampler import sample_row
from tests.support.engines.sampled_batches import (
    EOS,
    KINDS,
    LARGE,
    Params,
    anything,
    differences,
    sequence_of,
)


@pytest.mark.parametrize("kind", KINDS)
def test_a_thousand_rows_of_each_kind_are_what_each_row_alone_gives(kind: str) -> None:
    """Tokens, log-probabilities and the best ones beside them."""
    assert differences(random.Random(kind), KINDS[kind], 1000) == 0


def test_a_batch_of_all_kinds_is_what_each_row_alone_gives() -> None:
    rng = random.Random(5)
    assert differences(rng, lambda rng, vocab: rng.choice(list(KINDS.values()))(rng, vocab), 1000) == 0


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("temperature", name) for name in ("temperature", "u", "rows")),
        ("top_p", "top_p"),
        *(("top_k", name) for name in ("top_k", "top_k_rows")),
        ("min_p", "min_p"),
        *(("repetition", name) for name in ("repetition", "seen")),
        *(("presence", name) for name in ("presence", "output")),
        ("frequency", "frequency"),
        *(("bias", name) for name in ("bias", "biased")),
        ("grammar", "refused"),
        *(("anything", name) for name in ("masked", "scored")),
        ("logprobs", "top3"),
    ],
)
def test_a_planted_mistake_in_any_array_is_seen(
    kind: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row gets its neighbour's number, or a token its neighbour's."""

    def planted(arrays: dict[str, np.ndarray], device: torch.device) -> dict[str, torch.Tensor]:
        if name in arrays:
            array = arrays[name]
            is_of_tokens = name in ("seen", "output", "biased")
            arrays = {**arrays, name: abs(array - 1) if is_of_tokens else np.roll(array, 1, axis=0)}
        return upload(arrays, device)

    monkeypatch.setattr(draws, "upload", planted)
    assert differences(random.Random(kind), KINDS[kind], 300) > 0


def test_a_planted_mistake_in_the_position_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = sampler.uniform
    monkeypatch.setattr(sampler, "uniform", lambda seed, choice, position: sound(seed, choice, position + 1))
    assert differences(random.Random(1), KINDS["plain"], 50) > 25


@pytest.mark.parametrize("u", [0.0, 5e-324, 1 - 2**-53], ids=["0", "tiny", "almost 1"])
@pytest.mark.parametrize("kind", ["plain", "top_p", "anything"])
def test_the_ends_of_the_interval(kind: str, u: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "uniform", lambda *_: u)
    monkeypatch.setattr(rowwise_sampler, "uniform", lambda *_: u)
    assert differences(random.Random(2), KINDS[kind], 300) == 0


def test_equal_numbers_at_the_cut_are_kept_in_the_order_of_their_ids() -> None:
    """Everything is equal: top-p keeps the first ids, within the prefix and beyond it."""
    logits = torch.zeros(4, LARGE)
    logits[1:, 5:] -= 1000.0
    for top_p, row, most in ((0.5, 0, LARGE // 2 + 1), (0.1, 0, LARGE // 10 + 1), (0.5, 1, 3), (0.2, 2, 1)):
        picks = [
            (row, sequence_of(random.Random(seed), logits[row], {"temperature": 1.0, "top_p": top_p}))
            for seed in range(60)
        ]
        given = Sampler(EOS).sample(logits, picks)
        assert given == [sample_row(logits[row], one) for _, one in picks]
        assert all(isinstance(one, Sampled) and one.token_id < most for one in given)


def counted(monkeypatch: pytest.MonkeyPatch, name: str) -> list[int]:
    """Count the calls of a function of `draws`, by the number of their first argument's items."""
    sound, calls = getattr(draws, name), []

    def watched(*given: Any) -> Any:
        calls.append(len(given[0]))
        return sound(*given)

    monkeypatch.setattr(draws, name, watched)
    return calls


def peaked(rows: int) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(rows, LARGE) * 9


@pytest.mark.parametrize(("rows_max", "transfers"), [(64, 1), (8, 2), (5, 3)])
def test_a_step_comes_back_in_one_transfer_for_each_so_many_rows(
    rows_max: int, transfers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetches, begun = list[int](), sampler.BegunDraws
    monkeypatch.setattr(sampler, "BegunDraws", lambda *given: fetches.append(1) or begun(*given))
    rng = random.Random(3)
    made: list[Params] = [{"temperature": 0.0}, {"top_p": 0.9}, {}, {"logprobs": 3}, {"logprobs": 5}]
    logits = peaked(15)
    picks = [(row, sequence_of(rng, logits[row], made[row % 5])) for row in range(15)]
    given = Sampler(EOS, rows_max=rows_max).sample(logits, picks)
    assert not any(isinstance(one, Exception) for one in given)
    assert len(fetches) == transfers


def test_only_a_row_whose_best_tokens_do_not_decide_is_sorted_as_a_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = counted(monkeypatch, "_draw_whole")
    logits = peaked(6)
    logits[4] *= 1e-3
    picks = [(row, sequence_of(random.Random(row), logits[row], {"top_p": 0.9})) for row in range(6)]
    given = Sampler(EOS).sample(logits, picks)
    assert given == [sample_row(logits[row], one) for row, one in picks]
    assert len(whole) == 1


def test_logits_that_are_no_numbers_spoil_their_own_row_only() -> None:
    rng = random.Random(4)
    logits = peaked(5)
    logits[1, 77] = torch.nan
    logits[3] = torch.nan
    picks = [(row, sequence_of(rng, peaked(1)[0], anything(rng, LARGE))) for row in (0, 1, 1, 2, 3, 4)]
    picks.append((3, sequence_of(rng, logits[0], {"temperature": 0.0})))
    for (row, one), given in zip(picks, Sampler(EOS).sample(logits, picks), strict=True):
        if row in (1, 3):
            assert isinstance(given, NotNumbers)
        else:
            assert given == sample_row(logits[row], one, EOS)


@pytest.mark.parametrize(
    "bad",
    [{"logit_bias": ((LARGE, 1.0),)}, {"logit_bias": ((-1, 1.0),)}, {"mask": np.ones(5, dtype=np.bool_)}],
    ids=["beyond", "before", "mask"],
)
def test_a_pick_that_cannot_be_sampled_is_the_only_one(bad: Params) -> None:
    rng, logits = random.Random(6), peaked(3)
    picks = [(row, sequence_of(rng, logits[row], bad if row == 1 else {})) for row in range(3)]
    first, broken, last = Sampler(EOS).sample(logits, picks)
    assert isinstance(broken, IndexError)
    assert [first, last] == [sample_row(logits[row], one, EOS) for row, one in (picks[0], picks[2])]


def test_an_error_in_a_batch_is_that_of_one_pick(monkeypatch: pytest.MonkeyPatch) -> None:
    rng, logits = random.Random(7), peaked(4)
    picks = [(row, sequence_of(rng, logits[row], {"top_p": 0.5 if row == 2 else 1.0})) for row in range(4)]

    def broken(*_: object) -> torch.Tensor:
        raise ValueError("planted")

    monkeypatch.setattr(draws, "_draw_nucleus", broken)
    given = Sampler(EOS).sample(logits, picks)
    assert isinstance(given[2], ValueError)
    assert [given[row] for row in (0, 1, 3)] == [sample_row(logits[row], picks[row][1]) for row in (0, 1, 3)]


def test_an_answer_goes_on_growing_after_its_penalties_were_computed() -> None:
    """An array whose memory is lent out cannot grow."""
    logits = peaked(1)
    one = sequence_of(random.Random(8), logits[0], {"repetition_penalty": 1.2, "presence_penalty": 0.1})
    Sampler(EOS).sample(logits, [(0, one)])
    one.tokens.append(1)


def test_packed_arrays_come_out_as_they_went_in() -> None:
    arrays: dict[str, np.ndarray] = {
        "one byte": np.array([1], dtype=np.uint8),
        "ids": np.arange(5, dtype=np.int64),
        "mask": np.random.default_rng(0).random((3, 1027)) < 0.5,
        "floats": np.array([1.5, -2.0, np.inf], dtype=np.float32),
        "bits": np.array([True, False, True]),
        "doubles": np.array([[0.1, 1 - 2**-53]], dtype=np.float64),
        "none": np.empty(0, dtype=np.int32),
    }
    found = unpacked(arrays, torch.from_numpy(packed(arrays)))
    for name, tensor in upload(arrays, torch.device("cpu")).items():
        assert torch.equal(found[name], tensor), name
        assert found[name].dtype == tensor.dtype
