"""Short prompts and returns go first; long ones are passed for so long, and no longer."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samovar.cache_tiers.blocks import Placement
from samovar.cache_tiers.messages import BlockRange, LookupResult
from samovar.cache_tiers.pricing import PrefillPrice
from samovar.replicas.kv import PagePool
from samovar.replicas.messages import SamplingParams
from samovar.replicas.scheduling import OffloadState, Restore, RestorePiece, Scheduler, Sequence
from samovar.replicas.scheduling.order import expected_tokens
from samovar.replicas.scheduling.queues import DropNewest
from samovar.replicas.scheduling.step import CHUNK_TOKENS, StepBudget

BT = 16
PRICE = PrefillPrice(0.02, 2e-3, 0.0)


@dataclass
class Replica:
    """A scheduler whose model answers with zeros."""

    passed_max: int = 256
    pages: int = 4000
    step_tokens: int = 64
    target_s: float | None = None
    scheduler: Scheduler = field(init=False)
    done: dict[Sequence, int] = field(default_factory=dict)
    """Prompts that are computed, by the number of their last step."""
    steps: int = 0
    arrivals: int = 0

    def __post_init__(self) -> None:
        budget = StepBudget(
            self.step_tokens, self.target_s, lambda: PRICE, stretch=2.5, passed_tokens_max=self.passed_max
        )
        self.scheduler = Scheduler(
            PagePool(1 + self.pages, BT),
            sequences_max=16,
            policy=DropNewest(),
            budget=budget,
        )

    def send(
        self,
        tokens: int,
        answer: int = 1,
        offload_state: OffloadState | None = None,
        first_token: int | None = None,
    ) -> Sequence:
        """Queue a prompt; `first_token`: of another, which it extends or is extended by."""
        self.arrivals += 1
        sequence = Sequence(
            request_id=str(self.arrivals),
            arrival=self.arrivals,
            namespace=bytes(32),
            tokens=array("I", [first_token or 1000 + self.arrivals, *range(tokens - 1)]),
            prompt_tokens=tokens,
            sampling=SamplingParams(max_tokens=answer),
            seed=0,
            offload_state=offload_state,
        )
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> dict[Sequence, int]:
        """Compute one step; return its tokens by sequence."""
        plan = self.scheduler.schedule()
        assert plan.chunks, "work, and a step that does nothing"
        assert plan.tokens <= self.step_tokens
        assert len({chunk.sequence for chunk in plan.chunks}) == len(plan.chunks)
        self.scheduler.commit(plan)
        self.steps += 1
        for chunk in plan.chunks:
            one = chunk.sequence
            if one.computed < len(one.tokens):
                continue
            self.done.setdefault(one, self.steps)
            one.tokens.append(0)
            if one.output_tokens == one.sampling.max_tokens:
                self.scheduler.queues.finish(one)
        self.scheduler.check_integrity()
        return {chunk.sequence: chunk.count for chunk in plan.chunks}

    def drain(self) -> None:
        while self.scheduler.has_work:
            self.step()


def test_a_short_prompt_goes_before_a_long_one_under_way() -> None:
    replica = Replica()
    long = replica.send(2000)
    replica.step()
    short = replica.send(40)
    assert replica.step() == {short: 40, long: 24}, "and the rest of the step is not lost"
    replica.drain()
    assert replica.done[short] == 2


@pytest.mark.parametrize("running", [False, True])
def test_in_order_of_arrival_where_nobody_may_be_passed(running: bool) -> None:
    replica = Replica(passed_max=0)
    long = replica.send(200)
    if running:
        replica.step()
    short = replica.send(40)
    replica.drain()
    assert replica.done[long] <= replica.done[short]


def test_beside_a_stream_a_short_prompt_does_not_wait_for_a_long_ones_small_chunks() -> None:
    replica = Replica(step_tokens=512, target_s=0.4)
    replica.send(8, answer=500)
    replica.step()
    long = replica.send(4000)
    replica.step()
    short = replica.send(32)
    assert replica.step()[short] == CHUNK_TOKENS
    replica.drain()
    assert replica.done[short] == 4
    assert replica.done[long] > 100


def test_a_long_prompt_gets_every_second_token_once_it_was_passed_enough() -> None:
    replica = Replica(passed_max=256)
    long = replica.send(2000)
    replica.step()
    passed = own = 0
    while long not in replica.done:
        while len(replica.scheduler.waiting) < 4:
            replica.send(48)
        step = replica.step()
        own += step.get(long, 0)
        passed += sum(count for one, count in step.items() if one is not long)
        assert passed <= 256 + own + 48
    assert passed >= own / 2, "short ones have their part, too"


def test_a_return_counts_without_what_the_pool_and_the_tiers_have() -> None:
    replica = Replica()
    first = replica.send(800)
    replica.drain()
    long = replica.send(1000)
    replica.step()
    again = replica.send(830, first_token=first.tokens[0])
    assert expected_tokens(again, BT) <= 31 + BT
    assert again in replica.step()
    assert long not in replica.done
    found = LookupResult("", 0, (BlockRange(bytes(16), bytes(16), 0, 0, 50, "cpu", 1),))
    offload_state = OffloadState(Placement("cpu", (), "cpu"), 0.0, found=found)
    elsewhere = replica.send(830, offload_state=offload_state)
    assert expected_tokens(elsewhere, BT) == 30


def test_a_prompt_that_is_loaded_enters_at_once_and_takes_no_room() -> None:
    """Its pages are reserved and its load begins beside the long prompt's steps."""
    replica = Replica()

    class Restorer:
        def plan_restore(self, sequence: Sequence) -> None:
            if sequence.offload_state is not None:
                piece = RestorePiece(0, 800, "cpu", 800)
                sequence.restore = Restore([piece], BT, "load", True, 0.0, 1.0)

        def stop_restore(self, sequence: Sequence) -> None:
            pass

        def swap_out(self, sequence: Sequence, pages: object) -> bool:
            return False

        def pages_leaving(self) -> int:
            return 0

    replica.scheduler.queues.restorer = Restorer()
    long = replica.send(4000)
    replica.step()
    found = LookupResult("", 0, (BlockRange(bytes(16), bytes(16), 0, 0, 50, "cpu", 1),))
    back = replica.send(830, offload_state=OffloadState(Placement("cpu", (), "cpu"), 0.0, found=found))
    assert replica.step() == {long: 64}
    assert back in replica.scheduler.running
    assert back.restore is not None
    (piece,) = back.restore.pieces
    back.restore.claim(piece, 800)
    back.restore.placed(piece, 0.0)
    replica.scheduler.advance(back, 0)
    assert replica.step() == {back: 30, long: 34}


@given(
    st.lists(st.tuples(st.integers(1, 900), st.integers(1, 6), st.integers(0, 6)), min_size=1, max_size=30),
    st.sampled_from([0, 16, 100, 1024]),
    st.sampled_from([None, 0.05, 0.4]),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_every_prompt_is_served_within_so_many_steps(
    requests: list[tuple[int, int, int]], passed_max: int, target_s: float | None
) -> None:
    """However many short ones come later, and whatever streams run."""
    replica = Replica(passed_max=passed_max, target_s=target_s)
    came: list[tuple[Sequence, int, int, int]] = []
    for tokens, answer, steps in requests:
        for _ in range(steps):
            if replica.scheduler.has_work:
                replica.step()
        before = [one for one in replica.scheduler.queues if one not in replica.done]
        ahead = sum(one.pending for one in before)
        came.append((replica.send(tokens, answer), ahead, len(before), replica.steps))
    replica.drain()
    for one, ahead, count, sent_step in came:
        own = one.prompt_tokens
        # Of later prompts: as many tokens as may pass it, and as many as are computed of itself. Each is
        # another's last chunk at least every time that it is a small one.
        later = passed_max + own if passed_max else 0
        most = (ahead + own + later) / CHUNK_TOKENS + count + 1 + later
        places = sum(a for _, a, _ in requests)  # steps in which all places are taken by answers
        assert replica.done[one] - sent_step <= most + places
        assert one.passed_tokens <= passed_max + CHUNK_TOKENS * bool(passed_max)


@given(st.lists(st.integers(1, 400), min_size=2, max_size=12), st.integers(1, 600))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_of_prompts_that_come_together_none_is_passed_by_more_than_is_allowed(
    lengths: list[int], passed_max: int
) -> None:
    replica = Replica(passed_max=passed_max)
    prompts = [replica.send(length) for length in lengths]
    computed = dict.fromkeys(prompts, 0)
    passed = dict.fromkeys(prompts, 0)
    while replica.scheduler.has_work:
        for one, count in replica.step().items():
            computed[one] += count
            for other in prompts:
                if other.arrival < one.arrival and other not in replica.done:
                    passed[other] += count
    for one in prompts:
        assert computed[one] == one.prompt_tokens
        assert passed[one] <= passed_max + computed[one] + replica.step_tokens
