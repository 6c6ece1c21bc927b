"""What the scheduler's half learns of prices, and when it loads against them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from samovar.cache_tiers.blocks import CPU
from samovar.cache_tiers.messages import BlockRange, LookupResult
from samovar.cache_tiers.pricing import TierPrice
from samovar.cache_tiers.vllm import lookups
from samovar.cache_tiers.vllm.lookups import HURRY_S, HURRY_SHARE
from samovar.cache_tiers.vllm.messages import ConnectorOptions
from samovar.cache_tiers.vllm.scheduler import NO_HEARERS, Hearers, SchedulerHalf, Threads
from samovar.cache_tiers.vllm.worth import STEPS_UNDER_WAY_MAX
from tests.support.fake_vllm import BLOCK_TOKENS, FakeRequest, prompt

BLOCKS, NBYTES = 8, 8 << 20
DEAR = TierPrice(1e3, 1.0, True, is_proved=True)
DEAR_ONCE = TierPrice(1e3, 1.0, True, is_proved=False)


class AtOnce(Executor):
    def submit(self, work: Any, *args: Any, **_kwargs: Any) -> Future[Any]:
        work(*args)
        return Future()


class OneTier:
    """Tiers that have every block of every prompt, at a price."""

    def __init__(self, price: TierPrice) -> None:
        self.price = price

    def lookup(self, lookup: Any) -> LookupResult:
        span = BlockRange(b"e" * 16, lookup.tenant, 0, 0, BLOCKS, CPU.name, NBYTES)
        return LookupResult("life", 0, (span,), prices={CPU.name: self.price})

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was called")


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Iterator[Clock]:
    return Clock()


def half(
    price: TierPrice, clock: Clock, lookups: Executor | None = None, hearers: Hearers = NO_HEARERS
) -> SchedulerHalf:
    made = SchedulerHalf(
        ConnectorOptions(Path("/none")),
        OneTier(price),  # type: ignore[arg-type]
        Threads(lookups or AtOnce(), AtOnce()),
        block_tokens=BLOCK_TOKENS,
        pages=64,
        extra_of=lambda request: lambda tokens: [],
        hearers=hearers,
        clock=clock,
    )
    made.named(b"n" * 32, 1)
    return made


def matched(scheduler: SchedulerHalf, number: int) -> int | None:
    request = FakeRequest(f"r{number}", prompt(number, BLOCKS))
    scheduler.begin(request)
    answers = {scheduler.matched(request, 0) for _ in range(3)}  # vLLM asks again and again
    assert len(answers) == 1
    return answers.pop()


def test_what_costs_more_to_load_is_computed(clock: Clock) -> None:
    assert matched(half(DEAR, clock), 1) == 0


def test_a_price_that_no_load_has_proved_is_tried_now_and_then(clock: Clock) -> None:
    scheduler = half(DEAR_ONCE, clock)
    loaded = [matched(scheduler, number) for number in range(40)]
    assert loaded[0] == BLOCKS * BLOCK_TOKENS
    assert 0 < sum(map(bool, loaded)) < 12


def prefill_s(scheduler: SchedulerHalf, tokens: int) -> float:
    return scheduler.worth.compute_s(tokens, 0)


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_step_counts_from_the_end_of_the_one_before(clock: Clock, ahead: int) -> None:
    """`ahead`: vLLM schedules so many steps while one runs. Each takes a second."""
    scheduler = half(DEAR, clock)
    for _ in range(ahead):
        scheduler.step(1000, 0)
    for _ in range(60):
        scheduler.step(1000, 0)
        clock.now_s += 1.0
        scheduler.worth.step_over()
    assert prefill_s(scheduler, 1000) == pytest.approx(1.0, rel=0.1)


def test_a_decode_that_is_scheduled_beside_a_prompt_does_not_hide_it(clock: Clock) -> None:
    scheduler = half(DEAR, clock)
    for _ in range(60):
        scheduler.step(1000, 0)
        scheduler.step(0, 0)
        clock.now_s += 5.0
        scheduler.worth.step_over()
        scheduler.worth.step_over()
    assert prefill_s(scheduler, 1000) == pytest.approx(5.0, rel=0.1)


def test_steps_whose_end_is_not_seen_are_forgotten(clock: Clock) -> None:
    scheduler = half(DEAR, clock)
    for _ in range(20 * STEPS_UNDER_WAY_MAX):
        scheduler.step(1000, 0)
    clock.now_s += 1e6
    for _ in range(STEPS_UNDER_WAY_MAX):
        scheduler.worth.step_over()
    at_most = prefill_s(scheduler, 1000)
    scheduler.worth.step_over()  # none is under way
    assert prefill_s(scheduler, 1000) == at_most


class Never(Executor):
    def submit(self, *_args: Any, **_kwargs: Any) -> Future[Any]:
        return Future()


def test_a_node_that_hangs_holds_up_one_request_in_a_while(clock: Clock) -> None:
    scheduler, waited_s = half(DEAR, clock, Never()), []
    for number in range(100):
        request, began_s = FakeRequest(f"r{number}", prompt(number, 200)), clock.now_s
        scheduler.begin(request)
        while scheduler.matched(request, 0) is None:
            clock.now_s += 0.005
        waited_s.append(clock.now_s - began_s)
        clock.now_s += HURRY_S / 10
        _, params = scheduler.ended(request, [], "stop")
        assert params is not None
        assert params["samovar"]["missed"] == "lookup late"
    first_s = waited_s[0]
    assert 0.3 < first_s < scheduler.worth.compute_s(800, 0)
    assert 5 < sum(one == pytest.approx(first_s, abs=0.01) for one in waited_s) < 15
    assert sorted(waited_s)[50] == pytest.approx(HURRY_SHARE * first_s, abs=0.01)


@pytest.mark.parametrize(("known", "missed"), [(BLOCKS, ""), (0, "cheaper to compute")])
def test_what_vllm_has_itself_is_no_miss(clock: Clock, known: int, missed: str) -> None:
    scheduler, request = half(DEAR, clock), FakeRequest("r", prompt(1, BLOCKS))
    scheduler.begin(request)
    assert scheduler.matched(request, known * BLOCK_TOKENS) == 0
    _, params = scheduler.ended(request, [], "stop")
    assert params is not None
    assert params["samovar"]["missed"] == missed


def test_an_engine_with_one_request_waits_for_its_lookup(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each answer of "ask again" is an empty step of vLLM's, which takes longer than most lookups."""
    found = OneTier.lookup

    def slow(tiers: OneTier, lookup: Any) -> LookupResult:
        time.sleep(0.05)
        return found(tiers, lookup)

    monkeypatch.setattr(OneTier, "lookup", slow)
    monkeypatch.setattr(lookups, "ALONE_S", 60.0)  # as long as the prompt is worth, on a busy machine
    with ThreadPoolExecutor(1) as lane:
        scheduler, request = half(DEAR, clock, lane), FakeRequest("r", prompt(1, 2000))
        scheduler.begin(request)
        assert scheduler.matched(request, 0) == 0
