"""A prompt waits for its lookup for what that is worth, and never longer than it would take to compute."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from samovar.cache_tiers.blocks.tiers import LoadSource
from samovar.cache_tiers.pricing.load_plan import LookupWait, plan_wait
from samovar.cache_tiers.pricing.meters import PrefillPrice, TierPrice

CPU = PrefillPrice(0.04, 3.54e-3, 0.0)
S3: dict[LoadSource, TierPrice] = {"s3": TierPrice(0.1, 1e8)}


def wait(
    missing: int,
    resident: int = 0,
    *,
    nbytes: int = 40_000_000,
    prefill: PrefillPrice = CPU,
    prices: dict[LoadSource, TierPrice] = S3,
    usual_s: float = 0.0,
    share: float = 0.5,
    idle_share: float = 0.2,
    s_max: float = 4.0,
) -> LookupWait:
    return plan_wait(
        missing_tokens=missing,
        resident_tokens=resident,
        nbytes=nbytes,
        prefill=prefill,
        prices=prices,
        usual_s=usual_s,
        share=share,
        idle_share=idle_share,
        s_max=s_max,
    )


def test_960_tokens_in_s3_are_waited_for_longer_than_a_quarter_of_a_second() -> None:
    """The case that was seen: 3.4 s to compute, 0.5 s to load, and a lookup that took more than 0.25 s."""
    found = wait(960)
    assert 3.3 < found.recompute_s < 3.5
    assert 1.4 < found.until_s < 1.5
    assert 0.25 < found.idle_s < 0.3


def test_what_loading_costs_is_not_saved() -> None:
    assert wait(960, nbytes=0).until_s > wait(960).until_s
    assert wait(960, prices={}).until_s > wait(960).until_s, "no price heard yet: loading counts as free"
    both: dict[LoadSource, TierPrice] = {**S3, "cpu": TierPrice(1e-3, 4e9)}
    assert wait(960, prices=both).until_s > wait(960).until_s, "the cheapest counts"
    down: dict[LoadSource, TierPrice] = {**S3, "cpu": TierPrice(1e-3, 4e9, is_up=False)}
    assert wait(960, prices=down) == wait(960)


def test_where_loading_saves_nothing_nobody_waits() -> None:
    assert wait(100).until_s == 0.0, "as dear as computing"
    assert wait(0, 500).until_s == 0.0, "all of it is in the pool"


def test_an_answer_that_is_not_expected_in_time_is_not_waited_for() -> None:
    assert wait(960, usual_s=1.6).until_s == 0.0
    assert wait(960, usual_s=1.3).until_s > 1.3


def test_an_idle_engine_begins_later_where_lookups_take_longer_as_a_rule() -> None:
    assert wait(960, usual_s=0.01).idle_s == wait(960).idle_s
    assert wait(960, usual_s=0.3).idle_s == 0.6
    late = wait(960, usual_s=1.2)
    assert late.idle_s == late.until_s, "it does not begin"
    patient = wait(960, idle_share=1.0)
    assert patient.idle_s == patient.until_s


seconds = st.floats(0.0, 100.0)


@given(
    missing=st.integers(0, 10**5),
    resident=st.integers(0, 10**5),
    nbytes=st.integers(0, 10**12),
    prefill=st.builds(PrefillPrice, seconds, seconds, st.floats(0.0, 1e-3)),
    price=st.builds(TierPrice, seconds, st.floats(1.0, 1e12), st.booleans()),
    usual_s=seconds,
    share=st.floats(0.001, 100.0),
    idle_share=st.floats(0.0, 1.0),
    s_max=st.floats(0.001, 60.0),
)
def test_no_wait_is_longer_than_computing_or_than_its_bound(
    missing: int,
    resident: int,
    nbytes: int,
    prefill: PrefillPrice,
    price: TierPrice,
    usual_s: float,
    share: float,
    idle_share: float,
    s_max: float,
) -> None:
    found = wait(
        missing,
        resident,
        nbytes=nbytes,
        prefill=prefill,
        prices={"s3": price},
        usual_s=usual_s,
        share=share,
        idle_share=idle_share,
        s_max=s_max,
    )
    assert 0.0 <= found.idle_s <= found.until_s <= min(s_max, share * found.recompute_s)
    more = wait(
        missing + 1,
        resident,
        nbytes=nbytes,
        prefill=prefill,
        prices={"s3": price},
        usual_s=usual_s,
        share=share,
        idle_share=idle_share,
        s_max=s_max,
    )
    assert more.until_s >= found.until_s, "more to save is worth a longer wait"
