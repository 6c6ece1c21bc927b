"""What was begun to sample is what `sample` gives, whatever is written over the logits meanwhile."""

from __future__ import annotations

import random

import pytest
import torch

from samovar.replicas.messages import Sampled
from samovar.replicas.sampling import draws
from samovar.replicas.sampling.draws import greedy_of
from samovar.replicas.sampling.sampler import NotNumbers, Sampler
from tests.support.engines.sampled_batches import EOS, KINDS, batch_of


@pytest.fixture
def _on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws, "_is_on_host", lambda tensor: False)


@pytest.mark.usefixtures("_on_device")
@pytest.mark.parametrize("kind", [*KINDS, "all greedy", "mixed"])
def test_what_was_begun_is_what_is_sampled_whatever_follows(kind: str) -> None:
    rng, sampler, begun_some = random.Random(kind), Sampler(EOS, rows_max=64), 0
    kinds = {
        "all greedy": lambda rng, vocab: {"temperature": 0.0},
        "mixed": lambda rng, vocab: (
            {"temperature": 0.0} if rng.random() < 0.5 else rng.choice(list(KINDS.values()))(rng, vocab)
        ),
    } | KINDS
    for _ in range(60):
        logits, picks = batch_of(rng, kinds[kind])
        greedy = greedy_of(logits)
        wanted = sampler.sample(logits.clone(), picks)
        if kind == "all greedy" and rng.random() < 0.5:  # as a step of decodes has them
            picks = [(row, sequence) for row, (_, sequence) in zip(range(len(logits)), picks, strict=False)]
            wanted = sampler.sample(logits.clone(), picks)
        begun = sampler.begin(logits, picks, greedy)
        if begun is None:  # a pick that fails, or too many
            assert len(picks) > 64 or any(isinstance(one, Exception) for one in wanted)
            continue
        begun_some += 1
        ids = begun.token_ids
        logits.fill_(torch.nan)
        greedy.zero_()
        given = begun.read()
        assert [_plain(one) for one in given] == [_plain(one) for one in wanted]
        assert ids.dtype == torch.int32
        for token_id, one in zip(ids.tolist(), given, strict=True):
            assert isinstance(one, NotNumbers) or token_id == one.token_id  # type: ignore[union-attr]
    assert begun_some > 20


def _plain(one: Sampled | Exception) -> object:
    return type(one) if isinstance(one, Exception) else one


def test_more_than_fit_are_left_before_their_draws_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their masks would be computed for nothing, and once more by the engine's own thread."""
    logits, picks = batch_of(random.Random(1), lambda rng, vocab: {"top_p": 0.9})
    sampler = Sampler(EOS, rows_max=1)
    monkeypatch.setattr(sampler, "_draw", lambda *_: pytest.fail("a draw was made"))
    assert sampler.begin(logits, [picks[0], picks[0]], greedy_of(logits)) is None


def test_where_a_token_is_decided_on_the_host_nothing_is_begun() -> None:
    """A flat row on a CPU: the next step would begin with what is no token."""
    torch.manual_seed(0)
    logits = torch.randn(4, 3 * draws.PREFIX) * 0.01
    rng = random.Random(1)
    _, picks = batch_of(rng, lambda rng, vocab: {"top_p": 0.9})
    picks = [(0, sequence) for _, sequence in picks[:1]]
    assert Sampler(EOS).begin(logits, picks, greedy_of(logits)) is None
