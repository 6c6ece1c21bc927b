"""The sessions that may resume, as arrays, so that thousands are ranked at once.

A row holds since when a session is idle and how likely it resumes when (`forecast/turns.py`). Not
thread-safe.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from samovar.cache_tiers.forecast import (
    BINS,
    COLD,
    EDGES,
    TURN_S_MAX,
    Curves,
    Floats,
    Forecast,
    Hint,
    HintEvent,
    HintRecord,
    SessionKey,
    hinted,
    resume_probability,
)
from samovar.cache_tiers.policy import gittins

Slots = npt.NDArray[np.intp]
NO_SESSION = 0
"""The slot of sessions without a row: it has the `COLD` curve."""

_FIRST_ROWS = 64
_FRESH_MAX = 256
"""Curves whose index is worked out in one call; the rest counts by its hazard until the next."""
_COLUMNS = (
    "_excess",
    "_has_excess",
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
        # Of those that were ranked by it: by how much the Gittins index is above the hazard, by bin.
        self._excess: Curves = np.zeros((_FIRST_ROWS, BINS), dtype=np.float32)
        self._has_excess: npt.NDArray[np.bool_] = np.zeros(_FIRST_ROWS, dtype=np.bool_)
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
        self._set_curve(slot, COLD if curve is None else curve)
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
            self._set_curve(slot, curve)
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

    def indices(self, slots: Slots, idle_s: Floats) -> Floats:
        """Return the Gittins index, 1/s, of each slot after `idle_s`: see `gittins.py`."""
        fresh = slots[~self._has_excess[slots]]
        if len(fresh):
            fresh = np.unique(fresh)[:_FRESH_MAX]
            self._excess[fresh] = gittins.excesses(self.curves[fresh])
            self._has_excess[fresh] = True
        return gittins.indices(self.curves.take(slots, axis=0), self._excess.take(slots, axis=0), idle_s)

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
        self._set_curve(slot, COLD)
        self.ended_s[slot] = 0.0
        self.turn_s[slot] = self.busy_s[slot] = self.left_s[slot] = -np.inf
        self.running[slot] = self.tokens[slot] = 0
        self.new_tokens[slot] = 0.0
        self.is_tool[slot] = False
        self.next_s[slot] = np.inf
        return slot

    def _set_curve(self, slot: int, curve: Curves) -> None:
        self.curves[slot] = curve
        self._excess[slot] = 0.0
        self._has_excess[slot] = False

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
        self.hints.check_integrity()
        assert (self.running >= 0).all(), "more turns have ended than begun"
