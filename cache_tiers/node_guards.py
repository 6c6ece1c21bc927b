"""A node's tiers, each behind its guard, and what is told of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from cache_tiers.breaker import Breaker
from cache_tiers.cost import TierMeter
from cache_tiers.extent import TIERS, TierName
from cache_tiers.guarded_tier import GuardedTier
from cache_tiers.messages import TierStats
from cache_tiers.node_books import NodeBooks
from cache_tiers.tier import Tier, TierError
from configs.tier_settings import TierSettings

FIRST_PRICES: dict[TierName, tuple[float, float]] = {
    "cpu": (1e-3, 4e9),
    "nvme": (2e-3, 1e9),
    "s3": (0.05, 100e6),
}
"""Latency in seconds and bytes a second, until the first loads tell better."""


def guarded(
    tiers: Mapping[TierName, Tier],
    settings: TierSettings,
    bytes_max: Mapping[TierName, int],
    first_prices: Mapping[TierName, tuple[float, float]],
    clock: Callable[[], float],
) -> dict[TierName, GuardedTier]:
    """In the order of `TIERS`."""
    return {
        name: GuardedTier(
            tiers[name],
            bytes_max=bytes_max[name],
            breaker=Breaker(
                settings.breaker_failures, settings.breaker_open_s, settings.breaker_open_s_max, clock
            ),
            meter=TierMeter(*first_prices[name], clock=clock),
            threads=settings.io_threads,
            clock=clock,
        )
        for name in TIERS
        if name in tiers
    }


def tier_stats(books: NodeBooks, off: Mapping[TierName, str]) -> tuple[TierStats, ...]:
    """Rows in the order of `TIERS`, also for tiers that are `off`, with why."""
    rows = []
    for name in TIERS:
        guard = books.guards.get(name)
        if guard is not None:
            rows.append(_row(books, guard))
        else:
            rows.append(TierStats(name, f"off: {off.get(name, 'not configured')}"))
    return tuple(rows)


def _row(books: NodeBooks, guard: GuardedTier) -> TierStats:
    with books.lock:
        usage = books.directory.usage(guard.name)
    try:
        held = guard.tier.bytes_held()
    except TierError:
        held = usage.bytes_accounted
    counts, found = guard.counts, guard.tier.bad_found()
    bad = Counter({name.removeprefix("bad:"): n for name, n in counts.items() if name.startswith("bad:")})
    return TierStats(
        guard.name,
        guard.state,
        bytes_held=held,
        bytes_max=guard.bytes_max,
        extents=usage.extents,
        blocks=usage.blocks,
        tokens=usage.tokens,
        hits_blocks=counts.get("hits_blocks", 0),
        read_bytes=counts.get("read_bytes", 0),
        written_bytes=counts.get("written_bytes", 0),
        read_errors=counts.get("read_errors", 0),
        write_errors=counts.get("write_errors", 0),
        verify_failures=dict(bad + found.kinds),
        quarantined=counts.get("quarantined", 0) + found.quarantined,
        evicted_extents=counts.get("evicted_extents", 0),
        breaker_opened=guard.opened,
        price=guard.price(),
    )
