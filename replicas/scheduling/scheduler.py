"""Plans each step: continuous batching with a token budget. Pure.

Every step first gives one token to each running decode, so that a long prompt stalls no stream, and fills the
rest of the budget (`step.py`: tokens, and time beside decodes) with prefill chunks, short prompts first
(`prompt_order.py`). Waiting sequences are admitted while there are places, pages and budget, tenants taking
turns (`replicas/turns`; `tenants.py` while prompts are computed). If a running sequence needs a page and none
is available, a later sequence of the tenant with the largest share is preempted; a running sequence is also
preempted when a tenant with a smaller share waits (`tenants.py`).

A sequence with blocks in a cache tier is skipped twice, without blocking those behind it: during its tier
lookup and, with its pages reserved, during the transfer.

The scheduler owns the pool's bookkeeping and the queues; it has no tensors, text, sampling or clocks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from collections.abc import Sequence as Listing
from dataclasses import replace
from typing import Any, Literal

from cache_tiers.blocks import TAG_BYTES
from replicas.drafting import Drafter
from replicas.kv import PagePool, session_owner
from replicas.scheduling.page_tables import PageTables
from replicas.scheduling.preemption import Preemption, PreemptionPolicy
from replicas.scheduling.priorities import Priorities, foremost, gives, giving_way
from replicas.scheduling.prompt_order import PromptOrder
from replicas.scheduling.sequence import Restorer, Sequence
from replicas.scheduling.shortage import halved
from replicas.scheduling.step import Chunk as Chunk
from replicas.scheduling.step import StepBudget, StepRoom
from replicas.scheduling.step import StepPlan as StepPlan
from replicas.scheduling.tenants import DecodeRests, PrefillTurns, TenantShares
from replicas.turns import FairQueue

JOINED_TOKENS = 256
"""How much a prompt must have in common with a running one, beyond what is published, to wait for it."""


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
        step_tokens_max: int,
        sequences_max: int,
        policy: PreemptionPolicy,
        prefix_reuse: bool = True,
        restorer: Restorer | None = None,
        budget: StepBudget | None = None,
        quantum_tokens: int = 1024,
        weights: Mapping[bytes, float] | None = None,
    ) -> None:
        """Set up empty queues.

        `budget`: of a step; by default only `step_tokens_max` limits it. `quantum_tokens`: a tenant's turn
        while others wait; `weights`: by tenant's tag, 1 by default.
        """
        if step_tokens_max < sequences_max:
            raise ValueError("a step must hold one token of every running sequence")
        self.pool = pool
        self.step_tokens_max = step_tokens_max
        self.sequences_max = sequences_max
        self.policy = policy
        self.tables = PageTables(pool, prefix_reuse=prefix_reuse)
        self.restorer = restorer
        self.budget = budget or StepBudget(step_tokens_max)
        self.quantum_tokens = quantum_tokens
        self.weights = dict(weights or {})
        self._turns = PrefillTurns(quantum_tokens, self.weights)
        self._rests = DecodeRests(quantum_tokens)
        self._priorities = Priorities(step_tokens_max)
        self._order = PromptOrder(self.budget.passed_tokens_max)
        self._held_up: set[bytes] = set()  # tenants whose next sequence the last step did not admit
        self.waiting: FairQueue[bytes, Sequence] = FairQueue(quantum_tokens, self.weights)
        self.running: list[Sequence] = []  # in order of arrival
        self._copied: list[int] = []  # pages that the planned step copies from, and no sequence has now
        self.preemptions = 0
        self.swaps = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def has_ready(self) -> bool:
        """A waiting sequence is ready: its tier lookup has finished, and it follows no other."""
        return any(map(self._is_ready, self.waiting))

    @property
    def free_places(self) -> int:
        """Return how many more sequences could run, pages permitting."""
        return self.sequences_max - sum(sequence.forks for sequence in self.running)

    def fits(self, tokens: int) -> bool:
        """Return whether a sequence of this length could run alone."""
        return self.pool.pages_for(tokens) <= self.pool.usable

    def admits_at_once(self, sequence: Sequence) -> bool:
        """Return whether a new sequence can run without waiting for others to end.

        Ignores shared prefixes.
        """
        ahead = [*self.waiting, sequence]
        pages = sum(self.pool.pages_for(len(one.tokens)) for one in ahead)
        return sum(one.forks for one in ahead) <= self.free_places and pages <= self.pool.available

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence, at the cost of the tokens that it asks for.

        Of its answer, which may end early, at most `quantum_tokens` count.
        """
        self._priorities.came(sequence)
        sequence.known_tokens = len(self.tables.resident(sequence)) * self.pool.block_tokens
        cost = len(sequence.tokens) - sequence.known_tokens + self._answer(sequence)
        self.waiting.put(sequence.tenant, sequence, cost, sequence.priority)

    def _answer(self, sequence: Sequence) -> int:
        """Return what a sequence's answers count for, in tokens."""
        return min(sequence.tokens_left, self.quantum_tokens) * sequence.forks

    # -- one step --------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Plan the next step and reserve its pages. Follow it with `commit`."""
        self._forget_copied()
        self._priorities.begin(self.running, self._first_waiting())
        plan = StepPlan()
        active, stuck = self._prefilling()
        groups = self._turns.order(active)
        able = [one for one in self.running if one.is_decode and not one.holds]
        decodes = [one for one in able if not self._priorities.sits_out(one)]
        if not (groups or stuck):  # most steps: no prompts, and nothing to share out
            self._plan_decodes(plan, decodes)
            self._add_drafts(plan)
            self._own_drafts(plan)
            self._rests.ran((), ())
            self._held_up = set()
            return plan
        resting = self._rests.choose(self._shares(), {one.tenant for one in decodes}, groups)
        groups += [stuck] if stuck else []
        rested = [one for one in decodes if one.tenant in resting]
        self._plan_decodes(plan, [one for one in decodes if one.tenant not in resting])
        self._add_drafts(plan)
        room = self.budget.open([chunk.start for chunk in plan.chunks for _ in range(chunk.rows)])
        held_up = self._plan_groups(plan, room, groups, stuck)
        if resting and not plan.prompts:  # the prompts that they rested for found no pages
            self._plan_decodes(plan, rested)
        if not plan.chunks:  # nor did those for which others sat out
            self._priorities.share()
            self._plan_decodes(plan, [one for one in able if one not in plan.preempted])
            held_up = self._plan_groups(plan, room, groups, stuck)
        self._own_drafts(plan)
        for chunk in plan.prompts:
            self._turns.computed(chunk.sequence.tenant, chunk.count)
        self._rests.ran(resting, plan.prompts)
        self._held_up = held_up | stuck
        return plan

    def _plan_groups(
        self, plan: StepPlan, room: StepRoom, groups: Listing[set[bytes]], stuck: set[bytes]
    ) -> set[bytes]:
        """Plan the prompts of these tenants, in their turns; return whose next sequence is not admitted."""
        held_up = set(stuck)  # a tenant admitted ahead of these may not exceed their share
        for group in groups:
            if group is stuck:
                held_up -= stuck
            self._plan_prompts(plan, room, group, held_up)
            self._admit(plan, room, held_up, set().union(*groups) - group)
            if any(chunk.samples for chunk in plan.prompts):
                break  # a first token comes with this step: other tenants' prompts must not lengthen it
        return held_up

    def _first_waiting(self) -> list[Sequence]:
        """Return the next sequence of each tenant, of those that are ready and were not refused just now."""
        found = map(self._next_of, self.waiting.tenants() - self._held_up)
        return [one for one in found if one is not None]

    def _next_of(self, tenant: bytes) -> Sequence | None:
        return next(filter(self._is_ready, self.waiting.of(tenant)), None)

    def _prefilling(self) -> tuple[set[bytes], set[bytes]]:
        """Return the tenants whose prompts could be computed now, and those that wait for places or pages.

        The latter get no turns, so that they save none up while their own answers fill the replica.
        """
        places, pages = self.free_places, self.pool.available

        def may_enter(one: Sequence) -> bool:
            if not self._is_ready(one) or one.tenant not in self._held_up:
                return self._is_ready(one)
            return one.forks <= places and self.pool.pages_for(len(one.tokens)) <= pages

        prefilling = {one.tenant for one in self.running if not (one.is_decode or one.holds)}
        if not self.waiting:
            return prefilling, set()
        active = prefilling | self.waiting.tenants(may_enter)
        return active, self.waiting.tenants(self._is_ready) - active

    def _plan_decodes(self, plan: StepPlan, decodes: Iterable[Sequence]) -> None:
        for sequence in decodes:
            if sequence not in plan.preempted and self._make_room(sequence, 1, plan):
                plan.chunks.append(Chunk(sequence, sequence.computed, 1))

    def _add_drafts(self, plan: StepPlan) -> None:
        """Let a step's decodes check guesses besides; they have no pages yet."""
        if self.drafter is None or plan.preempted or plan.is_short:
            return
        drafts = self.drafter.drafts([chunk.sequence for chunk in plan.chunks])
        drafted = zip(plan.chunks, drafts, strict=True)
        plan.chunks = [replace(chunk, draft=draft) if draft else chunk for chunk, draft in drafted]

    def _own_drafts(self, plan: StepPlan) -> None:
        """Own the pages of guesses, of those that the rest of the step has left; else leave them out."""
        for place, chunk in enumerate(plan.chunks):
            if chunk.draft and self.tables.to_own(chunk.sequence, chunk.rows) > self.pool.available:
                plan.chunks[place] = replace(chunk, draft=())
            elif chunk.draft:
                self.tables.own(chunk.sequence, chunk.rows, plan)

    def _plan_prompts(
        self, plan: StepPlan, room: StepRoom, group: Collection[bytes], held_up: set[bytes]
    ) -> None:
        """Plan these tenants' prompts that are being computed, and shorter ones that wait before them."""
        left = [one for one in self.running if _is_prefill_of(group, one)]
        tried: set[bytes] = set()
        while left:
            ahead = foremost(left)
            if not room.is_full:
                than = ahead[self._order.first(ahead)]
                shorter = self._admit_before(than, plan, room, group, held_up, tried)
                left = [one for one in left if one not in plan.preempted]
                if shorter is not None:
                    left = sorted([*left, shorter], key=lambda one: one.arrival)
                    continue
                ahead = foremost(left)
            if left:
                following = ahead[self._order.first(ahead)]
                left.remove(following)
                if not self._priorities.sits_out(following):
                    self._plan_prompt(following, plan, room, left)
                left = [one for one in left if one not in plan.preempted]

    def _plan_prompt(
        self, sequence: Sequence, plan: StepPlan, room: StepRoom, others: Listing[Sequence] = ()
    ) -> None:
        """Plan what there is room for; `others` of its turn are not planned yet."""
        count = room.takes(sequence.computable, sequence.computed)
        count = self._priorities.part(sequence, plan.prompts, count)
        if count and self._make_room(sequence, count, plan) and (count := sequence.begin(count)):
            chunk = Chunk(sequence, sequence.computed, count)
            plan.chunks.append(chunk)
            room.take(count, sequence.computed)
            if chunk.samples:
                self.budget.answers(room)
            self._order.computed(sequence, count, [*others, *self.waiting.of(sequence.tenant)])

    def _make_room(self, sequence: Sequence, count: int, plan: StepPlan) -> bool:
        """Own every page that the step writes. False: it was preempted itself, or waits for pages.

        Until there are enough it owns none: what a plan copies must be computed with in the same step.
        """
        while self.tables.to_own(sequence, count) > self.pool.available:
            if self._pages_leaving():
                plan.is_short = True
                return False
            position = self.running.index(sequence)
            givers = [
                one
                for place, one in enumerate(self.running)
                if one not in plan.admitted and gives(one, sequence, is_later=place > position)
            ]
            choice = self.policy.choose(self._shares().of_largest_tenant(givers))
            self._preempt(choice, plan)
            if choice.victim is sequence:
                return False
        self.tables.own(sequence, count, plan)
        return True

    def _pages_leaving(self) -> int:
        """Return how many pages wait only to be copied: preempting more would not be sooner."""
        return 0 if self.restorer is None else self.restorer.pages_leaving()

    def _shares(self) -> TenantShares:
        return TenantShares(self.running, self.sequences_max, self.pool.usable, self.weights)

    def _preempt(self, choice: Preemption, plan: StepPlan) -> None:
        victim = choice.victim
        if choice.how == "swap" and self.restorer is not None:
            self.swaps += self.restorer.swap_out(victim, plan.filled(victim.pages))
        # A copy planned for the victim must not write into a page that another sequence may get now.
        plan.copies = [(source, target) for source, target in plan.copies if target not in victim.pages]
        plan.chunks = [chunk for chunk in plan.chunks if chunk.sequence is not victim]
        self._keep_copied(victim, plan)
        self._release(victim)
        victim.forget_computed()
        size = len(victim.tokens) + self._answer(victim)
        self.waiting.put_first(victim.tenant, victim, victim.priority, size)
        plan.preempted.append(victim)
        self.preemptions += 1

    def _release(self, sequence: Sequence) -> None:
        if self.restorer is not None:
            self.restorer.stop_restore(sequence)
        self.running.remove(sequence)
        self.pool.release(sequence.pages)

    def _keep_copied(self, victim: Sequence, plan: StepPlan) -> None:
        """Keep what the plan copies out of a victim's pages: its next owner might load into it at once."""
        copied = {source for source, _ in plan.copies}.intersection(victim.pages)
        for page in copied:
            self.pool.acquire(page)
        self._copied += copied

    def _forget_copied(self) -> None:
        self.pool.release(self._copied)
        self._copied = []

    def _admit(
        self, plan: StepPlan, room: StepRoom, held_up: set[bytes], others: Collection[bytes] = ()
    ) -> None:
        """Admit waiting sequences while the step has room.

        `held_up`: tenants whose next sequence cannot be admitted now; `others`: tenants whose turn it is not.
        """
        if plan.preempted or plan.is_short:
            return  # there were too few pages just now
        while not room.is_full:
            sequence = self.waiting.pick(self._is_ready, held_up.union(others))
            if sequence is None:
                break
            if self._priorities.sits_out(sequence) and not self.waiting.is_due(sequence):
                others = {*others, sequence.tenant}
                continue
            if not self._may_pass(sequence, held_up) or not self._try_admit(sequence, plan, room, held_up):
                held_up.add(sequence.tenant)
                if not self._shares().of(sequence.tenant):
                    break  # no tenant has a smaller share, so none may pass
                continue
            self._enter(sequence, plan)
            if not sequence.holds:
                self._plan_prompt(sequence, plan, room)

    def _admit_before(
        self,
        than: Sequence,
        plan: StepPlan,
        room: StepRoom,
        group: Collection[bytes],
        held_up: set[bytes],
        tried: set[bytes],
    ) -> Sequence | None:
        """Admit and return a waiting prompt of these tenants to compute before `than`, if there is one.

        `tried`: tenants whose shorter prompts could not be admitted in this step.
        """
        prompts = [one for one in self.running if _is_prefill_of(group, one)]
        able: set[Sequence] = set()
        for tenant in group:
            line = self.waiting.of(tenant)
            before = self._order.may_go_before(line, prompts, than, self.pool.block_tokens)
            if tenant == than.tenant:
                before = {one for one in before if not one.yields_to(than.priority)}
                following = self._next_of(tenant)
                before |= {following} if following and than.yields_to(following.priority) else set()
            able |= before
        while able and not plan.preempted and not plan.is_short:
            sequence = self.waiting.pick(lambda one: one in able and self._is_ready(one), held_up | tried)
            if sequence is None:
                break
            if not self._may_pass(sequence, held_up) or not self._try_admit(sequence, plan, room, held_up):
                tried.add(sequence.tenant)
                continue
            self._enter(sequence, plan)
            if not sequence.holds:
                return sequence
        return None

    def _is_ready(self, sequence: Sequence) -> bool:
        return not sequence.is_looking and not any(self._follows(sequence, one) for one in self.running)

    def _follows(self, sequence: Sequence, ahead: Sequence) -> bool:
        """Return whether a running prompt will soon publish a long run of blocks that this one needs, too.

        So of sub-agents that start at once the first computes, or loads, what they share; the others wait.
        Less than `JOINED_TOKENS` more in common are not worth the wait.
        """
        if ahead.is_decode or ahead.chain_broken or ahead.is_cleared or ahead.namespace != sequence.namespace:
            return False
        block_tokens = self.pool.block_tokens
        last = ahead.published_blocks + -(-JOINED_TOKENS // block_tokens)
        if not self.tables.prefix_reuse or last * block_tokens > min(
            sequence.reusable, len(ahead.tokens) - 1
        ):
            return False
        return sequence.keys_of(last, block_tokens)[-1] == ahead.keys_of(last, block_tokens)[-1]

    def _may_pass(self, sequence: Sequence, held_up: set[bytes]) -> bool:
        pages = self.pool.pages_for(len(sequence.tokens))
        return not held_up or self._shares().may_pass(sequence, pages, held_up)

    def _try_admit(self, sequence: Sequence, plan: StepPlan, room: StepRoom, held_up: set[bytes]) -> bool:
        """Reserve a place and pages, preempting others if allowed; tenants preempted for it are held up."""
        places_short = max(0, sequence.forks - self.free_places)
        if not places_short and self._reserve_prompt(sequence, room):
            return True
        pages_short = self.tables.short(sequence) - self._pages_leaving()
        if places_short <= 0 and pages_short <= 0:
            return False  # there is room for it as soon as others' blocks have been copied out
        short = places_short, pages_short
        others = [other for other in self.running if other not in plan.admitted]

        def freed(victim: Sequence) -> int:
            return sum(self.pool.refs(page) == 1 for page in victim.pages)

        def choose(candidates: Listing[Sequence]) -> Sequence:
            return self.policy.choose(candidates).victim

        gone = giving_way(sequence, short, others, freed, choose)
        if not gone:
            pages = self.pool.pages_for(len(sequence.tokens))
            gone = self._shares().victims_for(sequence, pages, short, others, freed) or []
        if not gone:
            return False
        for victim in gone:
            self._preempt(self.policy.choose([victim]), plan)
        held_up.update(victim.tenant for victim in gone if victim.tenant != sequence.tenant)
        return self._reserve_prompt(sequence, room)

    def _reserve_prompt(self, sequence: Sequence, room: StepRoom) -> bool:
        """Share the cached prefix and own pages for the rest, or change nothing and return False."""
        hits = self.tables.resident(sequence)
        for entry in hits:
            self.pool.acquire(entry.page)
        missing = self.pool.pages_for(len(sequence.tokens)) - len(hits)
        if missing > self.pool.available:
            self.pool.release([entry.page for entry in hits])
            return False
        for entry in hits:
            self.pool.own(entry.page, sequence.owner)
        sequence.pages = [entry.page for entry in hits] + [self.pool.allocate() for _ in range(missing)]
        sequence.computed = sequence.resident_tokens = len(hits) * self.pool.block_tokens
        if sequence.first_resident is None:
            sequence.first_resident = sequence.resident_tokens
        sequence.published_blocks = len(hits)
        if hits:
            sequence.chain_entry = hits[-1].number
        sequence.shared_step_s = room.shared_step_s(sequence.pending, sequence.computed)
        if self.restorer is not None:
            self.restorer.plan_restore(sequence)
        return True

    def _enter(self, sequence: Sequence, plan: StepPlan) -> None:
        sequence.is_due = sequence.is_due or self.waiting.is_due(sequence)
        self.waiting.take(sequence)
        self._insert_running(sequence)
        if not sequence.holds:
            self._priorities.entered(sequence)
        plan.admitted.append(sequence)

    def _insert_running(self, sequence: Sequence) -> None:
        place = len(self.running)
        while place and self.running[place - 1].arrival > sequence.arrival:
            place -= 1
        self.running.insert(place, sequence)

    def shrink(self, plan: StepPlan) -> Literal["halved", "preempted", "hopeless"]:
        """Make a plan smaller that did not fit into the device's memory, and return what was done.

        Drafts are left out first. Then the prompt tokens of this step are halved, as often as it takes; then
        sequences are preempted.
        "hopeless": one sequence is left, with as few tokens as can be; the plan is as it was.
        """
        if any(chunk.draft for chunk in plan.chunks):
            for chunk in plan.chunks:
                self.drop_drafted(chunk.sequence)
            plan.chunks = [replace(chunk, draft=()) for chunk in plan.chunks]
            return "halved"
        fewer = halved(plan.chunks)
        if fewer is not None:
            plan.chunks = fewer
            return "halved"
        if len(plan.chunks) == 1:
            return "hopeless"
        planned = {chunk.sequence for chunk in plan.chunks}
        candidates = [one for one in self.running if one in planned]
        self._preempt(self.policy.choose(self._shares().of_largest_tenant(candidates)), plan)
        return "preempted"

    def commit(self, plan: StepPlan) -> None:
        """Mark the step's slots as valid and publish full blocks, after the forward pass."""
        self._forget_copied()
        for chunk in plan.chunks:
            self.advance(chunk.sequence, chunk.start + chunk.count)

    def accept(self, sequence: Sequence) -> None:
        """Mark the slot of a guess as valid: it is the token that was sampled, now the last known one."""
        self.advance(sequence, sequence.computed + 1)

    def drop_drafted(self, sequence: Sequence) -> None:
        """Give back the pages behind the last known token: only guesses that were wrong needed them."""
        needed = self.pool.pages_for(len(sequence.tokens))
        self.pool.release(sequence.pages[needed:])
        del sequence.pages[needed:]

    def advance(self, sequence: Sequence, computed: int) -> None:
        """Mark slots below `computed` as valid, and the run loaded from a tier right behind them."""
        sequence.computed = computed if sequence.restore is None else sequence.restore.jump(computed)
        self.tables.publish(sequence)

    def fork(self, sequence: Sequence) -> list[Sequence]:
        """Create the other choices of a sequence whose prompt is computed; they share its pages."""
        siblings = []
        for index in range(1, sequence.forks):
            sibling = sequence.fork(index)
            for page in sibling.pages:
                self.pool.acquire(page)
            self._insert_running(sibling)
            siblings.append(sibling)
        sequence.forks = 1
        return siblings

    def finish(self, sequence: Sequence) -> None:
        """Remove a finished sequence, whatever the reason; its pages become free or cached."""
        if sequence in self.running:
            self.policy.lengths.ended(sequence.output_tokens)
            self._release(sequence)
            sequence.pages = []
        else:
            self.waiting.remove(sequence)

    def forget(self, tags: Collection[bytes]) -> int:
        """Forget the cleared owners' pages, including those that running sequences still write.

        Returns the number of pages.
        """
        for sequence in self.sequences():
            names = {sequence.owner, session_owner(sequence.owner), sequence.owner[:TAG_BYTES]}
            if not names.isdisjoint(tags):
                sequence.is_cleared = True
        return self.pool.forget(tags)

    def sequences(self) -> Iterator[Sequence]:
        yield from self.running
        yield from self.waiting

    def stats(self) -> dict[str, Any]:
        """Return these fields of `EngineStats`."""
        return {
            "running": len(self.running),
            "waiting": len(self.waiting),
            "pages_total": self.pool.usable,
            "pages_free": self.pool.free,
            "pages_cached": self.pool.cached,
            "pages_active": self.pool.active,
            "preemptions": self.preemptions,
            "swaps": self.swaps,
            "cow_copies": self.tables.cow_copies,
            "evictions": self.pool.evictions,
        }

    def check_integrity(self, others: Iterable[Listing[int]] = ()) -> None:
        """Raise `AssertionError` naming what is wrong. `others`: page tables referenced by others."""
        self.pool.check_integrity([*(one.pages for one in self.running), self._copied, *others])
        arrivals = [sequence.arrival for sequence in self.running]
        assert arrivals == sorted(arrivals), "running sequences are out of order"
        assert len(self.running) <= self.sequences_max, "more sequences run than there are places"
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
        self._turns.check_integrity()
        for sequence in self.waiting:
            assert not sequence.pages, "a waiting sequence holds pages"
            assert sequence.computed == 0, "a waiting sequence has computed slots"


def _is_prefill_of(tenants: Collection[bytes], sequence: Sequence) -> bool:
    return sequence.tenant in tenants and not (sequence.is_decode or sequence.holds)
