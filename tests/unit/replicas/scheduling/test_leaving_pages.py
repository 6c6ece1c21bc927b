"""A swapped sequence's pages are free when its blocks have been copied: who needs them waits, nobody else."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Listing

from samovar.cache_tiers.blocks.extent import TAG_BYTES
from samovar.replicas.kv.page_pool import PagePool
from samovar.replicas.messages import SamplingParams
from samovar.replicas.scheduling.queues import SwapNewest
from samovar.replicas.scheduling.scheduler import Scheduler
from samovar.replicas.scheduling.sequence import Sequence
from samovar.replicas.scheduling.step import StepBudget

BT = 16


class Aside:
    """Copies nothing; the pages of what is swapped out stay held until `land`."""

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.held: list[int] = []

    def plan_restore(self, sequence: Sequence) -> None:
        pass

    def stop_restore(self, sequence: Sequence) -> None:
        pass

    def swap_out(self, sequence: Sequence, pages: Listing[int]) -> bool:
        for page in pages:
            self.pool.acquire(page)
        self.held += pages
        return True

    def pages_leaving(self) -> int:
        return sum(self.pool.refs(page) == 1 for page in self.held)

    def land(self) -> None:
        self.pool.release(self.held)
        self.held = []


class Replica:
    def __init__(self, usable_pages: int) -> None:
        self.pool = PagePool(1 + usable_pages, BT)
        self.aside = Aside(self.pool)
        self.scheduler = Scheduler(
            self.pool,
            budget=StepBudget(256),
            sequences_max=8,
            policy=SwapNewest(),
            prefix_reuse=False,
            restorer=self.aside,
        )
        self.arrivals = 0

    def add(self, tokens: int, tenant: bytes = b"a") -> Sequence:
        self.arrivals += 1
        sequence = Sequence(
            request_id=str(self.arrivals),
            arrival=self.arrivals,
            namespace=bytes(32),
            tokens=array("I", range(tokens)),
            prompt_tokens=tokens,
            sampling=SamplingParams(max_tokens=64),
            seed=0,
            owner=tenant * (2 * TAG_BYTES),
        )
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> set[Sequence]:
        """Plan, compute and sample one step; returns whose tokens were computed."""
        plan = self.scheduler.schedule()
        self.scheduler.commit(plan)
        for chunk in plan.chunks:
            if chunk.sequence.computed == len(chunk.sequence.tokens):
                chunk.sequence.tokens.append(7)
        self.scheduler.check_integrity([[page] for page in self.aside.held])
        return {chunk.sequence for chunk in plan.chunks}


def test_a_sequence_waits_for_pages_on_their_way_out_and_no_other_is_preempted() -> None:
    replica = Replica(usable_pages=6)
    first, second, third = replica.add(2 * BT), replica.add(2 * BT - 3), replica.add(2 * BT - 2)
    assert replica.step() == {first, second, third}
    assert replica.step() == {second}, "the first needs a page of the third's, the second has room in its own"
    assert (list(third.pages), replica.aside.pages_leaving()) == ([], 2)
    assert replica.step() == {second}
    assert replica.scheduler.queues.preemptions == 1
    replica.aside.land()
    assert replica.step() >= {first, second}
    assert replica.scheduler.queues.preemptions == 1


def test_nothing_is_admitted_into_the_pages_that_a_running_sequence_waits_for() -> None:
    replica = Replica(usable_pages=5)
    first, second = replica.add(3 * BT), replica.add(2 * BT - 1)
    replica.step()
    small = replica.add(4)
    replica.step()
    assert not second.pages
    for _ in range(3):
        assert replica.step() == set()
        assert not small.pages
    replica.aside.land()
    assert first in replica.step()


def test_another_tenant_waits_for_pages_on_their_way_out_and_preempts_no_second_victim() -> None:
    replica = Replica(usable_pages=8)
    running = [replica.add(2 * BT - 8) for _ in range(4)]
    assert replica.step() == set(running)
    other = replica.add(2 * BT - 1, tenant=b"b")
    replica.step()
    assert replica.scheduler.queues.preemptions == 1
    for _ in range(3):
        assert replica.step() == set(running[:3])
    assert (replica.scheduler.queues.preemptions, list(other.pages)) == (1, [])
    replica.aside.land()
    assert other in replica.step()
    assert replica.scheduler.queues.preemptions == 1
