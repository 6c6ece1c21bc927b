"""Guesses take only pages that are left over in a step, and only for that step."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Listing
from typing import cast

import pytest

from samovar.cache_tiers.blocks import TAG_BYTES
from samovar.replicas.kv import PagePool
from samovar.replicas.messages import SamplingParams
from samovar.replicas.scheduling import Drafter, Scheduler, Sequence, StepBudget, StepPlan
from samovar.replicas.scheduling.queues import DropNewest

BLOCK = 16
ALICE, BOB = (bytes([number]) * TAG_BYTES for number in (1, 2))
SAMPLED = 7


class SameDraft:
    """Has `draft` checked for every answer that has room for it."""

    def __init__(self, draft: tuple[int, ...]) -> None:
        self.draft = draft

    def drafts(self, answers: Listing[Sequence]) -> list[tuple[int, ...]]:
        return [self.draft[: max(0, one.tokens_left - 1)] for one in answers]


class Replica:
    """A scheduler whose model answers with one token again and again."""

    def __init__(self, pages: int, places: int = 8, draft: tuple[int, ...] = ()) -> None:
        self.scheduler = Scheduler(
            PagePool(1 + pages, BLOCK), budget=StepBudget(256), sequences_max=places, policy=DropNewest()
        )
        if draft:
            self.scheduler.drafter = cast(Drafter, SameDraft(draft))
        self.arrivals = 0

    def send(self, tokens: int, tenant: bytes = ALICE, answer: int = 40) -> Sequence:
        self.arrivals += 1
        sequence = Sequence(
            request_id=str(self.arrivals),
            arrival=self.arrivals,
            namespace=2 * tenant,
            tokens=array("I", [self.arrivals, *range(100, 99 + tokens)]),
            prompt_tokens=tokens,
            sampling=SamplingParams(max_tokens=answer),
            seed=0,
            owner=tenant + bytes(TAG_BYTES),
        )
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> StepPlan:
        """Plan, compute and sample one step."""
        scheduler = self.scheduler
        plan = scheduler.schedule()
        sampling = [chunk for _, chunk in plan.sampling()]
        scheduler.commit(plan)
        for chunk in sampling:
            sequence, guesses = chunk.sequence, list(chunk.draft)
            sequence.tokens.append(SAMPLED)
            while guesses and guesses.pop(0) == SAMPLED:
                scheduler.accept(sequence)
                sequence.tokens.append(SAMPLED)
            scheduler.tables.trim(sequence)
            if not sequence.tokens_left:
                scheduler.queues.finish(sequence)
        scheduler.check_integrity()
        return plan


WRONG = (SAMPLED + 1,) * 6


@pytest.mark.parametrize("draft", [(), WRONG])
def test_nobody_is_preempted_for_a_prompt_that_fits_without_guesses(draft: tuple[int, ...]) -> None:
    replica = Replica(pages=5, places=5, draft=draft)
    for tenant in (ALICE, ALICE, ALICE, BOB):
        replica.send(BLOCK - 3, tenant)
    replica.step()
    late = replica.send(BLOCK - 3, BOB)
    plan = replica.step()
    assert len(plan.chunks) == 5
    assert plan.admitted == [late]
    assert plan.preempted == []


def test_pages_of_wrong_guesses_are_free_after_the_step() -> None:
    replica = Replica(pages=4, draft=WRONG)
    one = replica.send(BLOCK - 2)
    replica.step()
    plan = replica.step()
    assert [chunk.draft for chunk in plan.chunks] == [WRONG]
    assert (len(one.pages), replica.scheduler.pool.free) == (1, 3)


@pytest.mark.parametrize("draft", [(), WRONG])
def test_an_answer_gets_the_page_that_another_one_has_guessed_into(draft: tuple[int, ...]) -> None:
    """One page is left; the first answer guesses into it, and ends before it needs it."""
    replica = Replica(pages=3, draft=draft)
    first, second = replica.send(BLOCK - 5), replica.send(BLOCK - 1)
    for _ in range(4):
        replica.step()
    replica.scheduler.queues.finish(first)
    assert replica.scheduler.queues.preemptions == 0
    assert len(second.pages) == 2


def test_right_guesses_keep_their_pages() -> None:
    replica = Replica(pages=8, draft=(SAMPLED,) * 20)
    one = replica.send(BLOCK - 2)
    replica.step()
    replica.step()
    assert one.output_tokens == 1 + 21
    assert one.computed == len(one.tokens) - 1
    assert len(one.pages) == replica.scheduler.pool.pages_for(len(one.tokens))


def test_guesses_are_left_out_where_no_page_is_free() -> None:
    replica = Replica(pages=1, draft=WRONG)
    replica.send(BLOCK - 3, answer=3)
    replica.step()
    plan = replica.step()
    assert [chunk.draft for chunk in plan.chunks] == [WRONG[:1]]
    assert [chunk.rows for chunk in replica.step().chunks] == [1]


def test_a_plan_that_does_not_fit_gives_pages_of_guesses_back() -> None:
    replica = Replica(pages=4, draft=WRONG)
    one = replica.send(BLOCK - 2)
    replica.step()
    plan = replica.scheduler.schedule()
    assert len(one.pages) == 2
    assert replica.scheduler.shrink(plan) == "halved"
    assert [chunk.rows for chunk in plan.chunks] == [1]
    assert len(one.pages) == 1
