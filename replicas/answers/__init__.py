"""Answers, whichever engine computes them: text of tokens, when they end, which are kept (docs/adr/017)."""

from samovar.replicas.answers.answer_log import AnswerLog, AnswerLogs, Reader, SweepTimer
from samovar.replicas.answers.limits import EngineLimits, Waiting, refusal
from samovar.replicas.answers.output import AnswerTokens, OpenAnswers, OutputProcessor, TextOut, TokenText

__all__ = [
    "AnswerLog",
    "AnswerLogs",
    "AnswerTokens",
    "EngineLimits",
    "OpenAnswers",
    "OutputProcessor",
    "Reader",
    "SweepTimer",
    "TextOut",
    "TokenText",
    "Waiting",
    "refusal",
]
