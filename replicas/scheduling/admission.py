"""Admission: which waiting sequences run from this step on, on pages reserved for them. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Listing
from dataclasses import dataclass, field

from samovar.replicas.scheduling.order import Priorities, PromptOrder, giving_way
from samovar.replicas.scheduling.queues import Queues
from samovar.replicas.scheduling.sequence import Sequence
from samovar.replicas.scheduling.step import StepPlan, StepRoom

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
        if places_short or not self._tables.reserve(sequence):
            pages_short = self._tables.short(sequence) - queues.pages_leaving()
            if places_short <= 0 and pages_short <= 0:
                return False  # there is room for it as soon as others' blocks have been copied out
            gone = self._victims_for(sequence, needed, (places_short, pages_short), plan)
            for victim in gone:
                queues.preempt(queues.policy.choose([victim]), plan)
            lost = {victim.tenant for victim in gone if victim.tenant != sequence.tenant}
            turns.lost |= lost
            turns.held_up |= lost
            if not gone or not self._tables.reserve(sequence):
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
