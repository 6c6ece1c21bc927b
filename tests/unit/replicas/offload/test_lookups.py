"""Whatever the tiers do, a prompt waits within its price, and is looked up until it is computed."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from samovar.cache_tiers.blocks.extent import BlockShape, Placement
from samovar.cache_tiers.blocks.tiers import LoadSource, TierName
from samovar.cache_tiers.messages import BlockRange, Lookup, LookupResult
from samovar.cache_tiers.pricing.meters import PrefillPrice, TierPrice
from samovar.configs.sections import TierSettings
from samovar.replicas.messages import GenerateRequest, SamplingParams
from samovar.replicas.offload.lookups import NODE, TierLookups, slow_part, spare_tokens
from samovar.replicas.offload.tier_client import CompletionQueue
from samovar.replicas.scheduling.sequence import OffloadState, Sequence
from tests.support.clock import Clock
from tests.support.constants import tuned
from tests.support.engines.tier_engines import InlineExecutor

SHAPE = BlockShape(layers=2, layer_bytes=512, block_tokens=16)
PRICE = PrefillPrice(0.0, 0.01, 0.0)
PROMPT = 321  # 3.2 s to compute
FREE: dict[LoadSource, TierPrice] = {"s3": TierPrice(0.0, 1e12)}


def answer(
    blocks: int = 0, *, unlisted: tuple[TierName, ...] = (), seconds: dict[LoadSource, float] | None = None
) -> LookupResult:
    spans = (BlockRange(bytes(32), bytes(16), 0, 0, blocks, "s3", blocks * 1024),) if blocks else ()
    return LookupResult("i", 1, spans, prices=FREE, unlisted=unlisted, seconds=seconds or {})


class World:
    """One prompt, tiers that answer when the test says so, and an engine that is idle or not."""

    def __init__(self, failures: int = TierSettings.breaker_failures, **settings: Any) -> None:
        self.clock = Clock()
        self.lane = InlineExecutor()
        self.lane.held = True
        self.arrivals = CompletionQueue()
        self.asked: list[Lookup] = []
        self.next: LookupResult | None = answer(20)
        self.learned = 0
        self.lookups = TierLookups(
            self._look,
            self._learn,
            lambda: PRICE,
            tuned(TierSettings(**settings), breaker_failures=failures),
            SHAPE,
            self.lane,
            self.arrivals,
            self.clock,
        )

    def _look(self, lookup: Lookup) -> LookupResult | None:
        self.asked.append(lookup)
        return self.next

    def _learn(self, *_: object) -> None:
        self.learned += 1

    def open(self, tokens: int = PROMPT, resident: int = 0) -> Sequence:
        params = SamplingParams(max_tokens=8)
        prompt = list(range(tokens))
        sequence = Sequence("r", 1, bytes(32), array("I", prompt), tokens, params, 0)
        sequence.offload_state = OffloadState(Placement(), opened_s=self.clock())
        request = GenerateRequest("r", prompt, params, 1, b"", bytes(16), bytes(16), Placement())
        self.lookups.open(sequence, request, resident_tokens=resident, is_queued=True)
        return sequence

    def collect(self, *, is_idle: bool = False) -> list[Sequence]:
        self.arrivals.take_in()
        news = self.lookups.collect(is_idle=is_idle)
        self.lookups.check_integrity()
        return news

    def answered(self, found: LookupResult | None) -> list[Sequence]:
        self.next = found
        self.lane.release()
        return self.collect()

    def wake(self, *, is_idle: bool = False) -> bool:
        """Move to the next thing that is due; False if there is none."""
        times = list(self.lookups.wake_at_s(is_idle=is_idle))
        if times:
            self.clock.now_s = max(self.clock.now_s, min(times))
        return bool(times)


def offload_state_of(sequence: Sequence) -> OffloadState:
    assert sequence.offload_state is not None
    return sequence.offload_state


def test_it_waits_until_the_answer_and_is_told_of_then() -> None:
    world = World()
    sequence = world.open()
    assert sequence.is_looking
    assert world.collect() == []
    world.clock.now_s += 1.0
    assert world.answered(answer(20)) == [sequence]
    assert not sequence.is_looking
    assert offload_state_of(sequence).waited_s == 1.0
    assert not world.wake(), "nothing more is due"
    (asked,) = world.asked
    assert (asked.starts_turn, asked.is_queued) == (True, True)
    assert asked.wait_s == pytest.approx(1.6)
    assert not world.lookups.computed(sequence)


def test_its_deadline_is_a_share_of_the_saving_and_the_answer_counts_afterwards() -> None:
    world = World()
    sequence = world.open()
    assert world.wake()
    assert world.clock.now_s == pytest.approx(1001.6)
    assert world.collect() == [sequence], "it is computed from here on"
    assert sequence.computable == PROMPT, "in whole steps"
    assert world.answered(answer(20)) == [sequence], "... and the rest is loaded"
    assert offload_state_of(sequence).found is not None
    assert not world.lookups.computed(sequence)
    assert not world.lookups.slow


def test_an_idle_engine_begins_with_steps_no_longer_than_the_wait_so_far() -> None:
    world = World()
    sequence = world.open()
    assert world.wake(is_idle=True)
    assert world.clock.now_s == pytest.approx(1000.32)
    world.clock.now_s = 1000.33
    world.collect(is_idle=True)
    assert not sequence.is_looking
    steps = []
    while offload_state_of(sequence).spare_tokens is not None:
        steps.append(sequence.computable)
        assert steps[-1] * PRICE.a_s <= world.clock.now_s - 1000.0
        sequence.computed += steps[-1]
        world.clock.now_s += steps[-1] * PRICE.a_s
        world.collect()
    assert steps == [32, 64, 128]
    assert world.clock.now_s >= offload_state_of(sequence).deadline_s
    assert offload_state_of(sequence).waited_s == pytest.approx(0.33)


def test_only_one_of_those_that_wait_begins_on_an_idle_engine() -> None:
    world = World()
    first, second = world.open(), world.open()
    world.clock.now_s += 0.5
    world.collect(is_idle=True)
    assert [one.is_looking for one in (first, second)] == [False, True]
    world.collect(is_idle=False)
    assert second.is_looking


def test_a_tier_that_is_still_being_listed_is_asked_again_for_what_is_missing() -> None:
    world = World()
    sequence = world.open()
    assert world.answered(answer(unlisted=("s3",))) == []
    assert sequence.is_looking
    gaps = []
    for _ in range(6):
        before_s = world.clock.now_s
        assert world.wake()
        gaps.append(round(world.clock.now_s - before_s, 3))
        world.collect()
        assert world.answered(answer(unlisted=("s3",))) == []
    assert gaps == [0.02, 0.04, 0.08, 0.16, 0.25, 0.25]
    assert not any(one.starts_turn or one.is_queued for one in world.asked[1:]), "one turn has begun"
    world.wake()
    world.collect()
    assert world.answered(answer(20)) == [sequence]
    assert offload_state_of(sequence).found == answer(20)


def test_what_was_found_shortens_the_wait_for_the_rest() -> None:
    world = World()
    sequence = world.open()
    world.answered(answer(18, unlisted=("s3",)))  # 288 of 320
    assert sequence.is_looking
    assert offload_state_of(sequence).deadline_s == pytest.approx(1000.16)
    world.wake()
    world.collect()
    assert world.answered(answer(20, unlisted=("s3",))) == [sequence], "there is nothing left to wait for"


def test_asking_again_ends_when_the_prompt_is_computed() -> None:
    world = World()
    sequence = world.open()
    world.answered(answer(unlisted=("s3",)))
    world.clock.now_s = 1002.0
    assert world.collect() == [sequence]
    assert world.lookups.computed(sequence)
    assert offload_state_of(sequence).miss == "slow lookup"
    assert world.lookups.slow == {"s3": 1}, "that it was not listed was the reason"
    assert not world.wake()


@pytest.mark.parametrize(
    ("late", "part"),
    [
        (answer(20), NODE),
        (answer(20, seconds={"peer": 1.5, "s3": 0.2}), "peer"),
        (answer(20, seconds={"peer": 0.1}), NODE),
        (answer(unlisted=("s3",)), "s3"),
        (None, NODE),
    ],
)
def test_a_slow_lookup_is_counted_once_by_the_tier_that_was_slow(
    late: LookupResult | None, part: str
) -> None:
    world = World()
    sequence = world.open()
    began_s, look = world.clock.now_s, world.lookups._look_up

    def slow(lookup: Lookup) -> LookupResult | None:
        world.clock.now_s = began_s + 2.0
        return look(lookup)

    world.lookups._look_up = slow
    world.clock.now_s += 1.7
    world.collect()
    assert world.lookups.computed(sequence)
    assert not world.lookups.computed(sequence), "once"
    world.clock.now_s = began_s
    world.answered(late)
    assert world.lookups.slow == {part: 1}
    world.lookups.close(sequence)
    assert world.lookups.slow == {part: 1}


def test_a_lookup_that_nobody_answers_before_the_end_was_slow_as_well() -> None:
    world = World()
    sequence = world.open()
    world.clock.now_s += 1.7
    world.collect()
    world.lookups.computed(sequence)
    offload_state_of(sequence).is_over = True
    world.lookups.close(sequence)
    assert world.lookups.slow == {NODE: 1}
    world.lane.release()
    world.collect()
    assert world.asked == [], "... and is not asked any more"


def test_tiers_that_are_down_are_waited_for_by_nobody() -> None:
    world = World(failures=2)
    for _ in range(2):
        sequence = world.open()
        world.answered(None)
        assert (sequence.is_looking, offload_state_of(sequence).miss) == (False, "down")
    sequence = world.open()
    assert (sequence.is_looking, offload_state_of(sequence).miss) == (False, "down")
    assert len(world.asked) == 2
    assert not world.lookups.computed(sequence), "down is not slow"


def test_a_prompt_that_is_in_the_pool_waits_for_nothing() -> None:
    world = World()
    sequence = world.open(resident=PROMPT - 1)
    assert not sequence.is_looking
    assert not world.lookups.computed(sequence)
    assert not world.lookups.slow


@pytest.mark.parametrize("seed", range(20))
def test_no_request_waits_longer_than_its_own_recompute_price(seed: int) -> None:
    """Answers that come at any time, in part, or never; engines that are idle or not."""
    rng = random.Random(seed)
    world = World(lookup_share=rng.choice([0.1, 0.5, 1.0]), lookup_idle_share=rng.choice([0.0, 0.2, 1.0]))
    for _ in range(50):
        sequence = world.open(rng.randint(1, 2000), 0)
        offload_state = offload_state_of(sequence)
        listed_s = world.clock.now_s + rng.choice([0.0, 0.3, 3.0, 30.0])
        while sequence.is_looking:
            world.lane.held = rng.random() < 0.7
            is_listed = world.clock.now_s >= listed_s
            world.next = rng.choice([answer(rng.randint(0, 9), unlisted=() if is_listed else ("s3",))])
            if rng.random() < 0.5:
                world.lane.release()
            world.collect(is_idle=rng.random() < 0.5)
            if sequence.is_looking and not world.wake():
                pytest.fail("it waits for nothing that is due")
        assert offload_state.waited_s <= offload_state.recompute_s
        assert offload_state.waited_s <= 4.0
        world.lookups.computed(sequence)
        offload_state.is_over = True
        world.lookups.close(sequence)
        world.lane.release()
        world.collect()
    assert not world.lookups._open
    assert not world.wake()


def _at(computed: int, tokens: int = 200) -> Sequence:
    state = SimpleNamespace(pending=tokens - computed, computed=computed)
    return cast(Sequence, state)


@pytest.mark.parametrize(
    ("computed", "seconds", "count"),
    [(0, 0.0, 16), (0, 0.31, 16), (0, 0.33, 32), (16, 1.0, 96), (20, 0.0, 12), (20, 0.4, 28), (192, 9.0, 8)],
)
def test_a_spare_step_ends_with_a_block_and_is_at_least_one(
    computed: int, seconds: float, count: int
) -> None:
    found = spare_tokens(_at(computed), PRICE, seconds, 16)
    assert found == count or (computed == 192 and found == 16), "the last block is cut by what is pending"


@pytest.mark.parametrize("took_s", [0.0, 1.0])
def test_which_part_was_slow(took_s: float) -> None:
    name: Callable[[LookupResult | None], str] = lambda found: slow_part(found, took_s)  # noqa: E731
    assert name(None) == NODE
    assert name(answer(1, seconds={"s3": 0.6})) == "s3"
