"""Steps to sample from: rows of logits of every shape, and sequences that ask for every kind of sampling."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from samovar.replicas.messages import SamplingParams
from samovar.replicas.sampling.draws import PREFIX
from samovar.replicas.sampling.sampler import Sampler
from samovar.replicas.scheduling.sequence import Sequence
from tests.support.engines.rowwise_sampler import sample_row

EOS = (2, 7)
LARGE, SMALL = 3 * PREFIX - 71, 257
Params = dict[str, Any]


class MaskOnly:
    """A grammar's state, as far as a sampler asks: what may come next."""

    field = "response_format"

    def __init__(self, allowed: np.ndarray) -> None:
        self._allowed = allowed
        self.grammar = self

    def mask(self) -> np.ndarray:
        return self._allowed.copy()


def some_ids(rng: random.Random, vocab: int, most: int) -> tuple[int, ...]:
    return tuple(rng.sample(range(vocab), rng.randint(1, most)))


def masked(rng: random.Random, vocab: int) -> Params:
    allowed = np.array([rng.random() < 0.3 for _ in range(vocab)])
    allowed[[rng.randrange(vocab), *EOS]] = True
    return {"mask": allowed, "ignore_eos": rng.random() < 0.5}


Kind = Callable[[random.Random, int], Params]
WAYS: dict[str, Kind] = {
    "plain": lambda rng, vocab: {},
    "temperature": lambda rng, vocab: {"temperature": rng.choice([1e-4, 0.01, 0.3, 0.7, 1.3, 2.0, 5.0])},
    "top_k": lambda rng, vocab: {"top_k": rng.choice([1, 2, 5, 40, 200, vocab - 1, vocab, vocab + 9])},
    "top_p": lambda rng, vocab: {"top_p": rng.choice([5e-324, 1e-9, 0.1, 0.5, 0.9, 0.99, 0.9999, 1 - 1e-12])},
    "min_p": lambda rng, vocab: {"min_p": rng.choice([1e-6, 0.01, 0.1, 0.5, 1.0])},
    "repetition": lambda rng, vocab: {"repetition_penalty": rng.uniform(0.5, 2.0)},
    "presence": lambda rng, vocab: {"presence_penalty": rng.uniform(-2, 2)},
    "frequency": lambda rng, vocab: {"frequency_penalty": rng.uniform(-2, 2)},
    "bias": lambda rng, vocab: {
        "logit_bias": tuple((one, rng.uniform(-9, 9)) for one in some_ids(rng, vocab, 20))
    },
    "allowed": lambda rng, vocab: {"allowed_token_ids": (*some_ids(rng, vocab, 30), *EOS)},
    "grammar": masked,
    "min_tokens": lambda rng, vocab: {
        "min_tokens": rng.randint(1, 20),
        "stop_token_ids": (*some_ids(rng, vocab, 5), vocab + 3),
    },
    "logprobs": lambda rng, vocab: {"logprobs": rng.choice([0, 0, 1, 3, 20])},
}


def anything(rng: random.Random, vocab: int) -> Params:
    """Several ways at once."""
    params: Params = {}
    for way in rng.sample(list(WAYS.values()), rng.randint(0, 7)):
        params |= way(rng, vocab)
    return params


def greedy(rng: random.Random, vocab: int) -> Params:
    return anything(rng, vocab) | {"temperature": 0.0}


KINDS: dict[str, Kind] = {**WAYS, "anything": anything, "greedy with anything": greedy}


def logits_of(rng: random.Random, rows: int, vocab: int) -> torch.Tensor:
    """Rows that are flat, peaked, full of equal numbers as bfloat16 makes them, or mostly impossible."""
    torch.manual_seed(rng.randrange(2**31))
    made = (
        torch.randn(rows, vocab) * torch.tensor([rng.choice([0.3, 2.0, 6.0]) for _ in range(rows)])[:, None]
    )
    for row in made:
        shape = rng.randrange(6)
        if shape == 0:
            row.copy_(row.bfloat16().float())
        elif shape == 1:
            row.round_()
        elif shape == 2:
            row[torch.randperm(vocab)[: rng.randrange(vocab)]] = -torch.inf
        elif shape == 3:
            row[rng.randrange(vocab)] += 30
    return made


def sequence_of(rng: random.Random, row: torch.Tensor, params: Params, index: int = 0) -> Sequence:
    """A sequence of few different ids, which occur several times, most of them likely to be next."""
    params = {"temperature": 1.0} | params
    mask = params.pop("mask", None)
    prompt, output = rng.randint(1, 40), rng.choice([0, 0, 1, 7, 30])
    ids = [*row.topk(8).indices.tolist(), *(rng.randrange(len(row)) for _ in range(4))]
    return Sequence(
        request_id="r",
        arrival=0,
        namespace=bytes(32),
        tokens=array("I", rng.choices(ids, k=prompt + output)),
        prompt_tokens=prompt,
        sampling=SamplingParams(max_tokens=99, **params),
        seed=rng.randrange(2**63),
        index=index,
        grammar=None if mask is None else MaskOnly(mask),  # type: ignore[arg-type]
    )


def batch_of(
    rng: random.Random, kind: Kind, most: int = 16
) -> tuple[torch.Tensor, list[tuple[int, Sequence]]]:
    """A step: some rows, and picks of them, several of one row where a request has several choices."""
    vocab = rng.choice([LARGE, LARGE, SMALL, PREFIX, PREFIX + 1])
    logits = logits_of(rng, rng.randint(1, most), vocab)
    picks = [
        (row, sequence_of(rng, logits[row], kind(rng, vocab), index))
        for row in range(len(logits))
        for index in range(rng.choice([1, 1, 1, 3]))
    ]
    return logits, picks


def differences(rng: random.Random, kind: Kind, count: int) -> int:
    """How many of `count` picks, in batches, are not what their row alone gives."""
    batched, done, wrong = Sampler(EOS, rows_max=10), 0, 0
    while done < count:
        logits, picks = batch_of(rng, kind)
        before = logits.clone()
        given = batched.sample(logits, picks)
        assert torch.equal(logits, before), "the model's own logits were written to"
        wrong += sum(
            one != sample_row(logits[row], sequence, EOS)
            for one, (row, sequence) in zip(given, picks, strict=True)
        )
        done += len(picks)
    return wrong
