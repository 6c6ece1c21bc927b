"""From settings to tiers: which there are, which are off and why, and with which injected faults.

Decides nothing else. A tier that cannot be had is off, and the node works without it.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from cache_tiers.extent import TierName
from cache_tiers.faults import FaultyTier
from cache_tiers.lazy_link import LazyLink
from cache_tiers.link import Link
from cache_tiers.measure import measure_tier
from cache_tiers.node_guards import FIRST_PRICES
from cache_tiers.nvme_tier import NvmeTier, measure_direct_io
from cache_tiers.s3_tier import S3Tier
from cache_tiers.tier import Tier, TierError
from configs.section import MIB
from configs.tier_settings import FaultSettings, FaultsSettings, PeerSettings, TierSettings

logger = logging.getLogger("samovar.tiers")

OWED_FILE = "owed.json"
MEASURED_BYTES = 4 * MIB
MEASURE_REPEATS = 3
MEASURE_S_MAX = 1.0


@dataclass(slots=True)
class BuiltTiers:
    """`owed_path`: see `TierNode`; None where the directory is not ours."""

    tiers: dict[TierName, Tier] = field(default_factory=dict)
    off: dict[TierName, str] = field(default_factory=dict)
    bytes_max: dict[TierName, int] = field(default_factory=dict)
    owed_path: Path | None = None


def build_tiers(
    settings: TierSettings,
    nvme_dir: Path,
    *,
    make_cpu: Callable[[int], Tier],
    wall_clock: Callable[[], float],
) -> BuiltTiers:
    """`nvme_dir`: where files go (`settings.nvme.dir`, or `kv` in the model cache). `make_cpu(bytes_max)`.

    Takes the directory's lock; while another service holds it, the `nvme` tier is off.
    """
    built = BuiltTiers()
    if settings.cpu.bytes_max:
        _add(built, make_cpu(settings.cpu.bytes_max), settings.cpu.bytes_max, settings.faults.cpu)
    else:
        built.off["cpu"] = "bytes_max is 0"
    if settings.nvme.bytes_max:
        try:
            nvme = _nvme(settings, nvme_dir, wall_clock)
        except TierError as error:
            logger.warning("nvme tier: off: %s", error)
            built.off["nvme"] = str(error)
        else:
            _add(built, nvme, settings.nvme.bytes_max, settings.faults.nvme)
            built.owed_path = nvme_dir / OWED_FILE
    else:
        built.off["nvme"] = "bytes_max is 0"
    if not settings.s3.bucket:
        built.off["s3"] = "no bucket"
    elif not settings.s3.bytes_max:
        built.off["s3"] = "bytes_max is 0"
    else:
        try:
            s3 = S3Tier(settings.s3, wall_clock)
        except (ValueError, TierError) as error:
            logger.warning("s3 tier: off: %s", error)
            built.off["s3"] = str(error)
        else:
            _add(built, s3, settings.s3.bytes_max, settings.faults.s3)
    return built


def first_prices(built: BuiltTiers, clock: Callable[[], float]) -> dict[TierName, tuple[float, float]]:
    """What reading takes, measured now, about a second; for S3, and where that fails, what is usual."""
    prices = dict(FIRST_PRICES)
    for name in ("cpu", "nvme"):
        tier = built.tiers.get(name)
        nbytes = min(MEASURED_BYTES, built.bytes_max.get(name, 0) // 4)
        if tier is None or nbytes < 4096:
            continue
        inner = tier.inner if isinstance(tier, FaultyTier) else tier
        drop_cache = inner.drop_cache if isinstance(inner, NvmeTier) else None
        found = measure_tier(
            tier, nbytes, MEASURE_REPEATS, clock, budget_s=MEASURE_S_MAX, drop_cache=drop_cache
        )
        if found is not None:
            prices[name] = found
    return prices


def build_link(settings: PeerSettings, agent: str) -> LazyLink:
    """The way to other nodes' memory, not opened yet. `agent`: "node id:incarnation"."""
    if settings.transport == "ray":
        return LazyLink(None, "as configured")
    return LazyLink(
        lambda: Link(agent, arena_bytes=settings.arena_bytes, lease_s=settings.lease_s, clock=time.monotonic)
    )


class KillPoint:
    """`Reach` that kills this process when a move reaches a state, as `settings` say. For tests.

    `starts`: how often the actor was started, this time included.
    """

    def __init__(self, settings: FaultsSettings, starts: int, kill: Callable[[], None] | None = None) -> None:
        self._settings = settings
        self._is_armed = settings.kill_at is not None and starts <= settings.kill_starts
        self._seen: Counter[str] = Counter()
        self._kill = kill or (lambda: os.kill(os.getpid(), signal.SIGKILL))

    def __call__(self, state: str) -> None:
        if not self._is_armed or state != self._settings.kill_at:
            return
        self._seen[state] += 1
        if self._seen[state] == self._settings.kill_after:
            logger.warning("killed at %s, as configured", state)
            self._kill()


def _nvme(settings: TierSettings, nvme_dir: Path, wall_clock: Callable[[], float]) -> NvmeTier:
    nvme = settings.nvme

    def make(direct_io: bool) -> NvmeTier:
        return NvmeTier(
            nvme_dir,
            bytes_max=nvme.bytes_max,
            durability=nvme.durability,
            direct_io=direct_io,
            quarantine_bytes_max=nvme.quarantine_bytes_max,
            wall_clock=wall_clock,
        )

    if nvme.direct_io is not None:
        return make(nvme.direct_io)
    tier = make(direct_io=False)  # the lock first: never measure in somebody else's directory
    if not measure_direct_io(nvme_dir):
        return tier
    tier.close()
    return make(direct_io=True)


def _add(built: BuiltTiers, tier: Tier, bytes_max: int, faults: FaultSettings) -> None:
    name = tier.name
    built.tiers[name] = tier if faults == FaultSettings() else FaultyTier(tier, faults)
    built.bytes_max[name] = bytes_max
