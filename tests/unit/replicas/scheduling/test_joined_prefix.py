"""Prompts that come at once and share a long beginning: it is computed once."""

from __future__ import annotations

from array import array

import pytest

from samovar.replicas.kv import PagePool
from samovar.replicas.messages import SamplingParams
from samovar.replicas.scheduling.queues import DropNewest
from samovar.replicas.scheduling.scheduler import JOINED_TOKENS, Scheduler
from samovar.replicas.scheduling.sequence import Sequence
from samovar.replicas.scheduling.step import StepBudget

BT = 16
STEP = 128


def prompt(number: int, shared: int, own: int = 40, namespace: bytes = b"n" * 32) -> Sequence:
    tokens = array("I", [*range(shared), *(1000 * number + at for at in range(own))])
    return Sequence(
        request_id=str(number),
        arrival=number,
        namespace=namespace,
        tokens=tokens,
        prompt_tokens=len(tokens),
        sampling=SamplingParams(max_tokens=4),
        seed=0,
    )


def computed(sequences: list[Sequence], *, reuse: bool = True, lost: Sequence | None = None) -> int:
    """Run all to their first token; return the prompt tokens computed. `lost` ends after its first step."""
    scheduler = Scheduler(
        PagePool(400, BT), budget=StepBudget(STEP), sequences_max=8, policy=DropNewest(), prefix_reuse=reuse
    )
    for sequence in sequences:
        scheduler.add(sequence)
    total = 0
    for _ in range(1000):
        if not scheduler.has_work:
            scheduler.pool.check_integrity()
            return total
        plan = scheduler.schedule()
        assert plan.chunks, "work, and a step that does nothing"
        total += sum(chunk.count for chunk in plan.chunks)
        scheduler.commit(plan)
        for sequence in [one for one in scheduler.running if one.computed == len(one.tokens) or one is lost]:
            scheduler.queues.finish(sequence)
    raise AssertionError("work is left")


@pytest.mark.parametrize("count", [2, 5])
def test_what_sub_agents_share_is_computed_once(count: int) -> None:
    shared = 40 * BT
    sequences = [prompt(number, shared) for number in range(1, count + 1)]
    assert computed(sequences) == shared + 40 * count


def test_with_little_in_common_nobody_waits() -> None:
    shared = JOINED_TOKENS - BT
    first, second = prompt(1, shared, own=500), prompt(2, shared, own=30)
    scheduler = Scheduler(PagePool(400, BT), budget=StepBudget(1024), sequences_max=8, policy=DropNewest())
    for sequence in (first, second):
        scheduler.add(sequence)
    assert [chunk.sequence for chunk in scheduler.schedule().chunks] == [first, second]


@pytest.mark.parametrize("why", ["another namespace", "no reuse"])
def test_what_cannot_be_shared_is_not_waited_for(why: str) -> None:
    other = prompt(2, 40 * BT, namespace=(b"m" if why == "another namespace" else b"n") * 32)
    total = computed([prompt(1, 40 * BT), other], reuse=why != "no reuse")
    assert total == 2 * (40 * BT + 40)


def test_who_waited_for_one_that_is_gone_computes_the_rest() -> None:
    first, second = prompt(1, 40 * BT), prompt(2, 40 * BT)
    assert computed([first, second], lost=first) == 40 * BT + 40


def test_a_prompt_that_waits_for_pages_moves_none_of_its_own() -> None:
    """It is tried in each step: thousands of blocks that are taken and given back are a step's time."""
    moved = list[int]()

    class Told(PagePool):
        def acquire(self, *pages: int) -> None:
            moved.append(len(pages))
            super().acquire(*pages)

    pool = Told(1 + 40, BT)
    scheduler = Scheduler(pool, budget=StepBudget(STEP), sequences_max=8, policy=DropNewest())

    def run(sequence: Sequence) -> None:
        scheduler.add(sequence)
        while sequence not in scheduler.running or sequence.computed < len(sequence.tokens):
            scheduler.commit(scheduler.schedule())

    history, other = prompt(1, 10 * BT), prompt(2, 0, own=29 * BT)
    run(history)
    scheduler.queues.finish(history)
    run(other)
    returned = prompt(1, 10 * BT, own=3 * BT)
    scheduler.add(returned)
    moved.clear()
    for _ in range(5):
        other.tokens.append(7)
        plan = scheduler.schedule()
        assert [chunk.sequence for chunk in plan.chunks] == [other]
        scheduler.commit(plan)
    assert not [pages for pages in moved if pages], "it waits, and its blocks are shared with nothing"
    scheduler.queues.finish(other)
    run(returned)
    assert returned.resident_tokens >= 8 * BT
    pool.check_integrity()
