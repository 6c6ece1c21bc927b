"""Scheduling: what the next step computes, and in which order tenants are served."""

from samovar.replicas.scheduling.drafts import Drafter, DraftLimits
from samovar.replicas.scheduling.queues import (
    DropNewest,
    PreemptionPolicy,
    SwapPrices,
    preemption_policy,
)
from samovar.replicas.scheduling.scheduler import Scheduler
from samovar.replicas.scheduling.sequence import (
    OWN,
    BlockFates,
    Fate,
    OffloadState,
    Restore,
    RestorePiece,
    Sequence,
    bare_sequence,
    page_table,
)
from samovar.replicas.scheduling.step import Chunk, StepBudget, StepPlan, StepRoom, StepTimes

__all__ = [
    "OWN",
    "BlockFates",
    "Chunk",
    "DraftLimits",
    "Drafter",
    "DropNewest",
    "Fate",
    "OffloadState",
    "PreemptionPolicy",
    "Restore",
    "RestorePiece",
    "Scheduler",
    "Sequence",
    "StepBudget",
    "StepPlan",
    "StepRoom",
    "StepTimes",
    "SwapPrices",
    "bare_sequence",
    "page_table",
    "preemption_policy",
]
