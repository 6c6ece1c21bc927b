"""The engine: requests in (`requests.py`), steps, events out. Single-threaded and deterministic.

One `step` schedules, runs the model, samples, and returns the events of each request. Threads are in
`thread.py`, Ray in `deployment.py`; clock and seeds are injected.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection
from collections.abc import Sequence as Listing
from typing import Any, NamedTuple

import torch

from samovar.cache_tiers.pricing import PrefillMeter
from samovar.replicas.engine.audit import Auditor
from samovar.replicas.engine.requests import OpenRequests
from samovar.replicas.forward import DeviceTime, Runner
from samovar.replicas.messages import EngineStats, Event, Failed
from samovar.replicas.model import is_memory_short
from samovar.replicas.offload import Offload
from samovar.replicas.sampling import BegunSample
from samovar.replicas.scheduling import Chunk, Scheduler, Sequence, StepPlan, StepTimes

logger = logging.getLogger(__name__)


COUNTED = (
    *("steps", "prompt_tokens", "cached_tokens", "prefill_tokens", "generated_tokens"),
    *("drafted_tokens", "accepted_tokens", "refused", "aborted"),
)


HOLD_SHARE = 0.1
"""A step is delayed by at most this share of the last step's time while a lookup is about to finish.

A request that misses a step waits for all of it.
"""


class _Rows(NamedTuple):
    """Logits `[rows, vocab]` of a step, and what `greedy_of` says of them.

    `took`: of the runner, once it was launched; `is_recorded`: by a graph.
    """

    logits: torch.Tensor
    greedy: torch.Tensor
    took: DeviceTime | None
    is_recorded: bool


class _Flight(NamedTuple):
    """A step that is launched. `sampling`: of its plan; `is_usual`: see `_count_step`."""

    plan: StepPlan
    rows: _Rows
    sampling: list[tuple[int, Chunk]]
    is_usual: bool = True


class _Ahead:
    """The step that was launched before the tokens were known with which it begins: `flight`, if any."""

    def __init__(self, scheduler: Scheduler, requests: OpenRequests) -> None:
        self._scheduler = scheduler
        self._requests = requests
        self.flight: _Flight | None = None

    def launch(
        self, runner: Runner, before: _Flight, picks: Listing[tuple[int, Sequence]]
    ) -> BegunSample | None:
        """Begin to sample, and launch the step behind this one, which the device computes meanwhile.

        So the device does not wait for what is done with tokens. None: nothing was begun.
        """
        plan, rows = before.plan, before.rows
        behind = self._scheduler.behind(plan) if len(picks) == len(plan.chunks) else None
        if behind is None:
            return None
        begun = self._requests.sampler.begin(rows.logits, picks, rows.greedy)
        logits = None if begun is None else runner.run_behind(behind.chunks, begun.token_ids)
        if logits is not None:
            rows = _Rows(logits, runner.greedy, runner.took, runner.is_recorded)
            self.flight = _Flight(behind, rows, list(enumerate(behind.chunks)))
        return begun

    def take(self) -> _Flight | None:
        """Return what counts of the step: the rows of answers that have not ended; None: nothing."""
        ahead, self.flight = self.flight, None
        assert ahead is not None, "no step was launched ahead"
        sampling = [(row, one) for row, one in ahead.sampling if one.sequence in self._requests.key_of]
        if not sampling:
            return None
        for _, chunk in sampling:
            if chunk.sequence.grammar is not None:
                chunk.sequence.grammar.begin_mask()
        plan = self._scheduler.commit_behind([chunk for _, chunk in sampling])
        return _Flight(plan, ahead.rows, sampling)


class Engine:
    """Runs the step loop of one replica.

    `offload`: the client of the cache tiers, if any.
    """

    def __init__(
        self,
        *,
        runner: Runner,
        scheduler: Scheduler,
        requests: OpenRequests,
        meter: PrefillMeter,
        auditor: Auditor,
        offload: Offload | None = None,
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.requests = requests
        self.sampler = requests.sampler
        self.meter = meter
        self.auditor = auditor
        self.offload = offload
        self._step_times = StepTimes(meter, scheduler.budget.pace)
        self._step_s = 0.0  # time of the last step
        self._ahead = _Ahead(scheduler, requests)

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do now; if not, see `wake_in_s` and arrivals."""
        if self.has_arrivals or self.wake_in_s == 0.0:
            return True
        return (self.scheduler.has_work and not self.requests.is_stalled) or self.auditor.has_work

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
                self.requests.opened[self.requests.key_of[sequence]].since_s
                for sequence in self.scheduler.waiting
                if sequence.is_looking
            ),
            default=-math.inf,
        )
        return max(0.0, latest_s + HOLD_SHARE * self._step_s - self.requests.clock())

    def step(self) -> list[tuple[int, Event]]:
        """Run one step; return (request key, event) pairs in the order they happened."""
        if self.offload is not None:  # completed lookups and transfers, and what is late
            self.requests.jump(self.offload.collect())
            self.requests.is_stalled = False
        began_s, events = self.requests.clock(), list[tuple[int, Event]]()
        flight = (self._ahead.flight and self._ahead.take()) or self._launch(events)
        if flight is None:
            return events
        plan, rows, sampling, _ = flight
        self.scheduler.commit(plan)
        events += self.requests.drop_spoiled()
        # On a GPU only the sampled tokens say that the step is over.
        is_over = not sampling or rows.logits.device.type == "cpu"
        if is_over:
            self._count_step(flight, self.requests.clock() - began_s)
        if sampling:
            admitted, picks = self._picks(sampling)
            begun = self._ahead.launch(self.runner, flight, picks) if self.runner.computes_behind else None
            if begun is None:
                outcomes = self.sampler.sample(rows.logits, picks, rows.greedy, self._relieve)
            else:
                outcomes = begun.read()
            self.runner.check()  # now that they are here: what a lost rank had no part in is not told
            if not is_over:
                self._count_step(flight, self.requests.clock() - began_s)
            for (row, choice), outcome in zip(picks, outcomes, strict=True):
                if row in admitted:
                    events.append(admitted.pop(row))
                if choice in self.requests.key_of:  # else it was aborted when a sibling failed
                    events.append(self.requests.next_token(choice, outcome))
            events += self._check_drafts(sampling, rows)
        return events

    def _launch(self, events: list[tuple[int, Event]]) -> _Flight | None:
        """Schedule the next step and launch it; None: there is none. Adds what fails to `events`."""
        if not self.scheduler.has_work:
            if self.auditor.has_work:
                self.auditor.step()
            return None
        plan = self.scheduler.schedule()
        now_s = self.requests.clock()
        for sequence in plan.admitted:
            if sequence.admitted_s is None:
                sequence.admitted_s = now_s
        for sequence in plan.preempted:
            if self.offload is not None:
                self.offload.close(sequence, keep_swapped=True)
        if self.auditor.has_work and (plan.preempted or self.scheduler.admission.has_ready):
            self.auditor.abandon()  # another sequence needs its pages
        if not plan.chunks:
            self._stall(plan)
            return None
        for chunk in plan.chunks:
            if chunk.samples and chunk.sequence.grammar is not None:
                chunk.sequence.grammar.begin_mask()
        is_usual = not any(chunk.scored for chunk in plan.chunks)
        while (rows := self._compute(plan)) is None:
            is_usual = False
            self._give_way(plan, events)
            if not plan.chunks:
                return None
        return _Flight(plan, rows, plan.sampling(), is_usual)

    def _check_drafts(self, sampling: Collection[tuple[int, Chunk]], rows: _Rows) -> list[tuple[int, Event]]:
        """Return the tokens behind the guesses that were right.

        A guess is right where it is the token that was sampled. So the row computed behind it is, bit for
        bit, the one that the next step would compute, and its token is sampled as that step would.
        """
        events: list[tuple[int, Event]] = []
        drafted, guess = [(row, chunk) for row, chunk in sampling if chunk.draft], 0
        self.requests.counts.totals["drafted_tokens"] += sum(len(chunk.draft) for _, chunk in drafted)
        checked = drafted
        while checked := [(row, chunk) for row, chunk in checked if self._is_right(chunk, guess)]:
            guess += 1
            picks = [(row + guess, chunk.sequence) for row, chunk in checked]
            self.requests.counts.totals["accepted_tokens"] += len(picks)
            for _, sequence in picks:
                self.scheduler.accept(sequence)
            outcomes = self.sampler.sample(rows.logits, picks, rows.greedy, self._relieve)
            for (_, sequence), outcome in zip(picks, outcomes, strict=True):
                if sequence in self.requests.key_of:
                    events.append(self.requests.next_token(sequence, outcome))
        for _, chunk in drafted:
            self.scheduler.tables.trim(chunk.sequence)
        return events

    def _is_right(self, chunk: Chunk, guess: int) -> bool:
        """Return whether the answer goes on, and its last token is the chunk's guess of this number."""
        is_open = chunk.sequence in self.requests.key_of
        return is_open and guess < len(chunk.draft) and chunk.sequence.tokens[-1] == chunk.draft[guess]

    def _picks(
        self, sampling: Collection[tuple[int, Chunk]]
    ) -> tuple[dict[int, tuple[int, Event]], list[tuple[int, Sequence]]]:
        """Return the reports of prompts just computed, by row, and row and sequence of each next token."""
        admitted: dict[int, tuple[int, Event]] = {}
        picks: list[tuple[int, Sequence]] = []
        for row, chunk in sampling:
            sequence = chunk.sequence
            if sequence not in self.requests.key_of:
                continue
            if not sequence.is_reported:
                admitted[row] = self.requests.admitted(sequence)
                if self.offload is not None and self.auditor.audits():
                    suspects = self.offload.suspects(sequence)
                    if suspects:
                        self.auditor.consider(sequence, suspects)
            picks += [(row, choice) for choice in (sequence, *self.requests.split(sequence))]
        return admitted, picks

    def _compute(self, plan: StepPlan) -> _Rows | None:
        """Run the model; None: the step does not fit into the device's memory.

        Nothing has changed then but the pages to copy. They are copied before anything takes memory, and not
        again: their sources may belong to sequences whose tokens this try has written. What the step had
        allocated goes with the exception, so the caller makes room behind this.
        """
        try:
            logits, runner = self.runner.run(plan.chunks, plan.copies, self.requests.score), self.runner
            return _Rows(logits, runner.greedy, runner.took, runner.is_recorded)
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
            where = f"a step of {chunk.count} tokens behind {chunk.start}"
            failed = Failed(f"the device's memory is too short for {where}")
            events.append(self.requests.fail(chunk.sequence, failed))
        done = "failed" if outcome == "hopeless" else outcome
        self.requests.counts.shortages[done] += 1
        logger.warning("memory of the device is short: %s; %d tokens are left of the step", done, plan.tokens)
        self.runner.free_memory()

    def _relieve(self) -> None:
        """Give memory back before draws that did not fit are tried again, one by one."""
        self.requests.counts.shortages["resampled"] += 1
        self.runner.free_memory()

    def _stall(self, plan: StepPlan) -> None:
        """Handle a step without chunks.

        All sequences wait for the tiers, or for pages that such sequences hold.
        """
        if self.auditor.has_work:
            self.auditor.abandon()  # it may hold the missing pages
            return
        waits = any(s.holds or s.is_looking for s in self.scheduler.queues)
        held = not waits and self.offload is not None and self.offload.frees_pages()
        if not (waits or held or plan.admitted or plan.preempted):
            raise AssertionError("the scheduler has work and found nothing to do")
        self.requests.is_stalled = waits or held
        if self.offload is not None:
            self.offload.is_engine_idle = self.requests.is_stalled

    def _count_step(self, flight: _Flight, seconds: float) -> None:
        """Count a step that took `seconds` here; on the device it may still run.

        Not usual: it also computed log-probabilities of prompts, which the price of prefill is without,
        or was tried more than once.
        """
        self.requests.counts.totals["steps"] += 1
        self._step_s = seconds
        for chunk in flight.plan.chunks:
            end = min(chunk.start + chunk.count, chunk.sequence.prompt_tokens)
            self.requests.counts.totals["prefill_tokens"] += max(0, end - chunk.start)
        if flight.is_usual:
            took = flight.rows.took  # None: on CPU, where the step is over
            # Of decodes that are recorded, while prompts are not, prefill can learn nothing.
            prices = not flight.rows.is_recorded or self.runner.records_chunks
            self._step_times.ran(
                flight.plan.chunks, lambda: seconds if took is None else took.seconds(), prices=prices
            )

    def stats(self) -> EngineStats:
        counted: dict[str, Any] = {name: self.requests.counts.totals[name] for name in COUNTED}
        offload = {} if self.offload is None else self.offload.stats()
        price = self.meter.price
        return EngineStats(
            replica_id=self.requests.replica_id,
            kv_dtype=self.runner.pool.geometry.stored_name,
            **self.scheduler.stats(),
            **counted,
            finished=dict(self.requests.counts.finished),
            tokens_by_source=dict(self.requests.counts.by_source),
            missed_tokens=dict(self.requests.counts.missed),
            audits=dict(self.auditor.outcomes),
            memory_shortages=dict(self.requests.counts.shortages),
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
        known = set(self.requests.key_of)
        queued = {*self.scheduler.running, *self.scheduler.waiting}
        assert known == queued, "the engine and the scheduler know different sequences"
        assert known == {s for opened in self.requests.opened.values() for s in opened.sequences}, (
            "a sequence has no request"
        )
        if not self.scheduler.has_work:
            ours, active = len({page for some in held for page in some}), self.scheduler.pool.active
            assert active == ours, f"{active - ours} pages have no holder"
            assert not self.requests.opened, "a request without sequences is open"
