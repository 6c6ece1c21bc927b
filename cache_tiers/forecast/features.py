"""Features of a turn's end: the session's history, and the vector of numbers the model learns from.

Only what a server sees of a request: lengths, times, kinds, never text. Impossible times, NaN and
absurd lengths become bounded numbers here, so that no later module meets them.
"""

from __future__ import annotations

import math
import struct
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
_SLOPES: Final = np.tile(1.0 / np.diff(_RANGES), NUMBERS).astype(np.float32)
_STARTS: Final = np.tile(-_RANGES[:-1] / np.diff(_RANGES), NUMBERS).astype(np.float32)
RANGED: Final = len(_SLOPES)
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
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
CLIP: Final = np.float32(4.0)
"""A standardised feature is never further from 0, so that a session's input cannot upset the model."""

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
RECORD_BYTES: Final = _RECORD.size
NEW: Final = bytes(RECORD_BYTES)
"""The record of a session without turns."""
_HINTED: Final = 1
_WITH_TOOLS: Final = 2


class SessionHistory:
    """One session's turns so far, in a record of `RECORD_BYTES`. Gaps are idle times.

    Another attempt at an answer is no turn of its own: it says nothing of who asks again. Raises
    `struct.error` if `record` is none.
    """

    __slots__ = (
        "_after_stop",
        "_after_tools",
        "_began_s",
        "_ended_s",
        "_ended_with_tools",
        "_ewma",
        "_first_input",
        "_last",
        "_max",
        "_prompt",
        "_since_human",
        "_stops",
        "_tools",
        "is_hinted",
        "turns",
    )

    def __init__(self, record: bytes = NEW) -> None:
        (
            self._began_s,
            self._ended_s,
            self._first_input,
            self._prompt,
            self._last,  # of log gaps
            self._ewma,
            self._max,
            self._after_stop,  # sums of the log gaps that followed one kind of answer
            self._after_tools,
            self.turns,
            self._stops,
            self._tools,
            self._since_human,
            flags,
        ) = _RECORD.unpack(record)
        self.is_hinted = bool(flags & _HINTED)  # since its last turn
        self._ended_with_tools = bool(flags & _WITH_TOOLS)

    def record(self) -> bytes:
        """Return the session's record."""
        return _RECORD.pack(
            self._began_s,
            self._ended_s,
            self._first_input,
            self._prompt,
            self._last,
            self._ewma,
            self._max,
            self._after_stop,
            self._after_tools,
            self.turns,
            self._stops,
            self._tools,
            self._since_human,
            self.is_hinted * _HINTED + self._ended_with_tools * _WITH_TOOLS,
        )

    def features(
        self, turn: Turn, started_s: float, ended_s: float, lineage: LineageNumbers = ALONE
    ) -> Vector:
        """Add a finished turn; return `[FEATURES]`, finite, of the session at its end.

        `started_s`, `ended_s`: the turn's times, made sane by a `SaneClock`.
        """
        inputs = int(bounded(turn.input_tokens, TOKENS_MAX))
        outputs = bounded(turn.output_tokens, TOKENS_MAX)
        kept = bounded(turn.kept_tokens, inputs)
        is_edit = inputs < self._prompt or 2 * kept < self._prompt
        if self.turns == 0:
            self._began_s, self._first_input = started_s, inputs
        if not self.turns or not is_again(inputs, kept, self._prompt):
            if self.turns:
                self._add_gap(started_s - self._ended_s)
            self.turns += 1
            self._since_human = 0 if turn.role == "user" else self._since_human + 1
        self._ended_s = ended_s
        self._ended_with_tools = turn.stop == "tool_calls"
        self._prompt = inputs
        log = math.log1p
        row = [
            log(inputs),
            log(outputs),
            log(inputs - kept),
            float(is_edit),
            log(self._first_input),
            log(self.turns),
            self._last,
            self._ewma,
            self._max,
            self._after_stop / max(self._stops, 1),
            log(self._stops),
            self._after_tools / max(self._tools, 1),
            log(self._tools),
            log(self._since_human),
            log(bounded(ended_s - self._began_s, SECONDS_MAX)),
            log(bounded(ended_s - started_s, SECONDS_MAX)),
            float(self.is_hinted),
            float(self.turns == 1),
            *_NO_KINDS,
        ]
        row[_AT_LINEAGE:] = lineage
        self.is_hinted = False
        if (stop := STOPS.get(turn.stop)) is not None:
            row[_AT_STOPS + stop] = 1.0
        if (role := _ROLES.get(turn.role)) is not None:
            row[_AT_ROLES + role] = 1.0
        if (profile := PROFILES.get(turn.profile)) is not None:
            row[_AT_PROFILES + profile] = 1.0
        return np.array(row, dtype=np.float32)

    def _add_gap(self, gap_s: float) -> None:
        log_gap = math.log1p(bounded(gap_s, SECONDS_MAX))
        self._ewma = log_gap if self.turns == 1 else self._ewma + _EWMA * (log_gap - self._ewma)
        self._last = log_gap
        self._max = max(self._max, log_gap)
        if self._ended_with_tools:
            self._after_tools += log_gap
            self._tools += 1
        else:
            self._after_stop += log_gap
            self._stops += 1


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
_NO_KINDS: Final = (0.0,) * (FEATURES - NUMBERS)


class Standardiser:
    """Running mean and deviation of each feature over about the last `window` turns."""

    def __init__(self, window: int) -> None:
        self._window = window
        self.sums: Floats = np.zeros((3, FEATURES))  # count, values, squares
        self._mean: Vector = np.zeros(FEATURES, dtype=np.float32)
        self._scale: Vector = np.ones(FEATURES, dtype=np.float32)

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
        self._mean = mean.astype(np.float32)
        # The floor: a nearly constant feature says nothing until it changes, and then not all at once.
        self._scale = (1.0 / np.maximum(spread, 0.05)).astype(np.float32)

    def apply(self, rows: Vector) -> Vector:
        """Return standardised `[..., INPUTS]` of `[..., FEATURES]`, each within `CLIP` of 0."""
        standard = rows - self._mean
        standard *= self._scale
        np.maximum(standard, -CLIP, out=standard)
        np.minimum(standard, CLIP, out=standard)
        inputs: Vector = standard.take(_COLUMNS, axis=-1)
        ranged = inputs[..., _AT_LINEAGE : _AT_LINEAGE + RANGED]
        ranged *= _SLOPES
        ranged += _STARTS
        np.maximum(ranged, _ZERO, out=ranged)
        np.minimum(ranged, _ONE, out=ranged)
        return inputs
