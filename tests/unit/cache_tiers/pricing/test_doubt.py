"""What is done against the price: a bounded share, only while nothing has proved the price."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from samovar.cache_tiers.pricing.load_plan import BURST_EXTENTS, DOUBT_SHARE, Doubt, LoadPiece, plan_load
from samovar.cache_tiers.pricing.meters import PrefillPrice, TierMeter, TierPrice
from tests.support.clock import Clock

EXTENT = 1 << 20
DEAR = TierPrice(0.0, 1e3, is_proved=False)
QUICK = PrefillPrice(0.0, 1e-6, 0.0)


def test_a_few_extents_are_tried_and_then_a_share() -> None:
    doubt = Doubt(EXTENT)
    assert [doubt.tries(EXTENT, DEAR) for _ in range(6)] == [True] * BURST_EXTENTS + [False] * 2
    doubt.decided(99 * EXTENT)
    assert not doubt.tries(EXTENT, DEAR)
    doubt.decided(EXTENT)
    assert doubt.tries(EXTENT, DEAR)
    doubt.check_integrity()


def test_what_is_proved_or_down_is_not_tried() -> None:
    doubt = Doubt(EXTENT)
    assert not doubt.tries(EXTENT, TierPrice(0.0, 1e3))
    assert not doubt.tries(EXTENT, TierPrice(0.0, 1e3, is_up=False, is_proved=False))
    assert doubt.tries(EXTENT, DEAR)


@given(
    st.lists(st.tuples(st.integers(0, 40 * EXTENT), st.integers(0, 2 * EXTENT)), max_size=60),
)
@settings(max_examples=100, deadline=None)
def test_never_more_than_the_burst_and_the_share(turns: list[tuple[int, int]]) -> None:
    doubt, decided, tried = Doubt(EXTENT), 0, 0
    for offered, wanted in turns:
        doubt.decided(offered)
        decided += offered
        tried += wanted * doubt.tries(wanted, DEAR)
        doubt.check_integrity()
        assert tried <= BURST_EXTENTS * EXTENT + DOUBT_SHARE * decided + 1


def _plan(doubt: Doubt | None, *, is_proved: bool = False) -> tuple[str, int]:
    pieces = [LoadPiece(128 * at, 128, EXTENT, "cpu") for at in range(6)]
    plan = plan_load(
        prompt_tokens=1000,
        resident_tokens=0,
        pieces=pieces,
        prices={"cpu": TierPrice(0.0, 1e3, is_proved=is_proved)},
        prefill=QUICK,
        parallel=4,
        hedge_factor=1.5,
        hedge_slack_s=0.05,
        doubt=doubt,
    )
    return plan.decision, len(plan.pieces)


def test_a_load_that_does_not_pay_is_tried_from_the_front() -> None:
    doubt = Doubt(EXTENT)
    assert _plan(None) == ("recompute", 0)
    assert _plan(doubt, is_proved=True) == ("recompute", 0)
    assert _plan(doubt) == ("load", BURST_EXTENTS)
    assert _plan(doubt) == ("recompute", 0)


def test_what_a_dearer_tier_has_behind_is_tried_as_well() -> None:
    near = LoadPiece(0, 128, EXTENT, "cpu")
    far = LoadPiece(128, 128, EXTENT, "s3")
    plan = plan_load(
        prompt_tokens=300,
        resident_tokens=0,
        pieces=[near, far],
        prices={"cpu": TierPrice(0.0, 1e13), "s3": DEAR},
        prefill=QUICK,
        parallel=4,
        hedge_factor=1.5,
        hedge_slack_s=0.05,
        doubt=Doubt(EXTENT),
    )
    assert plan.pieces == (near, far)


def test_small_loads_do_not_prove_that_a_large_one_is_dear() -> None:
    """Else many short chats keep a bandwidth that is 50 times too low: they are loaded, long ones never."""
    clock, doubt = Clock(), Doubt(16 * EXTENT)
    meter = TierMeter(TierPrice(1e-4, 1e9), clock=clock)
    small, large = 368_000, 16 * EXTENT
    for _ in range(5000):
        clock.now_s += 0.02
        meter.observe(small, 1e-4 + small / 50e9)
    assert not doubt.tries(small, meter.price())
    assert doubt.tries(large, meter.price())
    meter.observe(large, 1e-4 + large / 50e9)
    meter.check_integrity()
    assert meter.price().bytes_per_s > 25e9
    assert not doubt.tries(large, meter.price())
    for _ in range(1200):  # what is large was proved too long ago
        clock.now_s += 0.02
        meter.observe(small, 1e-4 + small / 50e9)
    assert doubt.tries(large, meter.price())
