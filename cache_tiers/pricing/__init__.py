"""Prices of prefill and of tier loads, measured while serving, and the load plan they imply."""

from samovar.cache_tiers.pricing.load_plan import (
    BURST_EXTENTS,
    Doubt,
    LoadPiece,
    LoadPlan,
    LookupWait,
    break_even_tokens,
    in_digits,
    plan_load,
    plan_wait,
)
from samovar.cache_tiers.pricing.meters import (
    UNKNOWN_PREFILL,
    PrefillMeter,
    PrefillPrice,
    Sample,
    TierMeter,
    TierPrice,
    fit_prefill,
    moving_seconds,
    pairs_of,
    swap_or_drop,
    worth_storing,
)

__all__ = [
    "BURST_EXTENTS",
    "UNKNOWN_PREFILL",
    "Doubt",
    "LoadPiece",
    "LoadPlan",
    "LookupWait",
    "PrefillMeter",
    "PrefillPrice",
    "Sample",
    "TierMeter",
    "TierPrice",
    "break_even_tokens",
    "fit_prefill",
    "in_digits",
    "moving_seconds",
    "pairs_of",
    "plan_load",
    "plan_wait",
    "swap_or_drop",
    "worth_storing",
]
