"""Features of a turn's end: the session's history, the vector of numbers the model learns from, and the
newest turns of a profile with what became of them.

Only what a server sees of a request: lengths, times, kinds, never text. Impossible times, NaN and
absurd lengths become bounded numbers here, so that no later module meets them.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Final, get_args
from zlib import crc32

import numpy as np
import numpy.typing as npt

from samovar.cache_tiers.forecast.turns import (
    BINS,
    COLD,
    EDGES,
    EDGES_S,
    LAST_S,
    WIDTHS_S,
    Curves,
    Floats,
    Stop,
    Turn,
    log_survival,
)
from samovar.configs.sections import ProfileName

Vector = npt.NDArray[np.float32]

STOPS: Final[dict[str, int]] = {name: index for index, name in enumerate(get_args(Stop))}
PROFILES: Final[dict[str, int]] = {name: index for index, name in enumerate(get_args(ProfileName))}
TOOL_BUCKETS: Final = 16
_ROLES: Final[dict[str, int]] = {"user": 0, "tool": 1}

NUMBERS: Final = 18
"""The first features: all others are flags and what is known of lineages."""
_AT_STOPS: Final = NUMBERS
_AT_ROLES: Final = _AT_STOPS + len(STOPS)
_AT_PROFILES: Final = _AT_ROLES + len(_ROLES)
_AT_TOOLS: Final = _AT_PROFILES + len(PROFILES)
_AT_LINEAGE: Final = _AT_TOOLS + TOOL_BUCKETS
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
_TOOL_CHARS: Final = 64


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
        if turn.tool:
            digest = crc32(turn.tool[:_TOOL_CHARS].encode("utf-8", "replace"))
            row[_AT_TOOLS + digest % TOOL_BUCKETS] = 1.0
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


Rows = npt.NDArray[np.intp]
TurnsState = dict[str, npt.NDArray[np.generic]]

Calibration = tuple[tuple[float, float, int], ...]
"""Turns by what was forecast for them: mean P(resumes within a horizon), share that did, number of turns."""

CALIBRATION_S: Final = 600.0
"""The horizon of the predictor's calibration."""
_CALIBRATION_BINS: Final = 10


class Expert(IntEnum):
    """Whose forecast it is: of the network, the counts by kind, those of all together, recency (`COLD`)."""

    MODEL = 0
    COUNTS = 1
    COMMON = 2
    RECENCY = 3


TOLD: Final = 3
"""Experts whose curves are kept with a turn; recency's is always the same."""


class Outcome(IntEnum):
    IDLE = 0
    RETURNED = 1
    LOST = 2


class ReplayTurns:
    """The newest `rows_max` turns and their outcomes, to learn from and to judge forecasts by.

    A ring of arrays; a turn's number counts all turns ever added. A turn whose session is still idle has
    survived up to now; one whose session resumed has an idle time; one that is no longer followed has
    survived up to then (censored). Not thread-safe.
    """

    def __init__(self, rows_max: int) -> None:
        self.rows_max = rows_max
        self.added = 0
        self._held = 0
        self._features: Vector = np.zeros((rows_max, FEATURES), dtype=np.float32)
        self._curves: Curves = np.zeros((rows_max, TOLD, EDGES), dtype=np.float32)
        self._kinds: Rows = np.zeros(rows_max, dtype=np.intp)
        self._ended_s: Floats = np.zeros(rows_max)
        self._idle_s: Floats = np.zeros(rows_max)  # when it is known
        self._outcome: npt.NDArray[np.int8] = np.zeros(rows_max, dtype=np.int8)

    def __len__(self) -> int:
        return self._held

    def add(self, features: Vector, kind: int, curves: Sequence[Curves], ended_s: float) -> int:
        """Add a finished turn and return its number. `curves`: predicted, `[EDGES]`, one an `Expert`."""
        row = self.added % self.rows_max
        self._features[row] = features
        self._kinds[row] = kind
        self._curves[row] = curves
        self._ended_s[row] = ended_s
        self._outcome[row] = Outcome.IDLE
        self.added += 1
        self._held = min(self._held + 1, self.rows_max)
        return self.added - 1

    def resolve(self, number: int, outcome: Outcome, now_s: float) -> None:
        """Record a turn's outcome. No-op if it is too old; `LOST` if it had not ended by `now_s`."""
        if number < self.added - self.rows_max:
            return
        row = number % self.rows_max
        idle_s = now_s - self._ended_s[row]
        self._outcome[row] = outcome if idle_s >= 0.0 else Outcome.LOST
        self._idle_s[row] = max(idle_s, 0.0)

    def state(self, rows_max: int, now_s: float) -> TurnsState:
        """Return a copy of the newest `rows_max`. Turns still idle are saved as censored."""
        rows = self.latest(rows_max)
        idle_s, is_back = self._idle(rows, now_s)
        return {
            "turn_features": self._features[rows],
            "turn_curves": self._curves[rows],
            "turn_kinds": self._kinds[rows].astype(np.int16),
            "turn_idle_s": idle_s,
            "turn_is_back": is_back.astype(np.uint8),
        }

    def restore(self, state: TurnsState, added: int) -> None:
        """Continue after `added` turns with the newest turns of a `state()` that there is room for.

        `state` may come from other settings, but has passed `check_turns`. Empty: no turn is known.
        """
        self.added, self._held = added, 0
        if not state:
            return
        self._held = min(len(state["turn_kinds"]), self.rows_max)
        rows, newest = self.latest(self._held), slice(len(state["turn_kinds"]) - self._held, None)
        self._features[rows] = state["turn_features"][newest]
        self._curves[rows] = state["turn_curves"][newest]
        self._kinds[rows] = state["turn_kinds"][newest]
        self._idle_s[rows] = state["turn_idle_s"][newest]
        self._ended_s[rows] = 0.0
        self._outcome[rows] = np.where(state["turn_is_back"][newest], Outcome.RETURNED, Outcome.LOST)

    def latest(self, count: int) -> Rows:
        """Return the rows of the newest `count`, or of as many as there are."""
        return np.arange(self.added - min(count, len(self)), self.added) % self.rows_max

    def sample(self, rng: np.random.Generator, count: int, among: int) -> Rows:
        """Return `count` random rows of the newest `among`, with replacement."""
        newest = min(among, len(self))
        return (self.added - 1 - rng.integers(newest, size=count)) % self.rows_max

    def features(self, rows: Rows) -> Vector:
        """Return features `[n, FEATURES]`."""
        return self._features[rows]

    def kinds(self, rows: Rows) -> npt.NDArray[np.intp]:
        """Return kinds `[n]`."""
        return self._kinds[rows]

    def targets(self, rows: Rows, now_s: float) -> tuple[Floats, Floats]:
        """Return `came_back`, `survived`, each `[n, BINS]` in [0, 1].

        A bin that a session has passed counts whole, the bin it is in by its share so far, the bin it
        resumed in as an event.
        """
        idle_s, is_back = self._idle(rows, now_s)
        through = (idle_s[:, None] - EDGES_S[:-1]) / WIDTHS_S
        survived = np.minimum(np.maximum(through, 0.0), 1.0)
        came_back = ((through >= 0.0) & (through < 1.0) & is_back[:, None]).astype(np.float64)
        survived *= 1.0 - came_back
        return came_back, survived

    def losses(self, rows: Rows, now_s: float) -> Floats:
        """Return `[experts, n]`: losses of their curves, minus the log likelihood of what happened.

        A session that is still idle is judged as well, by the probability that it would be: among resumed
        sessions alone, the best forecast is that all resume.
        """
        idle_s, is_back = self._idle(rows, now_s)
        place = np.searchsorted(EDGES_S, idle_s, side="right") - 1
        is_event = is_back & (idle_s < LAST_S)
        place = np.minimum(place, BINS - 1)
        losses = np.zeros((len(Expert), len(rows)))
        at = np.arange(len(rows))
        for expert in Expert:
            if expert == Expert.RECENCY:
                curves = np.broadcast_to(COLD, (len(rows), EDGES))
            else:
                curves = np.ascontiguousarray(self._curves[rows, expert])
            rate = curves[at, place] - curves[at, place + 1]
            happened = log_survival(curves, idle_s) + is_event * np.log(np.maximum(rate, _RATE_MIN))
            losses[expert] = -happened
        return losses

    def calibration(self, rows: Rows, experts: Rows, horizon_s: float, now_s: float) -> Calibration:
        """Return how often the curves of `experts`, one of each row, came true within `horizon_s`.

        See `Calibration`. Of turns that ended that long ago, so that one which came true early counts no
        sooner than the others. Turns of an earlier process and those no longer followed are left out.
        """
        is_old = (self._ended_s[rows] > 0.0) & (now_s - self._ended_s[rows] >= horizon_s)
        idle_s, is_back = self._idle(rows, now_s)
        came_back = is_back & (idle_s < horizon_s)
        known = is_old & (came_back | (idle_s >= horizon_s))
        told = experts[known]
        curves = self._curves[rows[known], np.minimum(told, TOLD - 1)]
        curves[told == Expert.RECENCY] = COLD
        said = -np.expm1(log_survival(curves, np.full(len(curves), horizon_s)))
        true, bins = (
            came_back[known],
            np.minimum((said * _CALIBRATION_BINS).astype(np.intp), _CALIBRATION_BINS - 1),
        )
        return tuple(
            (float(said[bins == one].mean()), float(true[bins == one].mean()), int((bins == one).sum()))
            for one in np.unique(bins)
        )

    def _idle(self, rows: Rows, now_s: float) -> tuple[Floats, npt.NDArray[np.bool_]]:
        outcome = self._outcome[rows]
        idle_s = np.where(outcome == Outcome.IDLE, now_s - self._ended_s[rows], self._idle_s[rows])
        return np.minimum(np.maximum(idle_s, 0.0), LAST_S), outcome == Outcome.RETURNED

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is wrong."""
        assert 0 <= self._held <= min(self.added, self.rows_max), "more turns than were added"
        rows = self.latest(len(self))
        assert np.isfinite(self._features[rows]).all(), "a feature is not finite"
        assert np.isfinite(self._curves[rows]).all(), "a curve is not finite"
        assert np.isfinite(self._ended_s[rows]).all(), "a time is not finite"
        assert np.isfinite(self._idle_s[rows]).all(), "an idle time is not finite"


def check_turns(state: TurnsState, *, kinds: int) -> None:
    """Raise `ValueError` saying why `state` is not one of `ReplayTurns`."""
    turns = len(state["turn_kinds"]) if state["turn_kinds"].ndim else 0
    for name, (shape, dtype, lowest, highest) in _ARRAYS.items():
        array, wanted = state[name], (turns, *shape)
        if array.shape != wanted or array.dtype != dtype:
            raise ValueError(f"{name}: {array.dtype} {array.shape}, not {dtype} {wanted}")
        highest = kinds - 1 if name == "turn_kinds" else highest
        # NaN and inf fail this check as well.
        numbers = array.astype(np.float64)
        if not ((numbers >= lowest) & (numbers <= highest)).all():
            raise ValueError(f"{name}: not within {lowest:g} and {highest:g}")
    curves = state["turn_curves"].astype(np.float64)
    if (curves[..., :1] != 0.0).any() or (curves[..., 1:] > curves[..., :-1]).any():
        raise ValueError("turn_curves: a curve that rises")


_RATE_MIN: Final = 1e-7
_ARRAYS: Final[dict[str, tuple[tuple[int, ...], npt.DTypeLike, float, float]]] = {
    "turn_features": ((FEATURES,), np.dtype(np.float32), -100.0, 100.0),
    "turn_curves": ((TOLD, EDGES), np.dtype(np.float32), -1000.0, 0.0),
    "turn_kinds": ((), np.dtype(np.int16), 0.0, 0.0),
    "turn_idle_s": ((), np.dtype(np.float64), 0.0, LAST_S),
    "turn_is_back": ((), np.dtype(np.uint8), 0.0, 1.0),
}
"""Per array of a state: shape of one turn, dtype, and the range of its numbers (features: logs, flags)."""

TURNS_ARRAYS: Final = frozenset(_ARRAYS)
