"""A step is planned behind another one only where `schedule` would plan just that, if no answer ended."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from samovar.replicas.scheduling import StepPlan
from samovar.replicas.scheduling.sequence import Sequence
from tests.unit.replicas.scheduling.test_drafts import BLOCK, Replica


def launched(replica: Replica) -> tuple[StepPlan, StepPlan | None]:
    """Plan and compute a step whose tokens nobody has seen yet; return it, and the one behind it."""
    plan = replica.scheduler.schedule()
    replica.scheduler.commit(plan)
    return plan, replica.scheduler.behind(plan)


def sampled(replica: Replica, plan: StepPlan) -> None:
    for chunk in plan.chunks:
        chunk.sequence.tokens.append(7)
        if not chunk.sequence.tokens_left:
            replica.scheduler.queues.finish(chunk.sequence)
    replica.scheduler.check_integrity()


def test_decodes_follow_each_other_over_the_ends_of_pages_and_of_answers() -> None:
    """What is planned ahead is what `schedule` plans once the tokens are there."""
    ahead, plain = Replica(pages=12), Replica(pages=12)
    for replica in (ahead, plain):
        for answer in (3, 20, 40):
            replica.send(BLOCK - 2, answer=answer)
        plan = replica.scheduler.schedule()
        replica.scheduler.commit(plan)
        sampled(replica, plan)
    plan, behind = launched(ahead)
    for _ in range(30):
        assert behind is not None
        sampled(ahead, plan)
        plain.step()
        wanted = plain.scheduler.schedule()
        ends = [chunk for chunk in behind.chunks if chunk.sequence in ahead.scheduler.running]
        assert [(c.sequence.request_id, c.start) for c in ends] == [
            (c.sequence.request_id, c.start) for c in wanted.chunks
        ]
        assert [len(c.sequence.pages) for c in ends] == [len(c.sequence.pages) for c in wanted.chunks]
        plan = ahead.scheduler.commit_behind(ends)
        ahead.scheduler.commit(plan)
        behind = ahead.scheduler.behind(plan)
    assert ahead.scheduler.pool.free == plain.scheduler.pool.free


def waits(replica: Replica, plan: StepPlan) -> None:
    replica.send(5)


def holds(replica: Replica, plan: StepPlan) -> None:
    """One of them waits for blocks that come into its next pages: it is in no step now."""
    plan.chunks.pop()


def is_split(replica: Replica, plan: StepPlan) -> None:
    plan.chunks[0].sequence.forks = 2


def is_not_at_its_end(replica: Replica, plan: StepPlan) -> None:
    plan.chunks[0].sequence.tokens.extend([1, 2])


def ends(replica: Replica, plan: StepPlan) -> None:
    for chunk in plan.chunks:
        chunk.sequence.sampling = Mock(max_tokens=chunk.sequence.output_tokens + 1)


def has_no_pages(replica: Replica, plan: StepPlan) -> None:
    replica.scheduler.pool.allocate()


def is_audited(replica: Replica, plan: StepPlan) -> None:
    """Its last page is compared with what computing gives, and must stay as it is."""
    replica.scheduler.pool.acquire(plan.chunks[0].sequence.pages[-1])


@pytest.mark.parametrize(
    "what", [waits, holds, is_split, is_not_at_its_end, ends, has_no_pages, is_audited, None]
)
def test_whatever_is_to_be_decided_is_left_to_schedule(what: object) -> None:
    replica = Replica(pages=5)
    tokens = BLOCK - 2 if what is is_audited else BLOCK
    one, other = replica.send(tokens), replica.send(tokens)
    plan = replica.scheduler.schedule()
    replica.scheduler.commit(plan)
    assert [chunk.sequence for chunk in plan.chunks] == [one, other]
    before: list[Sequence] = list(replica.scheduler.running)
    if callable(what):
        if what is has_no_pages:
            replica.scheduler.pool.allocate()
        what(replica, plan)
    behind = replica.scheduler.behind(plan)
    assert (behind is None) == (what is not None)
    assert replica.scheduler.running == before
