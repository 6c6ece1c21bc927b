"""From which length on a load is quicker than computing."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from samovar.cache_tiers.pricing import PrefillPrice, TierPrice, break_even_tokens

PREFILL = PrefillPrice(0.02, 1e-3, 0.0, step_tokens=512)


@pytest.mark.parametrize(
    ("load", "prefill", "tokens"),
    [
        (TierPrice(0.01, 1e9), PrefillPrice(0.0, 1e-3, 0.0), 11),  # 0.95 ms a token are won, 10 ms lost
        (TierPrice(0.0, 1e9), PREFILL, 1),
        (TierPrice(0.01, 1e7), PrefillPrice(0.0, 1e-3, 0.0), None),  # a token's load takes 5 ms
        (TierPrice(0.01, 1e7), PrefillPrice(0.0, 1e-3, 1e-6), 4003),  # until attention takes more than that
        (TierPrice(0.01, 1e9, is_up=False), PREFILL, None),
        (TierPrice(0.01, 0.0), PREFILL, None),
    ],
)
def test_known_lengths(load: TierPrice, prefill: PrefillPrice, tokens: int | None) -> None:
    assert break_even_tokens(load, prefill, 50_000) == tokens


@given(
    st.floats(0, 10),
    st.floats(1e5, 1e12),
    st.floats(1e-7, 1),
    st.floats(1e-8, 1e-2),
    st.sampled_from([0.0, 1e-9, 1e-6]),
    st.floats(1, 1e6),
)
@example(latency_s=0.046875, bytes_per_s=1e5, c0_s=1.0, a_s=0.0078125, b_s=1e-9, bytes_per_token=126676.0)
def test_from_there_on_loading_is_quicker_and_before_it_is_not(
    latency_s: float, bytes_per_s: float, c0_s: float, a_s: float, b_s: float, bytes_per_token: float
) -> None:
    load, prefill = TierPrice(latency_s, bytes_per_s), PrefillPrice(c0_s, a_s, b_s, step_tokens=512)
    found = break_even_tokens(load, prefill, bytes_per_token)

    def gain_s(tokens: int) -> float:
        return prefill.added_seconds(tokens, 0) - load.seconds(round(tokens * bytes_per_token))

    if found is None:
        assert gain_s(1 << 20) <= 1e-6 * load.seconds(round((1 << 20) * bytes_per_token)) or b_s == 0.0
        return
    for tokens in (found + 1, 2 * found + 2):
        assert gain_s(tokens) > -1e-6 * load.seconds(round(tokens * bytes_per_token)) - 1e-6
    if found > 2:
        assert gain_s(found - 2) < 1e-6 * load.seconds(round(found * bytes_per_token)) + 1e-6
    assert math.isfinite(found)
