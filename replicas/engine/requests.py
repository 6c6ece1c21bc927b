"""Requests of one engine, from their arrival to their last token: what is refused, open, told and counted."""

from __future__ import annotations

import itertools
import logging
import math
from array import array
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import torch

from samovar.cache_tiers.blocks import TAG_BYTES, Clear, namespace_digest
from samovar.cache_tiers.forecast import Stop
from samovar.cache_tiers.pricing import PrefillMeter
from samovar.replicas.engine.output import OpenRequest, OutputProcessor
from samovar.replicas.engine.receipts import receipt_of
from samovar.replicas.grammar import GrammarRefused, GrammarState
from samovar.replicas.kv import session_owner
from samovar.replicas.messages import (
    Admitted,
    Delta,
    Event,
    Failed,
    FinishReason,
    GenerateRequest,
    Grammar,
    Refused,
    Resume,
    TokenLogprob,
)
from samovar.replicas.model import is_device_lost, is_memory_short
from samovar.replicas.offload import Offload
from samovar.replicas.sampling import NotNumbers, Sampled
from samovar.replicas.scheduling import Chunk, Scheduler, Sequence

logger = logging.getLogger(__name__)


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


def refusal(request: GenerateRequest, limits: EngineLimits, scheduler: Scheduler) -> Refused | None:
    """Return why `request` cannot be accepted now, or None if it can. Pure."""
    prompt, answer = len(request.prompt_token_ids), request.sampling.max_tokens
    limit = limits.context_tokens_max
    if prompt < 1 or answer < 1:
        return Refused("too_long", "a request needs at least one prompt token and one answer token")
    if prompt and max(request.prompt_token_ids) >= limits.vocab:
        return Refused("invalid", f"a token id of the prompt is not below {limits.vocab}")
    if max(request.sampling.allowed_token_ids, default=0) >= limits.vocab:
        return Refused("invalid", f"a token id of allowed_token_ids is not below {limits.vocab}")
    if max((token_id for token_id, _ in request.sampling.logit_bias), default=0) >= limits.vocab:
        return Refused("invalid", f"a token id of logit_bias is not below {limits.vocab}")
    if prompt + answer > limit or scheduler.pool.pages_for(prompt + answer) > scheduler.pool.usable:
        return Refused(
            "too_long", f"{prompt} prompt tokens and {answer} answer tokens exceed this model's {limit}"
        )
    if request.n > (places := scheduler.queues.sequences_max):
        return Refused("too_long", f"n={request.n} exceeds the {places} running sequences")
    if request.resume is not None and (why := _bad_resume(request, request.resume, limits, scheduler)):
        return Refused("invalid", why)
    return _no_place(request, limits, scheduler)


def _no_place(request: GenerateRequest, limits: EngineLimits, scheduler: Scheduler) -> Refused | None:
    """Return why a request cannot wait, or None.

    What yields to it takes none of its places, so that a flood of one priority refuses no better one; but no
    queue is ever longer than twice its limit.
    """
    own = list(scheduler.waiting.of(request.tenant))
    yielding = sum(one.forks for one in own if one.yields_to(request.priority))
    waiting = sum(one.forks for one in scheduler.waiting)
    more = request.n - scheduler.queues.free_places

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
    request: GenerateRequest, resume: Resume, limits: EngineLimits, scheduler: Scheduler
) -> str | None:
    """Return why an answer cannot be resumed, or None.

    It may have no token yet, if only its siblings had.
    """
    if request.n != 1:
        return f"only one answer can be resumed at a time, not n={request.n}"
    if not 0 <= resume.choice < scheduler.queues.sequences_max:
        return f"choice {resume.choice} is not among {scheduler.queues.sequences_max}"
    if len(resume.token_ids) >= request.sampling.max_tokens:
        return f"all {request.sampling.max_tokens} tokens of the answer to resume exist already"
    if resume.token_ids and not 0 <= min(resume.token_ids) <= max(resume.token_ids) < limits.vocab:
        return f"a token id of the answer to resume is not below {limits.vocab}"
    return None


def _score_from(request: GenerateRequest) -> int | None:
    """Return the first slot whose logits give a log-probability of the prompt that is asked for, if any."""
    params = request.sampling
    first = max(0, params.prompt_logprobs_from - 1)
    wanted = params.prompt_logprobs is not None and first < len(request.prompt_token_ids) - 1
    return first if wanted else None


class Intake:
    """Makes the sequences of requests, in the order of their arrival.

    `namespace`: what makes the model's KV interchangeable (G3, docs/guarantees.md); a salt is added to it.
    """

    def __init__(
        self,
        limits: EngineLimits,
        namespace: bytes,
        open_grammar: Callable[[Grammar | None], GrammarState | None],
        draw_seed: Callable[[], int],
    ) -> None:
        self.limits = limits
        self.namespace = namespace
        self._open_grammar = open_grammar
        self._draw_seed = draw_seed
        self._arrivals = itertools.count()

    def sequence(self, request: GenerateRequest) -> Sequence:
        """Return what is to be computed for a request. Raises `GrammarRefused`."""
        params = request.sampling
        return Sequence(
            request_id=request.request_id,
            arrival=next(self._arrivals),
            namespace=namespace_digest(self.namespace, request.salt),
            tokens=array("I", request.prompt_token_ids),
            prompt_tokens=len(request.prompt_token_ids),
            sampling=params,
            seed=self._draw_seed() if params.seed is None else params.seed,
            owner=request.tenant + request.session,
            index=0 if request.resume is None else request.resume.choice,
            forks=request.n,
            priority=request.priority,
            grammar=self._open_grammar(params.grammar),
            score_from=_score_from(request),
        )


@dataclass(slots=True)
class EngineCounts:
    """What an engine has counted since its start."""

    totals: Counter[str] = field(default_factory=Counter)
    finished: Counter[str] = field(default_factory=Counter)  # answers, by reason
    by_source: Counter[str] = field(default_factory=Counter)  # tokens of prompts
    missed: Counter[str] = field(default_factory=Counter)  # tokens known and computed again, by reason
    shortages: Counter[str] = field(default_factory=Counter)  # of the device's memory, by what was given up


class OpenRequests:
    """The requests that are not over, and what becomes of them: each event belongs to a request's `key`.

    `offload`: the client of the cache tiers, if any. `opened`: by key; `key_of`: of each of their sequences.
    `is_stalled`: nothing can be computed before something arrives.
    """

    def __init__(
        self,
        intake: Intake,
        output: OutputProcessor,
        scheduler: Scheduler,
        *,
        offload: Offload | None,
        meter: PrefillMeter,
        clock: Callable[[], float],
        replica_id: str,
    ) -> None:
        self.intake = intake
        self.output = output
        self.replica_id = replica_id
        self.counts = EngineCounts()
        self.opened: dict[int, OpenRequest] = {}
        self.key_of: dict[Sequence, int] = {}
        self.is_stalled = False
        self._scheduler = scheduler
        self._offload = offload
        self._meter = meter
        self.clock = clock
        self._spoiled: list[Sequence] = []  # in this step

    def open_keys(self) -> list[int]:
        """Return the keys of the unfinished requests."""
        return list(self.opened)

    def add(self, key: int, request: GenerateRequest) -> Refused | None:
        """Queue a request under the caller's unique `key`, or return why it is refused."""
        refused = refusal(request, self.intake.limits, self._scheduler)
        if refused is None:
            try:
                opened = OpenRequest(request, self.clock(), [self.intake.sequence(request)])
                refused = self.output.resume(opened)
            except GrammarRefused as error:
                refused = error.event
        if refused is not None:
            self.counts.totals["refused"] += 1
            return refused
        (sequence,) = opened.sequences
        self.opened[key] = opened
        self.key_of[sequence] = key
        if self._offload is not None:
            self._offload.open(sequence, request, is_queued=not self._scheduler.admission.at_once(sequence))
            self._offload.reporter.began(sequence.owner)
        self._scheduler.add(sequence)
        self.is_stalled = False
        self.counts.totals["prompt_tokens"] += sequence.prompt_tokens
        return None

    def abort(self, key: int) -> bool:
        """Abort a request and release its pages before returning. False if it is already over."""
        opened = self.opened.pop(key, None)
        if opened is None:
            return False
        self._turn_over(opened, opened.sequences[-1], "gone")
        for sequence in opened.sequences:
            if self._offload is not None:
                self._offload.turns.gave_up(sequence)
            self._release(sequence)
        self.counts.totals["aborted"] += 1
        return True

    def fail(self, sequence: Sequence, event: Event) -> tuple[int, Event]:
        """End the request of a sequence with this event; its pages are released."""
        key = self.key_of[sequence]
        self.abort(key)
        return key, event

    def _distrust(self, sequence: Sequence) -> None:
        """Forget the session of a sequence with possibly bad blocks; a retry then starts from nothing."""
        self.forget({session_owner(sequence.owner)})
        if self._offload is not None:
            for suspect in self._offload.suspects(sequence):
                suspect.condemn()
            tenant, session = sequence.owner[:TAG_BYTES], sequence.owner[TAG_BYTES:]
            self._offload.reports.distrust(Clear(tenant, session))

    def distrust_tenant(self, owner: bytes) -> None:
        """Forget a tenant's cache after an audit found a wrong block: all KV behind it may be wrong."""
        tenant = owner[:TAG_BYTES]
        self.forget({tenant})
        if self._offload is not None:
            self._offload.reports.distrust(Clear(tenant))

    def _release(self, sequence: Sequence) -> None:
        if self._offload is not None:
            self._offload.close(sequence)
        self._scheduler.queues.finish(sequence)
        del self.key_of[sequence]
        self.is_stalled = False

    def forget(self, tags: Collection[bytes]) -> int:
        """Forget the pages of these owners or tenants; return their number. See `GenerateRequest`."""
        if self._offload is not None:
            self._offload.cleared(tags)
        return self._scheduler.forget(tags)

    def jump(self, sequences: Collection[Sequence]) -> None:
        """Move the computed marks of sequences past what has been loaded for them."""
        for sequence in sequences:
            if sequence in self.key_of and sequence.pages:
                self._scheduler.advance(sequence, sequence.computed)

    def score(self, chunk: Chunk, start: int, logits: torch.Tensor) -> None:
        """Keep the log-probabilities of the prompt's tokens behind slots `start` and following."""
        sequence, end = chunk.sequence, start + logits.shape[0]
        top, given = sequence.sampling.prompt_logprobs, sequence.tokens[start + 1 : end + 1].tolist()
        assert top is not None, "the prompt's log-probabilities are not wanted"
        scores = self.opened[self.key_of[sequence]].scores
        for sampled in self.output.sampler.score(logits, given, top):
            scores += self.output.text.logprobs(sampled)
        if any(math.isnan(score.logprob) for score in scores[-len(given) :]):
            self._spoiled.append(sequence)
        sequence.score_from = end if end < sequence.prompt_tokens - 1 else None

    def drop_spoiled(self) -> list[tuple[int, Event]]:
        """End the requests whose prompt has log-probabilities that are not numbers."""
        events: list[tuple[int, Event]] = []
        for sequence in dict.fromkeys(self._spoiled):
            if sequence not in self.key_of:
                continue  # it failed for another reason in the same step
            self._distrust(sequence)
            events.append(self.fail(sequence, Failed("the model's logits are not numbers (NaN)")))
        self._spoiled = []
        return events

    def _prompt_logprobs(self, sequence: Sequence) -> tuple[TokenLogprob, ...]:
        """Return all tokens of a computed prompt, if their log-probabilities were asked for."""
        if sequence.sampling.prompt_logprobs is None:
            return ()
        scores = self.opened[self.key_of[sequence]].scores
        before = sequence.tokens[: sequence.prompt_tokens - len(scores)]
        return (*map(self.output.text.unscored, before), *scores)

    def admitted(self, sequence: Sequence) -> tuple[int, Event]:
        """Report where the KV of a computed prompt came from."""
        key = self.key_of[sequence]
        sequence.is_reported = True
        if self._offload is not None:
            self._offload.prompt_computed(sequence)
        left_tokens = self.opened[key].request.route.cached_tokens
        receipt = receipt_of(sequence, self._meter.price, self._scheduler.pool.block_tokens, left_tokens)
        self.counts.missed.update(receipt.missed)
        self.counts.by_source.update({str(source): count for source, count in receipt.tokens.items()})
        cached = sequence.prompt_tokens - receipt.tokens["compute"]
        self.counts.totals["cached_tokens"] += cached
        admitted_s = self.clock() if sequence.admitted_s is None else sequence.admitted_s
        queue_s = admitted_s - self.opened[key].since_s
        logprobs = self._prompt_logprobs(sequence)
        return key, Admitted(self.replica_id, cached, queue_s, receipt, logprobs)

    def split(self, sequence: Sequence) -> list[Sequence]:
        """Start the request's other choices, on the pages of its computed prompt."""
        if sequence.forks == 1:
            return []
        key = self.key_of[sequence]
        siblings = self._scheduler.queues.fork(sequence)
        for sibling in siblings:
            self.opened[key].sequences.append(sibling)
            self.key_of[sibling] = key
        return siblings

    def next_token(self, sequence: Sequence, sampled: Sampled | Exception) -> tuple[int, Event]:
        """Apply the next token; an error ends only this sequence's request."""
        try:
            if isinstance(sampled, NotNumbers):
                self._distrust(sequence)
                raise FloatingPointError(str(sampled))
            if isinstance(sampled, Exception):
                raise sampled
            return self._advance(sequence, sampled)
        except GrammarRefused as refused:
            return self.fail(sequence, refused.event)
        except Exception as error:
            if is_device_lost(error):
                raise
            self.counts.shortages += Counter(failed=int(is_memory_short(error)))
            logger.exception("request %s failed", sequence.request_id)
            return self.fail(sequence, Failed(f"{type(error).__name__}: {error}"))

    def _advance(self, sequence: Sequence, sampled: Sampled) -> tuple[int, Event]:
        """Append a sampled token and decide whether the answer ends with it."""
        key = self.key_of[sequence]
        told = self.output.append(self.opened[key], sequence, sampled.token_id)
        self.counts.totals["generated_tokens"] += 1
        if told.reason is not None:
            self._finish(key, sequence, told.reason)
        logprobs = self.output.text.logprobs(sampled)  # of the end token, too: as many as there are ids
        return key, Delta(sequence.index, told.text, (sampled.token_id,), logprobs, told.reason)

    def _finish(self, key: int, sequence: Sequence, reason: FinishReason) -> None:
        if self._offload is not None:
            self._offload.finish(sequence)
            self.jump(self._offload.take_touched())  # it may have taken in what came for others
        opened = self.opened[key]
        opened.sequences.remove(sequence)
        if not opened.sequences:
            self._turn_over(opened, sequence, reason)
            del self.opened[key]
        self._release(sequence)
        self.counts.finished[reason] += 1

    def _turn_over(self, opened: OpenRequest, sequence: Sequence, stop: Stop) -> None:
        if self._offload is not None:
            tool = opened.called_tool(sequence.index) if stop == "stop" else None
            self._offload.reporter.over(
                opened.request,
                sequence,
                stop if tool is None else "tool_calls",
                self.clock() - opened.since_s,
                tool=tool or "",
            )
