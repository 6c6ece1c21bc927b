"""Samples from one row of logits at a time, as the engine did until draws were batched: their reference."""

from __future__ import annotations

import torch

from samovar.replicas.messages import Sampled
from samovar.replicas.sampling.draws import TEMPERATURE_MIN
from samovar.replicas.sampling.sampler import uniform
from samovar.replicas.scheduling.sequence import Sequence


def sample_row(row: torch.Tensor, sequence: Sequence, eos_token_ids: tuple[int, ...] = ()) -> Sampled:
    """Sample a token from `row` (float32 `[vocab]`)."""
    params = sequence.sampling
    adjusted = _penalised(row, sequence, eos_token_ids)
    if params.temperature < TEMPERATURE_MIN:
        token_id = int(adjusted.argmax())
    else:
        token_id = _draw(
            _distribution(adjusted / params.temperature, params.top_k, params.top_p, params.min_p),
            uniform(sequence.seed, sequence.index, sequence.output_tokens),
        )
    if params.logprobs is None:
        return Sampled(token_id)
    logprobs = row.log_softmax(dim=-1)
    best = logprobs.topk(min(params.logprobs, row.shape[0]))
    top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return Sampled(token_id, float(logprobs[token_id]), top)


def _penalised(row: torch.Tensor, sequence: Sequence, eos_token_ids: tuple[int, ...]) -> torch.Tensor:
    params = sequence.sampling
    adjusted = row.clone()
    if params.repetition_penalty != 1:
        seen = torch.unique(torch.tensor(sequence.tokens, dtype=torch.long))
        values = adjusted[seen]
        adjusted[seen] = torch.where(
            values > 0, values / params.repetition_penalty, values * params.repetition_penalty
        )
    if (params.presence_penalty or params.frequency_penalty) and sequence.output_tokens:
        output = torch.tensor(sequence.tokens[sequence.prompt_tokens :], dtype=torch.long)
        ids, counts = torch.unique(output, return_counts=True)
        adjusted[ids] -= params.presence_penalty + params.frequency_penalty * counts
    if params.logit_bias:
        biased = [token_id for token_id, _ in params.logit_bias]
        adjusted[biased] += torch.tensor([bias for _, bias in params.logit_bias])
    allowed = _allowed(row.shape[0], sequence, eos_token_ids)
    if allowed is not None:
        adjusted[~allowed] = -torch.inf
    return adjusted


def _allowed(vocab: int, sequence: Sequence, eos_token_ids: tuple[int, ...]) -> torch.Tensor | None:
    params, grammar = sequence.sampling, sequence.grammar
    banned: set[int] = set()
    if sequence.output_tokens < params.min_tokens:
        banned.update(eos_token_ids, params.stop_token_ids)
    elif grammar is not None and params.ignore_eos:
        banned.update(eos_token_ids)
    if grammar is None and not banned and not params.allowed_token_ids:
        return None
    allowed = torch.ones(vocab, dtype=torch.bool)
    if grammar is not None:
        allowed = torch.from_numpy(grammar.mask())
    if params.allowed_token_ids:
        listed = torch.zeros(vocab, dtype=torch.bool)
        listed[list(params.allowed_token_ids)] = True
        allowed = allowed & listed
    if banned:
        others = allowed.clone()
        others[[token_id for token_id in banned if token_id < vocab]] = False
        if others.any():
            return others
    return allowed


def _distribution(logits: torch.Tensor, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """Return float32 `[vocab]` probabilities after top-k, then min-p, then top-p; not renormalised."""
    if 0 < top_k < logits.shape[0]:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -torch.inf)
    probabilities = logits.softmax(dim=-1)
    if min_p > 0:
        probabilities = probabilities.masked_fill(probabilities < min_p * probabilities.max(), 0.0)
    if top_p < 1:
        ordered, order = probabilities.sort(descending=True, stable=True)
        before = ordered.double().cumsum(dim=-1) - ordered  # mass of strictly better tokens
        cut = before >= top_p * float(ordered.double().sum())
        cut[0] = False  # the best one stays, even if `top_p` times the mass rounds to 0
        probabilities[order[cut]] = 0.0
    return probabilities


def _draw(probabilities: torch.Tensor, u: float) -> int:
    """Return the token whose interval of the cumulative distribution contains `u`."""
    cumulative = probabilities.double().cumsum(dim=-1)
    position = int(torch.searchsorted(cumulative, u * float(cumulative[-1]), right=True))
    if position >= probabilities.shape[0]:  # u so near 1 that it rounded up
        position = int(probabilities.nonzero()[-1])
    return position
