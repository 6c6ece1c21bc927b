"""From which length on loading a context is quicker than computing it. Pure."""

from __future__ import annotations

import math

from samovar.cache_tiers.pricing.meters import PrefillPrice, TierPrice


def break_even_tokens(load: TierPrice, prefill: PrefillPrice, bytes_per_token: float) -> int | None:
    """Return the least number of tokens whose load takes less time than computing them; None: none does.

    Both as parts of a prompt whose rest is computed in any case, as `plan_load` compares them: what computing
    gains over a load is a*n + b*n*n - latency, so above the result loading always wins.
    """
    if not load.is_up or not load.bytes_per_s > 0:
        return None
    computed_s = prefill.a_s + prefill.c0_s / prefill.step_tokens  # a token's, without attention
    linear_s = computed_s - bytes_per_token / load.bytes_per_s
    if load.latency_s <= 0 and linear_s > 0:
        return 1
    divisor = linear_s + math.sqrt(linear_s * linear_s + 4 * prefill.b_s * max(load.latency_s, 0.0))
    if divisor > 0:
        tokens = 2 * load.latency_s / divisor
    elif prefill.b_s > 0:
        tokens = -linear_s / prefill.b_s
    else:
        return None
    # The next whole number: at the root itself both take as long.
    return max(1, math.floor(tokens) + 1) if tokens < TOKENS_MAX else None


TOKENS_MAX = 1 << 32
"""A context that is longer is none."""


def in_digits(number: float) -> str:
    """Return a price as people read it: three digits, no exponent where it can be helped."""
    return f"{float(f'{number:.3g}'):,.12g}"
