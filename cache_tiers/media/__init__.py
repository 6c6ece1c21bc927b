"""Storage tiers behind one contract: memory, NVMe files, S3; with guards, injected faults, measuring.

`s3` is imported explicitly where needed.
"""

from samovar.cache_tiers.media.faults import FaultyTier
from samovar.cache_tiers.media.files import Syscalls, aligned_empty, lock_owner
from samovar.cache_tiers.media.guard import Breaker, GuardedTier, TierDown, TierLate
from samovar.cache_tiers.media.measure import RESERVED_NAMESPACE, measure_tier, random_record
from samovar.cache_tiers.media.memory import MemoryFile, Room, SharedRecord, SharedTier, shared
from samovar.cache_tiers.media.nvme import NvmeTier, measure_direct_io
from samovar.cache_tiers.media.tier import Deadline, Scanned, Tier, TierAround, open_medium

__all__ = [
    "RESERVED_NAMESPACE",
    "Breaker",
    "Deadline",
    "FaultyTier",
    "GuardedTier",
    "MemoryFile",
    "NvmeTier",
    "Room",
    "Scanned",
    "SharedRecord",
    "SharedTier",
    "Syscalls",
    "Tier",
    "TierAround",
    "TierDown",
    "TierLate",
    "aligned_empty",
    "lock_owner",
    "measure_direct_io",
    "measure_tier",
    "open_medium",
    "random_record",
    "shared",
]
