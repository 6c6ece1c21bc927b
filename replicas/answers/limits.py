"""What any engine refuses at once: what cannot be computed, and what finds no place to wait. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from samovar.replicas.messages import GenerateRequest, Refused, Resume


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Limits on the requests that an engine accepts.

    `context_tokens_max`: prompt and answer of one sequence together; `queue_max`: waiting sequences;
    `tenant_queue_max`: those of one tenant; `vocab`: token ids are below it.
    """

    vocab: int
    context_tokens_max: int
    queue_max: int
    retry_after_s: float
    tenant_queue_max: int | None = None  # None: the whole queue


class Waiting(Protocol):
    """What waits for its tokens: `forks` sequences."""

    @property
    def forks(self) -> int: ...

    def yields_to(self, priority: int) -> bool:
        """Whether it gives way to its tenant's requests of this priority."""


def refusal(
    request: GenerateRequest,
    limits: EngineLimits,
    own: Iterable[Waiting],
    waiting: Iterable[Waiting],
    *,
    free_places: int,
    sequences_max: int,
    pool_tokens: int,
) -> Refused | None:
    """Return why `request` cannot be accepted now, or None if it can. Pure.

    `own`: what waits of its tenant; `waiting`: all that waits. `sequences_max` run at once, for
    `free_places` of them there is room now; `pool_tokens`: that all pages hold.
    """
    prompt, answer = len(request.prompt_token_ids), request.sampling.max_tokens
    limit = limits.context_tokens_max
    if prompt < 1 or answer < 1:
        return Refused("too_long", "a request needs at least one prompt token and one answer token")
    if max(request.prompt_token_ids) >= limits.vocab:
        return Refused("invalid", f"a token id of the prompt is not below {limits.vocab}")
    if max(request.sampling.allowed_token_ids, default=0) >= limits.vocab:
        return Refused("invalid", f"a token id of allowed_token_ids is not below {limits.vocab}")
    if max((token_id for token_id, _ in request.sampling.logit_bias), default=0) >= limits.vocab:
        return Refused("invalid", f"a token id of logit_bias is not below {limits.vocab}")
    if prompt + answer > min(limit, pool_tokens):
        return Refused(
            "too_long", f"{prompt} prompt tokens and {answer} answer tokens exceed this model's {limit}"
        )
    if request.n > sequences_max:
        return Refused("too_long", f"n={request.n} exceeds the {sequences_max} running sequences")
    if request.resume is not None and (why := _bad_resume(request, request.resume, limits, sequences_max)):
        return Refused("invalid", why)
    return _no_place(request, limits, list(own), waiting, free_places)


def _no_place(
    request: GenerateRequest,
    limits: EngineLimits,
    own: list[Waiting],
    all_waiting: Iterable[Waiting],
    free_places: int,
) -> Refused | None:
    """Return why a request cannot wait, or None.

    What yields to it takes none of its places, so that a flood of one priority refuses no better one; but no
    queue is ever longer than twice its limit.
    """
    yielding = sum(one.forks for one in own if one.yields_to(request.priority))
    waiting = sum(one.forks for one in all_waiting)
    more = request.n - free_places

    def is_full(count: int, limit: int) -> bool:
        return count - yielding + more > limit or count + more > 2 * limit

    if is_full(waiting, limits.queue_max):
        return Refused("queue_full", f"{waiting} sequences are waiting already", limits.retry_after_s)
    held = sum(one.forks for one in own)
    if limits.tenant_queue_max is not None and is_full(held, limits.tenant_queue_max):
        message = (
            f"{held} sequences of this API key are waiting already, and it may have "
            f"{limits.tenant_queue_max} of the queue's places (limits.tenant_share)"
        )
        return Refused("queue_full", message, limits.retry_after_s)
    return None


def _bad_resume(
    request: GenerateRequest, resume: Resume, limits: EngineLimits, sequences_max: int
) -> str | None:
    """Return why an answer cannot be resumed, or None.

    It may have no token yet, if only its siblings had.
    """
    if request.n != 1:
        return f"only one answer can be resumed at a time, not n={request.n}"
    if not 0 <= resume.choice < sequences_max:
        return f"choice {resume.choice} is not among {sequences_max}"
    if len(resume.token_ids) >= request.sampling.max_tokens:
        return f"all {request.sampling.max_tokens} tokens of the answer to resume exist already"
    if resume.token_ids and not 0 <= min(resume.token_ids) <= max(resume.token_ids) < limits.vocab:
        return f"a token id of the answer to resume is not below {limits.vocab}"
    return None
