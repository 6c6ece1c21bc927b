"""Samples the next token from a row of logits.

Randomness is a pure function of (seed, choice, output position): a Philox counter, no state. So a sequence
draws the same tokens alone or in a batch, after a preemption, with or without a cache hit, and on another
replica. Log-probabilities are the model's own, before temperature, penalties and grammars, as OpenAI's are.
"""

from __future__ import annotations

from collections.abc import Sequence as Listing
from dataclasses import dataclass

import numpy as np
import torch

from replicas.grammar import GrammarCompiler, GrammarRefused, GrammarState
from replicas.messages import Grammar
from replicas.scheduling import Sequence

TEMPERATURE_MIN = 1e-5
"""Below this, dividing logits overflows float32; sampling is then effectively greedy."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """A sampled token. `top`: (token id, log-probability) pairs, best first; empty if not requested.

    `rank`: of a token that was given: its place among all, 1 for the best; 0: not computed.
    """

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0


class Sampler:
    """Samples tokens. `eos_token_ids` are banned while an answer is shorter than its `min_tokens`.

    `grammars`: compiles what answers must look like; None: no answer has a grammar.
    """

    def __init__(self, eos_token_ids: tuple[int, ...], grammars: GrammarCompiler | None = None) -> None:
        self.eos_token_ids = eos_token_ids
        self.grammars = grammars

    def open_grammar(self, grammar: Grammar | None) -> GrammarState | None:
        """Return the state of an answer without tokens; None: any text. Raises `GrammarRefused`."""
        if grammar is None:
            return None
        if self.grammars is None:
            raise GrammarRefused(grammar.field, "this replica compiles no grammars")
        return self.grammars.open(grammar)

    def ends_turn(self, token_id: int, sequence: Sequence) -> bool:
        """Return whether this token, just sampled, ends the answer."""
        params = sequence.sampling
        if sequence.grammar is not None:  # after what ends it, it allows nothing
            return token_id in self.eos_token_ids or token_id in params.stop_token_ids
        if sequence.output_tokens < params.min_tokens:
            return False
        if token_id in params.stop_token_ids:
            return True
        return token_id in self.eos_token_ids and not params.ignore_eos

    @staticmethod
    def is_plain_greedy(sequence: Sequence) -> bool:
        """Return whether the row's maximum is the answer and nothing else is requested."""
        params = sequence.sampling
        return (
            params.temperature < TEMPERATURE_MIN
            and params.logprobs is None
            and not params.allowed_token_ids
            and not params.logit_bias
            and sequence.grammar is None
            and params.presence_penalty == 0
            and params.frequency_penalty == 0
            and params.repetition_penalty == 1
            and sequence.output_tokens >= params.min_tokens
        )

    @torch.inference_mode()
    def sample(self, row: torch.Tensor, sequence: Sequence) -> Sampled:
        """Sample a token from `row` (float32 `[vocab]`, on any device)."""
        row, params = row.cpu(), sequence.sampling
        adjusted = self._penalised(row, sequence)
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

    @staticmethod
    @torch.inference_mode()
    def score(rows: torch.Tensor, token_ids: Listing[int], top: int) -> list[Sampled]:
        """Return the log-probability of each given token under its row of logits `[tokens, vocab]`."""
        logprobs = rows.log_softmax(dim=-1)
        given = torch.tensor(token_ids, dtype=torch.long, device=rows.device)[:, None]
        own = logprobs.gather(1, given)
        ranks = 1 + (logprobs > own).sum(dim=-1)
        best = logprobs.topk(min(top, rows.shape[1]), dim=-1)
        return [
            Sampled(token_id, logprob, tuple(zip(ids, values, strict=True)), rank)
            for token_id, (logprob,), ids, values, rank in zip(
                token_ids,
                own.tolist(),
                best.indices.tolist(),
                best.values.tolist(),
                ranks.tolist(),
                strict=True,
            )
        ]

    def _penalised(self, row: torch.Tensor, sequence: Sequence) -> torch.Tensor:
        params = sequence.sampling
        adjusted = row.clone()
        if params.repetition_penalty != 1:  # prompt and output, as in CTRL (arXiv 1909.05858)
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
        allowed = self._allowed(row.shape[0], sequence)
        if allowed is not None:
            adjusted[~allowed] = -torch.inf
        return adjusted

    def _allowed(self, vocab: int, sequence: Sequence) -> torch.Tensor | None:
        """Return bool `[vocab]`, the tokens that may be sampled; None: all.

        Raises `GrammarRefused` if a grammar and `allowed_token_ids` have none in common.
        """
        params, grammar = sequence.sampling, sequence.grammar
        banned: set[int] = set()
        if sequence.output_tokens < params.min_tokens:
            banned.update(self.eos_token_ids, params.stop_token_ids)
        elif grammar is not None and params.ignore_eos:
            banned.update(self.eos_token_ids)
        if grammar is None and not banned and not params.allowed_token_ids:
            return None
        allowed = torch.ones(vocab, dtype=torch.bool)
        if grammar is not None:
            allowed = torch.from_numpy(grammar.mask())
        if params.allowed_token_ids:
            listed = torch.zeros(vocab, dtype=torch.bool)
            listed[list(params.allowed_token_ids)] = True
            allowed = allowed & listed
            if grammar is not None and not allowed.any():
                reason = f"none of them may follow here by {grammar.grammar.field}"
                raise GrammarRefused("allowed_token_ids", reason)
        if banned:
            others = allowed.clone()
            others[[token_id for token_id in banned if token_id < vocab]] = False
            if others.any():  # where nothing else is allowed, the answer goes on with what would end it
                return others
        return allowed


@torch.inference_mode()
def best_tokens(logits: torch.Tensor) -> tuple[list[int], list[bool]]:
    """Return the best token of each row `[rows, vocab]`, and whether the row contains a NaN.

    One copy from the device. A NaN counts as the greatest number, so only the best one is looked at.
    """
    best = logits.argmax(dim=-1, keepdim=True)
    told = torch.cat((best, logits.gather(1, best).isnan()), dim=1).tolist()
    return [token_id for token_id, _ in told], [bool(is_nan) for _, is_nan in told]


def uniform(seed: int, choice: int, position: int) -> float:
    """Return the number in [0, 1) of this output position of this choice of this seed."""
    generator = np.random.Philox(key=seed % 2**64, counter=[position, choice, 0, 0])
    return float(np.random.Generator(generator).random())


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
    # A token of probability 0 has an empty interval; `right=True` skips it.
    position = int(torch.searchsorted(cumulative, u * float(cumulative[-1]), right=True))
    if position >= probabilities.shape[0]:  # u so near 1 that it rounded up
        position = int(probabilities.nonzero()[-1])
    return position
