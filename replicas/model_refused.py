"""Why a model cannot be served, in words for the person who started the service.

Knows nothing of models: a reason, and what to do about it.
"""

from __future__ import annotations


class ModelRefused(Exception):
    """A model that cannot be served. `reason` names what is wrong and where, `fix` what helps."""

    def __init__(self, reason: str, fix: str) -> None:
        super().__init__(reason, fix)  # both as args: the exception survives pickling between processes
        self.reason = reason
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.reason.rstrip('.')}. Fix: {self.fix.rstrip('.')}."
