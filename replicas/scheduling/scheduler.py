"""Plans each step: continuous batching with a token budget. Pure.

Every step first gives one token to each running decode, so that a long prompt stalls no stream, and fills the
rest of the budget (`step.py`: tokens, and time beside decodes) with prefill chunks, short prompts first
(`order.py`). Waiting sequences are admitted while there are places, pages and budget (`admission.py`),
tenants taking turns (`replicas/turns`; `tenants.py` while prompts are computed). If a running sequence needs
a page and none is available, a later sequence of the tenant with the largest share is preempted
(`queues.py`); a running sequence is also preempted when a tenant with a smaller share waits (`tenants.py`).

A sequence with blocks in a cache tier is skipped twice, without blocking those behind it: during its tier
lookup and, with its pages reserved, during the transfer.

The scheduler owns the pool's bookkeeping and the queues; it has no tensors, text, sampling or clocks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as Listing
from dataclasses import replace
from typing import Any, Literal

from samovar.cache_tiers.blocks import TAG_BYTES
from samovar.replicas.kv import PagePool, session_owner
from samovar.replicas.scheduling.admission import Admission, StepTurns
from samovar.replicas.scheduling.drafts import Drafter
from samovar.replicas.scheduling.order import Priorities, PromptOrder, foremost
from samovar.replicas.scheduling.page_tables import PageTables
from samovar.replicas.scheduling.preemption import PreemptionPolicy
from samovar.replicas.scheduling.queues import Queues
from samovar.replicas.scheduling.sequence import Restorer, Sequence
from samovar.replicas.scheduling.step import Chunk, StepBudget, StepPlan, halved
from samovar.replicas.scheduling.tenants import DecodeRests, PrefillTurns


class Scheduler:
    """Holds the queues and page tables of one replica and plans its steps.

    `drafter`: guesses tokens that a step of decodes checks besides; only for a model of which a row's bits do
    not depend on the rows beside it.
    """

    drafter: Drafter | None = None

    def __init__(
        self,
        pool: PagePool,
        *,
        budget: StepBudget,
        sequences_max: int,
        policy: PreemptionPolicy,
        prefix_reuse: bool = True,
        restorer: Restorer | None = None,
        quantum_tokens: int = 1024,
        weights: Mapping[bytes, float] | None = None,
    ) -> None:
        """Set up empty queues.

        `budget`: of a step. `quantum_tokens`: a tenant's turn while others wait; `weights`: by tenant's tag,
        1 by default.
        """
        if budget.tokens_max < sequences_max:
            raise ValueError("a step must hold one token of every running sequence")
        weights = dict(weights or {})
        self.pool = pool
        self.budget = budget
        self.tables = PageTables(pool, prefix_reuse=prefix_reuse)
        self.queues = Queues(
            self.tables,
            sequences_max=sequences_max,
            policy=policy,
            restorer=restorer,
            quantum_tokens=quantum_tokens,
            weights=weights,
        )
        self.running, self.waiting = self.queues.running, self.queues.waiting
        self._prefill_turns = PrefillTurns(quantum_tokens, weights)
        self._rests = DecodeRests(quantum_tokens)
        self._priorities = Priorities(budget.tokens_max)
        self._order = PromptOrder(budget.passed_tokens_max)
        self.admission = Admission(self.queues, self._priorities, self._order)
        self._turns: StepTurns | None = None  # of the last step; None: it had no prompts

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence, at the cost of the tokens that it asks for."""
        self._priorities.came(sequence)
        sequence.known_tokens = len(self.tables.resident(sequence)) * self.pool.block_tokens
        cost = len(sequence.tokens) - sequence.known_tokens + self.queues.answer_tokens(sequence)
        self.waiting.put(sequence.tenant, sequence, cost, sequence.priority)

    def schedule(self) -> StepPlan:
        """Plan the next step and reserve its pages. Follow it with `commit`."""
        self.tables.forget_copied()
        self._priorities.begin(self.running, self.admission.first())
        plan = StepPlan()
        active, stuck = self.admission.tenants()
        groups = self._prefill_turns.order(active)
        able = [one for one in self.running if one.is_decode and not one.holds]
        decodes = [one for one in able if not self._priorities.sits_out(one)]
        if not (groups or stuck):  # most steps: no prompts, and nothing to share out
            self._plan_decodes(plan, decodes)
            self._add_drafts(plan)
            self.tables.own_drafts(plan)
            self._rests.ran((), ())
            self._turns, self.admission.refused = None, set()
            return plan
        resting = self._rests.choose(self.queues.shares(), {one.tenant for one in decodes}, groups)
        groups += [stuck] if stuck else []
        rested = [one for one in decodes if one.tenant in resting]
        self._plan_decodes(plan, [one for one in decodes if one.tenant not in resting])
        self._add_drafts(plan)
        room = self.budget.open([chunk.start for chunk in plan.chunks for _ in range(chunk.rows)])
        turns = StepTurns(groups, stuck, room)
        self._plan_turns(plan, turns)
        if resting and not plan.prompts:  # the prompts that they rested for found no pages
            self._plan_decodes(plan, rested)
        if not plan.chunks:  # nor did those for which others sat out
            self._priorities.share()
            self._plan_decodes(plan, [one for one in able if one not in plan.preempted])
            turns = StepTurns(groups, stuck, room)
            self._plan_turns(plan, turns)
        self.tables.own_drafts(plan)
        for chunk in plan.prompts:
            self._prefill_turns.computed(chunk.sequence.tenant, chunk.count)
        self._rests.ran(resting, plan.prompts)
        self._turns, self.admission.refused = turns, turns.held_up | stuck
        return plan

    def _plan_turns(self, plan: StepPlan, turns: StepTurns) -> None:
        """Plan the prompts of a step's tenants, each in its turn."""
        for _ in turns:
            self._plan_prompts(plan, turns)
            for sequence in self.admission.admit(plan, turns):
                self._plan_prompt(sequence, plan, turns)
            if any(chunk.samples for chunk in plan.prompts):
                break  # a first token comes with this step: other tenants' prompts must not lengthen it

    def _plan_decodes(self, plan: StepPlan, decodes: Iterable[Sequence]) -> None:
        for sequence in decodes:
            if sequence not in plan.preempted and self.queues.make_room(sequence, 1, plan):
                plan.chunks.append(Chunk(sequence, sequence.computed, 1))

    def _add_drafts(self, plan: StepPlan) -> None:
        """Let a step's decodes check guesses besides; they have no pages yet."""
        if self.drafter is None or plan.preempted or plan.is_short:
            return
        drafts = self.drafter.drafts([chunk.sequence for chunk in plan.chunks])
        drafted = zip(plan.chunks, drafts, strict=True)
        plan.chunks = [replace(chunk, draft=draft) if draft else chunk for chunk, draft in drafted]

    def _plan_prompts(self, plan: StepPlan, turns: StepTurns) -> None:
        """Plan these tenants' prompts that are being computed, and shorter ones that wait before them."""
        left = [one for one in self.running if one.tenant in turns.group and one.is_prefill]
        while left:
            ahead = foremost(left)
            if not turns.room.is_full:
                than = ahead[self._order.first(ahead)]
                shorter = self.admission.admit_before(than, plan, turns)
                left = [one for one in left if one not in plan.preempted]
                if shorter is not None:
                    left = sorted([*left, shorter], key=lambda one: one.arrival)
                    continue
                ahead = foremost(left)
            if left:
                following = ahead[self._order.first(ahead)]
                left.remove(following)
                if not self._priorities.sits_out(following):
                    self._plan_prompt(following, plan, turns, left)
                left = [one for one in left if one not in plan.preempted]

    def _plan_prompt(
        self, sequence: Sequence, plan: StepPlan, turns: StepTurns, others: Listing[Sequence] = ()
    ) -> None:
        """Plan what there is room for; `others` of its turn are not planned yet."""
        room = turns.room
        count = room.takes(sequence.computable, sequence.computed)
        count = self._priorities.part(sequence, plan.prompts, count)
        if count and self.queues.make_room(sequence, count, plan) and (count := sequence.begin(count)):
            chunk = Chunk(sequence, sequence.computed, count)
            plan.chunks.append(chunk)
            room.take(count, sequence.computed)
            if chunk.samples:
                self.budget.answers(room)
            self._order.computed(sequence, count, [*others, *self.waiting.of(sequence.tenant)])

    def shrink(self, plan: StepPlan) -> Literal["halved", "preempted", "hopeless"]:
        """Make a plan smaller that did not fit into the device's memory, and return what was done.

        Drafts are left out first. Then the prompt tokens of this step are halved, as often as it takes; then
        sequences are preempted.
        "hopeless": one sequence is left, with as few tokens as can be; the plan is as it was.
        """
        if any(chunk.draft for chunk in plan.chunks):
            for chunk in plan.chunks:
                self.tables.trim(chunk.sequence)
            plan.chunks = [replace(chunk, draft=()) for chunk in plan.chunks]
            return "halved"
        fewer = halved(plan.chunks)
        if fewer is not None:
            plan.chunks = fewer
            return "halved"
        if len(plan.chunks) == 1:
            return "hopeless"
        planned = {chunk.sequence for chunk in plan.chunks}
        self.queues.preempt_one([one for one in self.running if one in planned], plan)
        return "preempted"

    def commit(self, plan: StepPlan) -> None:
        """Mark the step's slots as valid and publish full blocks, after the forward pass."""
        self.tables.forget_copied()
        for chunk in plan.chunks:
            self.advance(chunk.sequence, chunk.start + chunk.count)

    def accept(self, sequence: Sequence) -> None:
        """Mark the slot of a guess as valid: it is the token that was sampled, now the last known one."""
        self.advance(sequence, sequence.computed + 1)

    def advance(self, sequence: Sequence, computed: int) -> None:
        """Mark slots below `computed` as valid, and the run loaded from a tier right behind them."""
        sequence.computed = computed if sequence.restore is None else sequence.restore.jump(computed)
        self.tables.publish(sequence)

    def forget(self, tags: Collection[bytes]) -> int:
        """Forget the cleared owners' pages, including those that running sequences still write.

        Returns the number of pages.
        """
        for sequence in self.queues:
            names = {sequence.owner, session_owner(sequence.owner), sequence.owner[:TAG_BYTES]}
            if not names.isdisjoint(tags):
                sequence.is_cleared = True
        return self.pool.forget(tags)

    def stats(self) -> dict[str, Any]:
        """Return these fields of `EngineStats`."""
        return {
            "running": len(self.running),
            "waiting": len(self.waiting),
            "pages_total": self.pool.usable,
            "pages_free": self.pool.free,
            "pages_cached": self.pool.cached,
            "pages_active": self.pool.active,
            "preemptions": self.queues.preemptions,
            "swaps": self.queues.swaps,
            "cow_copies": self.tables.cow_copies,
            "evictions": self.pool.evictions,
        }

    def check_integrity(self, others: Iterable[Listing[int]] = ()) -> None:
        """Raise `AssertionError` naming what is wrong. `others`: page tables referenced by others."""
        tables = [sequence.pages for sequence in self.running]
        self.pool.check_integrity([*tables, self.tables.copied, *others])
        arrivals = [sequence.arrival for sequence in self.running]
        assert arrivals == sorted(arrivals), "running sequences are out of order"
        assert len(self.running) <= self.queues.sequences_max, "more sequences run than there are places"
        for sequence in self.running:
            assert 0 <= sequence.computed < len(sequence.tokens), "a running sequence has nothing to compute"
            assert self.pool.pages_for(sequence.computed) <= len(sequence.pages), "slots without a page"
            assert len(sequence.pages) <= self.pool.pages_for(len(sequence.tokens)), "pages without a slot"
            assert sequence.score_from is None or sequence.computed <= sequence.score_from, (
                "slots whose logits are wanted were jumped over"
            )
            if sequence.restore is not None:
                sequence.restore.check_integrity()
                limit = sequence.restore.limit(sequence.computed)
                stays = limit is None or limit > sequence.computed or sequence.holds
                assert stays, "computing did not jump over a loaded run"
        self.waiting.check_integrity()
        self._prefill_turns.check_integrity()
        for sequence in self.waiting:
            assert not sequence.pages, "a waiting sequence holds pages"
            assert sequence.computed == 0, "a waiting sequence has computed slots"
        if self._turns is not None:
            self._turns.check_integrity()
