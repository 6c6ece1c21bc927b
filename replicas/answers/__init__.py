"""Answers that are kept for a while, for a client that names them and may ask again (docs/adr/017)."""

from replicas.answers.kept import KeptAnswers, KeptLog, Reader
from replicas.answers.sweep_timer import SweepTimer

__all__ = ["KeptAnswers", "KeptLog", "Reader", "SweepTimer"]
