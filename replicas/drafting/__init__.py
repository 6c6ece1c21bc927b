"""Drafts: guesses of an answer's next tokens from its own text, which one step checks together."""

from replicas.drafting.drafter import Drafter, DraftLimits
from replicas.drafting.guesses import Guesses

__all__ = ["DraftLimits", "Drafter", "Guesses"]
