"""A device whose steps take as long as launching them: what prefill costs there, and what follows from it.

The device is a clock: the tiny model computes, and seconds pass by the number of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samovar.cache_tiers.blocks.extent import Placement
from samovar.cache_tiers.media.memory import HeapTier
from samovar.cache_tiers.pricing.load_plan import LoadPiece, plan_load
from samovar.cache_tiers.pricing.meters import (
    PrefillMeter,
    PrefillPrice,
    TierPrice,
    fit_prefill,
    swap_or_drop,
    worth_storing,
)
from samovar.replicas.forward.runner import Runner
from samovar.replicas.start.measure import SAMPLES, SLOW_NEW, measure_prefill
from samovar.router.routing.request_router import _prefill as told_price
from tests.support.clock import Clock
from tests.support.engines.engines import prompt_of
from tests.support.engines.tier_engines import MIB, Tiered, receipt_of, tiered

STEP_TOKENS = 512
PROMPT_TOKENS = 2000
BYTES_PER_TOKEN = 131_072  # an 8 B model's
RAM = TierPrice(1e-3, 20e9)
TINY_BYTES_PER_TOKEN = 512  # the tiny model's; moved so slowly that a token takes as long as the 8 B model's
TINY_RAM = (RAM.latency_s, RAM.bytes_per_s * TINY_BYTES_PER_TOKEN / BYTES_PER_TOKEN)

Device = Callable[[int, int], float]  # (tokens of a step, tokens in context before them) -> seconds


def launch_bound(tokens: int, _: int) -> float:
    return max(0.022, tokens * 0.05e-3)


def launch_and_compute(tokens: int, _: int) -> float:
    return 0.022 + tokens * 0.05e-3


def recorded(tokens: int, _: int) -> float:
    """Launches of up to 512 tokens are recorded: what is left is reading the weights, then computing."""
    launches_s = 0.0055 if tokens <= 512 else 0.022
    return max(launches_s, tokens * 0.03e-3)


def slow_cpu(tokens: int, context: int) -> float:
    return PrefillPrice(0.04, 1.1e-3, 4.5e-7).seconds(tokens, context)


FAST = {"launch bound": launch_bound, "launch and compute": launch_and_compute, "recorded": recorded}
BAD_STARTS = {
    "fitted to 16-256 tokens": PrefillPrice(0.022, 1e-10, 1e-16),
    "measured beside others": PrefillPrice(0.22, 5e-4, 1e-8),
}


def prefill_s(device: Device, tokens: int, step_tokens: int = STEP_TOKENS) -> float:
    return sum(device(min(step_tokens, tokens - start), start) for start in range(0, tokens, step_tokens))


def assert_right(price: PrefillPrice, device: Device, tokens: int, step_tokens: int = STEP_TOKENS) -> None:
    """Within twice."""
    truth = prefill_s(device, tokens, step_tokens)
    assert truth / 2 < price.seconds(tokens, 0) < truth * 2, price
    # Of what is stored, extent by extent, the parts add up to the whole.
    added = sum(price.added_seconds(16, start) for start in range(0, tokens, 16))
    assert truth / 2 < added < truth * 2, price


def on(
    device: Device,
    monkeypatch: pytest.MonkeyPatch,
    model: Path,
    folder: Path,
    prefill: PrefillPrice | None = None,
) -> Tiered:
    """An engine whose steps take what `device` says; without `prefill` its price is measured at start."""
    clock = Clock()

    class OnDevice(Runner):
        def run(self, chunks, copies=(), score=None):  # type: ignore[no-untyped-def]
            clock.now_s += device(sum(chunk.count for chunk in chunks), chunks[0].start)
            return super().run(chunks, copies, score)

    monkeypatch.setattr("samovar.replicas.start.build.Runner", OnDevice)
    monkeypatch.setattr("samovar.replicas.start.build.measure_prefill", partial(measure_prefill, clock=clock))
    engine = tiered(
        model,
        folder,
        tiers={"cpu": HeapTier(64 * MIB)},
        clock=clock,
        prefill=prefill,  # type: ignore[arg-type]
        node={"prices": {"cpu": TINY_RAM}},
        pool_tokens=4096,
        measures_anew=True,
        step_tokens_max=STEP_TOKENS,
    )
    engine.placement = Placement("cpu", (), "cpu")
    engine.built.engine.requests.clock = clock
    for name in ("observe", "observe_steps"):  # that the meter learns is what is tested here
        vars(engine.built.engine.meter).pop(name, None)
    return engine


class Took:
    """The time of a step on a device, known at once if the step sampled, else when it is asked for again."""

    def __init__(self, seconds: float, is_over: bool) -> None:
        self._seconds, self._is_over = seconds, is_over

    def seconds(self) -> float | None:
        was_over, self._is_over = self._is_over, True
        return self._seconds if was_over else None


def only_launches(engine: Tiered) -> None:
    """Let steps that sample nothing end later than `run` returns."""
    runner, run, clock = engine.built.engine.runner, engine.built.engine.runner.run, engine.clock

    def launch(chunks, copies=(), score=None):  # type: ignore[no-untyped-def]
        before_s = clock.now_s
        logits = run(chunks, copies, score)
        samples = any(chunk.samples for chunk in chunks)
        runner.took = Took(clock.now_s - before_s, samples)  # type: ignore[assignment]
        if not samples:
            clock.now_s = before_s + 1e-3
        return logits

    runner.run = launch  # type: ignore[method-assign]


@pytest.mark.parametrize("device", FAST.values(), ids=FAST.keys())
@pytest.mark.parametrize("start", [None, *BAD_STARTS.values()], ids=["measured", *BAD_STARTS])
@pytest.mark.parametrize("is_later", [False, True], ids=["over at once", "over later"])
def test_after_one_long_turn_the_price_is_right_and_turns_are_stored_and_loaded(
    tiny_llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    device: Device,
    start: PrefillPrice | None,
    is_later: bool,
) -> None:
    engine = on(device, monkeypatch, tiny_llama, tmp_path, start)
    meter = engine.built.engine.meter
    if start is None:
        assert_right(meter.price, device, PROMPT_TOKENS)
    if is_later:
        only_launches(engine)
    prompt = prompt_of(PROMPT_TOKENS)
    answer = engine.run(prompt)
    assert_right(meter.price, device, PROMPT_TOKENS)
    stores = engine.built.engine.stats().stores
    assert stores.get("taken", 0) >= 1, stores
    assert "skipped:price" not in stores
    engine.forget_pool()
    again = receipt_of(engine.run([*prompt, *answer.ids, *prompt_of(9, seed=1)]))
    assert again.decision == "load"
    assert again.tokens["cpu"] >= PROMPT_TOKENS


def test_a_slow_cpu_stores_and_loads_as_ever(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = on(slow_cpu, monkeypatch, tiny_llama, tmp_path)
    price = engine.built.engine.meter.price
    assert (price.c0_s, price.a_s, price.b_s) == pytest.approx((0.04, 1.1e-3, 4.5e-7), rel=0.02)
    prompt = prompt_of(700)
    answer = engine.run(prompt)
    engine.forget_pool()
    again = receipt_of(engine.run([*prompt, *answer.ids, *prompt_of(9, seed=1)]))
    assert again.decision == "load"
    assert again.tokens["cpu"] >= 700


def test_a_slow_cpu_is_measured_with_few_tokens_some_behind_a_long_context(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[tuple[int, int]] = []

    def noting(tokens: int, context: int) -> float:
        sizes.append((tokens, context))
        return slow_cpu(tokens, context)

    on(noting, monkeypatch, tiny_llama, tmp_path)
    first, (few, long_context) = SAMPLES[0], sizes[-1]
    assert sizes == [first, first, first, (SLOW_NEW, 0), (16, long_context)]  # what is quick is done twice
    assert few + long_context > 1000
    assert sum(tokens for tokens, _ in sizes) < 150


@pytest.mark.parametrize("step_tokens", [512, 4096])
@pytest.mark.parametrize("device", FAST.values(), ids=FAST.keys())
def test_samples_that_all_took_the_same_do_not_mislead_for_long(device: Device, step_tokens: int) -> None:
    """A start that saw nothing of the device but its launches; eight full steps and some tokens later."""
    samples = [(m, n, 0.022) for m, n in SAMPLES]
    meter = PrefillMeter(fit_prefill(samples, step_tokens), samples)
    turn = 8 * step_tokens
    for start in range(0, turn, step_tokens):
        meter.observe(step_tokens, start, device(step_tokens, start))
    for token in range(8):
        meter.observe(1, turn + token, device(1, turn + token))
    for tokens in (64, 512, 4096, 32768):
        truth = prefill_s(device, tokens, step_tokens)
        assert truth / 2 < meter.price.seconds(tokens, 0) < truth * 2
    assert_right(meter.price, device, turn, step_tokens)


def test_an_8b_model_on_a_launch_bound_device_uses_its_tiers() -> None:
    """The decisions themselves, with the price of a start that has seen 512 tokens at most."""
    samples = [(m, n, launch_bound(m, n)) for m, n in [*SAMPLES, (512, 0)]]
    price = fit_prefill(samples, STEP_TOKENS)
    assert worth_storing(512, 512 * BYTES_PER_TOKEN, price, RAM)

    def decision(held_tokens: int) -> str:
        return plan_load(
            prompt_tokens=held_tokens + 32,
            resident_tokens=0,
            pieces=[LoadPiece(0, held_tokens, held_tokens * BYTES_PER_TOKEN, "cpu")],
            prices={"cpu": RAM},
            prefill=price,
            parallel=4,
            hedge_factor=1.5,
            hedge_slack_s=0.05,
        ).decision

    assert decision(8192) == "load"
    assert swap_or_drop(8192, 8192 * BYTES_PER_TOKEN, RAM, price) == "swap"
    # What fits into the step that is due anyway is not worth a load: it takes 22 ms with and without.
    assert decision(100) == "recompute"


@given(
    st.lists(
        st.tuples(st.integers(1, 4096), st.integers(0, 8192), st.floats(1e-4, 10.0)), min_size=1, max_size=8
    )
)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_no_token_is_for_nothing(samples: list[tuple[int, int, float]]) -> None:
    price = fit_prefill(samples)
    largest = max(tokens for tokens, _, _ in samples)
    assert price.a_s >= price.c0_s / (8 * largest) * (1 - 1e-9)
    meter = PrefillMeter(PrefillPrice(price.c0_s, 0.0, 0.0))
    for sample in samples:
        meter.observe(*sample)
        assert meter.price.a_s >= meter.price.c0_s / (8 * largest) * (1 - 1e-9)
        meter.check_integrity()


def test_a_prompt_of_several_steps_pays_for_each_of_them() -> None:
    price = PrefillPrice(1.0, 0.1, 0.0, step_tokens=10)
    assert price.seconds(10, 0) == pytest.approx(2.0)
    assert price.seconds(11, 0) == pytest.approx(3.1)
    assert price.added_seconds(10, 0) == pytest.approx(2.0)
    assert price.chunk_seconds(10, 0) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="no price"):
        PrefillPrice(1.0, 0.1, 0.0, step_tokens=0)


def test_routers_are_told_what_a_step_holds() -> None:
    told = {"prefill": [0.022, 1e-5, 0.0], "step_tokens": 512}
    assert told_price(told) == PrefillPrice(0.022, 1e-5, 0.0, 512)
    for step_tokens in (None, 0, -1, "x", math.nan, math.inf):  # an older replica, or nonsense
        assert told_price({**told, "step_tokens": step_tokens}) == PrefillPrice(0.022, 1e-5, 0.0)
