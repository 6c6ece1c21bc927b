"""How long a prompt waits to learn what the tiers hold of it, decided by price. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from samovar.cache_tiers.blocks import LoadSource
from samovar.cache_tiers.pricing.meters import PrefillPrice, TierPrice


@dataclass(frozen=True, slots=True)
class LookupWait:
    """Seconds from a prompt's arrival.

    `until_s`: without an answer by then it is computed; 0: waiting does not pay. `idle_s`: from then on an
    engine with nothing else to do computes it in small steps meanwhile; `until_s`: it does not.
    `recompute_s`: what computing the missing tokens takes: more than any wait for at most all of the saving.
    """

    until_s: float
    idle_s: float
    recompute_s: float


def plan_wait(
    *,
    missing_tokens: int,
    resident_tokens: int,
    nbytes: int,
    prefill: PrefillPrice,
    prices: Mapping[LoadSource, TierPrice],
    usual_s: float,
    share: float,
    idle_share: float,
    s_max: float,
) -> LookupWait:
    """Return the wait for the lookup of `missing_tokens` behind `resident_tokens` in the pool.

    It is `share` of what loading would save, at most `s_max`: computing them, less loading their `nbytes`
    from the cheapest tier in `prices` (as last heard; without any, or where none is proved, loading counts as
    free). `usual_s`: what
    a lookup takes as a rule; an answer that is not expected in time is not waited for. An idle engine begins
    after `idle_share` of the wait, but not before twice `usual_s`: most answers come until then, and a step
    that has begun cannot be taken back.
    """
    recompute_s = prefill.added_seconds(max(0, missing_tokens), resident_tokens)
    loads_s = (price.seconds(nbytes) if price.is_proved else 0.0 for price in prices.values() if price.is_up)
    load_s = min(loads_s, default=0.0)
    until_s = min(s_max, share * max(0.0, recompute_s - load_s))
    if until_s <= usual_s:
        return LookupWait(0.0, 0.0, recompute_s)
    return LookupWait(until_s, min(until_s, max(idle_share * until_s, 2 * usual_s)), recompute_s)
