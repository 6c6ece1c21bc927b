"""Decides how many guesses each answer's next step checks. Pure."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from collections.abc import Sequence as Listing
from typing import NamedTuple, Protocol

from cache_tiers.pricing import PrefillPrice
from replicas.drafting.guesses import Guesses

ROW_DEARNESS = 2.0
"""What a row of a step of few rows takes, in prices of a prompt's token: it shares weights with fewer."""


class DraftLimits(NamedTuple):
    """Limits of drafts. `tokens_max`: of one answer's; `rows_max`: of a step with drafts, all answers'.

    `stretch`: where an answer has none, how many times as long the step may take as without drafts.
    """

    tokens_max: int
    rows_max: int
    stretch: float = math.inf


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
    row now, right or wrong. All answers of a step wait for its rows: so those that are drafted get as many as
    the others, and one that is not waits for no more than a few. `price`: of computing, read at every step.
    """

    def __init__(self, limits: DraftLimits, price: Callable[[], PrefillPrice]) -> None:
        self._limits = limits
        self._price = price

    def drafts(self, answers: Listing[Drafted]) -> list[tuple[int, ...]]:
        """Return the guesses to check for each of the answers that the next step decodes; often none."""
        price, count = self._price(), len(answers)
        odds_min = _odds_min(price, count)
        left = self._limits.rows_max - count
        drafted = []
        for answer in answers:
            answer.guesses.follow(answer.tokens)
            most = min(self._limits.tokens_max, left, answer.tokens_left - 1)
            drafted.append(answer.guesses.next(answer.tokens, odds_min, max(0, most)))
        waits = any(drafted) and not all(drafted)
        rows_max = _rows_within(price, count, self._limits.stretch) if waits else math.inf
        return _levelled(drafted, min(left, rows_max - count))


def _odds_min(price: PrefillPrice, answers: int) -> float:
    """Return how likely a guess must be to be right."""
    row_s = ROW_DEARNESS * price.a_s
    saved_s = row_s + price.c0_s / max(1, answers)
    return row_s / saved_s if saved_s > 0 else 1.0


def _rows_within(price: PrefillPrice, rows: int, stretch: float) -> float:
    """Return the rows of a step that takes `stretch` times as long as one of `rows`."""
    row_s = ROW_DEARNESS * price.a_s
    return stretch * rows + (stretch - 1) * price.c0_s / row_s if row_s > 0 else math.inf


def _levelled(drafted: Listing[tuple[int, ...]], left: float) -> list[tuple[int, ...]]:
    """Return at most `left` of the guesses: of each answer the first ones, of none more than of others."""
    most = max(map(len, drafted), default=0)
    while most and sum(min(len(draft), most) for draft in drafted) > left:
        most -= 1
    return [draft[:most] for draft in drafted]
