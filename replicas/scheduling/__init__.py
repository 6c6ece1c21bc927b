"""Scheduling: what the next step computes, and in which order tenants are served."""

from replicas.scheduling.fates import BlockFates, Fate
from replicas.scheduling.preemption import DropNewest, NewestByPrice, PreemptionPolicy, SwapNewest
from replicas.scheduling.scheduler import Scheduler
from replicas.scheduling.sequence import OWN, OffloadState, Restore, RestorePiece, Sequence, bare_sequence
from replicas.scheduling.step import Chunk, StepBudget, StepPlan, StepRoom, StepTimes

__all__ = [
    "OWN",
    "BlockFates",
    "Chunk",
    "DropNewest",
    "Fate",
    "NewestByPrice",
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
    "SwapNewest",
    "bare_sequence",
]
