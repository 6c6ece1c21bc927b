"""Residency policies, the eviction queue, and prefetching."""

from samovar.cache_tiers.policy.eviction_queue import (
    MOVES_MAX,
    LazyHeap,
    Place,
    Residence,
    Thing,
    ValueQueue,
    faded_rate,
    used_rate,
)
from samovar.cache_tiers.policy.idle_sessions import IdleSessions
from samovar.cache_tiers.policy.policies import LeastRecentlyUsed, ResidencyPolicy, TimeOracle, make_policy
from samovar.cache_tiers.policy.prefetcher import SINK_SHARE, Known, Prefetcher
from samovar.cache_tiers.policy.shadow import ShadowLru

__all__ = [
    "MOVES_MAX",
    "SINK_SHARE",
    "IdleSessions",
    "Known",
    "LazyHeap",
    "LeastRecentlyUsed",
    "Place",
    "Prefetcher",
    "Residence",
    "ResidencyPolicy",
    "ShadowLru",
    "Thing",
    "TimeOracle",
    "ValueQueue",
    "faded_rate",
    "make_policy",
    "used_rate",
]
