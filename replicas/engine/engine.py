"""The engine: requests in, steps, events out. Single-threaded and deterministic.

One `step` schedules, runs the model, samples, and returns the events of each request. Threads are in
`thread.py`, Ray in `deployment.py`; clock and seeds are injected.
"""

from __future__ import annotations

import itertools
import logging
import math
from array import array
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer

from cache_tiers.blocks import TAG_BYTES, Clear, namespace_digest
from cache_tiers.forecast import Stop
from cache_tiers.pricing import PrefillMeter
from replicas.engine.audit import Auditor
from replicas.engine.limits import EngineLimits, refusal
from replicas.engine.output import OpenRequest, OutputProcessor, TokenText
from replicas.engine.receipts import receipt_of
from replicas.forward import Runner
from replicas.grammar import GrammarRefused
from replicas.kv import session_owner
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
from replicas.model import is_device_lost, is_memory_short
from replicas.offload import Offload
from replicas.sampling import NotNumbers, Sampled, Sampler, greedy_of
from replicas.scheduling import Chunk, Scheduler, Sequence, StepPlan, StepTimes

logger = logging.getLogger(__name__)


def _score_from(request: GenerateRequest) -> int | None:
    """Return the first slot whose logits give a log-probability of the prompt that is asked for, if any."""
    params = request.sampling
    first = max(0, params.prompt_logprobs_from - 1)
    wanted = params.prompt_logprobs is not None and first < len(request.prompt_token_ids) - 1
    return first if wanted else None


COUNTED = (
    *("steps", "prompt_tokens", "cached_tokens", "prefill_tokens", "generated_tokens"),
    *("drafted_tokens", "accepted_tokens", "refused", "aborted"),
)


HOLD_SHARE = 0.1
"""A step is delayed by at most this share of the last step's time while a lookup is about to finish.

A request that misses a step waits for all of it.
"""


class _Rows(NamedTuple):
    """Logits `[rows, vocab]` of a step, and what `greedy_of` says of them."""

    logits: torch.Tensor
    greedy: torch.Tensor


class Engine:
    """Runs the step loop of one replica.

    `namespace`: what makes the model's KV interchangeable (G3, docs/guarantees.md); a salt is added to it.
    """

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
        meter: PrefillMeter,
        auditor: Auditor,
        offload: Offload | None = None,
        audits: Callable[[], bool] = lambda: False,
    ) -> None:
        """Set up an engine without requests.

        `offload`: the client of the cache tiers, if any; `audits`: decides whether a restore is audited.
        """
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
        self.meter = meter
        self._step_times = StepTimes(meter, scheduler.budget.pace)
        self.auditor = auditor
        self.offload = offload
        self._audits = audits
        self._is_stalled = False  # nothing can be computed before something arrives
        self._step_s = 0.0  # time of the last step
        self._arrivals = itertools.count()
        self._rules = OutputProcessor(tokenizer, sampler, limits.context_tokens_max)
        self._open: dict[int, OpenRequest] = {}
        self._of_sequence: dict[Sequence, int] = {}
        self._spoiled: list[Sequence] = []  # in this step
        self._counts: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()
        self._by_source: Counter[str] = Counter()
        self._missed: Counter[str] = Counter()  # tokens that were known and computed again, by reason
        self._shortages: Counter[str] = Counter()  # of the device's memory, by what was given up

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do now; if not, see `wake_in_s` and arrivals."""
        if self.has_arrivals or self.wake_in_s == 0.0:
            return True
        return (self.scheduler.has_work and not self._is_stalled) or self.auditor.has_work

    @property
    def is_settled(self) -> bool:
        """Whether every finished turn has been handed to the tiers, or dropped."""
        return self.offload is None or (not self.has_arrivals and self.offload.turns.is_settled)

    @property
    def has_arrivals(self) -> bool:
        return self.offload is not None and len(self.offload.arrivals) > 0

    def on_wake(self, wake: Callable[[], None]) -> None:
        """Set the callback for arrivals; it is called on any thread."""
        if self.offload is not None:
            self.offload.arrivals.wake = wake

    @property
    def wake_in_s(self) -> float | None:
        """Seconds until a pending lookup or transfer is late; None if none is pending."""
        return None if self.offload is None else self.offload.wake_in_s()

    @property
    def hold_s(self) -> float:
        """Seconds by which to delay the next step, for the lookup of the latest request."""
        latest_s = max(
            (
                self._open[self._of_sequence[sequence]].since_s
                for sequence in self.scheduler.waiting
                if sequence.is_looking
            ),
            default=-math.inf,
        )
        return max(0.0, latest_s + HOLD_SHARE * self._step_s - self._clock())

    def open_keys(self) -> list[int]:
        """Return the keys of the unfinished requests."""
        return list(self._open)

    # -- requests --------------------------------------------------------------------------

    def add(self, key: int, request: GenerateRequest) -> Refused | None:
        """Queue a request under the caller's unique `key`, or return why it is refused."""
        refused = refusal(request, self.limits, self.scheduler)
        if refused is None:
            try:
                opened = OpenRequest(request, self._clock(), [self._sequence(request)])
                refused = self._rules.resume(opened)
            except GrammarRefused as error:
                refused = error.event
        if refused is not None:
            self._counts["refused"] += 1
            return refused
        (sequence,) = opened.sequences
        self._open[key] = opened
        self._of_sequence[sequence] = key
        if self.offload is not None:
            self.offload.open(sequence, request, is_queued=not self.scheduler.admits_at_once(sequence))
            self.offload.reporter.began(sequence.owner)
        self.scheduler.add(sequence)
        self._is_stalled = False
        self._counts["prompt_tokens"] += sequence.prompt_tokens
        return None

    def _sequence(self, request: GenerateRequest) -> Sequence:
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
            grammar=self.sampler.open_grammar(params.grammar),
            score_from=_score_from(request),
        )

    def abort(self, key: int) -> bool:
        """Abort a request and release its pages before returning. False if it is already over."""
        opened = self._open.pop(key, None)
        if opened is None:
            return False
        self._turn_over(opened, opened.sequences[-1], "gone")
        for sequence in opened.sequences:
            if self.offload is not None:
                self.offload.turns.gave_up(sequence)
            self._release(sequence)
        self._counts["aborted"] += 1
        return True

    def _distrust(self, sequence: Sequence) -> None:
        """Forget the session of a sequence with possibly bad blocks; a retry then starts from nothing."""
        self.forget({session_owner(sequence.owner)})
        if self.offload is not None:
            for suspect in self.offload.suspects(sequence):
                suspect.condemn()
            tenant, session = sequence.owner[:TAG_BYTES], sequence.owner[TAG_BYTES:]
            self.offload.reports.distrust(Clear(tenant, session))

    def distrust_tenant(self, owner: bytes) -> None:
        """Forget a tenant's cache after an audit found a wrong block: all KV behind it may be wrong."""
        tenant = owner[:TAG_BYTES]
        self.forget({tenant})
        if self.offload is not None:
            self.offload.reports.distrust(Clear(tenant))

    def _release(self, sequence: Sequence) -> None:
        if self.offload is not None:
            self.offload.close(sequence)
        self.scheduler.finish(sequence)
        del self._of_sequence[sequence]
        self._is_stalled = False

    def forget(self, tags: Collection[bytes]) -> int:
        """Forget the pages of these owners or tenants; return their number. See `GenerateRequest`."""
        if self.offload is not None:
            self.offload.cleared(tags)
        return self.scheduler.forget(tags)

    # -- steps -----------------------------------------------------------------------------

    def step(self) -> list[tuple[int, Event]]:
        """Run one step; return (request key, event) pairs in the order they happened."""
        self._collect()
        if not self.scheduler.has_work:
            if self.auditor.has_work:
                self.auditor.step()
            return []
        plan = self.scheduler.schedule()
        now_s = self._clock()
        for sequence in plan.admitted:
            if sequence.admitted_s is None:
                sequence.admitted_s = now_s
        for sequence in plan.preempted:
            if self.offload is not None:
                self.offload.close(sequence, keep_swapped=True)
        if self.auditor.has_work and (plan.preempted or self.scheduler.has_ready):
            self.auditor.abandon()  # another sequence needs its pages
        if not plan.chunks:
            self._stall(plan)
            return []
        for chunk in plan.chunks:
            if chunk.samples and chunk.sequence.grammar is not None:
                chunk.sequence.grammar.begin_mask()
        is_usual = not any(chunk.scored for chunk in plan.chunks)
        events: list[tuple[int, Event]] = []
        while (rows := self._compute(plan)) is None:
            is_usual = False
            self._give_way(plan, events)
            if not plan.chunks:
                return events
        sampling = plan.sampling()
        self.scheduler.commit(plan)
        events += self._drop_spoiled()
        # On a GPU only the sampled tokens say that the step is over.
        is_over = not sampling or rows.logits.device.type == "cpu"
        if is_over:
            self._count_step(plan, self._clock() - now_s, is_usual=is_usual)
        if sampling:
            admitted, picks = self._picks(sampling)
            outcomes = self.sampler.sample(rows.logits, picks, rows.greedy, self._relieve)
            self.runner.check()  # now that they are here: what a lost rank had no part in is not told
            if not is_over:
                self._count_step(plan, self._clock() - now_s, is_usual=is_usual)
            for (row, choice), outcome in zip(picks, outcomes, strict=True):
                if row in admitted:
                    events.append(admitted.pop(row))
                if choice in self._of_sequence:  # else it was aborted when a sibling failed
                    events.append(self._next_token(choice, outcome))
            events += self._check_drafts(sampling, rows)
        return events

    def _check_drafts(self, sampling: Collection[tuple[int, Chunk]], rows: _Rows) -> list[tuple[int, Event]]:
        """Return the tokens behind the guesses that were right.

        A guess is right where it is the token that was sampled. So the row computed behind it is, bit for
        bit, the one that the next step would compute, and its token is sampled as that step would.
        """
        events: list[tuple[int, Event]] = []
        drafted, guess = [(row, chunk) for row, chunk in sampling if chunk.draft], 0
        self._counts["drafted_tokens"] += sum(len(chunk.draft) for _, chunk in drafted)
        checked = drafted
        while checked := [(row, chunk) for row, chunk in checked if self._is_right(chunk, guess)]:
            guess += 1
            picks = [(row + guess, chunk.sequence) for row, chunk in checked]
            self._counts["accepted_tokens"] += len(picks)
            for _, sequence in picks:
                self.scheduler.accept(sequence)
            outcomes = self.sampler.sample(rows.logits, picks, rows.greedy, self._relieve)
            for (_, sequence), outcome in zip(picks, outcomes, strict=True):
                if sequence in self._of_sequence:
                    events.append(self._next_token(sequence, outcome))
        for _, chunk in drafted:
            self.scheduler.drop_drafted(chunk.sequence)
        return events

    def _is_right(self, chunk: Chunk, guess: int) -> bool:
        """Return whether the answer goes on, and its last token is the chunk's guess of this number."""
        is_open = chunk.sequence in self._of_sequence
        return is_open and guess < len(chunk.draft) and chunk.sequence.tokens[-1] == chunk.draft[guess]

    def _picks(
        self, sampling: Collection[tuple[int, Chunk]]
    ) -> tuple[dict[int, tuple[int, Event]], list[tuple[int, Sequence]]]:
        """Return the reports of prompts just computed, by row, and row and sequence of each next token."""
        admitted: dict[int, tuple[int, Event]] = {}
        picks: list[tuple[int, Sequence]] = []
        for row, chunk in sampling:
            sequence = chunk.sequence
            if sequence not in self._of_sequence:
                continue
            if not sequence.is_reported:
                admitted[row] = self._admitted(sequence)
            picks += [(row, choice) for choice in (sequence, *self._split(sequence))]
        return admitted, picks

    def _compute(self, plan: StepPlan) -> _Rows | None:
        """Run the model; None: the step does not fit into the device's memory.

        Nothing has changed then but the pages to copy. They are copied before anything takes memory, and not
        again: their sources may belong to sequences whose tokens this try has written. What the step had
        allocated goes with the exception, so the caller makes room behind this.
        """
        try:
            logits = self.runner.run(plan.chunks, plan.copies, self._score)
            greedy = self.runner.greedy
            return _Rows(logits, greedy_of(logits) if greedy is None else greedy)
        except Exception as error:
            if not is_memory_short(error):
                raise
            shape = f"{plan.tokens} tokens of {len(plan.chunks)} sequences"
            logger.error("a step of %s does not fit into the device's memory: %s", shape, error)
            plan.copies = []
            return None

    def _give_way(self, plan: StepPlan, events: list[tuple[int, Event]]) -> None:
        """Make a plan smaller that did not fit, at last by failing the one request that is left in it."""
        outcome = self.scheduler.shrink(plan)
        if outcome == "preempted" and self.offload is not None:
            self.offload.close(plan.preempted[-1], keep_swapped=True)
        if outcome == "hopeless":
            (chunk,) = plan.chunks
            plan.chunks = []
            key = self._of_sequence[chunk.sequence]
            self.abort(key)
            where = f"a step of {chunk.count} tokens behind {chunk.start}"
            events.append((key, Failed(f"the device's memory is too short for {where}")))
        done = "failed" if outcome == "hopeless" else outcome
        self._shortages[done] += 1
        logger.warning("memory of the device is short: %s; %d tokens are left of the step", done, plan.tokens)
        self.runner.free_memory()

    def _relieve(self) -> None:
        """Give memory back before draws that did not fit are tried again, one by one."""
        self._shortages["resampled"] += 1
        self.runner.free_memory()

    def _collect(self) -> None:
        """Take in completed lookups and transfers, and handle those that are late."""
        if self.offload is None:
            return
        self._jump(self.offload.collect())
        self._is_stalled = False

    def _jump(self, sequences: Collection[Sequence]) -> None:
        """Move the computed marks of sequences past what has been loaded for them."""
        for sequence in sequences:
            if sequence in self._of_sequence and sequence.pages:
                self.scheduler.advance(sequence, sequence.computed)

    def _stall(self, plan: StepPlan) -> None:
        """Handle a step without chunks.

        All sequences wait for the tiers, or for pages that such sequences hold.
        """
        if self.auditor.has_work:
            self.auditor.abandon()  # it may hold the missing pages
            return
        waits = any(s.holds or s.is_looking for s in self.scheduler.sequences())
        held = not waits and self.offload is not None and self.offload.frees_pages()
        if not (waits or held or plan.admitted or plan.preempted):
            raise AssertionError("the scheduler has work and found nothing to do")
        self._is_stalled = waits or held
        if self.offload is not None:
            self.offload.is_engine_idle = self._is_stalled

    def _score(self, chunk: Chunk, start: int, logits: torch.Tensor) -> None:
        """Keep the log-probabilities of the prompt's tokens behind slots `start` and following."""
        sequence, end = chunk.sequence, start + logits.shape[0]
        top, given = sequence.sampling.prompt_logprobs, sequence.tokens[start + 1 : end + 1].tolist()
        assert top is not None, "the prompt's log-probabilities are not wanted"
        scores = self._open[self._of_sequence[sequence]].scores
        for sampled in self.sampler.score(logits, given, top):
            scores += self.token_text.logprobs(sampled)
        if any(math.isnan(score.logprob) for score in scores[-len(given) :]):
            self._spoiled.append(sequence)
        sequence.score_from = end if end < sequence.prompt_tokens - 1 else None

    def _drop_spoiled(self) -> list[tuple[int, Event]]:
        """End the requests whose prompt has log-probabilities that are not numbers."""
        events: list[tuple[int, Event]] = []
        for sequence in dict.fromkeys(self._spoiled):
            if sequence not in self._of_sequence:
                continue  # it failed for another reason in the same step
            self._distrust(sequence)
            key = self._of_sequence[sequence]
            self.abort(key)
            events.append((key, Failed("the model's logits are not numbers (NaN)")))
        self._spoiled = []
        return events

    def _prompt_logprobs(self, sequence: Sequence) -> tuple[TokenLogprob, ...]:
        """Return all tokens of a computed prompt, if their log-probabilities were asked for."""
        if sequence.sampling.prompt_logprobs is None:
            return ()
        scores = self._open[self._of_sequence[sequence]].scores
        before = sequence.tokens[: sequence.prompt_tokens - len(scores)]
        return (*map(self.token_text.unscored, before), *scores)

    def _next_token(self, sequence: Sequence, sampled: Sampled | Exception) -> tuple[int, Event]:
        """Apply the next token; an error ends only this sequence's request."""
        try:
            if isinstance(sampled, NotNumbers):
                self._distrust(sequence)
                raise FloatingPointError(str(sampled))
            if isinstance(sampled, Exception):
                raise sampled
            return self._advance(sequence, sampled)
        except GrammarRefused as refused:
            key = self._of_sequence[sequence]
            self.abort(key)
            return key, refused.event
        except Exception as error:
            if is_device_lost(error):
                raise
            self._shortages += Counter(failed=int(is_memory_short(error)))
            key = self._of_sequence[sequence]
            logger.exception("request %s failed", sequence.request_id)
            self.abort(key)
            return key, Failed(f"{type(error).__name__}: {error}")

    def _admitted(self, sequence: Sequence) -> tuple[int, Event]:
        """Report where the KV of a computed prompt came from."""
        key = self._of_sequence[sequence]
        sequence.is_reported = True
        if self.offload is not None:
            self.offload.prompt_computed(sequence)
        left_tokens = self._open[key].request.route.cached_tokens
        receipt = receipt_of(sequence, self.meter.price, self.scheduler.pool.block_tokens, left_tokens)
        self._missed.update(receipt.missed)
        self._by_source.update({str(source): count for source, count in receipt.tokens.items()})
        cached = sequence.prompt_tokens - receipt.tokens["compute"]
        self._counts["cached_tokens"] += cached
        if self.offload is not None and self._audits():
            suspects = self.offload.suspects(sequence)
            if suspects:
                self.auditor.consider(sequence, suspects)
        admitted_s = self._clock() if sequence.admitted_s is None else sequence.admitted_s
        queue_s = admitted_s - self._open[key].since_s
        logprobs = self._prompt_logprobs(sequence)
        return key, Admitted(self.replica_id, cached, queue_s, receipt, logprobs)

    def _count_step(self, plan: StepPlan, seconds: float, *, is_usual: bool) -> None:
        """Count a step that took `seconds` here; on the device it may still run.

        Not `is_usual`: it also computed log-probabilities of prompts, which the price of prefill is without,
        or was tried more than once.
        """
        self._counts["steps"] += 1
        self._step_s = seconds
        for chunk in plan.chunks:
            end = min(chunk.start + chunk.count, chunk.sequence.prompt_tokens)
            self._counts["prefill_tokens"] += max(0, end - chunk.start)
        if is_usual and self.runner.greedy is None:  # a recorded decode says nothing of prefill
            took = self.runner.took  # None: on CPU, where the step is over
            self._step_times.ran(plan.chunks, lambda: seconds if took is None else took.seconds())

    def _split(self, sequence: Sequence) -> list[Sequence]:
        """Start the request's other choices, on the pages of its computed prompt."""
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
        told = self._rules.append(self._open[key], sequence, sampled.token_id)
        self._counts["generated_tokens"] += 1
        if told.reason is not None:
            self._finish(key, sequence, told.reason)
        logprobs = self.token_text.logprobs(sampled)  # of the end token, too: as many as there are ids
        return key, Delta(sequence.index, told.text, (sampled.token_id,), logprobs, told.reason)

    def _finish(self, key: int, sequence: Sequence, reason: FinishReason) -> None:
        if self.offload is not None:
            self.offload.finish(sequence)
            self._jump(self.offload.take_touched())  # it may have taken in what came for others
        opened = self._open[key]
        opened.sequences.remove(sequence)
        if not opened.sequences:
            self._turn_over(opened, sequence, reason)
            del self._open[key]
        self._release(sequence)
        self._finished[reason] += 1

    def _turn_over(self, opened: OpenRequest, sequence: Sequence, stop: Stop) -> None:
        if self.offload is not None:
            tool = opened.called_tool(sequence.index) if stop == "stop" else None
            self.offload.reporter.over(
                opened.request,
                sequence,
                stop if tool is None else "tool_calls",
                self._clock() - opened.since_s,
                tool=tool or "",
            )

    # -- inspection ------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        counted: dict[str, Any] = {name: self._counts[name] for name in COUNTED}
        offload = {} if self.offload is None else self.offload.stats()
        price = self.meter.price
        return EngineStats(
            replica_id=self.replica_id,
            kv_dtype=self.runner.pool.geometry.stored_name,
            **self.scheduler.stats(),
            **counted,
            finished=dict(self._finished),
            tokens_by_source=dict(self._by_source),
            missed_tokens=dict(self._missed),
            audits=dict(self.auditor.outcomes),
            memory_shortages=dict(self._shortages),
            prefill_price=(price.c0_s, price.a_s, price.b_s),
            **offload,
        )

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is wrong; when idle, also if pages or requests were leaked."""
        offload = self.offload
        held = [*self.auditor.pages_held(), *([] if offload is None else offload.pages_held())]
        self.scheduler.check_integrity(held)
        if offload is not None:
            offload.check_integrity()
        known = set(self._of_sequence)
        assert known == set(self.scheduler.sequences()), (
            "the engine and the scheduler know different sequences"
        )
        assert known == {s for opened in self._open.values() for s in opened.sequences}, (
            "a sequence has no request"
        )
        if not self.scheduler.has_work:
            ours, active = len({page for some in held for page in some}), self.scheduler.pool.active
            assert active == ours, f"{active - ours} pages have no holder"
            assert not self._open, "a request without sequences is open"
