"""Drafts: guesses of an answer's next tokens from its own text, which one step checks together. Pure.

What follows is guessed from what followed the same tokens earlier in the text: prompt lookup decoding
(Saxena 2023; "LLMA", arXiv 2304.04487). Answers that quote, edit or repeat need no second model.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from collections.abc import Sequence as Listing
from typing import NamedTuple, Protocol

from samovar.cache_tiers.pricing import PrefillPrice

SUFFIXES = (2, 4, 8, 16)
"""Numbers of last tokens that are looked for; more only where fewer were found."""
LOOKBACK_TOKENS = 1 << 16
"""How far back is looked: searching takes about 10 us for each 10,000 tokens."""
GRADES = (2, 4, 8, 16)
"""Tokens in a row that agreed, from which on guesses have a share of right ones of their own."""
NEWER = 0.25
"""Weight of the latest guess in that share."""
ROW_DEARNESS = 2.0
"""What a row of a step of few rows takes, in prices of a prompt's token: it shares weights with fewer."""


class Guesses:
    """What one text says of its own next tokens, and the share of such guesses that were right.

    Each token that comes is compared with its guess, whether or not it was asked for. So whether guesses
    are worth asking for is known before the first one is used.
    """

    def __init__(self) -> None:
        self._seen = 0  # tokens of the text that were compared
        self._source: int | None = None  # where the token stands that is expected next
        self._agreed = 0  # tokens before it that are the same as before the expected one
        self._right = [0.0] * len(GRADES)

    def follow(self, tokens: array[int]) -> None:
        """Take in the tokens that the text got since the last call; it never gets shorter."""
        if self._seen == 0 or self._seen > len(tokens):
            self._seen, self._source = len(tokens), None
        for place in range(self._seen, len(tokens)):
            if self._source is None:
                break
            is_right = tokens[self._source] == tokens[place]
            grade = _grade(self._agreed)
            self._right[grade] += NEWER * (is_right - self._right[grade])
            self._source = self._source + 1 if is_right else None
            self._agreed += 1
        self._seen = len(tokens)
        if self._source is None:
            self._source, self._agreed = last_match(tokens)

    def next(self, tokens: array[int], odds_min: float, count: int) -> tuple[int, ...]:
        """Return at most `count` guesses of what follows `tokens`, the text that was followed last.

        None of which all before it and itself are less likely to be right than `odds_min`. A text that
        repeats itself is expected to go on so.
        """
        drafted: list[int] = []
        if self._source is None:
            return ()
        odds, end = 1.0, len(tokens)
        while len(drafted) < count:
            odds *= self._right[_grade(self._agreed + len(drafted))]
            if odds < odds_min or odds == 0:
                break
            place = self._source + len(drafted)
            drafted.append(tokens[place] if place < end else drafted[place - end])
        return tuple(drafted)


def _grade(agreed: int) -> int:
    return max((grade for grade, least in enumerate(GRADES) if agreed >= least), default=0)


def last_match(tokens: array[int]) -> tuple[int | None, int]:
    """Return the place behind the last earlier run of the text's last tokens, and that run's length.

    (None, 0) if not even its last two tokens were there before.
    """
    end = len(tokens)
    text = tokens[max(0, end - LOOKBACK_TOKENS) :].tobytes()
    width = tokens.itemsize
    first = end - len(text) // width
    match: tuple[int | None, int] = (None, 0)
    for length in SUFFIXES:
        found = _last_place(text, text[-length * width :], width) if length < end - first else -1
        if found < 0:
            break
        match = first + found // width + length, length
    return match


def _last_place(text: bytes, wanted: bytes, width: int) -> int:
    """Return where the last of these runs of whole tokens begins that ends before the text; -1: nowhere."""
    before = len(text) - width
    while (found := text.rfind(wanted, 0, before)) >= 0 and found % width:
        before = found + len(wanted) - 1
    return found


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
        # Of each answer the first ones, of none more than of others.
        most, fits = max(map(len, drafted), default=0), min(left, rows_max - count)
        while most and sum(min(len(draft), most) for draft in drafted) > fits:
            most -= 1
        return [draft[:most] for draft in drafted]


def _odds_min(price: PrefillPrice, answers: int) -> float:
    """Return how likely a guess must be to be right."""
    row_s = ROW_DEARNESS * price.a_s
    saved_s = row_s + price.c0_s / max(1, answers)
    return row_s / saved_s if saved_s > 0 else 1.0


def _rows_within(price: PrefillPrice, rows: int, stretch: float) -> float:
    """Return the rows of a step that takes `stretch` times as long as one of `rows`."""
    row_s = ROW_DEARNESS * price.a_s
    return stretch * rows + (stretch - 1) * price.c0_s / row_s if row_s > 0 else math.inf
