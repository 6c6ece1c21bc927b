"""Conversations longer than the window: which turns leave the prompt, and what comes back of them.

Nothing imports it while `compaction.enabled` is false.
"""

from samovar.router.context.compaction.compactor import Compactor, IdleQueue, IdleWork, open_compaction
from samovar.router.context.compaction.compose import Summary, composed, fenced_summary, usable_summary
from samovar.router.context.compaction.errands import Errands, Served
from samovar.router.context.compaction.fitter import Fitted, Fitter, Wish
from samovar.router.context.compaction.memory import CutMemory, chain
from samovar.router.context.compaction.pieces import (
    FoundPiece,
    OldPiece,
    PieceIndex,
    fenced_pieces,
    pieces_of,
)
from samovar.router.context.compaction.planner import (
    NEVER,
    WHOLE,
    Cut,
    Talk,
    WindowPlan,
    boundaries,
    cut_of,
    next_cut,
)
from samovar.router.context.compaction.summaries import SummaryStore
from samovar.router.context.compaction.tokens import MessageTokens

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
