"""The two queues of one replica: sequences that run, on pages of their own, and those that wait. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Listing

from samovar.replicas.scheduling.order import gives
from samovar.replicas.scheduling.page_tables import PageTables
from samovar.replicas.scheduling.preemption import Preemption, PreemptionPolicy
from samovar.replicas.scheduling.sequence import Restorer, Sequence
from samovar.replicas.scheduling.step import StepPlan
from samovar.replicas.scheduling.tenants import TenantShares
from samovar.replicas.turns import FairQueue


class Queues:
    """Who runs and who waits, and how a sequence that runs comes to wait again.

    `sequences_max`: places of running sequences; `quantum_tokens`, `weights`: see `FairQueue`.
    """

    def __init__(
        self,
        tables: PageTables,
        *,
        sequences_max: int,
        policy: PreemptionPolicy,
        restorer: Restorer | None,
        quantum_tokens: int,
        weights: Mapping[bytes, float],
    ) -> None:
        self.tables = tables
        self.sequences_max = sequences_max
        self.policy = policy
        self.restorer = restorer
        self.waiting: FairQueue[bytes, Sequence] = FairQueue(quantum_tokens, weights)
        self.running: list[Sequence] = []  # in order of arrival
        self.preemptions = 0
        self.swaps = 0
        self._quantum_tokens = quantum_tokens
        self._weights = weights

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.running
        yield from self.waiting

    @property
    def free_places(self) -> int:
        """Return how many more sequences could run, pages permitting."""
        return self.sequences_max - sum(sequence.forks for sequence in self.running)

    def shares(self) -> TenantShares:
        """Return what each tenant has of the places and pages now."""
        return TenantShares(self.running, self.sequences_max, self.tables.pool.usable, self._weights)

    def pages_leaving(self) -> int:
        """Return how many pages wait only to be copied: preempting more would not be sooner."""
        return 0 if self.restorer is None else self.restorer.pages_leaving()

    def answer_tokens(self, sequence: Sequence) -> int:
        """Return what a sequence's answers count for: they may end early, so at most a turn of each."""
        return min(sequence.tokens_left, self._quantum_tokens) * sequence.forks

    def enter(self, sequence: Sequence, plan: StepPlan) -> None:
        """Let a waiting sequence run that has its pages."""
        sequence.is_due = sequence.is_due or self.waiting.is_due(sequence)
        self.waiting.take(sequence)
        self._insert(sequence)
        plan.admitted.append(sequence)

    def _insert(self, sequence: Sequence) -> None:
        place = len(self.running)
        while place and self.running[place - 1].arrival > sequence.arrival:
            place -= 1
        self.running.insert(place, sequence)

    def fork(self, sequence: Sequence) -> list[Sequence]:
        """Let the other choices of a sequence run whose prompt is computed."""
        siblings = [self.tables.fork(sequence, index) for index in range(1, sequence.forks)]
        for sibling in siblings:
            self._insert(sibling)
        sequence.forks = 1
        return siblings

    def make_room(self, sequence: Sequence, count: int, plan: StepPlan) -> bool:
        """Own every page that the step writes. False: it was preempted itself, or waits for pages.

        Until there are enough it owns none: what a plan copies must be computed with in the same step.
        """
        while self.tables.to_own(sequence, count) > self.tables.pool.available:
            if self.pages_leaving():
                plan.is_short = True
                return False
            position = self.running.index(sequence)
            givers = [
                one
                for place, one in enumerate(self.running)
                if one not in plan.admitted and gives(one, sequence, is_later=place > position)
            ]
            if self.preempt_one(givers, plan) is sequence:
                return False
        self.tables.own(sequence, count, plan)
        return True

    def preempt_one(self, givers: Listing[Sequence], plan: StepPlan) -> Sequence:
        """Preempt one of these running sequences, of the tenant with the largest share; return it."""
        choice = self.policy.choose(self.shares().of_largest_tenant(givers))
        self.preempt(choice, plan)
        return choice.victim

    def preempt(self, choice: Preemption, plan: StepPlan) -> None:
        """Take a running sequence's pages and its part in the plan; it is the next of its tenant to run."""
        victim = choice.victim
        if choice.how == "swap" and self.restorer is not None:
            self.swaps += self.restorer.swap_out(victim, plan.filled(victim.pages))
        # A copy planned for the victim must not write into a page that another sequence may get now.
        plan.copies = [(source, target) for source, target in plan.copies if target not in victim.pages]
        plan.chunks = [chunk for chunk in plan.chunks if chunk.sequence is not victim]
        self.tables.keep_copied(victim, plan)
        self._release(victim)
        victim.forget_computed()
        size = len(victim.tokens) + self.answer_tokens(victim)
        self.waiting.put_first(victim.tenant, victim, victim.priority, size)
        plan.preempted.append(victim)
        self.preemptions += 1

    def _release(self, sequence: Sequence) -> None:
        if self.restorer is not None:
            self.restorer.stop_restore(sequence)
        self.running.remove(sequence)
        self.tables.pool.release(sequence.pages)

    def finish(self, sequence: Sequence) -> None:
        """Remove a finished sequence, whatever the reason; its pages become free or cached."""
        if sequence in self.running:
            self.policy.lengths.ended(sequence.output_tokens)
            self._release(sequence)
            sequence.pages = []
        else:
            self.waiting.remove(sequence)
