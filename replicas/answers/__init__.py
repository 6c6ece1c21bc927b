"""Answers that are kept for a while, for a client that names them and may ask again (docs/adr/017)."""

from samovar.replicas.answers.answer_log import AnswerLog, AnswerLogs, Reader
from samovar.replicas.answers.sweep_timer import SweepTimer

__all__ = ["AnswerLog", "AnswerLogs", "Reader", "SweepTimer"]
