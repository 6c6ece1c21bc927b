"""The engine: requests in, steps, events out. Single-threaded and deterministic.

One `step` schedules, runs the model, samples, and says what each request may be told. Threads
are in `engine_thread.py`, Ray in `deployment.py`; clock and seeds are handed in.
"""

from __future__ import annotations

import itertools
import logging
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from tokenizers import Tokenizer

from cache_tiers.keys import namespace_digest
from replicas.messages import (
    Admitted,
    Delta,
    EngineStats,
    Event,
    Failed,
    FinishReason,
    GenerateRequest,
    Refused,
    TokenLogprob,
)
from replicas.runner import Runner
from replicas.sampler import Sampled, Sampler
from replicas.scheduler import Scheduler, StepPlan
from replicas.sequence import Sequence
from replicas.text_out import TextOut
from replicas.token_text import TokenText

logger = logging.getLogger("samovar.engine")


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """`context_tokens_max`: prompt and answer of one sequence together; `queue_max`: sequences that wait;
    `vocab`: token ids are below it."""

    vocab: int
    context_tokens_max: int
    queue_max: int
    retry_after_s: float


class _Rows(NamedTuple):
    """Logits `[rows, vocab]` of a step, and of each row the best token and whether there is a NaN in it."""

    logits: torch.Tensor
    best: list[int]
    has_nan: list[bool]


@dataclass(slots=True)
class _Open:
    """A request with unfinished choices."""

    request: GenerateRequest
    since_s: float
    texts: dict[int, TextOut] = field(default_factory=dict)  # by choice
    sequences: list[Sequence] = field(default_factory=list)


class Engine:
    """`namespace`: what makes the model's KV interchangeable (law L3); a request's salt is added to it."""

    def __init__(
        self,
        *,
        runner: Runner,
        scheduler: Scheduler,
        sampler: Sampler,
        tokenizer: Tokenizer,
        token_text: TokenText,
        limits: EngineLimits,
        namespace: bytes,
        replica_id: str,
        clock: Callable[[], float],
        draw_seed: Callable[[], int],
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.sampler = sampler
        self.tokenizer = tokenizer
        self.token_text = token_text
        self.limits = limits
        self.namespace = namespace
        self.replica_id = replica_id
        self._clock = clock
        self._draw_seed = draw_seed
        self._arrivals = itertools.count()
        self._open: dict[int, _Open] = {}
        self._of_sequence: dict[Sequence, int] = {}
        self._counts: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def open_keys(self) -> list[int]:
        """Keys of the requests that are not over."""
        return list(self._open)

    # -- requests --------------------------------------------------------------------------

    def add(self, key: int, request: GenerateRequest) -> Refused | None:
        """Queue a request under the caller's unique `key`, or say why it cannot be taken."""
        refused = self._refusal(request)
        if refused is not None:
            self._counts["refused"] += 1
            return refused
        params = request.sampling
        sequence = Sequence(
            request_id=request.request_id,
            arrival=next(self._arrivals),
            namespace=namespace_digest(self.namespace, request.salt),
            tokens=array("I", request.prompt_token_ids),
            prompt_tokens=len(request.prompt_token_ids),
            sampling=params,
            seed=self._draw_seed() if params.seed is None else params.seed,
            forks=request.n,
        )
        self._open[key] = _Open(request, self._clock(), sequences=[sequence])
        self._of_sequence[sequence] = key
        self.scheduler.add(sequence)
        self._counts["prompt_tokens"] += sequence.prompt_tokens
        return None

    def _refusal(self, request: GenerateRequest) -> Refused | None:
        prompt, answer = len(request.prompt_token_ids), request.sampling.max_tokens
        limit = self.limits.context_tokens_max
        if prompt < 1 or answer < 1:
            return Refused("too_long", "a request needs at least one prompt token and one answer token")
        if prompt and max(request.prompt_token_ids) >= self.limits.vocab:
            return Refused("invalid", f"a token id of the prompt is not below {self.limits.vocab}")
        if prompt + answer > limit or not self.scheduler.fits(prompt + answer):
            return Refused(
                "too_long", f"{prompt} prompt tokens and {answer} answer tokens exceed this model's {limit}"
            )
        if request.n > self.scheduler.sequences_max:
            return Refused(
                "too_long", f"n={request.n} exceeds the {self.scheduler.sequences_max} running sequences"
            )
        waiting = sum(sequence.forks for sequence in self.scheduler.waiting)
        if waiting + request.n - self.scheduler.free_places > self.limits.queue_max:
            return Refused(
                "queue_full", f"{waiting} sequences are waiting already", self.limits.retry_after_s
            )
        return None

    def abort(self, key: int) -> bool:
        """Give up a request; its pages are released before this returns. False when it is over already."""
        opened = self._open.pop(key, None)
        if opened is None:
            return False
        for sequence in opened.sequences:
            self.scheduler.finish(sequence)
            del self._of_sequence[sequence]
        self._counts["aborted"] += 1
        return True

    # -- steps -----------------------------------------------------------------------------

    def step(self) -> list[tuple[int, Event]]:
        """Compute once; (request key, event) pairs in the order they happened."""
        plan = self.scheduler.schedule()
        if not plan.chunks:
            raise AssertionError("the scheduler has work and found nothing to do")
        events: list[tuple[int, Event]] = [self._admitted(sequence) for sequence in plan.admitted]
        logits = self.runner.run(plan.chunks, plan.copies)
        self.scheduler.commit(plan)
        self._count_step(plan)
        sampling = [chunk.sequence for chunk in plan.chunks if chunk.samples]
        if sampling:
            rows = _Rows(logits, logits.argmax(dim=-1).tolist(), logits.isnan().any(dim=-1).tolist())
            for row, sequence in enumerate(sampling):
                for choice in [sequence, *self._split(sequence)]:
                    if choice in self._of_sequence:  # else a sibling's failure took it along
                        events.append(self._next_token(choice, rows, row))
        return events

    def _next_token(self, sequence: Sequence, rows: _Rows, row: int) -> tuple[int, Event]:
        """A fault with one sequence is the end of its request, not of everybody's."""
        try:
            if rows.has_nan[row]:
                raise FloatingPointError("the model's logits are not numbers (NaN)")
            if self.sampler.is_plain_greedy(sequence):
                return self._advance(sequence, Sampled(rows.best[row]))
            return self._advance(sequence, self.sampler.sample(rows.logits[row], sequence))
        except Exception as error:
            key = self._of_sequence[sequence]
            logger.exception("request %s failed", sequence.request_id)
            self.abort(key)
            return key, Failed(f"{type(error).__name__}: {error}")

    def _admitted(self, sequence: Sequence) -> tuple[int, Event]:
        key = self._of_sequence[sequence]
        cached = sequence.cached_tokens or 0
        self._counts["cached_tokens"] += cached
        return key, Admitted(self.replica_id, cached, self._clock() - self._open[key].since_s)

    def _count_step(self, plan: StepPlan) -> None:
        self._counts["steps"] += 1
        for chunk in plan.chunks:
            end = min(chunk.start + chunk.count, chunk.sequence.prompt_tokens)
            self._counts["prefill_tokens"] += max(0, end - chunk.start)

    def _split(self, sequence: Sequence) -> list[Sequence]:
        """The prompt is computed: the request's other choices begin here, on the same pages."""
        if sequence.forks == 1:
            return []
        key = self._of_sequence[sequence]
        siblings = self.scheduler.fork(sequence)
        for sibling in siblings:
            self._open[key].sequences.append(sibling)
            self._of_sequence[sibling] = key
        return siblings

    def _advance(self, sequence: Sequence, sampled: Sampled) -> tuple[int, Event]:
        """Append a sampled token and decide whether the answer ends with it."""
        key = self._of_sequence[sequence]
        opened, params = self._open[key], sequence.sampling
        if sequence.index not in opened.texts:
            opened.texts[sequence.index] = TextOut(self.tokenizer, params.stop)
        text_out = opened.texts[sequence.index]
        sequence.tokens.append(sampled.token_id)
        self._counts["generated_tokens"] += 1
        reason: FinishReason | None = None
        text = ""
        logprobs: tuple[TokenLogprob, ...] = ()
        if self._ends_turn(sampled.token_id, sequence):
            reason, text = "stop", text_out.flush()
        else:
            may_stop = sequence.output_tokens >= params.min_tokens
            text, stopped = text_out.push(sampled.token_id, may_stop=may_stop)
            logprobs = self._logprobs(sampled)
            if stopped:
                reason = "stop"
            elif self._is_full(sequence):
                reason, text = "length", text + text_out.flush()
        if reason is not None:
            self._finish(key, sequence, reason)
        return key, Delta(sequence.index, text, (sampled.token_id,), logprobs, reason)

    def _ends_turn(self, token_id: int, sequence: Sequence) -> bool:
        params = sequence.sampling
        if sequence.output_tokens < params.min_tokens:
            return False
        if token_id in params.stop_token_ids:
            return True
        return token_id in self.sampler.eos_token_ids and not params.ignore_eos

    def _is_full(self, sequence: Sequence) -> bool:
        if sequence.output_tokens >= sequence.sampling.max_tokens:
            return True
        return len(sequence.tokens) >= self.limits.context_tokens_max

    def _logprobs(self, sampled: Sampled) -> tuple[TokenLogprob, ...]:
        if sampled.logprob is None:
            return ()
        top = tuple(TokenLogprob(i, *self.token_text.of(i), logprob) for i, logprob in sampled.top)
        return (TokenLogprob(sampled.token_id, *self.token_text.of(sampled.token_id), sampled.logprob, top),)

    def _finish(self, key: int, sequence: Sequence, reason: FinishReason) -> None:
        self.scheduler.finish(sequence)
        self._finished[reason] += 1
        del self._of_sequence[sequence]
        opened = self._open[key]
        opened.sequences.remove(sequence)
        if not opened.sequences:
            del self._open[key]

    # -- looking in ------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        pool, counts = self.scheduler.pool, self._counts
        return EngineStats(
            replica_id=self.replica_id,
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            pages_total=pool.usable,
            pages_free=pool.free,
            pages_cached=pool.cached,
            pages_active=pool.active,
            steps=counts["steps"],
            prompt_tokens=counts["prompt_tokens"],
            cached_tokens=counts["cached_tokens"],
            prefill_tokens=counts["prefill_tokens"],
            generated_tokens=counts["generated_tokens"],
            preemptions=self.scheduler.preemptions,
            cow_copies=self.scheduler.cow_copies,
            evictions=pool.evictions,
            refused=counts["refused"],
            aborted=counts["aborted"],
            finished=dict(self._finished),
        )

    def check_integrity(self) -> None:
        """Raises `AssertionError` naming what is wrong; when idle, also that nothing was left behind."""
        self.scheduler.check_integrity()
        known = set(self._of_sequence)
        assert known == set(self.scheduler.sequences()), (
            "the engine and the scheduler know different sequences"
        )
        assert known == {s for opened in self._open.values() for s in opened.sequences}, (
            "a sequence has no request"
        )
        if not self.scheduler.has_work:
            assert self.scheduler.pool.active == 0, f"{self.scheduler.pool.active} pages are held by nobody"
            assert not self._open, "a request without sequences is open"
