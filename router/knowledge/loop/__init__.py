"""What answers teach: turns are kept, feedback makes candidates, and few of them become entries.

Nothing enters the knowledge base without a person's word, or a policy that the operator has switched on.
"""

from router.knowledge.loop.bodies import ConfirmBody, FeedbackBody, LoopVerdict, QuestionsBody, RejectBody
from router.knowledge.loop.candidates import (
    CandidateEntry,
    Evidence,
    KeptTurn,
    State,
    TurnCall,
    says_the_same,
)
from router.knowledge.loop.gate import Gate, asked
from router.knowledge.loop.learning import LearningLoop, LoopMemory
from router.knowledge.loop.policy import AUTHOR, CaptureCounts, capture_refusals

__all__ = [
    "AUTHOR",
    "CandidateEntry",
    "CaptureCounts",
    "ConfirmBody",
    "Evidence",
    "FeedbackBody",
    "Gate",
    "KeptTurn",
    "LearningLoop",
    "LoopMemory",
    "LoopVerdict",
    "QuestionsBody",
    "RejectBody",
    "State",
    "TurnCall",
    "asked",
    "capture_refusals",
    "says_the_same",
]
