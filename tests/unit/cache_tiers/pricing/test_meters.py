"""Prices of computing and loading: what the meters learn, and what they shrug off."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samovar.cache_tiers.pricing.meters import (
    BYTE_S_MAX,
    BYTE_S_MIN,
    SECONDS_MAX,
    UNKNOWN_PREFILL,
    PrefillMeter,
    PrefillPrice,
    TierMeter,
    TierPrice,
    fit_prefill,
    swap_or_drop,
    worth_storing,
)
from tests.support.clock import Clock

CPU = PrefillPrice(0.04, 1.1e-3, 4.5e-7)
H200 = PrefillPrice(2e-3, 1e-5, 1e-10)
BYTES_PER_TOKEN = 23_040
RAM = TierPrice(1e-3, 8e9)
S3 = TierPrice(0.05, 200e6)
odd_seconds = st.sampled_from([0.0, -1.0, math.nan, math.inf, -math.inf])


def _mean_error(price: PrefillPrice, truth: PrefillPrice) -> float:
    """Largest relative error over steps as they come, short and long."""
    steps = [(32, 0), (32, 4000), (512, 0), (512, 2000), (2048, 0), (2048, 6000)]
    return max(abs(price.seconds(m, n) / truth.seconds(m, n) - 1) for m, n in steps)


def test_the_formula() -> None:
    price = PrefillPrice(1.0, 0.1, 0.01)
    assert price.seconds(3, 5) == pytest.approx(1.0 + 0.3 + 0.01 * (2 * 5 * 3 + 9))
    assert price.seconds(0, 5) == 0.0
    assert price.added_seconds(3, 5) == pytest.approx(price.seconds(3, 5) - 1.0)
    # In two steps or in one: what attends to what is the same.
    assert price.added_seconds(3, 0) + price.added_seconds(4, 3) == pytest.approx(price.added_seconds(7, 0))


@pytest.mark.parametrize("bad", [-1e-9, math.nan, math.inf])
def test_a_price_that_is_no_number_is_refused(bad: float) -> None:
    for parts in ((bad, 1.0, 1.0), (1.0, bad, 1.0), (1.0, 1.0, bad)):
        with pytest.raises(ValueError, match="no price"):
            PrefillPrice(*parts)


@pytest.mark.parametrize("truth", [CPU, H200])
def test_fit_finds_the_price(truth: PrefillPrice) -> None:
    rng = random.Random(1)
    sizes = [(m, n) for m in (16, 64, 256, 1024) for n in (0, 500, 4000)]
    exact = fit_prefill([(m, n, truth.seconds(m, n)) for m, n in sizes])
    assert _mean_error(exact, truth) < 1e-3
    noisy = fit_prefill([(m, n, truth.seconds(m, n) * rng.uniform(0.9, 1.1)) for m, n in sizes])
    assert _mean_error(noisy, truth) < 0.25


def test_two_measurements_are_met_exactly() -> None:
    for samples in ([(128, 0, 0.115), (512, 0, 0.546)], [(128, 0, 0.2), (512, 0, 0.5)]):
        price = fit_prefill(samples)
        for m, n, seconds in samples:
            assert price.seconds(m, n) == pytest.approx(seconds, rel=0.02)


@pytest.mark.parametrize(
    "samples",
    [
        [],
        [(128, 0, 0.1)],
        [(128, 0, 0.1)] * 5,
        [(128, 0, 0.1), (512, 0, 0.1)],
        [(128, 0, 0.5), (512, 0, 0.1)],  # the longer was quicker
        [(1, 0, 1e-9), (1_000_000, 1_000_000, 1e5)],
        [(0, 0, 0.1), (-5, 0, 0.1), (5, -1, 0.1), (5, 0, math.nan), (5, 0, 0.0), (5, 0, math.inf)],
    ],
)
def test_degenerate_measurements_give_a_sane_price(samples: list[tuple[int, int, float]]) -> None:
    price = fit_prefill(samples)
    for m, n in ((1, 0), (100, 0), (10_000, 100_000)):
        assert math.isfinite(price.seconds(m, n))
        assert price.seconds(m, n) > 0
    assert min(price.c0_s, price.a_s, price.b_s) > 0


def test_without_a_measurement_the_price_is_the_dear_one() -> None:
    assert fit_prefill([]) == UNKNOWN_PREFILL


@pytest.mark.parametrize("factors", [(1, 3, 1), (1, 1, 4), (3, 0.5, 0.3), (1, 10, 10)])
def test_the_meter_learns_each_part(factors: tuple[float, float, float]) -> None:
    truth = PrefillPrice(CPU.c0_s * factors[0], CPU.a_s * factors[1], CPU.b_s * factors[2])
    meter = PrefillMeter(CPU)
    rng = random.Random(2)
    for _ in range(600):
        m, n = rng.choice([4, 32, 128, 512]), rng.choice([0, 0, 1000, 7000])
        meter.observe(m, n, truth.seconds(m, n) * rng.uniform(0.95, 1.05))
    assert _mean_error(meter.price, truth) < 0.15


def test_the_meter_shrugs_off_stalls() -> None:
    meter = PrefillMeter(CPU)
    rng = random.Random(3)
    for step in range(500):
        m, n = rng.choice([32, 512]), rng.choice([0, 3000])
        meter.observe(m, n, CPU.seconds(m, n) * (100 if step % 10 == 0 else rng.uniform(0.97, 1.03)))
    assert _mean_error(meter.price, CPU) < 0.12
    before = meter.price.seconds(512, 3000)
    meter.observe(512, 3000, 1e6)
    assert meter.price.seconds(512, 3000) < 1.1 * before


def test_a_part_that_was_zero_can_grow() -> None:
    meter = PrefillMeter(PrefillPrice(0.0, 1e-3, 0.0))
    for step in range(3000):
        m, n = (32, 0) if step % 2 else (256, 8000)
        meter.observe(m, n, CPU.seconds(m, n))
    assert meter.price.seconds(256, 8000) == pytest.approx(CPU.seconds(256, 8000), rel=0.1)
    assert meter.price.seconds(32, 0) == pytest.approx(CPU.seconds(32, 0), rel=0.1)


@given(
    st.lists(st.tuples(st.integers(-5, 10**9), st.integers(-5, 10**9), odd_seconds | st.floats(1e-12, 1e12)))
)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_no_measurement_breaks_the_meter(steps: list[tuple[int, int, float]]) -> None:
    meter = PrefillMeter(H200)
    for step in steps:
        meter.observe(*step)
        assert 0 < meter.price.seconds(100, 100) < math.inf
        meter.check_integrity()


def test_a_corrupt_prefill_meter_is_noticed() -> None:
    meter = PrefillMeter(CPU)
    meter._price = PrefillPrice(0.0, 0.0, 0.0)
    with pytest.raises(AssertionError, match="out of bounds"):
        meter.check_integrity()


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_nonsense_is_not_learned(seconds: float) -> None:
    meter = PrefillMeter(CPU)
    before = meter.price
    meter.observe(10, 0, seconds)
    meter.observe(0, 0, 1.0)
    meter.observe(10, -1, 1.0)
    assert meter.price == before


@pytest.mark.parametrize(
    ("latency_s", "bytes_per_s"), [(1e-3, 3e9), (0.05, 200e6), (0.3, 20e6), (1e-4, 8e9), (5.0, 1e6)]
)
def test_a_tiers_price_is_learned_from_mixed_sizes(latency_s: float, bytes_per_s: float) -> None:
    meter = TierMeter(TierPrice(0.02, 1e9), clock=Clock())
    truth = TierPrice(latency_s, bytes_per_s)
    rng = random.Random(4)
    sizes = [4096, 360 * 1024, 4 << 20, 16 << 20]
    for _ in range(400):
        nbytes = rng.choice(sizes)
        meter.observe(nbytes, truth.seconds(nbytes) * rng.uniform(0.9, 1.1))
        meter.check_integrity()
    for nbytes in sizes:
        assert meter.price().seconds(nbytes) == pytest.approx(truth.seconds(nbytes), rel=0.2)


def test_one_size_alone_does_not_tear_the_price_apart() -> None:
    meter = TierMeter(TierPrice(0.05, 200e6), clock=Clock())
    for _ in range(1000):
        meter.observe(1 << 20, 0.1)
    price = meter.price()
    assert price.seconds(1 << 20) == pytest.approx(0.1, rel=0.01)
    # Both parts took their share of the change: another size is still priced sensibly.
    assert 0.05 < price.latency_s < 0.1
    assert 100e6 < price.bytes_per_s < 200e6


def test_sizes_that_are_almost_one_do_not_tear_it_apart_either() -> None:
    meter = TierMeter(TierPrice(0.05, 200e6), clock=Clock())
    rng = random.Random(5)
    for _ in range(1000):
        meter.observe(int((1 << 20) * rng.uniform(0.98, 1.02)), 0.1 * rng.uniform(0.8, 1.25))
        price = meter.price()
        assert 0.02 < price.latency_s < 0.12
        assert 20e6 < price.bytes_per_s < 2e9


def test_a_slow_call_moves_the_price_but_a_little() -> None:
    meter = TierMeter(TierPrice(0.05, 200e6), clock=Clock())
    meter.observe(1 << 20, 300.0)
    assert meter.price().seconds(1 << 20) < 1.5 * TierPrice(0.05, 200e6).seconds(1 << 20)


def test_without_a_measurement_a_load_counts_as_free_until_the_first() -> None:
    meter = TierMeter(clock=Clock())
    unknown = meter.price()
    assert (unknown.is_known, unknown.is_proved, unknown.seconds(1 << 40)) == (False, False, 0.0)
    meter.observe(16 << 20, 0.2)
    known = meter.price()
    assert (known.is_known, known.is_proved) == (True, True)
    assert known.seconds(16 << 20) == pytest.approx(0.2)
    assert known.seconds(64 << 20) == pytest.approx(0.8, rel=0.1)  # a large one says little of latency


def test_a_starts_measurement_is_taken_until_a_load_has_said_more() -> None:
    meter = TierMeter(clock=Clock())
    meter.measured(TierPrice(0.01, 1e9))
    first = meter.price()
    assert (first.latency_s, first.bytes_per_s) == (0.01, pytest.approx(1e9))
    assert (first.is_known, first.is_proved) == (True, False)
    meter.observe(1 << 20, 0.02)
    learned = meter.price()
    meter.measured(TierPrice(5.0, 1e3))  # another replica of the node starts
    assert meter.price() == learned


def test_what_is_cheaper_than_an_unproved_price_is_believed_at_once() -> None:
    clock = Clock()
    meter = TierMeter(TierPrice(0.05, 200e6), clock=clock, doubt_s=20.0)
    before = meter.price()
    meter.observe(1 << 20, before.seconds(1 << 20) / 10)
    assert meter.price().seconds(1 << 20) == pytest.approx(before.seconds(1 << 20) / 10)
    meter.observe(1 << 20, before.seconds(1 << 20) / 100)  # proved now: one load does not overthrow it
    assert meter.price().seconds(1 << 20) > before.seconds(1 << 20) / 20
    clock.now_s += 20.0
    assert not meter.price().is_proved
    meter.observe(1 << 20, before.seconds(1 << 20) / 100)
    assert meter.price().seconds(1 << 20) == pytest.approx(before.seconds(1 << 20) / 100)


def test_what_is_dearer_than_an_unproved_price_may_be_a_stall() -> None:
    clock = Clock()
    meter = TierMeter(TierPrice(0.05, 200e6), clock=clock, doubt_s=20.0)
    meter.observe(1 << 20, 0.1)
    clock.now_s += 20.0
    meter.observe(1 << 20, 10.0)
    assert meter.price().seconds(1 << 20) < 0.2


def test_a_failure_is_dear_for_a_while() -> None:
    clock = Clock()
    meter = TierMeter(TierPrice(0.05, 200e6), clock=clock, failure_fade_s=30.0)
    before = meter.price().seconds(0)
    meter.observe_failure(2.0)
    assert meter.price().seconds(0) == pytest.approx(before + 2.0)
    clock.now_s += 30.0
    assert meter.price().seconds(0) == pytest.approx(before + 1.0)
    clock.now_s += 600.0
    assert meter.price().seconds(0) == pytest.approx(before, rel=1e-3)
    meter.observe_failure(2.0)
    for _ in range(12):
        meter.observe(0, before)  # it works again: no need to wait
    assert meter.price().seconds(0) == pytest.approx(before, rel=0.02)
    meter.check_integrity()


def test_failures_add_up_to_a_bound() -> None:
    meter = TierMeter(TierPrice(0.05, 200e6), clock=Clock())
    for _ in range(1000):
        meter.observe_failure(60.0)
        meter.check_integrity()
    assert meter.price().latency_s == SECONDS_MAX


def test_a_price_that_no_load_confirms_is_unproved_again() -> None:
    clock = Clock()
    meter = TierMeter(TierPrice(0.05, 200e6), clock=clock, doubt_s=20.0)
    assert not meter.price().is_proved
    for _ in range(100):
        meter.observe(1 << 20, 20.0)
    dear = meter.price()
    assert dear.is_proved
    assert dear.seconds(1 << 20) > 15
    clock.now_s += 20.0
    assert meter.price() == replace(dear, is_proved=False, proved_bytes=math.inf)


def test_f26_a_clock_that_jumps_does_not_hurt_the_meter() -> None:
    clock = Clock()
    meter = TierMeter(TierPrice(0.05, 200e6), clock=clock, doubt_s=20.0)
    meter.observe_failure(2.0)
    dear = meter.price()
    clock.now_s -= 3600.0
    assert meter.price() == dear
    clock.now_s += 30.0  # time goes on from there
    assert meter.price().latency_s == pytest.approx(0.05 + 1.0)
    clock.now_s += 600.0
    for _ in range(100):
        meter.observe(0, 5.0)
    clock.now_s -= 3600.0
    assert meter.price().latency_s == pytest.approx(5.0, rel=0.01)
    assert meter.price().is_proved
    clock.now_s += 20.0
    assert not meter.price().is_proved
    meter.check_integrity()


@given(st.lists(st.tuples(st.integers(-5, 2**60), odd_seconds | st.floats(1e-300, 1e300), st.booleans())))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_no_transfer_breaks_the_meter(transfers: list[tuple[int, float, bool]]) -> None:
    meter = TierMeter(TierPrice(0.05, 200e6), clock=Clock())
    for nbytes, seconds, failed in transfers:
        if failed:
            meter.observe_failure(seconds)
        else:
            meter.observe(nbytes, seconds)
        meter.check_integrity()
        price = meter.price()
        assert 0 < price.latency_s <= SECONDS_MAX
        assert BYTE_S_MIN <= 1.001 / price.bytes_per_s <= 1.002 * BYTE_S_MAX


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_a_first_price_that_is_none_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="no price"):
        TierMeter(TierPrice(bad, 1e9))
    with pytest.raises(ValueError, match="no price"):
        TierMeter(TierPrice(0.05, bad))


@pytest.mark.parametrize(
    ("parts", "penalty_s", "named"),
    [((math.nan, 1e-9), 0.0, "latency"), ((0.1, 0.0), 0.0, "bandwidth"), ((0.1, 1e-9), -1.0, "penalty")],
)
def test_a_corrupt_meter_is_noticed(parts: tuple[float, float], penalty_s: float, named: str) -> None:
    meter = TierMeter(TierPrice(0.05, 200e6), clock=Clock())
    meter._parts, meter._penalty_s = parts, penalty_s
    with pytest.raises(AssertionError, match=named):
        meter.check_integrity()


def test_the_price_says_whether_the_tier_is_up() -> None:
    meter = TierMeter(TierPrice(0.05, 200e6), clock=Clock())
    assert meter.price(is_up=True).is_up
    assert not meter.price(is_up=False).is_up


@pytest.mark.parametrize(
    ("tokens", "copy", "prefill", "expected"),
    [
        (2048, RAM, CPU, "swap"),
        (16, RAM, CPU, "swap"),
        (2048, S3, H200, "drop"),
        (2048, TierPrice(1e-3, 8e9, is_up=False), CPU, "drop"),
        (0, RAM, CPU, "drop"),
    ],
)
def test_swap_or_drop(tokens: int, copy: TierPrice, prefill: PrefillPrice, expected: str) -> None:
    assert swap_or_drop(tokens, tokens * BYTES_PER_TOKEN, copy, prefill) == expected


def test_a_swap_costs_two_copies() -> None:
    prefill = PrefillPrice(0.0, 1e-3, 0.0)
    assert swap_or_drop(1000, 49 * 10**6, TierPrice(0.0, 100e6), prefill) == "swap"  # 2 * 0.49 s < 1 s
    assert swap_or_drop(1000, 51 * 10**6, TierPrice(0.0, 100e6), prefill) == "drop"


@pytest.mark.parametrize(
    ("tokens", "prefill", "load", "expected"),
    [
        (512, CPU, RAM, True),
        (512, CPU, S3, True),
        (512, H200, RAM, True),
        (512, H200, S3, False),
        (512, CPU, TierPrice(1e-3, 8e9, is_up=False), False),
        (512, H200, TierPrice(0.0, math.inf, is_proved=False), True),
    ],
)
def test_worth_storing(tokens: int, prefill: PrefillPrice, load: TierPrice, expected: bool) -> None:
    assert worth_storing(tokens, tokens * BYTES_PER_TOKEN, prefill, load) is expected


def test_a_longer_chain_is_more_worth_storing_and_then_as_a_whole() -> None:
    slow = TierPrice(0.05, 1.5e9)
    assert not worth_storing(100, 100 * BYTES_PER_TOKEN, H200, slow)
    assert worth_storing(100_000, 100_000 * BYTES_PER_TOKEN, H200, slow)
