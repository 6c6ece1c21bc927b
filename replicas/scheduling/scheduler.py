"""Plans each step: continuous batching with a token budget. Pure.

Every step first gives one token to each running decode, so that a long prompt stalls no stream, and fills the
rest of the budget (`step.py`: tokens, and time beside decodes) with prefill chunks, short prompts first
(`order.py`). Waiting sequences are admitted while there are places, pages and budget (`Admission`),
tenants taking turns (`replicas/turns`; `order.py` while prompts are computed). If a running sequence needs
a page and none is available, a later sequence of the tenant with the largest share is preempted
(`queues.py`); a running sequence is also preempted when a tenant with a smaller share waits (`order.py`).

A sequence with blocks in a cache tier is skipped twice, without blocking those behind it: during its tier
lookup and, with its pages reserved, during the transfer.

The scheduler owns the pool's bookkeeping and the queues; it has no tensors, text, sampling or clocks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from collections.abc import Sequence as Listing
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from samovar.cache_tiers.blocks import TAG_BYTES, session_owner
from samovar.replicas.kv import PagePool
from samovar.replicas.scheduling.drafts import Drafter
from samovar.replicas.scheduling.order import (
    DecodeRests,
    PrefillTurns,
    Priorities,
    PromptOrder,
    foremost,
    giving_way,
)
from samovar.replicas.scheduling.queues import PageTables, PreemptionPolicy, Queues
from samovar.replicas.scheduling.sequence import Restorer, Sequence
from samovar.replicas.scheduling.step import Chunk, StepBudget, StepPlan, StepRoom, halved


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

    def behind(self, plan: StepPlan) -> StepPlan | None:
        """Plan the decodes behind a step that is committed, and whose tokens are not known yet.

        As if no answer ended. None: about the step behind it `schedule` has to decide, or there are no pages
        for it. Who computes it calls `commit_behind` with what of it still runs.
        """
        sequences = [chunk.sequence for chunk in plan.chunks]
        if len(sequences) != len(self.running) or not all(chunk.samples for chunk in plan.chunks):
            return None  # a prompt is not at its end, or a sequence waits for blocks
        if self.admission.has_ready or any(chunk.draft for chunk in plan.chunks):
            return None
        if any(one.forks > 1 or self.tables.is_shared(one, 1) for one in sequences):
            return None  # `schedule` splits it, or copies the page first
        if sum(self.tables.to_own(one, 1) for one in sequences) > self.pool.available:
            return None
        if all(one.tokens_left <= 1 for one in sequences):
            return None
        behind = StepPlan()
        for one in sequences:
            self.tables.own(one, 1, behind)
            behind.chunks.append(Chunk(one, one.computed, 1))
        return behind

    def commit_behind(self, chunks: list[Chunk]) -> StepPlan:
        """Return what of a step of `behind` counts, as `schedule` would have planned it."""
        self._rests.ran((), ())
        self._turns, self.admission.refused = None, set()
        return StepPlan(chunks)

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


JOINED_TOKENS = 256
"""How much a prompt must have in common with a running one, beyond what is published, to wait for it."""


@dataclass(slots=True, eq=False)
class StepTurns:
    """Whose turn it is in one step with prompts, and whose next sequence it cannot admit.

    `groups`: tenants with prompts to compute, in the order of their turns; one group is served together.
    `stuck`: tenants all of whose prompts wait for places or pages; they are the last group, if any. `room`:
    what is left of the step. `group`: whose turn it is; `others`: whose it is not. `held_up`: what is
    admitted ahead of these tenants leaves its own no larger a share than they have. `tried`: tenants of which
    no shorter prompt can be admitted before others. `lost`: tenants of which a sequence was preempted for
    another tenant's.

    No tenant is in two groups. A tenant is held up from the first of its sequences on that is not admitted,
    so never before its turn; one that lost a sequence from then on; one that is stuck until its turn. Others
    who are held up stay so to the end of the step, and nothing more of them is admitted.
    """

    groups: Listing[set[bytes]]
    stuck: set[bytes]
    room: StepRoom
    group: set[bytes] = field(default_factory=set)
    others: set[bytes] = field(default_factory=set)
    held_up: set[bytes] = field(default_factory=set)
    tried: set[bytes] = field(default_factory=set)
    lost: set[bytes] = field(default_factory=set)
    _begun: int = 0  # groups

    def __iter__(self) -> Iterator[set[bytes]]:
        """Give each group its turn."""
        self.held_up |= self.stuck
        for group in self.groups:
            self._begun += 1
            self.group, self.others = group, set().union(*self.groups) - group
            if group is self.stuck:
                self.held_up -= self.stuck
            yield group

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is wrong."""
        begun, later = set().union(*self.groups[: self._begun]), set().union(*self.groups[self._begun :])
        assert sum(map(len, self.groups)) == len(begun | later), "a tenant has two turns"
        assert not self.stuck or self.groups[-1] is self.stuck, "those that are stuck are not the last"
        assert self.stuck <= self.held_up | begun, "a tenant that is stuck was passed before its turn"
        assert self.held_up.isdisjoint(later - self.stuck - self.lost), "a tenant is held up before its turn"
        assert self.lost <= self.held_up | self.stuck, "a tenant that lost a sequence may be passed by all"
        assert self.tried <= begun, "a tenant's shorter prompts were tried before its turn"


class Admission:
    """Admits waiting sequences: while there are places, pages and room in the step, tenants taking turns.

    A sequence with blocks in a cache tier is skipped during its tier lookup, without blocking those behind
    it. `refused`: tenants whose next sequence the last step did not admit.
    """

    def __init__(self, queues: Queues, priorities: Priorities, order: PromptOrder) -> None:
        self.refused: set[bytes] = set()
        self._queues = queues
        self._tables = queues.tables
        self._pool = queues.tables.pool
        self._priorities = priorities
        self._order = order

    @property
    def has_ready(self) -> bool:
        """A waiting sequence is ready: its tier lookup has finished, and it follows no other."""
        return any(map(self._is_ready, self._queues.waiting))

    def at_once(self, sequence: Sequence) -> bool:
        """Return whether a new sequence can run without waiting for others to end.

        Ignores shared prefixes.
        """
        ahead = [*self._queues.waiting, sequence]
        pages = sum(self._pool.pages_for(len(one.tokens)) for one in ahead)
        return sum(one.forks for one in ahead) <= self._queues.free_places and pages <= self._pool.available

    def first(self) -> list[Sequence]:
        """Return the next sequence of each tenant, of those that are ready and were not refused just now."""
        found = map(self._next_of, self._queues.waiting.tenants() - self.refused)
        return [one for one in found if one is not None]

    def _next_of(self, tenant: bytes) -> Sequence | None:
        return next(filter(self._is_ready, self._queues.waiting.of(tenant)), None)

    def tenants(self) -> tuple[set[bytes], set[bytes]]:
        """Return the tenants whose prompts could be computed now, and those that wait for places or pages.

        The latter get no turns, so that they save none up while their own answers fill the replica.
        """
        waiting, places, pages = self._queues.waiting, self._queues.free_places, self._pool.available

        def may_enter(one: Sequence) -> bool:
            if not self._is_ready(one) or one.tenant not in self.refused:
                return self._is_ready(one)
            return one.forks <= places and self._pool.pages_for(len(one.tokens)) <= pages

        prefilling = {one.tenant for one in self._queues.running if one.is_prefill}
        if not waiting:
            return prefilling, set()
        active = prefilling | waiting.tenants(may_enter)
        return active, waiting.tenants(self._is_ready) - active

    def admit(self, plan: StepPlan, turns: StepTurns) -> Iterator[Sequence]:
        """Admit waiting sequences of the tenants whose turn it is, while the step has room.

        Yields each one for which there may be something to compute: the caller plans it before the next.
        """
        if plan.preempted or plan.is_short:
            return  # there were too few pages just now
        waiting, others = self._queues.waiting, set(turns.others)
        while not turns.room.is_full:
            sequence = waiting.pick(self._is_ready, turns.held_up | others)
            if sequence is None:
                break
            if self._priorities.sits_out(sequence) and not waiting.is_due(sequence):
                others.add(sequence.tenant)
                continue
            if not self._try_admit(sequence, plan, turns):
                turns.held_up.add(sequence.tenant)
                if not self._queues.shares().of(sequence.tenant):
                    break  # no tenant has a smaller share, so none may pass
                continue
            self._queues.enter(sequence, plan)
            if not sequence.holds:
                self._priorities.entered(sequence)
                yield sequence

    def admit_before(self, than: Sequence, plan: StepPlan, turns: StepTurns) -> Sequence | None:
        """Admit and return a waiting prompt to compute before `than`, whose turn it is, if there is one."""
        queues, group = self._queues, turns.group
        prompts = [one for one in queues.running if one.tenant in group and one.is_prefill]
        able: set[Sequence] = set()
        for tenant in group:
            line = queues.waiting.of(tenant)
            before = self._order.may_go_before(line, prompts, than, self._pool.block_tokens)
            if tenant == than.tenant:
                before = {one for one in before if not one.yields_to(than.priority)}
                following = self._next_of(tenant)
                before |= {following} if following and than.yields_to(following.priority) else set()
            able |= before
        while able and not plan.preempted and not plan.is_short:
            sequence = queues.waiting.pick(
                lambda one: one in able and self._is_ready(one), turns.held_up | turns.tried
            )
            if sequence is None:
                break
            if not self._try_admit(sequence, plan, turns):
                turns.tried.add(sequence.tenant)
                continue
            queues.enter(sequence, plan)
            if not sequence.holds:
                self._priorities.entered(sequence)
                return sequence
        return None

    def _is_ready(self, sequence: Sequence) -> bool:
        return not sequence.is_looking and not any(
            self._follows(sequence, one) for one in self._queues.running
        )

    def _follows(self, sequence: Sequence, ahead: Sequence) -> bool:
        """Return whether a running prompt will soon publish a long run of blocks that this one needs, too.

        So of sub-agents that start at once the first computes, or loads, what they share; the others wait.
        Less than `JOINED_TOKENS` more in common are not worth the wait.
        """
        if ahead.is_decode or ahead.chain_broken or ahead.is_cleared or ahead.namespace != sequence.namespace:
            return False
        block_tokens = self._pool.block_tokens
        last = ahead.published_blocks + -(-JOINED_TOKENS // block_tokens)
        if not self._tables.prefix_reuse or last * block_tokens > min(
            sequence.reusable, len(ahead.tokens) - 1
        ):
            return False
        return sequence.keys_of(last, block_tokens)[-1] == ahead.keys_of(last, block_tokens)[-1]

    def _try_admit(self, sequence: Sequence, plan: StepPlan, turns: StepTurns) -> bool:
        """Reserve a place and pages, preempting others if allowed; tenants preempted for it are held up."""
        queues, needed = self._queues, self._pool.pages_for(len(sequence.tokens))
        if turns.held_up and not queues.shares().may_pass(sequence, needed, turns.held_up):
            return False
        places_short = max(0, sequence.forks - queues.free_places)
        pages_short = self._tables.short(sequence) if places_short else self._tables.reserve(sequence)
        if places_short or pages_short > 0:
            pages_short -= queues.pages_leaving()
            if places_short <= 0 and pages_short <= 0:
                return False  # there is room for it as soon as others' blocks have been copied out
            gone = self._victims_for(sequence, needed, (places_short, pages_short), plan)
            for victim in gone:
                queues.preempt(queues.policy.choose([victim]), plan)
            lost = {victim.tenant for victim in gone if victim.tenant != sequence.tenant}
            turns.lost |= lost
            turns.held_up |= lost
            if not gone or self._tables.reserve(sequence) > 0:
                return False
        sequence.shared_step_s = turns.room.shared_step_s(sequence.pending, sequence.computed)
        if queues.restorer is not None:
            queues.restorer.plan_restore(sequence)
        return True

    def _victims_for(
        self, sequence: Sequence, needed: int, short: tuple[int, int], plan: StepPlan
    ) -> list[Sequence]:
        """Choose who is preempted so that `sequence`, which needs so many pages, can run; none: it cannot.

        `short`: places and pages that are missing.
        """
        queues, freed = self._queues, self._tables.freed
        others = [other for other in queues.running if other not in plan.admitted]

        def choose(candidates: Listing[Sequence]) -> Sequence:
            return queues.policy.choose(candidates).victim

        gone = giving_way(sequence, short, others, freed, choose)
        return gone or queues.shares().victims_for(sequence, needed, short, others, freed) or []
