"""Features of a turn's end: the session's history, and the vector of numbers the model learns from.

Only what a server sees of a request: lengths, times, kinds, never text. Impossible times, NaN and
absurd lengths become bounded numbers here, so that no later module meets them.
"""

from __future__ import annotations

import math
import struct
from functools import lru_cache
from math import log1p
from typing import Final, get_args

import numpy as np
import numpy.typing as npt

from samovar.cache_tiers.forecast.turns import (
    Floats,
    Stop,
    Turn,
)
from samovar.configs.sections import ProfileName

Vector = npt.NDArray[np.float32]

STOPS: Final[dict[str, int]] = {name: index for index, name in enumerate(get_args(Stop))}
PROFILES: Final[dict[str, int]] = {name: index for index, name in enumerate(get_args(ProfileName))}
TOOL_BUCKETS: Final = 16
"""Always 0: `tool_times.py` alone learns from which tools are called, as its factors would be wrong for a
network that slowly learns the same. Saved networks have inputs for them."""
_ROLES: Final[dict[str, int]] = {"user": 0, "tool": 1}

NUMBERS: Final = 18
"""The first features: all others are flags and what is known of lineages."""
_AT_STOPS: Final = NUMBERS
_AT_ROLES: Final = _AT_STOPS + len(STOPS)
_AT_PROFILES: Final = _AT_ROLES + len(_ROLES)
_AT_LINEAGE: Final = _AT_PROFILES + len(PROFILES) + TOOL_BUCKETS
LINEAGE_FEATURES: Final = 4
FEATURES: Final = _AT_LINEAGE + LINEAGE_FEATURES
AT_RATIO: Final = FEATURES - 1
"""Where the log of `lineages.Standing.ratio` is: part of the odds known beforehand."""

LineageNumbers = tuple[float, float, float, float]
"""Whether it began beside others; logs: of others running, of others begun since, of a factor on hazards."""
ALONE: Final[LineageNumbers] = (0.0, 0.0, 0.0, 0.0)
"""Of the only lineage of a session."""

TOKENS_MAX: Final = 10**8
SECONDS_MAX: Final = 10.0**7
_RANGES: Final = np.array([-1.5, -0.6, 0.0, 0.6, 1.5], dtype=np.float32)
RANGED: Final = NUMBERS * (len(_RANGES) - 1)
"""For each number, how far it is through each range: so that the network need not be linear in it (piecewise
linear encoding: Gorishniy et al., 2022)."""
INPUTS: Final = FEATURES + RANGED
"""Of the network: features but those of lineages, numbers by range, lineages."""
_COLUMNS: Final = np.concatenate(
    (
        np.arange(_AT_LINEAGE),
        np.repeat(np.arange(NUMBERS), len(_RANGES) - 1),
        np.arange(_AT_LINEAGE, FEATURES),
    )
)
CLIP: Final = np.float32(4.0)
"""A standardised feature is never further from 0, so that a session's input cannot upset the model."""
# Of each input: what it is multiplied with and begins at, once standardised, and its bounds.
_SLOPES, _STARTS, _LEAST, _MOST = (
    np.concatenate((np.full(_AT_LINEAGE, plain), ranged, np.full(LINEAGE_FEATURES, plain))).astype(np.float32)
    for plain, ranged in (
        (1.0, np.tile(1.0 / np.diff(_RANGES), NUMBERS)),
        (0.0, np.tile(-_RANGES[:-1] / np.diff(_RANGES), NUMBERS)),
        (-CLIP, np.zeros(RANGED)),
        (CLIP, np.ones(RANGED)),
    )
)

_TIME_MAX_S: Final = 1e11
_EWMA: Final = 0.3


def bounded(value: float, top: float) -> float:
    """Return `value` clamped to [0, top]; NaN is 0."""
    if 0 <= value <= top:
        return value
    return top if value > top else 0.0


class SaneClock:
    """Passes times through, and replaces an invalid one by the latest valid one."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def sane(self, at_s: float) -> float:
        """Return `at_s` if it is a valid time, else the latest one."""
        return float(at_s) if -_TIME_MAX_S <= at_s <= _TIME_MAX_S else self.now_s

    def at(self, at_s: float) -> float:
        """Set the current time to `at_s` and return it; clocks may jump, also back."""
        self.now_s = self.sane(at_s)
        return self.now_s


def is_again(input_tokens: float, kept_tokens: float, before: float) -> bool:
    """Return whether a prompt is the one `before`, whose answer is wanted again: no further turn.

    It has as many tokens, and begins with what that one did.
    """
    return input_tokens == before and 2 * kept_tokens >= before


_RECORD: Final = struct.Struct("<2d2I5f4IB")
_ROW: Final = struct.Struct(f"={FEATURES}f")
RECORD_BYTES: Final = _RECORD.size
NEW: Final = bytes(RECORD_BYTES)
"""The record of a session without turns."""
_AT_TURNS: Final = 9
# Flags of a record: a hint since its last turn, which ended with calls of tools.
_HINTED: Final = 1
_WITH_TOOLS: Final = 2


class SessionHistory:
    """One session's turns so far, in a record of `RECORD_BYTES`. Gaps are idle times.

    Another attempt at an answer is no turn of its own: it says nothing of who asks again. Raises
    `struct.error` if `record` is none.
    """

    __slots__ = ("_record", "turns")

    def __init__(self, record: bytes = NEW) -> None:
        self._record = record
        self.turns: int = _RECORD.unpack(record)[_AT_TURNS]

    def record(self) -> bytes:
        """Return the session's record."""
        return self._record

    def features(
        self, turn: Turn, started_s: float, ended_s: float, lineage: LineageNumbers = ALONE
    ) -> Vector:
        """Add a finished turn; return `[FEATURES]`, finite, of the session at its end.

        `started_s`, `ended_s`: the turn's times, made sane by a `SaneClock`.
        """
        (
            began_s,
            last_ended_s,
            first_input,
            prompt,
            last,  # of log gaps
            ewma,
            longest,
            after_stop,  # sums of the log gaps that followed one kind of answer
            after_tools,
            turns,
            stops,
            tools,
            since_human,
            flags,
        ) = _RECORD.unpack(self._record)
        inputs = int(bounded(turn.input_tokens, TOKENS_MAX))
        outputs = bounded(turn.output_tokens, TOKENS_MAX)
        kept = bounded(turn.kept_tokens, inputs)
        if turns == 0:
            began_s, first_input = started_s, inputs
        if not turns or not is_again(inputs, kept, prompt):
            if turns:
                last = log1p(bounded(started_s - last_ended_s, SECONDS_MAX))
                ewma = last if turns == 1 else ewma + _EWMA * (last - ewma)
                longest = max(longest, last)
                if flags & _WITH_TOOLS:
                    after_tools, tools = after_tools + last, tools + 1
                else:
                    after_stop, stops = after_stop + last, stops + 1
            turns += 1
            since_human = 0 if turn.role == "user" else since_human + 1
        row = _ROW.pack(
            log1p(inputs),
            log1p(outputs),
            log1p(inputs - kept),
            inputs < prompt or 2 * kept < prompt,
            log1p(first_input),
            log1p(turns),
            last,
            ewma,
            longest,
            after_stop / (stops or 1),
            log1p(stops),
            after_tools / (tools or 1),
            log1p(tools),
            log1p(since_human),
            log1p(bounded(ended_s - began_s, SECONDS_MAX)),
            log1p(bounded(ended_s - started_s, SECONDS_MAX)),
            flags & _HINTED,
            turns == 1,
            *_flags(turn.stop, turn.role, turn.profile),
            *lineage,
        )
        self.turns = turns
        self._record = _RECORD.pack(
            began_s,
            ended_s,
            first_input,
            inputs,
            last,
            ewma,
            longest,
            after_stop,
            after_tools,
            turns,
            stops,
            tools,
            since_human,
            _WITH_TOOLS if turn.stop == "tool_calls" else 0,
        )
        return np.frombuffer(row, dtype=np.float32)


def hinted_record(record: bytes) -> bytes:
    """Return a session's record with a hint since its last turn."""
    return record[:-1] + bytes([record[-1] | _HINTED])


def moved_record(record: bytes, by_s: float) -> bytes | None:
    """Return a record with its times moved by `by_s`, to another node's clock; None if it is none.

    It may come from another node: what it says is bounded.
    """
    if len(record) != RECORD_BYTES:
        return None
    began_s, ended_s, first, prompt, *more = _RECORD.unpack(record)
    gaps, counts, flags = more[:5], more[5:9], more[9]
    began_s, ended_s = began_s + by_s, ended_s + by_s
    numbers = (began_s, ended_s, *gaps)
    if not all(map(math.isfinite, numbers)) or max(map(abs, numbers[:2])) > _TIME_MAX_S:
        return None
    gaps_max = math.log1p(SECONDS_MAX) * (1 + max(counts))
    is_sane = max(first, prompt) <= TOKENS_MAX and all(0.0 <= gap <= gaps_max for gap in gaps)
    if not is_sane or max(counts) > _TURNS_MAX or flags > _HINTED + _WITH_TOOLS:
        return None
    return _RECORD.pack(began_s, ended_s, first, prompt, *gaps, *counts, flags)


_TURNS_MAX: Final = 10**7


@lru_cache(maxsize=256)
def _flags(stop: str, role: str, profile: str) -> tuple[float, ...]:
    """Return the features between the numbers and those of lineages."""
    flags = [0.0] * (_AT_LINEAGE - _AT_STOPS)
    for at, names, name in (
        (_AT_STOPS, STOPS, stop),
        (_AT_ROLES, _ROLES, role),
        (_AT_PROFILES, PROFILES, profile),
    ):
        if (number := names.get(name)) is not None:
            flags[at - _AT_STOPS + number] = 1.0
    return tuple(flags)


class Standardiser:
    """Running mean and deviation of each feature over about the last `window` turns."""

    def __init__(self, window: int) -> None:
        self._window = window
        self.sums: Floats = np.zeros((3, FEATURES))  # count, values, squares
        self._mean: Vector = np.zeros(INPUTS, dtype=np.float32)
        self._scale: Vector = np.ones(INPUTS, dtype=np.float32)

    def add(self, rows: Vector) -> None:
        """Add rows `[n, FEATURES]`."""
        wide = rows.astype(np.float64)
        self.sums[0] += len(rows)
        self.sums[1] += wide.sum(axis=0)
        self.sums[2] += np.square(wide).sum(axis=0)
        if self.sums[0, 0] >= 2 * self._window:
            self.sums *= 0.5
        self.settle()

    def settle(self) -> None:
        """Recompute mean and scale from `sums`."""
        count, values, squares = self.sums
        mean = values / np.maximum(count, 1.0)
        spread = np.sqrt(np.maximum(squares / np.maximum(count, 1.0) - mean * mean, 0.0))
        self._mean = mean.astype(np.float32).take(_COLUMNS)
        # The floor: a nearly constant feature says nothing until it changes, and then not all at once.
        self._scale = (1.0 / np.maximum(spread, 0.05)).astype(np.float32).take(_COLUMNS)

    def apply(self, rows: Vector) -> Vector:
        """Return standardised `[..., INPUTS]` of `[..., FEATURES]`, each within `CLIP` of 0."""
        inputs: Vector = rows.take(_COLUMNS, axis=-1)
        inputs -= self._mean
        inputs *= self._scale
        inputs *= _SLOPES
        inputs += _STARTS
        np.maximum(inputs, _LEAST, out=inputs)
        return np.minimum(inputs, _MOST, out=inputs)
