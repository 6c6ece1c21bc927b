"""The replica's side of the cache tiers: tier lookup, load, store, swap.

`ray_link`, which imports Ray, is imported as a module where it is used.
"""

from replicas.offload.block_runs import StoreRun
from replicas.offload.handover import Handover
from replicas.offload.load import Expected, LoadedBlocks, PieceLoads, Suspect
from replicas.offload.load import load as load_extent
from replicas.offload.lookups import TierLookups
from replicas.offload.moves import PageMoves
from replicas.offload.offload import Offload, Restores
from replicas.offload.reports import TierReporter, TurnReporter
from replicas.offload.store import TurnStore, provenance_of
from replicas.offload.swap import SwapSpace, check_swapped, swap_record
from replicas.offload.tier_client import CompletionQueue, TierAccess, TierLink, WorkerPools

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
