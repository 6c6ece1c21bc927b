"""Decides how many guesses each answer's next step checks. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from collections.abc import Sequence as Listing
from typing import NamedTuple, Protocol

from cache_tiers.pricing import PrefillPrice
from replicas.drafting.guesses import Guesses

ROW_DEARNESS = 2.0
"""What a row of a step of few rows takes, in prices of a prompt's token: it shares weights with fewer."""


class DraftLimits(NamedTuple):
    """Limits of drafts. `tokens_max`: of one answer's; `rows_max`: of a step with drafts, all answers'."""

    tokens_max: int
    rows_max: int


class Drafted(Protocol):
    """An answer that is being decoded: its tokens, and what they say of the next ones."""

    tokens: array[int]
    guesses: Guesses

    @property
    def tokens_left(self) -> int:
        """How many tokens the answer may still get."""
        ...


class Drafter:
    """Drafts while a guess is likely to save more than it costs.

    A guess that is right saves its answer a later row and a share of that step; one that is checked costs a
    row now, right or wrong. `price`: of computing, read at every step.
    """

    def __init__(self, limits: DraftLimits, price: Callable[[], PrefillPrice]) -> None:
        self._limits = limits
        self._price = price

    def drafts(self, answers: Listing[Drafted]) -> list[tuple[int, ...]]:
        """Return the guesses to check for each of the answers that the next step decodes; often none."""
        odds_min = self._odds_min(len(answers))
        left = self._limits.rows_max - len(answers)
        drafted = []
        for answer in answers:
            answer.guesses.follow(answer.tokens)
            count = min(self._limits.tokens_max, left, answer.tokens_left - 1)
            guesses = answer.guesses.next(answer.tokens, odds_min, max(0, count))
            left -= len(guesses)
            drafted.append(guesses)
        return drafted

    def _odds_min(self, answers: int) -> float:
        """Return how likely a guess must be to be right."""
        price = self._price()
        row_s = ROW_DEARNESS * price.a_s
        saved_s = row_s + price.c0_s / max(1, answers)
        return row_s / saved_s if saved_s > 0 else 1.0
