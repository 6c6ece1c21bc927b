"""How much of the limits a generation request needs. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from replicas.messages import GenerateRequest
from router.auth import Need
from router.openai import ParsedChat, ParsedCompletion


def need_at_least(request: ParsedChat | ParsedCompletion) -> Need:
    """Return a lower bound of the request's need, before anything is tokenised."""
    prompts = () if isinstance(request, ParsedChat) else request.prompts
    count = max(1, len(prompts))
    sequences = count * request.n
    cut = request.truncate_tokens
    lengths = [1 if isinstance(prompt, str) else len(prompt) for prompt in prompts]
    prompt_tokens = sum(lengths) if cut is None else sum(min(length, cut) for length in lengths)
    return Need(
        sequences,
        max(count, prompt_tokens)
        + sequences * (1 if request.is_length_default else request.sampling.max_tokens or 1),
        "n" if request.n > 1 else "prompt",
    )


def need_of(asks: Sequence[GenerateRequest]) -> Need:
    """Return the need of the replica requests.

    An answer without `max_tokens` may take the whole context.
    """
    return Need(
        sum(ask.n for ask in asks),
        sum(len(ask.prompt_token_ids) + ask.n * ask.sampling.max_tokens for ask in asks),
        "n" if asks[0].n > 1 else "prompt",
    )


def within_right(request: ParsedChat | ParsedCompletion, best: int) -> ParsedChat | ParsedCompletion:
    """Return a request with a priority that its tenant may have, at best `best`; told if it had another."""
    if request.priority >= best:
        return request
    return replace(request, priority=best, ignored_fields=(*request.ignored_fields, "priority"))


def with_cut(
    request: ParsedChat | ParsedCompletion, context_tokens_max: int
) -> ParsedChat | ParsedCompletion:
    """Return a request whose prompt is cut to as many tokens as fit, where it asks for that."""
    if request.truncate_tokens != -1:
        return request
    # The default length of a chat's answer takes nothing from its prompt.
    is_asked = isinstance(request, ParsedCompletion) or not request.is_length_default
    left = context_tokens_max - max(1, request.sampling.max_tokens if is_asked else 1)
    return replace(request, truncate_tokens=max(1, left))
