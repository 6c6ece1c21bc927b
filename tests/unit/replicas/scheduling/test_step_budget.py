"""The chunk of a prompt that one step takes: by tokens, and by time while answers are written."""

from __future__ import annotations

from functools import partial

from hypothesis import given, settings
from hypothesis import strategies as st

from cache_tiers.pricing.meters import PrefillMeter, PrefillPrice
from replicas.scheduling.step import CHUNK_TOKENS, LIGHT_STEPS, RUNNING_MAX, Chunk, StepBudget, StepTimes

TARGET_S = 0.4
SLOW = PrefillPrice(0.085, 4.7e-3, 0.0)  # a 512-token chunk of one CPU core: 2.4 s


def _taken(price: PrefillPrice, decodes: list[int], tokens: int, context: int = 0) -> int:
    return StepBudget(512, TARGET_S, lambda: price).open(decodes).take(tokens, context)


def test_p8_a_chunk_beside_a_stream_ends_within_the_target() -> None:
    count = _taken(SLOW, [100], 512)
    step_s = SLOW.c0_s + SLOW.chunk_seconds(1, 100) + SLOW.chunk_seconds(count, 0)
    assert count % CHUNK_TOKENS == 0
    assert step_s <= TARGET_S < step_s + CHUNK_TOKENS * SLOW.a_s


def test_without_a_stream_a_step_is_filled() -> None:
    assert _taken(SLOW, [], 5000) == 512
    assert StepBudget(512, None, lambda: SLOW).open([1, 2]).take(5000, 0) == 510
    assert StepBudget(512).open([1, 2]).take(5000, 0) == 510


def test_s2_among_tenants_every_step_ends_within_the_target() -> None:
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


def test_p6_steps_that_are_only_launched_are_told_one_by_one_as_they_are_over() -> None:
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
