"""The replica's side of the cache tiers: tier lookup, load, store, swap.

`ray_link`, which imports Ray, is imported as a module where it is used.
"""

from samovar.replicas.offload.load import Expected, LoadedBlocks, PageMoves, PieceLoads, Suspect
from samovar.replicas.offload.load import load as load_extent
from samovar.replicas.offload.lookups import TierLookups
from samovar.replicas.offload.offload import (
    Handover,
    Offload,
    Restores,
    SwapSpace,
    check_swapped,
    swap_record,
)
from samovar.replicas.offload.store import StoreRun, TurnStore, provenance_of
from samovar.replicas.offload.tier_client import (
    CompletionQueue,
    TierAccess,
    TierLink,
    TierReporter,
    TurnReporter,
    WorkerPools,
)

__all__ = [
    "CompletionQueue",
    "Expected",
    "Handover",
    "LoadedBlocks",
    "Offload",
    "PageMoves",
    "PieceLoads",
    "Restores",
    "StoreRun",
    "Suspect",
    "SwapSpace",
    "TierAccess",
    "TierLink",
    "TierLookups",
    "TierReporter",
    "TurnReporter",
    "TurnStore",
    "WorkerPools",
    "check_swapped",
    "load_extent",
    "provenance_of",
    "swap_record",
]
