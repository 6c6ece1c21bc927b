"""A session's turns as the server sees them, from a request, a trace or a generator; and when the next comes.

Plain data: lengths, times and kinds, never text. Times are seconds of one clock that the caller chooses.
What is called a session here and in all tables of this folder is one lineage of a client's session, a chain
of prompts that extend one another: beside the conversation its client sends titles, sub-agents and the like
under the same id. `Opening.whole` names the client's session.

When it comes is a survival curve over log-spaced bins of idle time: `log S` at the bin edges, f32 `[EDGES]`,
where `S(t)` is the probability that the session is still idle after `t` seconds. The hazard is constant
within a bin (discrete-time survival analysis: Tutz and Schmid, 2016), and beyond the last edge it falls with
1 / t from that of the last bin: a forecast that has run out of range ranks by recency. Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Final, Literal
from zlib import crc32

import numpy as np
import numpy.typing as npt

SessionKey = Hashable
"""Identifies a lineage of a session: tags in the service, a number in a trace."""

TURN_S_MAX = 900.0
"""A turn begun longer ago counts as over without a report: its replica has died."""

Stop = Literal["tool_calls", "stop", "length", "gone"]
"""Why an answer ended. `gone`: the client disconnected."""

Role = Literal["user", "tool", "other"]
"""Role of the prompt's last message."""

HintEvent = Literal["typing", "tool_started", "tool_finished", "hidden", "closed"]


CALLS_MAX: Final = 8
"""Calls of one answer that are told apart."""
_TOOL_CHARS: Final = 64


def tool_tags(names: Iterable[str]) -> str:
    """Return tags of the tools that an answer calls, of 8 hex digits each, in their order.

    All that forecasts and the tiers learn of a tool's name.
    """
    tags = (crc32(name[:_TOOL_CHARS].encode("utf-8", "replace")) for name in islice(names, CALLS_MAX))
    return " ".join(f"{tag:08x}" for tag in tags)


@dataclass(frozen=True, slots=True)
class Opening:
    """What the beginning of a turn says of its prompt, without its text.

    `whole`: the client's session, of which the turn's session is one lineage. `roots`: digests of the
    prompt's first 1, 2, 4, ... blocks (`lineages.py`). `branches`: how many branches of the lineage's chain
    were left behind by edits and regenerated answers; `regained`: how much of them this prompt goes back
    to, each counting 1.
    """

    whole: SessionKey
    roots: tuple[int, ...] = ()
    branches: int = 0
    regained: float = 0.0


@dataclass(frozen=True, slots=True)
class Turn:
    """One finished turn.

    `kept_tokens`: how much of the session's chain this prompt begins with unchanged; 0 at a first turn,
    and less than the chain after an edit. `tool`: the tools that were called, as `tool_tags` has them; empty:
    none, or nothing is known of them. `profile`: the use case.
    """

    session: SessionKey
    started_s: float
    ended_s: float
    input_tokens: int
    output_tokens: int
    kept_tokens: int = 0
    stop: Stop = "stop"
    role: Role = "user"
    tool: str = ""
    profile: str = "chat"

    @property
    def chain_tokens(self) -> int:
        """Return the length of the session's chain after this turn."""
        return self.input_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class HintReading:
    """How a hint is read. `trust`: share of such hints that come true; `spread`: of log time, logistic."""

    trust: float
    spread: float


@dataclass(frozen=True, slots=True)
class Hint:
    """A client's hint about its idle session. `expected_return_s`: from `at_s` on.

    `reading`: as such hints have turned out (`policy/idle_sessions.py`); None: nothing is known of them.
    """

    session: SessionKey
    at_s: float
    event: HintEvent | None = None
    expected_return_s: float | None = None
    reading: HintReading | None = None


def fast_clock(clock: Callable[[], float], rate: float) -> Callable[[], float]:
    """Return a clock that runs `rate` times as fast as `clock`; both were 0 at the same moment.

    To serve a recording of an hour in minutes. Used for idle times, resumptions and expiry; deadlines and
    prices stay in real time.
    """
    return clock if rate == 1.0 else lambda: clock() * rate


Floats = npt.NDArray[np.float64]
Curves = npt.NDArray[np.float32]
"""`[EDGES]`, or `[sessions, EDGES]`."""

EDGES_S: Final = np.array(
    [0, 2, 4, 6, 8, 12, 20, 30, 60, 120, 300, 600, 1200, 3600, 7200, 14400, 43200]
    + [86400 * days for days in (1, 2, 4, 8)],
    dtype=np.float64,
)
EDGES: Final = len(EDGES_S)
BINS: Final = EDGES - 1
WIDTHS_S: Final = np.diff(EDGES_S)
LAST_S: Final = float(EDGES_S[-1])

# All edges are whole seconds, so a table by second gives the bin of a time: ten times faster than a
# search.
_BIN_OF_SECOND: Final = np.minimum(
    np.searchsorted(EDGES_S, np.arange(int(LAST_S) + 1), side="right") - 1, BINS - 1
).astype(np.int8)


def bin_of(idle_s: float) -> int:
    """Return the bin of a time; the last one for all longer times."""
    return int(_BIN_OF_SECOND[int(min(max(idle_s, 0.0), LAST_S))])


def bins_of(idle_s: Floats) -> npt.NDArray[np.int8]:
    """Return the bins of times within [0, `LAST_S`]."""
    return _BIN_OF_SECOND.take(idle_s.astype(np.intp))


def curve_of(hazards: npt.ArrayLike) -> Curves:
    """Return the curves of `hazards`, `[..., BINS]`: P(resumes in this bin | idle up to its beginning)."""
    kept = np.log1p(-np.clip(np.asarray(hazards, dtype=np.float64), 0.0, 1.0 - 1e-7))
    log_s = np.zeros((*kept.shape[:-1], EDGES), dtype=np.float32)
    np.cumsum(kept, axis=-1, out=kept)
    log_s[..., 1:] = kept
    return log_s


def log_survival(curves: Curves, over_s: Floats | float, idle_s: Floats | float = 0.0) -> Floats:
    """Return log P(still idle `over_s` later | idle for `idle_s`), `[n]`, of curves `[n, EDGES]`.

    A sum of what bins add, none of it positive, and not a difference of two `log S`: that rounds to more than
    what distinguishes days of idle time.
    """
    flat = curves.reshape(-1).astype(np.float64)
    rows = np.arange(0, len(flat), EDGES)
    idle_s, over_s = np.maximum(np.zeros(len(rows)), idle_s), np.maximum(over_s, 0.0)
    until_s = idle_s + over_s
    begin_s, end_s = np.minimum(idle_s, LAST_S), np.minimum(until_s, LAST_S)
    first, last = _BIN_OF_SECOND[begin_s.astype(np.intp)], _BIN_OF_SECOND[end_s.astype(np.intp)]
    after_first, at_last = flat[rows + first + 1], flat[rows + last]
    slope = (after_first - flat[rows + first]) / WIDTHS_S[first]
    in_last = (flat[rows + last + 1] - at_last) / WIDTHS_S[last] * (end_s - EDGES_S[last])
    found: Floats = np.where(
        first == last,
        slope * np.minimum(over_s, LAST_S - begin_s),
        slope * (EDGES_S[first + 1] - begin_s) + (at_last - after_first) + in_last,
    )
    if (until_s > LAST_S).any():
        after_s = np.maximum(idle_s, LAST_S)
        last_slope = (flat[rows + BINS] - flat[rows + BINS - 1]) / WIDTHS_S[-1]
        found += last_slope * LAST_S * np.log1p((np.maximum(until_s, LAST_S) - after_s) / after_s)
    return found


def resume_probability(curves: Curves, idle_s: Floats, horizon_s: float) -> Floats:
    """Return P(resumes within `horizon_s` | idle for `idle_s`), `[n]`, of curves `[n, EDGES]`."""
    probability: Floats = -np.expm1(log_survival(curves, horizon_s, idle_s))
    return probability


def resume_within(curve: Curves, idle_s: float, horizon_s: float) -> float:
    """Return `resume_probability` of one session."""
    return float(resume_probability(curve[None], np.array([idle_s]), horizon_s)[0])


def _cold() -> Curves:
    """Return a curve whose hazard falls with time squared: after an hour hardly any session resumes."""
    gone = 0.5 / (1.0 + EDGES_S / 120.0)
    return curve_of(-np.expm1(np.diff(gone)))


COLD: Final = _cold()
"""For sessions of which nothing is known: the probability orders them by recency."""


def times(curve: Curves, ratio: float) -> Curves:
    """Return the curve with hazards `ratio` times as high."""
    return curve if ratio == 1.0 else (curve * np.float32(ratio)).astype(np.float32)


def rest_of(curve: Curves, idle_s: float) -> Floats:
    """Return what is left of a curve after `idle_s`, `[EDGES]`, counted from then on."""
    at_s = max(idle_s, 0.0) + EDGES_S
    last_slope = (float(curve[-1]) - float(curve[-2])) / WIDTHS_S[-1]
    since = np.interp(at_s, EDGES_S, curve) + last_slope * LAST_S * np.log(np.maximum(at_s / LAST_S, 1.0))
    rest: Floats = since - since[0]
    return rest


TRUST: Final = 0.9
"""Share of hinted sessions assumed to resume when they say."""

RETURN_S: Final[dict[HintEvent, float]] = {"typing": 10.0, "tool_finished": 2.0}
"""Expected return of a session whose hint gives only an event."""

_SOONEST_S: Final = 0.5
_STEEPNESS: Final = 4.0
_LOG_MIN: Final = -80.0


def hinted(curve: Curves, idle_s: float, hint: Hint) -> Curves:
    """Return the curve `[EDGES]` from `hint.at_s` on, for a session with `curve` that was idle `idle_s`.

    `closed`: never resumes, unless such hints were wrong too often; `hidden`: less likely. With an expected
    return, or one implied by the event, and a `reading`: what follows from both (Bayes). Without one: `TRUST`
    of the probability lies around it (log-logistic); the rest keeps the shape of `curve`, so that a session
    that does not return as hinted soon counts as any idle one. Else what is left of `curve`.
    """
    reading = hint.reading
    if hint.event == "closed" and (reading is None or reading.trust >= CLOSED_TRUST_MIN):
        return np.zeros(EDGES, dtype=np.float32)
    rest = rest_of(curve, idle_s)
    if hint.event in ("closed", "hidden"):
        return _curve(rest * (1.0 - (HIDDEN_TRUST if reading is None else reading.trust)))
    expected_s = hint.expected_return_s
    if expected_s is None or expected_s != expected_s:
        expected_s = RETURN_S.get(hint.event) if hint.event is not None else None
    if expected_s is None:
        return _curve(rest)
    expected_s = min(max(expected_s, _SOONEST_S), LAST_S)
    if reading is not None:
        return _read(rest, expected_s, reading)
    waiting = 1.0 / (1.0 + (EDGES_S / expected_s) ** _STEEPNESS)
    mixed = TRUST * waiting + (1.0 - TRUST) * np.exp(np.maximum(rest, _LOG_MIN))
    return _curve(np.log(mixed))


CLOSED_TRUST_MIN: Final = 0.8
"""Of clients whose `closed` is less often true it only makes a return less likely."""
HIDDEN_TRUST: Final = 0.5

_PARTS: Final = 4
_FINE_S: Final = np.interp(np.arange(BINS * _PARTS + 1) / _PARTS, np.arange(EDGES), EDGES_S)
_MIDDLE_S: Final = (_FINE_S[1:] + _FINE_S[:-1]) / 2.0
_LOG_WIDTHS: Final = np.diff(np.log(_FINE_S + _SOONEST_S))
_LEAST: Final = 1e-4
"""What any time has besides the forecast: a hint may be right where that says never."""
ANYWHERE: Final = 1.0 / 12.0
"""Density of log time where a hint says nothing of it: from half a second to a day all are alike."""


def logistic(error: Floats | float, spread: float) -> Floats:
    """Return the density of a logistic distribution around 0."""
    density: Floats = 0.25 / spread / np.cosh(np.minimum(np.abs(error) / spread, 80.0) / 2.0) ** 2
    return density


def _read(rest: Floats, expected_s: float, reading: HintReading) -> Curves:
    """Return the curve given a hint of a kind that is as exact as `reading` says.

    Of hints that come true, the times are those of the forecast that fit the hint (Bayes).
    """
    survival = np.exp(np.maximum(rest, _LOG_MIN))
    masses = -np.diff(np.exp(np.interp(_FINE_S, EDGES_S, np.maximum(rest, _LOG_MIN))))
    errors = np.log((_MIDDLE_S + _SOONEST_S) / (expected_s + _SOONEST_S))
    shape = (masses + _LEAST * _LOG_WIDTHS) * logistic(errors, reading.spread)
    waiting = np.concatenate([shape[::-1].cumsum()[::-1], [0.0]])[::_PARTS] / shape.sum()
    left = reading.trust * waiting + (1.0 - reading.trust) * survival
    left /= left[0]
    return _curve(np.maximum(np.log(np.maximum(left, 1e-30)), _LOG_MIN))


def _curve(log_s: Floats) -> Curves:
    curve: Curves = log_s.astype(np.float32)
    return curve


@dataclass(frozen=True, slots=True)
class Forecast:
    """What is expected after a turn. Curves are f32 `[EDGES]`, counted from the turn's end.

    `curve`: of its session. `others`: of other lineages of the same client's session whose expectation has
    changed by this turn. `left_share`: what a branch behind a fork is worth relative to the chain that its
    session uses; None: nothing is known of it.
    """

    curve: Curves
    others: tuple[tuple[SessionKey, Curves], ...] = ()
    left_share: float | None = None
