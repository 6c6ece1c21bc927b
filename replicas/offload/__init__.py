"""The replica's side of the cache tiers: tier lookup, load, store, swap.

`ray_link`, which imports Ray, is imported as a module where it is used.
"""

from replicas.offload.block_runs import StoreRun
from replicas.offload.handover import Handover
from replicas.offload.load import Expected, LoadedBlocks, Suspect
from replicas.offload.load import load as load_extent
from replicas.offload.moves import PageMoves
from replicas.offload.offload import Offload
from replicas.offload.reports import TurnReporter
from replicas.offload.store import TurnStore
from replicas.offload.swap import SwapSpace, check_swapped, swap_record
from replicas.offload.tier_client import CompletionQueue, TierAccess, TierLink, WorkerPools

__all__ = [
    "CompletionQueue",
    "Expected",
    "Handover",
    "LoadedBlocks",
    "Offload",
    "PageMoves",
    "StoreRun",
    "Suspect",
    "SwapSpace",
    "TierAccess",
    "TierLink",
    "TurnReporter",
    "TurnStore",
    "WorkerPools",
    "check_swapped",
    "load_extent",
    "swap_record",
]
