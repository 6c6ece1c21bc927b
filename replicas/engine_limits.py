"""What an engine takes, and what it tells a request that it does not take. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from replicas.messages import GenerateRequest, Refused, Resume
from replicas.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """`context_tokens_max`: prompt and answer of one sequence together; `queue_max`: sequences that wait;
    `tenant_queue_max`: those of one tenant; `vocab`: token ids are below it."""

    vocab: int
    context_tokens_max: int
    queue_max: int
    retry_after_s: float
    tenant_queue_max: int | None = None  # None: all of it


def refusal(request: GenerateRequest, limits: EngineLimits, scheduler: Scheduler) -> Refused | None:
    """Why `request` cannot be taken now, if it cannot."""
    prompt, answer = len(request.prompt_token_ids), request.sampling.max_tokens
    limit = limits.context_tokens_max
    if prompt < 1 or answer < 1:
        return Refused("too_long", "a request needs at least one prompt token and one answer token")
    if prompt and max(request.prompt_token_ids) >= limits.vocab:
        return Refused("invalid", f"a token id of the prompt is not below {limits.vocab}")
    if prompt + answer > limit or not scheduler.fits(prompt + answer):
        return Refused(
            "too_long", f"{prompt} prompt tokens and {answer} answer tokens exceed this model's {limit}"
        )
    if request.n > scheduler.sequences_max:
        return Refused("too_long", f"n={request.n} exceeds the {scheduler.sequences_max} running sequences")
    if request.resume is not None and (why := _bad_resume(request, request.resume, limits, scheduler)):
        return Refused("invalid", why)
    waiting = sum(sequence.forks for sequence in scheduler.waiting)
    if waiting + request.n - scheduler.free_places > limits.queue_max:
        return Refused("queue_full", f"{waiting} sequences are waiting already", limits.retry_after_s)
    if limits.tenant_queue_max is None:
        return None
    own = sum(sequence.forks for sequence in scheduler.waiting.of(request.tenant))
    if own + request.n - scheduler.free_places > limits.tenant_queue_max:
        message = (
            f"{own} sequences of this API key are waiting already, and it may have {limits.tenant_queue_max} "
            "of the queue's places (limits.tenant_share)"
        )
        return Refused("queue_full", message, limits.retry_after_s)
    return None


def _bad_resume(
    request: GenerateRequest, resume: Resume, limits: EngineLimits, scheduler: Scheduler
) -> str | None:
    """Why an answer cannot be gone on with; it may have no token yet (its siblings had)."""
    if request.n != 1:
        return f"one answer is resumed at a time, not n={request.n}"
    if not 0 <= resume.choice < scheduler.sequences_max:
        return f"choice {resume.choice} is not among {scheduler.sequences_max}"
    if len(resume.token_ids) >= request.sampling.max_tokens:
        return f"all {request.sampling.max_tokens} tokens of the answer to go on with are there"
    if resume.token_ids and not 0 <= min(resume.token_ids) <= max(resume.token_ids) < limits.vocab:
        return f"a token id of the answer to go on with is not below {limits.vocab}"
    return None
