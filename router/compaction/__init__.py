"""Conversations longer than the window: which turns leave the prompt, and what comes back of them.

Nothing imports it while `compaction.enabled` is false.
"""

from router.compaction.compactor import Compactor
from router.compaction.compose import Summary, composed, fenced_summary, usable_summary
from router.compaction.errands import Errands, Served
from router.compaction.fitter import Fitted, Fitter, Wish
from router.compaction.idle import IdleQueue, IdleWork
from router.compaction.memory import CutMemory, chain
from router.compaction.opening import open_compaction
from router.compaction.pieces import FoundPiece, OldPiece, PieceIndex, fenced_pieces, pieces_of
from router.compaction.planner import (
    NEVER,
    WHOLE,
    Cut,
    Talk,
    WindowPlan,
    boundaries,
    cut_of,
    next_cut,
)
from router.compaction.summaries import SummaryStore
from router.compaction.tokens import MessageTokens

__all__ = [
    "NEVER",
    "WHOLE",
    "Compactor",
    "Cut",
    "CutMemory",
    "Errands",
    "Fitted",
    "Fitter",
    "FoundPiece",
    "IdleQueue",
    "IdleWork",
    "MessageTokens",
    "OldPiece",
    "PieceIndex",
    "Served",
    "Summary",
    "SummaryStore",
    "Talk",
    "WindowPlan",
    "Wish",
    "boundaries",
    "chain",
    "composed",
    "cut_of",
    "fenced_pieces",
    "fenced_summary",
    "next_cut",
    "open_compaction",
    "pieces_of",
    "usable_summary",
]
