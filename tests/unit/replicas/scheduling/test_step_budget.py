"""The chunk of a prompt that one step takes: by tokens, and by time while answers are written."""

from __future__ import annotations

import math
from functools import partial

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from samovar.cache_tiers.pricing.meters import PrefillMeter, PrefillPrice, pairs_of
from samovar.replicas.scheduling.step import (
    CHUNK_TOKENS,
    LIGHT_STEPS,
    RECENT_STEPS,
    RUNNING_MAX,
    Chunk,
    StepBudget,
    StepPace,
    StepTimes,
    Work,
)

TARGET_S = 0.4
SLOW = PrefillPrice(0.085, 4.7e-3, 0.0)  # a 512-token chunk of one CPU core: 2.4 s


def _taken(price: PrefillPrice, decodes: list[int], tokens: int, context: int = 0) -> int:
    return StepBudget(512, TARGET_S, lambda: price).open(decodes).take(tokens, context)


def test_a_chunk_beside_a_stream_ends_within_the_target() -> None:
    count = _taken(SLOW, [100], 512)
    step_s = SLOW.c0_s + SLOW.chunk_seconds(1, 100) + SLOW.chunk_seconds(count, 0)
    assert count % CHUNK_TOKENS == 0
    assert step_s <= TARGET_S < step_s + CHUNK_TOKENS * SLOW.a_s


def test_without_a_stream_a_step_is_filled() -> None:
    assert _taken(SLOW, [], 5000) == 512
    assert StepBudget(512, None, lambda: SLOW).open([1, 2]).take(5000, 0) == 510
    assert StepBudget(512).open([1, 2]).take(5000, 0) == 510


def test_among_tenants_every_step_ends_within_the_target() -> None:
    """Who comes waits for the step that runs, and nothing is known of them before."""
    budget = StepBudget(512, TARGET_S, lambda: SLOW, has_tenants=True)
    count = budget.open([]).take(5000, 0)
    assert count % CHUNK_TOKENS == 0
    assert SLOW.seconds(count, 0) <= TARGET_S < SLOW.seconds(count + CHUNK_TOKENS, 0)
    assert StepBudget(512, None, lambda: SLOW, has_tenants=True).open([]).take(5000, 0) == 512


def test_a_fast_device_fills_its_steps_beside_streams_too() -> None:
    assert _taken(PrefillPrice(2e-3, 1e-5, 1e-10), [1000] * 32, 5000) == 480


def test_behind_a_long_context_a_chunk_is_shorter() -> None:
    price = PrefillPrice(0.04, 1.1e-3, 4.5e-7)
    lengths = [_taken(price, [100], 512, context) for context in (0, 1000, 4000, 8000)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > 2 * lengths[-1]


def test_many_decodes_slow_a_prompt_down_and_do_not_stop_it() -> None:
    """They take longer than the target by themselves: the prompt gets as much again."""
    price = PrefillPrice(0.1, 5e-3, 0.0)
    decodes = [0] * 100  # 0.6 s
    assert _taken(price, decodes, 512) == 112  # 0.56 s


def test_prompts_of_one_step_share_its_time() -> None:
    room = StepBudget(512, TARGET_S, lambda: SLOW).open([100])
    assert room.take(40, 0) == 40
    assert room.take(512, 0) == 16
    assert room.is_full
    assert room.take(512, 0) == 0
    assert room.spent_s <= TARGET_S


def test_what_is_lost_by_not_being_in_this_step() -> None:
    """All of it, where all would fit; else the tokens that would; and never more than waiting for its end."""
    room = StepBudget(512, TARGET_S, lambda: SLOW).open([100])
    assert room.shared_step_s(30, 0) == room.spent_s
    assert room.shared_step_s(500, 0) == room.spent_s
    small = StepBudget(17, TARGET_S, lambda: SLOW).open([100])
    assert small.shared_step_s(40, 0) == pytest.approx(16 * SLOW.a_s)
    assert StepBudget(512, TARGET_S, lambda: SLOW).open([]).shared_step_s(30, 0) == 0.0


def test_a_step_that_brings_a_first_token_is_not_filled_with_anothers_prompt() -> None:
    budget = StepBudget(512, 10.0, lambda: STEADY, stretch=2.5)
    room = budget.open([])
    room.take(40, 0)
    assert room.spent_s == pytest.approx(STEADY.seconds(40, 0))
    budget.answers(room)
    more = room.take(4000, 0)
    assert STEADY.seconds(40 + more, 0) <= 2.5 * STEADY.seconds(40, 0) * 1.01
    assert more >= 2 * CHUNK_TOKENS
    for free in (StepBudget(512, None, lambda: STEADY), StepBudget(512)):
        room = free.open([])
        room.take(40, 0)
        free.answers(room)
        assert room.take(4000, 0) == 472


STEADY = PrefillPrice(0.023, 2e-3, 1e-7)  # a small model on two CPU cores


def _step_s(price: PrefillPrice, decodes: list[int], tokens: int, context: int) -> float:
    return (
        price.seconds(1, decodes[0])
        + sum(price.chunk_seconds(1, c) for c in decodes[1:])
        + price.chunk_seconds(tokens, context)
    )


@pytest.mark.parametrize("streams", [1, 4, 8])
@pytest.mark.parametrize("context", [0, 2000, 8000])
def test_a_stream_becomes_slower_by_no_more_than_the_stretch(streams: int, context: int) -> None:
    """Of what its decodes take alone, whatever they take; where the target allows for less, that holds."""
    decodes = [300] * streams
    alone_s = _step_s(STEADY, decodes, 0, 0)
    for stretch in (2.0, 2.5, 5.0):
        taken = StepBudget(512, 10.0, lambda: STEADY, stretch=stretch).open(decodes).take(4096, context)
        took_s = _step_s(STEADY, decodes, taken, context)
        one_more_s = _step_s(STEADY, decodes, taken + CHUNK_TOKENS, context)
        assert took_s <= stretch * alone_s < one_more_s or taken == CHUNK_TOKENS
    tight = StepBudget(512, 1.5 * alone_s, lambda: STEADY, stretch=100.0).open(decodes).take(4096, context)
    assert tight == StepBudget(512, 1.5 * alone_s, lambda: STEADY).open(decodes).take(4096, context)


def test_without_a_stream_nothing_is_stretched() -> None:
    assert StepBudget(512, TARGET_S, lambda: STEADY, stretch=1.1).open([]).take(4096, 0) == 512


def test_where_a_step_is_bound_by_its_launch_a_chunk_is_large() -> None:
    """A GPU: a decode takes 22 ms, and 512 tokens beside it 5 ms more."""
    launch_bound = PrefillPrice(0.022, 1e-5, 1e-10)
    assert StepBudget(512, TARGET_S, lambda: launch_bound, stretch=2.5).open([1000] * 8).take(8192, 0) == 504


@given(
    st.builds(PrefillPrice, st.floats(1e-4, 0.1), st.floats(1e-5, 1e-2), st.sampled_from([0.0, 1e-9, 1e-6])),
    st.floats(1.05, 10.0),
    st.none() | st.floats(1e-3, 10.0),
    st.lists(st.integers(0, 8000), min_size=1, max_size=8),
    st.floats(0.25, 4.0),
    st.floats(0.25, 4.0),
)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_no_stream_waits_longer_but_for_one_small_chunk(
    price: PrefillPrice,
    stretch: float,
    target_s: float | None,
    decodes: list[int],
    of_decodes: float,
    of_prompts: float,
) -> None:
    """On a machine that takes other times than the price says, which the pace has seen."""
    pace = StepPace()
    alone_s = of_decodes * _step_s(price, decodes, 0, 0)
    some = Work(len(decodes), sum(pairs_of(1, context) for context in decodes))
    chunk_s = of_prompts * price.chunk_seconds(100, 500)
    assume(chunk_s > alone_s / 20)  # else it is too small to be seen
    for _ in range(5):
        pace.ran(some, Work(0, 0.0), alone_s)
        pace.ran(some, Work(100, pairs_of(100, 500)), alone_s + chunk_s)
    budget = StepBudget(512, target_s, lambda: price, stretch=stretch, pace=pace)
    taken = budget.open(decodes).take(4096, 500)
    took_s = alone_s + of_prompts * price.chunk_seconds(taken, 500)
    wait_s = min(stretch * alone_s, math.inf if target_s is None else target_s)
    share_s = min(1.0, stretch - 1.0) * alone_s  # many decodes slow prompts down, and do not stop them
    smallest_s = of_prompts * price.chunk_seconds(CHUNK_TOKENS, 500)
    assert took_s <= max(wait_s, alone_s + share_s, alone_s + smallest_s) * (1 + 1e-6)
    assert taken >= CHUNK_TOKENS


ONE, NONE, CHUNK = Work(1, 0.0), Work(0, 0.0), Work(64, 4096.0)


def _paced(*factors: float) -> float:
    """After steps beside a stream whose prompts took so many times their price."""
    pace = StepPace()
    for factor in factors:
        chunk_s = factor * STEADY.chunk_seconds(64, 0)
        pace.ran(ONE, CHUNK, STEADY.step_seconds(1, 0.0) + chunk_s if factor else factor)
    return pace.of_prompts(STEADY)


def test_the_pace_follows_a_slower_machine_in_a_few_steps_and_no_single_one() -> None:
    assert _paced() == 1.0
    assert _paced(1.0, 1.0, 1.0, 1.0, 20.0) <= 1.5
    assert _paced(1.0, 1.0, 1.0, 20.0, 1.0, 1.0) <= 1.2
    assert _paced(1.0, 1.0, 1.0, 2.0, 2.0, 2.0) >= 1.8
    assert _paced(*[2.0] * 9) == pytest.approx(2.0)
    assert _paced(2.0, math.nan, math.inf, 0.0, -math.inf) == pytest.approx(2.0)
    assert 0 < _paced(*[1e-9] * 9) < 0.02, "a chunk that is not seen is cheap, and still has a price"


def test_before_a_prompt_was_seen_it_is_as_slow_as_decodes() -> None:
    pace = StepPace()
    assert pace.of_decodes(STEADY) == pace.of_prompts(STEADY) == 1.0
    pace.ran(ONE, NONE, 3 * STEADY.step_seconds(1, 0.0))
    assert pace.of_decodes(STEADY) == pace.of_prompts(STEADY) == pytest.approx(3.0)
    pace.ran(ONE, CHUNK, 3 * STEADY.step_seconds(1, 0.0) + STEADY.chunk_seconds(64, 0))
    assert pace.of_prompts(STEADY) == pytest.approx(1.0)


def test_a_price_that_has_learned_is_not_corrected_again() -> None:
    """What was seen is seconds, not a factor: they stay what they are while the price moves."""
    pace = StepPace()
    for _ in range(5):
        pace.ran(ONE, NONE, 0.05)
        pace.ran(ONE, CHUNK, 0.2)
    for c0_s, a_s in ((0.01, 1e-3), (0.02, 5e-3), (0.05, 1e-4)):
        price = PrefillPrice(c0_s, a_s, 0.0)
        assert pace.of_decodes(price) * price.step_seconds(1, 0.0) == pytest.approx(0.05)
        assert pace.of_prompts(price) * price.chunk_seconds(64, 0) == pytest.approx(0.15)


def test_decodes_that_were_slow_once_are_forgotten_though_every_step_has_prompts() -> None:
    pace = StepPace()
    for _ in range(5):
        pace.ran(ONE, NONE, 1.0)  # the machine was busy
    for _ in range(5):
        pace.ran(ONE, CHUNK, 0.2)
    assert pace.of_decodes(STEADY) * STEADY.step_seconds(1, 0.0) <= 0.2 * 1.001


part = st.sampled_from([0.0, 1e-9, 1e-4, 1e-2, 1.0])


@given(
    st.builds(PrefillPrice, part, part, part),
    st.none() | st.floats(1e-6, 600),
    st.lists(st.integers(0, 100_000), max_size=16),
    st.lists(st.tuples(st.integers(1, 10_000), st.integers(0, 100_000)), min_size=1, max_size=6),
)
@settings(max_examples=300, deadline=None, derandomize=True)
def test_a_prompt_goes_on_and_no_step_is_too_full(
    price: PrefillPrice, target_s: float | None, decodes: list[int], prompts: list[tuple[int, int]]
) -> None:
    room = StepBudget(64, target_s, lambda: price).open(decodes)
    taken = [room.take(tokens, context) for tokens, context in prompts]
    assert taken[0] >= min(CHUNK_TOKENS, prompts[0][0])
    assert len(decodes) + sum(taken) <= 64
    assert all(0 <= count <= tokens for count, (tokens, _) in zip(taken, prompts, strict=True))
    if not decodes or target_s is None:
        assert sum(taken) == min(64 - len(decodes), sum(tokens for tokens, _ in prompts))
        return
    decodes_s = price.c0_s + sum(price.chunk_seconds(1, context) for context in decodes)
    least_s = price.chunk_seconds(min(CHUNK_TOKENS, prompts[0][0]), prompts[0][1])
    limit_s = max(target_s, 2 * decodes_s, decodes_s + least_s)
    assert room.spent_s <= limit_s * (1 + 1e-9)


class Told(PrefillMeter):
    def __init__(self) -> None:
        super().__init__(SLOW)
        self.told: list[tuple[int, int, float]] = []

    def observe_steps(self, steps: int, tokens: int, pairs: float, seconds: float) -> None:
        self.told.append((steps, tokens, seconds))


def _chunk(start: int, count: int) -> Chunk:
    return Chunk(None, start, count)  # type: ignore[arg-type]


def test_steps_with_decodes_teach_the_meter_too() -> None:
    meter = Told()
    times = StepTimes(meter)
    times.ran([_chunk(100, 1), _chunk(50, 1), _chunk(0, 64)], lambda: 0.5)
    assert meter.told == [(1, 66, 0.5)]
    for _ in range(100):  # a few of decodes alone, which tell what an empty step takes
        times.ran([_chunk(100, 1)], lambda: 0.1)
    assert meter.told[1:] == [(1, 1, 0.1)]
    for _ in range(100):
        times.ran([_chunk(0, 64)], lambda: 0.4)
    for _ in range(100):
        times.ran([_chunk(100, 1)], lambda: 0.1)
    assert len(meter.told) == 2 + 100 + LIGHT_STEPS


def test_steps_that_went_another_way_than_prompts_set_the_pace_and_no_price() -> None:
    """Decodes that are recorded, beside prompts that are not: a price of those would be taken for both."""
    meter, pace, price = Told(), StepPace(), PrefillPrice(0.02, 1e-4, 0.0)
    times = StepTimes(meter, pace)
    times.ran([_chunk(0, 64)], lambda: 0.04)
    for _ in range(RECENT_STEPS):
        times.ran([_chunk(100, 1)], lambda: 0.005, prices=False)
    assert meter.told == [(1, 64, 0.04)]
    assert pace.of_decodes(price) == pytest.approx(0.005 / 0.0201, rel=0.01)


def test_steps_that_are_only_launched_are_told_one_by_one_as_they_are_over() -> None:
    """CUDA: a step that samples nothing is not waited for; its events are read at a later step."""
    meter = Told()
    times = StepTimes(meter)
    over: dict[int, float] = {}
    for step in range(4):
        times.ran([_chunk(512 * step, 512)], partial(over.get, step))
    assert meter.told == []
    over |= {0: 0.25, 1: 0.5, 3: 0.75}
    times.ran([_chunk(2048, 100)], lambda: 0.1)
    assert meter.told == [(1, 512, 0.25), (1, 512, 0.5)]
    over[2] = 0.6
    times.ran([_chunk(2148, 1)], lambda: 0.05)
    assert meter.told[2:] == [(1, 512, 0.6), (1, 512, 0.75), (1, 100, 0.1), (1, 1, 0.05)]


def test_steps_whose_times_never_come_are_forgotten() -> None:
    times = StepTimes(Told())
    for _ in range(2 * RUNNING_MAX):
        times.ran([_chunk(0, 64)], lambda: None)
    assert len(times._running) == RUNNING_MAX
