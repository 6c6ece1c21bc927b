"""What the next step computes: continuous batching with a token budget. Pure.

Every step gives one token to each running decode first, so that nobody's stream stalls behind
a long prompt, and fills the rest of the budget (`step.py`: tokens, and time beside decodes) with
prefill chunks in order of arrival. Waiting sequences are admitted while there are places, pages and
budget, tenants taking turns (`fair_queue.py`; `tenants.py` while prompts are computed). When a
running sequence needs a page and there is none, a later one is preempted (`scheduler.py`), of the tenant
who has most; so is one where a tenant waits that has less (`tenants.py`).

A sequence that is to get blocks from a cache tier is passed over twice, without holding up those
behind it: while it waits to hear what the tiers have, and, with its pages, while they come.

The scheduler owns the pool's bookkeeping and the queues. It knows nothing of tensors, text,
sampling or clocks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from collections.abc import Sequence as Listing
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

from cache_tiers.blocks import TAG_BYTES
from cache_tiers.pricing import PrefillPrice, TierPrice, swap_or_drop
from replicas.fair_queue import FairQueue
from replicas.kv import OutOfPages, PagePool, PrefixEntry
from replicas.scheduling.sequence import Sequence
from replicas.scheduling.step import Chunk as Chunk
from replicas.scheduling.step import StepBudget, StepRoom
from replicas.scheduling.step import StepPlan as StepPlan
from replicas.scheduling.tenants import DecodeRests, PrefillTurns, TenantShares

# Who makes room when the pages run out, and what becomes of its blocks. Pure.
#
# `drop` forgets the victim's pages and computes them again later; `swap` copies the blocks out and back
# in. Which of the two is cheaper is `cost.swap_or_drop`'s arithmetic.


@dataclass(frozen=True, slots=True)
class Preemption:
    victim: Sequence
    how: Literal["drop", "swap"]


class PreemptionPolicy(Protocol):
    def choose(self, candidates: Listing[Sequence]) -> Preemption:
        """One of `candidates` (running, oldest first, never empty) gives up its pages."""
        ...


class DropNewest:
    """The newest loses least service and delays nobody who came before it."""

    def choose(self, candidates: Listing[Sequence]) -> Preemption:
        return Preemption(candidates[-1], "drop")


class NewestByPrice:
    """The newest goes, and its blocks the cheaper way. `copy`: one direction between pages and memory."""

    def __init__(
        self, prefill: Callable[[], PrefillPrice], copy: TierPrice, block_bytes: int, block_tokens: int
    ) -> None:
        self._prefill = prefill
        self._copy = copy
        self._block_bytes = block_bytes
        self._block_tokens = block_tokens

    def choose(self, candidates: Listing[Sequence]) -> Preemption:
        victim = candidates[-1]
        nbytes = -(-victim.computed // self._block_tokens) * self._block_bytes
        return Preemption(victim, swap_or_drop(victim.computed, nbytes, self._copy, self._prefill()))


class SwapNewest:
    """The newest goes, and its blocks are always kept aside where there is room."""

    def choose(self, candidates: Listing[Sequence]) -> Preemption:
        return Preemption(candidates[-1], "swap")


# What the scheduler asks of whoever keeps blocks outside the pool.


class Restorer(Protocol):
    """Brings blocks back from somewhere else. The engine's side of the cache tiers is one."""

    def plan_restore(self, sequence: Sequence) -> None:
        """`sequence` has just got its pages: set its `restore` if something is to be loaded into them."""
        ...

    def swap_out(self, sequence: Sequence, pages: Listing[int]) -> bool:
        """Keep the blocks of a preempted sequence, which are in `pages`, aside, now.

        False: not possible, they are dropped.
        """
        ...


class Scheduler:
    """Queues and pages of one replica."""

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
        turn_tokens: int = 1024,
        weights: Mapping[bytes, float] | None = None,
    ) -> None:
        """`budget`: of a step; without it `step_tokens_max` alone decides. `turn_tokens`: a tenant's turn
        while others wait; `weights`: by tenant's tag, else 1."""
        if step_tokens_max < sequences_max:
            raise ValueError("a step must hold one token of every running sequence")
        self.pool = pool
        self.step_tokens_max = step_tokens_max
        self.sequences_max = sequences_max
        self.policy = policy
        self.prefix_reuse = prefix_reuse
        self.restorer = restorer
        self.budget = budget or StepBudget(step_tokens_max)
        self.turn_tokens = turn_tokens
        self.weights = dict(weights or {})
        self._turns = PrefillTurns(turn_tokens, self.weights)
        self._rests = DecodeRests(turn_tokens)
        self._held_up: set[bytes] = set()  # tenants whose next sequence could not come in, in the last step
        self.waiting: FairQueue[bytes, Sequence] = FairQueue(turn_tokens, self.weights)
        self.running: list[Sequence] = []  # in order of arrival
        self.preemptions = 0
        self.swaps = 0
        self.cow_copies = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def has_ready(self) -> bool:
        """A waiting sequence is ready: its tier lookup has finished."""
        return any(map(_is_ready, self.waiting))

    @property
    def free_places(self) -> int:
        """Sequences that could still run, pages permitting."""
        return self.sequences_max - sum(sequence.forks for sequence in self.running)

    def fits(self, tokens: int) -> bool:
        """Whether a sequence of this length could run when it is alone."""
        return self.pool.pages_for(tokens) <= self.pool.usable

    def admits_at_once(self, sequence: Sequence) -> bool:
        """Whether a sequence that comes now need not wait for others to end. Shared prefixes do not count."""
        ahead = [*self.waiting, sequence]
        pages = sum(self.pool.pages_for(len(one.tokens)) for one in ahead)
        return sum(one.forks for one in ahead) <= self.free_places and pages <= self.pool.available

    def add(self, sequence: Sequence) -> None:
        self.waiting.put(sequence.tenant, sequence, self._cost(sequence))

    def _cost(self, sequence: Sequence) -> int:
        """Tokens it asks for. Of an answer, which may end early, a turn's worth at most."""
        prompt = len(sequence.tokens)
        answer = min(sequence.sampling.max_tokens - sequence.output_tokens, self.turn_tokens)
        return prompt - len(self._resident(sequence)) * self.pool.block_tokens + answer * sequence.forks

    # -- one step --------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Decide the next step and reserve its pages. Follow it with `commit`."""
        plan = StepPlan()
        active, stuck = self._prefilling()
        groups = self._turns.order(active)
        decodes = [one for one in self.running if one.is_decode and not one.holds]
        resting = self._rests.choose(self._shares(), {one.tenant for one in decodes}, groups)
        groups += [stuck] if stuck else []
        room = self.budget.open([one.computed for one in decodes if one.tenant not in resting])
        by_arrival = len(groups) < 2
        self._plan_running(plan, room, lambda one: one.tenant not in resting if one.is_decode else by_arrival)
        held_up = set(stuck)  # who comes before them may have no more than they
        for group in groups:
            if group is stuck:
                held_up -= stuck
            if not by_arrival:
                self._plan_running(plan, room, partial(_is_prefill_of, group))
            self._admit(plan, room, held_up, set().union(*groups) - group)
            if any(chunk.samples for chunk in plan.prompts):
                break  # a first token comes with this step: others' prompts do not make it longer
        if resting and not plan.prompts:  # there were no pages for whom they made way
            self._plan_running(plan, room, lambda one: one.is_decode and one.tenant in resting)
        for chunk in plan.prompts:
            self._turns.computed(chunk.sequence.tenant, chunk.count)
        self._rests.ran(resting, plan.prompts)
        self._held_up = held_up | stuck
        return plan

    def _prefilling(self) -> tuple[set[bytes], set[bytes]]:
        """Tenants whose prompts could be computed now, and those whose prompts wait for places or pages.

        The latter have no turns, so that they save none up while their own answers fill the replica.
        """
        places, pages = self.free_places, self.pool.available

        def has_room(one: Sequence) -> bool:
            return one.forks <= places and self.pool.pages_for(len(one.tokens)) <= pages

        ready = self.waiting.tenants(_is_ready)
        active = {one.tenant for one in self.running if not (one.is_decode or one.holds)} | (
            self.waiting.tenants(lambda one: _is_ready(one) and has_room(one)) | ready - self._held_up
        )
        return active, ready - active

    def _plan_running(self, plan: StepPlan, room: StepRoom, wanted: Callable[[Sequence], bool]) -> None:
        position = 0
        while position < len(self.running):  # preemption shortens the list behind `position`
            sequence = self.running[position]
            if sequence.holds or not wanted(sequence):
                position += 1
                continue
            count = 1 if sequence.is_decode else room.takes(sequence.computable, sequence.computed)
            if not self._make_room(sequence, count, position, plan):
                continue  # it had to go: the next one stands in its place now
            if count:
                plan.chunks.append(Chunk(sequence, sequence.computed, count))
                if not sequence.is_decode:
                    room.take(count, sequence.computed)
            position += 1

    def _make_room(self, sequence: Sequence, count: int, position: int, plan: StepPlan) -> bool:
        """Own every page that the step writes; False when the sequence itself had to go."""
        while True:
            try:
                self._own_pages(sequence, count, plan)
                return True
            except OutOfPages:
                later = [one for one in self.running[position:] if one not in plan.admitted]
                choice = self.policy.choose(self._shares().richest(later))
                self._preempt(choice, plan)
                if choice.victim is sequence:
                    return False

    def _shares(self) -> TenantShares:
        return TenantShares(self.running, self.sequences_max, self.pool.usable, self.weights)

    def _own_pages(self, sequence: Sequence, count: int, plan: StepPlan) -> None:
        block_tokens = self.pool.block_tokens
        first = sequence.computed // block_tokens
        last = (sequence.computed + count - 1) // block_tokens
        for block in range(first, last + 1):
            if block == len(sequence.pages):
                sequence.pages.append(self.pool.allocate())
                continue
            page = sequence.pages[block]
            if self.pool.refs(page) > 1:  # shared with a sibling: copy before the first write
                own = self.pool.allocate()
                plan.copies.append((page, own))
                self.pool.release([page])
                sequence.pages[block] = own
                self.cow_copies += 1

    def _preempt(self, choice: Preemption, plan: StepPlan) -> None:
        victim = choice.victim
        if choice.how == "swap" and self.restorer is not None:
            self.swaps += self.restorer.swap_out(victim, _filled(victim, plan))
        # A copy planned for the victim must not write into a page that somebody else gets now.
        plan.copies = [(source, target) for source, target in plan.copies if target not in victim.pages]
        plan.chunks = [chunk for chunk in plan.chunks if chunk.sequence is not victim]
        self.running.remove(victim)
        self.pool.release(victim.pages)
        victim.forget_computed()
        self.waiting.put_first(victim.tenant, victim)
        plan.preempted.append(victim)
        self.preemptions += 1

    def _admit(
        self, plan: StepPlan, room: StepRoom, held_up: set[bytes], others: Collection[bytes] = ()
    ) -> None:
        """`held_up`: tenants whose next sequence cannot come in now; `others`: those whose turn it is not."""
        if plan.preempted:
            return  # there were too few pages just now
        while not room.is_full:
            sequence = self.waiting.pick(_is_ready, held_up.union(others))
            if sequence is None:
                break
            if not self._may_pass(sequence, held_up) or not self._take_in(sequence, plan, room, held_up):
                held_up.add(sequence.tenant)
                if not self._shares().of(sequence.tenant):
                    break  # nobody has less, so nobody may pass
                continue
            self.waiting.take(sequence)
            self._insert_running(sequence)
            plan.admitted.append(sequence)
            count = 0 if sequence.holds else room.take(sequence.computable, sequence.computed)
            if count:
                plan.chunks.append(Chunk(sequence, sequence.computed, count))

    def _may_pass(self, sequence: Sequence, held_up: set[bytes]) -> bool:
        pages = self.pool.pages_for(len(sequence.tokens))
        return not held_up or self._shares().may_pass(sequence, pages, held_up)

    def _take_in(self, sequence: Sequence, plan: StepPlan, room: StepRoom, held_up: set[bytes]) -> bool:
        """Give it pages, if there is a place for it, or if others make way. They are held up then."""
        places_short = max(0, sequence.forks - self.free_places)
        if not places_short and self._reserve_prompt(sequence, room):
            return True
        gone = self._shares().make_way(
            sequence,
            self.pool.pages_for(len(sequence.tokens)),
            (places_short, self._pages_short(sequence)),
            [other for other in self.running if other not in plan.admitted],
            lambda victim: sum(self.pool.refs(page) == 1 for page in victim.pages),
        )
        if not gone:
            return False
        for victim in gone:
            self._preempt(self.policy.choose([victim]), plan)
        held_up.update(victim.tenant for victim in gone)
        return self._reserve_prompt(sequence, room)

    def _resident(self, sequence: Sequence) -> list[PrefixEntry]:
        """The blocks of a sequence that the pool has. Its last token is never among them: it is computed,
        for its logits are what the request is for."""
        if not self.prefix_reuse:
            return []
        blocks_max = (len(sequence.tokens) - 1) // self.pool.block_tokens
        return self.pool.match(sequence.keys_of(blocks_max, self.pool.block_tokens), sequence.tokens)

    def _pages_short(self, sequence: Sequence) -> int:
        """How many pages more there would have to be for its prompt."""
        hits = self._resident(sequence)
        revived = sum(self.pool.refs(entry.page) == 0 for entry in hits)  # they are no cache then
        return self.pool.pages_for(len(sequence.tokens)) - len(hits) + revived - self.pool.available

    def _reserve_prompt(self, sequence: Sequence, room: StepRoom) -> bool:
        """Share the cached prefix and own pages for all the rest, or leave everything as it was."""
        hits = self._resident(sequence)
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
        sequence.riding_s = room.riding_s(sequence.pending, sequence.computed)
        if self.restorer is not None:
            self.restorer.plan_restore(sequence)
        return True

    def _insert_running(self, sequence: Sequence) -> None:
        place = len(self.running)
        while place and self.running[place - 1].arrival > sequence.arrival:
            place -= 1
        self.running.insert(place, sequence)

    def commit(self, plan: StepPlan) -> None:
        """The forward pass is done: its slots are valid, full blocks become findable."""
        for chunk in plan.chunks:
            self.advance(chunk.sequence, chunk.start + chunk.count)

    def advance(self, sequence: Sequence, computed: int) -> None:
        """Slots below `computed` are valid, and those that a tier has brought right behind them."""
        sequence.computed = computed if sequence.restore is None else sequence.restore.jump(computed)
        self._publish(sequence)

    def _publish(self, sequence: Sequence) -> None:
        if not self.prefix_reuse or sequence.is_cleared:
            return
        block_tokens = self.pool.block_tokens
        while (
            not sequence.chain_broken and (sequence.published_blocks + 1) * block_tokens <= sequence.computed
        ):
            block = sequence.published_blocks
            ids = sequence.tokens[block * block_tokens : (block + 1) * block_tokens]
            key = sequence.keys_of(block + 1, block_tokens)[block]
            page = sequence.pages[block]
            published = self.pool.publish(key, sequence.chain_entry, ids, page)
            if published is None:
                sequence.chain_broken = True
                return
            if published.duplicate:  # somebody computed the same block meanwhile: share theirs
                self.pool.acquire(published.entry.page)
                self.pool.release([page])
                sequence.pages[block] = published.entry.page
            self.pool.own(published.entry.page, sequence.owner)
            sequence.chain_entry = published.entry.number
            sequence.published_blocks = block + 1

    def fork(self, sequence: Sequence) -> list[Sequence]:
        """Split off the other choices of a sequence whose prompt is computed; they share its pages."""
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
        """The sequence is over, whatever the reason: its pages are free or cached from now on."""
        if sequence in self.running:
            self.running.remove(sequence)
            self.pool.release(sequence.pages)
            sequence.pages = []
        else:
            self.waiting.remove(sequence)

    def forget(self, tags: Collection[bytes]) -> int:
        """Cleared owners' pages are found by nobody, nor are those their running sequences still write."""
        for sequence in self.sequences():
            if sequence.owner in tags or sequence.owner[:TAG_BYTES] in tags:
                sequence.is_cleared = True
        return self.pool.forget(tags)

    def sequences(self) -> Iterator[Sequence]:
        yield from self.running
        yield from self.waiting

    def stats(self) -> dict[str, Any]:
        """Fields of `EngineStats`."""
        return {
            "running": len(self.running),
            "waiting": len(self.waiting),
            "pages_total": self.pool.usable,
            "pages_free": self.pool.free,
            "pages_cached": self.pool.cached,
            "pages_active": self.pool.active,
            "preemptions": self.preemptions,
            "swaps": self.swaps,
            "cow_copies": self.cow_copies,
            "evictions": self.pool.evictions,
        }

    def check_integrity(self, others: Iterable[Listing[int]] = ()) -> None:
        """Raises `AssertionError` naming what is wrong. `others`: pages that others hold references of."""
        self.pool.check_integrity([*(sequence.pages for sequence in self.running), *others])
        arrivals = [sequence.arrival for sequence in self.running]
        assert arrivals == sorted(arrivals), "running sequences are out of order"
        assert len(self.running) <= self.sequences_max, "more sequences run than there are places"
        for sequence in self.running:
            assert 0 <= sequence.computed < len(sequence.tokens), "a running sequence has nothing to compute"
            assert self.pool.pages_for(sequence.computed) <= len(sequence.pages), "slots without a page"
            if sequence.restore is not None:
                sequence.restore.check_integrity()
                limit = sequence.restore.limit(sequence.computed)
                assert limit is None or limit > sequence.computed, "computing did not jump over a loaded run"
        self.waiting.check_integrity()
        self._turns.check_integrity()
        for sequence in self.waiting:
            assert not sequence.pages, "a waiting sequence holds pages"
            assert sequence.computed == 0, "a waiting sequence has computed slots"


def _is_ready(sequence: Sequence) -> bool:
    return not sequence.is_looking


def _is_prefill_of(tenants: Collection[bytes], sequence: Sequence) -> bool:
    return not sequence.is_decode and sequence.tenant in tenants


def _filled(sequence: Sequence, plan: StepPlan) -> list[int]:
    """Where the bytes of a sequence are now: a page that a planned copy is to fill has none yet."""
    source_of = {target: source for source, target in plan.copies}
    return [source_of.get(page, page) for page in sequence.pages]
