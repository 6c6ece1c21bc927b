"""What a token adds to an answer, and whether the answer ends with it.

The same rules for a token that was just sampled and for those that another replica has sampled before it
was lost: an answer that goes on here stands exactly where it stood there. Pure but for the tokenizer;
knows nothing of logits, pages or steps.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import NamedTuple

from tokenizers import Tokenizer

from replicas.messages import FinishReason, GenerateRequest, Refused
from replicas.sampler import Sampler
from replicas.sequence import Sequence
from replicas.text_out import TextOut

logger = logging.getLogger("samovar.engine")


@dataclass(slots=True)
class OpenRequest:
    """A request with unfinished choices."""

    request: GenerateRequest
    since_s: float
    sequences: list[Sequence]
    texts: dict[int, TextOut] = field(default_factory=dict)  # by choice


class Told(NamedTuple):
    """`text` may go out; `is_word`: the token is part of the answer, not only its end."""

    text: str
    reason: FinishReason | None
    is_word: bool


class AnswerRules:
    """`context_tokens_max`: prompt and answer of one sequence together."""

    def __init__(self, tokenizer: Tokenizer, sampler: Sampler, context_tokens_max: int) -> None:
        self._tokenizer = tokenizer
        self._sampler = sampler
        self._context_tokens_max = context_tokens_max

    def append(self, opened: OpenRequest, sequence: Sequence, token_id: int) -> Told:
        """Add a token to one answer of a request."""
        params = sequence.sampling
        if sequence.index not in opened.texts:
            opened.texts[sequence.index] = TextOut(self._tokenizer, params.stop)
        text_out = opened.texts[sequence.index]
        sequence.tokens.append(token_id)
        if self._sampler.ends_turn(token_id, sequence):
            return Told(text_out.flush(), "stop", is_word=False)
        text, stopped = text_out.push(token_id, may_stop=sequence.output_tokens >= params.min_tokens)
        if stopped:
            return Told(text, "stop", is_word=True)
        if self._is_full(sequence):
            return Told(text + text_out.flush(), "length", is_word=True)
        return Told(text, None, is_word=True)

    def resume(self, opened: OpenRequest) -> Refused | None:
        """Bring an answer to where another replica left it, if one did; or say why that cannot be."""
        resume = opened.request.resume
        if resume is None:
            return None
        (sequence,) = opened.sequences
        try:
            is_over = any(self.append(opened, sequence, token).reason for token in resume.token_ids)
        except Exception:  # else the request would kill one replica after the other
            logger.exception("request %s cannot be resumed", sequence.request_id)
            return Refused("invalid", "the tokens to go on from cannot be read")
        return Refused("invalid", "the answer to go on with is over") if is_over else None

    def _is_full(self, sequence: Sequence) -> bool:
        if sequence.output_tokens >= sequence.sampling.max_tokens:
            return True
        return len(sequence.tokens) >= self._context_tokens_max
