"""The sessions that may resume, as arrays, so that thousands are ranked at once.

A row holds since when a session is idle and how likely it resumes when (`forecast/turns.py`). Not
thread-safe.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, Literal, get_args

import numpy as np
import numpy.typing as npt

from samovar.cache_tiers.forecast import (
    ANYWHERE,
    COLD,
    EDGES,
    RETURN_S,
    TRUST,
    TURN_S_MAX,
    Curves,
    Floats,
    Forecast,
    Hint,
    HintEvent,
    HintReading,
    SessionKey,
    hinted,
    logistic,
    resume_probability,
    tenant_of,
)

Slots = npt.NDArray[np.intp]
NO_SESSION = 0
"""The slot of sessions without a row: it has the `COLD` curve."""

_FIRST_ROWS = 64
_COLUMNS = (
    "ended_s",
    "turn_s",
    "busy_s",
    "left_s",
    "running",
    "tokens",
    "new_tokens",
    "is_tool",
    "next_s",
)


class IdleSessions:
    """At most `sessions_max` rows; the longest untouched are dropped first, as if never seen.

    A row stands for one lineage of a client's session: what another lineage uses, or when it runs, says
    nothing about this one.

    Columns, one row per session, read-only for callers: `curves` f32 `[rows, EDGES]`, `ended_s` (since
    when it is idle), `turn_s` (when its last turn began), `busy_s` (when the first of the turns began that
    ran at the same time as that), `left_s` (the same when it last became idle: what was not used since
    then is superseded), `running` (turns in progress), `tokens`, `new_tokens`, `is_tool`, `next_s` as in
    `ended`.
    `left_share`: as in `Forecast`. `hints`: what became of those about these sessions.
    """

    def __init__(self, sessions_max: int) -> None:
        self._sessions_max = sessions_max
        self._slots: OrderedDict[SessionKey, int] = OrderedDict()  # longest untouched first
        self._free: list[int] = []
        self.curves: Curves = np.tile(COLD, (_FIRST_ROWS, 1))
        self.ended_s: Floats = np.zeros(_FIRST_ROWS)
        self.left_share: float | None = None
        self.hints = HintRecord()
        self.turn_s: Floats = np.zeros(_FIRST_ROWS)
        self.busy_s: Floats = np.zeros(_FIRST_ROWS)
        self.left_s: Floats = np.full(_FIRST_ROWS, -np.inf)
        self.running: npt.NDArray[np.int32] = np.zeros(_FIRST_ROWS, dtype=np.int32)
        self.tokens: npt.NDArray[np.int64] = np.zeros(_FIRST_ROWS, dtype=np.int64)
        self.new_tokens: Floats = np.zeros(_FIRST_ROWS)
        self.is_tool: npt.NDArray[np.bool_] = np.zeros(_FIRST_ROWS, dtype=np.bool_)
        self.next_s: Floats = np.full(_FIRST_ROWS, np.inf)
        self._rows = 1  # slots ever allocated; the first is NO_SESSION's

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, session: SessionKey) -> bool:
        return session in self._slots

    def slot(self, session: SessionKey) -> int:
        """Return a session's row, or `NO_SESSION`. The next call that adds a session may reassign it."""
        return self._slots.get(session, NO_SESSION)

    def started(self, session: SessionKey, now_s: float) -> None:
        """Record that a turn has begun: the session is running until as many have `ended`.

        Call it before touching what the session uses: what was last used earlier counts as superseded
        when the turn is over.
        """
        if session in self.hints.open:
            self.hints.arrived(session, now_s)
        slot = self._row(session)
        if self.running[slot] == 0 or now_s - self.turn_s[slot] >= TURN_S_MAX:
            self.running[slot] = 0
            self.busy_s[slot] = now_s
        self.running[slot] += 1
        self.turn_s[slot] = now_s

    def ended(
        self,
        session: SessionKey,
        now_s: float,
        curve: Curves | None = None,
        *,
        tokens: int = 0,
        new_tokens: float = 0.0,
        is_tool: bool = False,
        next_s: float = np.inf,
    ) -> None:
        """Record that a turn is over, or that a session without one was found.

        `curve`: `[EDGES]`; None: nothing is known. `tokens`: length of its chain. `new_tokens`: expected
        tokens added by its next turn. `is_tool`: the turn ended with a tool call. `next_s`: when the
        session resumes, for callers that know the future.
        """
        slot = self._row(session)
        self.running[slot] = max(0, self.running[slot] - 1)
        self.curves[slot] = COLD if curve is None else curve
        self.ended_s[slot] = now_s
        if self.running[slot] == 0:  # what turns beside this one use is not left behind
            self.left_s[slot] = self.busy_s[slot]
        self.tokens[slot] = tokens
        self.new_tokens[slot] = new_tokens
        self.is_tool[slot] = is_tool
        self.next_s[slot] = next_s

    def set_curve(self, session: SessionKey, curve: Curves, since_s: float) -> None:
        """Replace a session's curve, counted from `since_s`: a client's hint. No-op if it is unknown."""
        slot = self._slots.get(session)
        if slot is not None:
            self.curves[slot] = curve
            self.ended_s[slot] = since_s

    def hint(
        self, session: SessionKey, event: HintEvent | None, expected_return_s: float | None, now_s: float
    ) -> bool:
        """Apply a client's hint about an idle session; return False, and do nothing, if it is unknown."""
        slot = self._slots.get(session)
        if slot is None:
            return False
        idle_s = now_s - float(self.ended_s[slot])
        hint = self.hints.told(Hint(session, now_s, event, expected_return_s))
        self.set_curve(session, hinted(self.curves[slot], idle_s, hint), now_s)
        return True

    def told(self, session: SessionKey, forecast: Forecast, since_s: float) -> list[SessionKey]:
        """Apply a forecast, counted from `since_s`; return the sessions whose rows have changed."""
        self.left_share = forecast.left_share
        curves = [(session, forecast.curve), *forecast.others]
        changed = [(of, curve) for of, curve in curves if of in self._slots]
        for of, curve in changed:
            self.set_curve(of, curve, since_s)
        return [of for of, _ in changed]

    def calls_tool(self, session: SessionKey) -> None:
        """Mark its last turn as ended by a tool call. No-op if the session is unknown."""
        slot = self._slots.get(session)
        if slot is not None:
            self.is_tool[slot] = True

    def forget(self, session: SessionKey) -> None:
        """Remove a session. No-op if it is unknown."""
        slot = self._slots.pop(session, None)
        self.hints.forget(session)
        if slot is not None:
            self._free.append(slot)

    def probabilities(self, slots: Slots, now_s: float, horizon_s: float) -> Floats:
        """Return P(resumes within `horizon_s`) of each slot."""
        curves = self.curves.take(slots, axis=0)  # a fifth faster than indexing
        return resume_probability(curves, now_s - self.ended_s[slots], horizon_s)

    def expected(self, now_s: float, horizon_s: float) -> tuple[float, float]:
        """Return the sums over idle sessions of P(resumes within `horizon_s`): of 1, and of their tokens."""
        slots = self.all_slots()
        idle = slots[~self.are_running(slots, now_s)]
        likely = self.probabilities(idle, now_s, horizon_s)
        return float(likely.sum()), float(likely @ self.tokens[idle])

    def are_unlikely(self, sessions: Collection[SessionKey], now_s: float, least: float) -> bool:
        """Return whether all of these are known, idle, and were expected to resume less likely than `least`.

        Ever, and as of their last turn: one that has been idle for long is not unlikely for that.
        """
        slots: Slots = np.array([self.slot(session) for session in sessions], dtype=np.intp)
        if not len(slots) or (slots == NO_SESSION).any() or self.are_running(slots, now_s).any():
            return False
        return bool((-np.expm1(self.curves[slots, -1]) < least).all())

    def are_running(self, slots: Slots, now_s: float) -> npt.NDArray[np.bool_]:
        """Return whether each session is in the middle of a turn."""
        is_running: npt.NDArray[np.bool_] = self.running[slots] > 0
        return is_running & (now_s - self.turn_s[slots] < TURN_S_MAX)

    def all_slots(self) -> Slots:
        """Return the slots of all known sessions, longest untouched first."""
        return np.fromiter(self._slots.values(), dtype=np.intp, count=len(self._slots))

    def sessions(self) -> list[SessionKey]:
        """Return the sessions in the order of `all_slots`."""
        return list(self._slots)

    def _row(self, session: SessionKey) -> int:
        slot = self._slots.get(session)
        if slot is not None:
            self._slots.move_to_end(session)
            return slot
        if len(self._slots) >= self._sessions_max:
            _, slot = self._slots.popitem(last=False)
        elif self._free:
            slot = self._free.pop()
        else:
            slot = self._rows
            self._rows += 1
            if slot == len(self.ended_s):
                self._grow()
        self._slots[session] = slot
        self.curves[slot] = COLD
        self.ended_s[slot] = 0.0
        self.turn_s[slot] = self.busy_s[slot] = self.left_s[slot] = -np.inf
        self.running[slot] = self.tokens[slot] = 0
        self.new_tokens[slot] = 0.0
        self.is_tool[slot] = False
        self.next_s[slot] = np.inf
        return slot

    def _grow(self) -> None:
        rows = len(self.ended_s)
        self.curves = np.concatenate([self.curves, np.tile(COLD, (rows, 1))])
        for name in _COLUMNS:
            column = getattr(self, name)
            setattr(self, name, np.concatenate([column, np.zeros_like(column)]))

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is wrong."""
        slots = list(self._slots.values())
        assert len(slots) <= self._sessions_max, "too many sessions are remembered"
        assert len(set(slots) | set(self._free)) == len(slots) + len(self._free), "a row is used twice"
        assert set(slots) | set(self._free) == set(range(1, self._rows)), "a row is lost"
        assert self.curves.shape == (len(self.ended_s), EDGES), "the columns differ in length"
        if self.hints.counts:
            self.hints.check_integrity()
        assert (self.running >= 0).all(), "more turns have ended than begun"


HintKind = Literal["typing", "tool_finished", "return", "closed", "hidden"]
"""What a hint claims: a return after the time that its event implies or that it names, or none."""

Outcome = Literal["received", "true", "false"]

STAYS_S: Final = 1800.0
"""A session has been away for so long: that it was said to be gone was right."""
LATE_TIMES: Final = 20.0
LATE_S: Final = 60.0
"""A return later than so many times what was told, and so much more, counts as none."""

SESSIONS_MAX: Final = 10_000
TENANTS_MAX: Final = 1024
SETTLED_A_CALL: Final = 8
_FADE: Final = 0.99
"""A judgement that was a hundred judgements ago counts for a third."""
_STRENGTH: Final = 8.0
"""Judgements that the first guess about a tenant counts as; that of its tenant about a session: a quarter."""
_SPREAD: Final = 0.25
_FIRST: Final[dict[HintKind, float]] = {"hidden": 0.5}
"""Share of hints that are believed before any was judged, where it is not `TRUST`."""
SPREAD_MIN, SPREAD_MAX = 0.05, 3.0


class _HintWorth:
    """Judgements of some hints of one kind, faded. `exact`: those that came about when told."""

    __slots__ = ("errors", "exact", "judged")

    def __init__(self) -> None:
        self.judged = self.exact = self.errors = 0.0

    def judge(self, share: float, error: float) -> None:
        self.judged = _FADE * self.judged + 1.0
        self.exact = _FADE * self.exact + share
        self.errors = _FADE * self.errors + share * error

    def reading(self, first: HintReading, strength: float) -> HintReading:
        """Return how such hints are read, with `strength` judgements as `first` has them."""
        trust = (self.exact + strength * first.trust) / (self.judged + strength)
        # The mean distance of a logistic distribution is 2 ln 2 of its scale.
        known = (self.errors / (2.0 * math.log(2.0)) + strength * first.spread) / (self.exact + strength)
        return HintReading(trust, min(max(known, SPREAD_MIN), SPREAD_MAX))


@dataclass(frozen=True, slots=True)
class _OpenHint:
    told_s: float
    expected_s: float
    until_s: float
    reading: HintReading


class HintRecord:
    """What clients' hints are worth: how often they come true and how exact, by tenant, session and kind.

    A hint that names a time is judged when its session returns, or when it is far too late; one that says
    that its session is gone, when that returns, or has not for long. Each session begins with what its
    tenant's hints of that kind were worth, and soon has a record of its own: a lie costs the liar. Pure and
    bounded; times come in.

    `open`: sessions with a hint that is not judged yet; `counts`: hints by kind and outcome.
    """

    def __init__(self) -> None:
        self.open: OrderedDict[SessionKey, dict[HintKind, _OpenHint]] = OrderedDict()
        self.counts: Counter[tuple[HintKind, Outcome]] = Counter()
        self._tenants: OrderedDict[tuple[SessionKey, HintKind], _HintWorth] = OrderedDict()
        self._sessions: OrderedDict[tuple[SessionKey, HintKind], _HintWorth] = OrderedDict()

    def told(self, hint: Hint) -> Hint:
        """Take in a hint; return it with how it is to be read."""
        self._settle(hint.at_s)
        kind, expected_s = claim_of(hint)
        if kind is None:
            return hint
        self.counts[kind, "received"] += 1
        reading = self.reading(hint.session, kind)
        of = self.open.setdefault(hint.session, {})
        if kind not in of:  # told again it is the same claim, and still the first one's time counts
            until_s = hint.at_s + (STAYS_S if expected_s == math.inf else LATE_TIMES * expected_s + LATE_S)
            of[kind] = _OpenHint(hint.at_s, expected_s, until_s, reading)
        if len(self.open) > SESSIONS_MAX:
            self.open.popitem(last=False)
        return Hint(hint.session, hint.at_s, hint.event, hint.expected_return_s, reading)

    def reading(self, session: SessionKey, kind: HintKind) -> HintReading:
        """Return how a session's hints of this kind are read now."""
        first = HintReading(_FIRST.get(kind, TRUST), _SPREAD)
        tenant = self._tenants.get((tenant_of(session), kind))
        if tenant is not None:
            first = tenant.reading(first, _STRENGTH)
        own = self._sessions.get((session, kind))
        return first if own is None else own.reading(first, _STRENGTH / 4)

    def arrived(self, session: SessionKey, now_s: float) -> None:
        """Judge a session's open hints: its next turn begins."""
        for kind, one in self.open.pop(session, {}).items():
            if one.expected_s == math.inf:
                self._judge(session, kind, float(now_s >= one.until_s), 0.0)
                continue
            error = abs(log_error(max(0.0, now_s - one.told_s), one.expected_s))
            likely = one.reading.trust * float(logistic(error, one.reading.spread))
            self._judge(session, kind, likely / (likely + (1.0 - one.reading.trust) * ANYWHERE), error)

    def forget(self, session: SessionKey) -> None:
        """Forget a session, but not what its tenant's hints were worth."""
        self.open.pop(session, None)
        for kind in get_args(HintKind):
            self._sessions.pop((session, kind), None)

    def stats(self) -> dict[str, int]:
        """Return the counts by `kind:outcome`."""
        return {f"{kind}:{outcome}": count for (kind, outcome), count in self.counts.items()}

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is wrong."""
        assert len(self.open) <= SESSIONS_MAX, "too many hints are open"
        assert len(self._sessions) <= SESSIONS_MAX, "too many sessions have a record"
        assert len(self._tenants) <= TENANTS_MAX, "too many tenants have a record"
        for worth in (*self._sessions.values(), *self._tenants.values()):
            assert 0.0 <= worth.exact <= worth.judged + 1e-9, "more hints came true than were judged"

    def _settle(self, now_s: float) -> None:
        """Judge hints whose time is long over; the oldest first, a few a call."""
        for session in list(self.open)[:SETTLED_A_CALL] if self.open else ():
            of = self.open[session]
            for kind in [kind for kind, one in of.items() if one.until_s <= now_s]:
                self._judge(session, kind, float(of.pop(kind).expected_s == math.inf), 0.0)
            if not of:
                del self.open[session]
            else:
                self.open.move_to_end(session)

    def _judge(self, session: SessionKey, kind: HintKind, share: float, error: float) -> None:
        self.counts[kind, "true" if share >= 0.5 else "false"] += 1
        for table, name, most in (
            (self._tenants, tenant_of(session), TENANTS_MAX),
            (self._sessions, session, SESSIONS_MAX),
        ):
            worth = table.setdefault((name, kind), _HintWorth())
            table.move_to_end((name, kind))
            worth.judge(share, error)
            if len(table) > most:
                table.popitem(last=False)


_SOON_S: Final = 0.5


def log_error(came_s: float, told_s: float) -> float:
    """Return the log of how many times later than told it was; half a second is the smallest unit."""
    return math.log((came_s + _SOON_S) / (told_s + _SOON_S))


def claim_of(hint: Hint) -> tuple[HintKind | None, float]:
    """Return what a hint claims, and after how many seconds; infinity: never. None: it claims nothing."""
    told_s = hint.expected_return_s
    if hint.event in ("closed", "hidden"):
        return hint.event, math.inf
    if told_s is not None and 0.0 <= told_s < math.inf:
        return "return", told_s
    if hint.event in ("typing", "tool_finished"):
        return hint.event, RETURN_S[hint.event]
    return None, 0.0
