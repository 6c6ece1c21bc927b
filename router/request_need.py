"""What a request will take of its tenant's limits: at least, as soon as it is parsed, and in the end."""

from __future__ import annotations

from collections.abc import Sequence

from replicas.messages import GenerateRequest
from router.limits import Need
from router.parsed_request import ParsedChat, ParsedCompletion


def need_at_least(request: ParsedChat | ParsedCompletion) -> Need:
    """Before anything is tokenised."""
    prompts = () if isinstance(request, ParsedChat) else request.prompts
    count = max(1, len(prompts))
    sequences = count * request.n
    prompt_tokens = sum(1 if isinstance(prompt, str) else len(prompt) for prompt in prompts)
    return Need(
        sequences,
        max(count, prompt_tokens) + sequences * (request.sampling.max_tokens or 1),
        "n" if request.n > 1 else "prompt",
    )


def need_of(asks: Sequence[GenerateRequest]) -> Need:
    """What replicas will be asked for. An answer without `max_tokens` may take all of the context."""
    return Need(
        sum(ask.n for ask in asks),
        sum(len(ask.prompt_token_ids) + ask.n * ask.sampling.max_tokens for ask in asks),
        "n" if asks[0].n > 1 else "prompt",
    )
