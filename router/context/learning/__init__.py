"""What answers teach: turns are kept, feedback makes candidates, and few of them become entries.

Nothing enters the knowledge base without a person's word, or a policy that the operator has switched on.
Nothing imports it while `knowledge.enabled` is false.
"""

from samovar.router.context.learning.bodies import (
    ConfirmBody,
    FeedbackBody,
    LoopVerdict,
    QuestionsBody,
    RejectBody,
)
from samovar.router.context.learning.candidates import (
    AUTHOR,
    CandidateEntry,
    CaptureCounts,
    Evidence,
    NotedTurn,
    State,
    TurnCall,
    capture_refusals,
    says_the_same,
)
from samovar.router.context.learning.feedback_routes import FEEDBACK, feedback_routes
from samovar.router.context.learning.gate import Gate, asked
from samovar.router.context.learning.learning import LearningLoop, LoopMemory

__all__ = [
    "AUTHOR",
    "FEEDBACK",
    "CandidateEntry",
    "CaptureCounts",
    "ConfirmBody",
    "Evidence",
    "FeedbackBody",
    "Gate",
    "LearningLoop",
    "LoopMemory",
    "LoopVerdict",
    "NotedTurn",
    "QuestionsBody",
    "RejectBody",
    "State",
    "TurnCall",
    "asked",
    "capture_refusals",
    "feedback_routes",
    "says_the_same",
]
