"""Scheduling: what the next step computes, and in which order tenants are served."""

from replicas.scheduling.drafts import Drafter, DraftLimits
from replicas.scheduling.fates import BlockFates, Fate
from replicas.scheduling.preemption import DropNewest, PreemptionPolicy, SwapPrices, preemption_policy
from replicas.scheduling.restore import OWN, Restore, RestorePiece
from replicas.scheduling.scheduler import Scheduler
from replicas.scheduling.sequence import OffloadState, Sequence, bare_sequence
from replicas.scheduling.step import Chunk, StepBudget, StepPlan, StepRoom, StepTimes

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
    "preemption_policy",
]
