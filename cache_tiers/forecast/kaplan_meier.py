"""How soon sessions of a kind come back: survival curves by counting, online.

Per bin of idle time, how many came back in it of how many were idle when it began (Kaplan and Meier, 1958;
in bins: the life table). Sessions that are still idle count as survived as far as they have got, a bin
they are in by its share so far: waiting for an outcome would leave out those who never return. Each kind's
hazards are shrunk towards those of all, and these towards `survival.COLD`, by `SHRINKAGE` sessions each.
Clocks come in with the turns; if they jump the counts suffer, nothing else.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from cache_tiers.forecast.features import PROFILES, STOPS, SaneClock
from cache_tiers.forecast.survival import (
    BINS,
    COLD,
    EDGES_S,
    LAST_S,
    WIDTHS_S,
    Curves,
    Floats,
    bin_of,
    curve_of,
    hinted,
)
from cache_tiers.forecast.turns import Hint, SessionKey, Turn
from configs.sections import PredictorSettings

SHRINKAGE: Final = 20.0
RETURNS_MIN: Final = 50
"""Sessions that must have come back before counting says more than "the latest first"."""

TAIL_RETURNS_MIN: Final = 200.0
"""Returns in a bin, or in a later one, without which kinds and features are not told apart there."""

_COLD_HAZARDS: Final[list[float]] = (-np.expm1(np.diff(COLD.astype(np.float64)))).tolist()
_BEGINS_S: Final[list[float]] = EDGES_S[:-1].tolist()
_ENDS_S: Final[list[float]] = EDGES_S[1:].tolist()
_WIDTHS_S: Final[list[float]] = WIDTHS_S.tolist()
_CROSSINGS_MAX: Final = 256
"""Bins that are closed in one call at most: a clock that jumps holds nobody up."""


@dataclass(slots=True)
class _TypeCounts:
    """Lists of `BINS` numbers, not arrays: they are changed one at a time, several for every turn."""

    came_back: list[float] = field(default_factory=lambda: [0.0] * BINS)
    survived: list[float] = field(default_factory=lambda: [0.0] * BINS)
    idle: list[int] = field(default_factory=lambda: [0] * BINS)  # sessions in this bin now,
    sum_ended_s: list[float] = field(default_factory=lambda: [0.0] * BINS)  # and when they ended, together

    def enter(self, place: int, ended_s: float) -> None:
        self.idle[place] += 1
        self.sum_ended_s[place] += ended_s

    def leave(self, place: int, ended_s: float) -> None:
        self.idle[place] -= 1
        if self.idle[place]:
            self.sum_ended_s[place] -= ended_s
        else:
            self.sum_ended_s[place] = 0.0  # and with it what rounding has left

    def returned(self, place: int, landed: int, is_event: bool) -> None:
        for survived in range(place, landed):
            self.survived[survived] += 1.0
        self.came_back[landed] += is_event

    def hazards(self, now_s: float, prior: Sequence[float]) -> list[float]:
        """Shrunk to `prior`."""
        hazards = []
        for place, came_back in enumerate(self.came_back):
            seen = came_back + self.survived[place] + SHRINKAGE
            if self.idle[place]:
                seen += self.share(place, now_s)
            hazards.append((came_back + SHRINKAGE * prior[place]) / seen)
        return hazards

    def share(self, place: int, now_s: float) -> float:
        """Of a bin, what those who are in it have survived so far, together."""
        idle = self.idle[place]
        share = ((now_s - _BEGINS_S[place]) * idle - self.sum_ended_s[place]) / _WIDTHS_S[place]
        return min(max(share, 0.0), idle)

    def fade(self) -> None:
        self.came_back = [count * 0.5 for count in self.came_back]
        self.survived = [count * 0.5 for count in self.survived]


class KaplanMeier:
    """Counts of `kinds` kinds of sessions; a kind is a number from 0 on.

    `sessions_max`: idle sessions followed; those without news the longest are then no longer. `window`:
    after as many sessions what was counted is halved, so that old days fade.
    """

    def __init__(self, kinds: int, *, sessions_max: int, window: int) -> None:
        self._sessions_max = sessions_max
        self._window = window
        self._kinds = [_TypeCounts() for _ in range(kinds)]
        self._all = _TypeCounts()
        self._bins: list[dict[SessionKey, tuple[_TypeCounts, float]]] = [
            {} for _ in range(BINS)
        ]  # and `ended_s`
        self._place: dict[SessionKey, int] = {}  # the bin; without news the longest first
        self._now_s = 0.0
        self.returns = 0

    def __len__(self) -> int:
        return len(self._place)

    def began_idle(self, session: SessionKey, kind: int, now_s: float) -> None:
        """From now on, whatever was known of it before."""
        self.dropped(session)
        if len(self._place) >= self._sessions_max:
            self.dropped(next(iter(self._place)))
        self._enter(session, 0, self._kinds[kind], now_s)
        self._now_s = now_s

    def came_back(self, session: SessionKey, now_s: float) -> None:
        """Nothing if it is not followed, or was not idle yet by then: turns overlap, clocks jump."""
        self._advance(now_s)
        found = self._leave(session)
        if found is None or now_s < found[2]:
            return
        place, kind, ended_s = found
        idle_s = now_s - ended_s
        landed = bin_of(idle_s)
        kind.returned(place, landed, idle_s < LAST_S)
        self._all.returned(place, landed, idle_s < LAST_S)
        self.returns += 1
        if self._all.came_back[0] + self._all.survived[0] >= 2 * self._window:
            for each in (self._all, *self._kinds):
                each.fade()

    def dropped(self, session: SessionKey) -> None:
        """It is not followed any more; what it has survived stays counted."""
        self._leave(session)

    def hazards(self, kind: int) -> list[float]:
        """`[BINS]`: of a kind, in (0, 1); of all kinds where too little was seen to tell them apart."""
        pooled = self._all.hazards(self._now_s, _COLD_HAZARDS)
        of_kind = self._kinds[kind].hazards(self._now_s, pooled)
        both = zip(of_kind, pooled, self.seen(), strict=True)
        return [own if is_seen else common for own, common, is_seen in both]

    def seen(self) -> list[bool]:
        """`[BINS]`: enough have come back in this bin, or in a later one, to say who does.

        A tail that few have lived to see is the same for all: what a frozen forecast made up for it would
        keep its session for hours.
        """
        later = 0.0
        seen = []
        for came_back in reversed(self._all.came_back):
            later += came_back
            seen.append(later >= TAIL_RETURNS_MIN)
        return seen[::-1]

    @property
    def counts(self) -> Floats:
        """`[2, kinds + 1, BINS]`: who came back in which bin and who survived it; the last row: all kinds."""
        kinds = (*self._kinds, self._all)
        return np.array([[each.came_back for each in kinds], [each.survived for each in kinds]])

    @counts.setter
    def counts(self, counts: Floats) -> None:
        for each, came_back, survived in zip((*self._kinds, self._all), *counts.tolist(), strict=True):
            each.came_back, each.survived = came_back, survived

    def counts_so_far(self) -> Floats:
        """`counts`, those still idle included as far as they have got: for who goes on without them."""
        counts = self.counts
        for row, each in enumerate((*self._kinds, self._all)):
            counts[1, row] += [each.share(place, self._now_s) for place in range(BINS)]
        return counts

    def _advance(self, now_s: float) -> None:
        """Sessions that have been through their bin go on to the next."""
        self._now_s = now_s
        left = _CROSSINGS_MAX
        for place in range(BINS - 1, -1, -1):  # backwards: a session moves one bin a call at most
            waiting = self._bins[place]
            while waiting and left:
                session, (kind, ended_s) = next(iter(waiting.items()))
                if now_s - ended_s < _ENDS_S[place]:
                    break
                left -= 1
                self._leave(session)
                kind.survived[place] += 1.0
                self._all.survived[place] += 1.0
                if place + 1 < BINS:
                    self._enter(session, place + 1, kind, ended_s)

    def _enter(self, session: SessionKey, place: int, kind: _TypeCounts, ended_s: float) -> None:
        self._bins[place][session] = kind, ended_s
        self._place[session] = place
        kind.enter(place, ended_s)
        self._all.enter(place, ended_s)

    def _leave(self, session: SessionKey) -> tuple[int, _TypeCounts, float] | None:
        """The bin it was in, its kind, and when it began to be idle."""
        place = self._place.pop(session, None)
        if place is None:
            return None
        kind, ended_s = self._bins[place].pop(session)
        kind.leave(place, ended_s)
        self._all.leave(place, ended_s)
        return place, kind, ended_s

    def check_integrity(self) -> None:
        """Raises `AssertionError` naming what is wrong."""
        assert len(self._place) <= self._sessions_max, "too many sessions are followed"
        assert sum(map(len, self._bins)) == len(self._place), "a session is in two bins or none"
        assert all(session in self._bins[place] for session, place in self._place.items()), "a wrong bin"
        assert [len(waiting) for waiting in self._bins] == self._all.idle, "an idle session is not counted"
        assert np.isfinite(self.counts).all(), "a count is not finite"
        assert (self.counts >= 0.0).all(), "a count is negative"


KINDS: Final = (len(PROFILES) + 1) * (len(STOPS) + 1) * 3
"""Profile, stop, and whether it was the first, second or a later turn."""


def kind_of(turn: Turn, turns: int) -> int:
    """0..`KINDS - 1`. `turns`: of the session, this one included."""
    profile = PROFILES.get(turn.profile, len(PROFILES))
    stop = STOPS.get(turn.stop, len(STOPS))
    return (profile * (len(STOPS) + 1) + stop) * 3 + min(max(turns, 1), 3) - 1


@dataclass(slots=True)
class _Known:
    """Of one session: its turns so far, and its curve, counted from `since_s`."""

    curve: Curves
    turns: int = 0
    since_s: float = 0.0


class TypeKm:
    """Forecasts by kind of turn alone, in the form of `predictor.Predictor`; as careful of what turns say."""

    def __init__(self, settings: PredictorSettings) -> None:
        self.counts = KaplanMeier(KINDS, sessions_max=settings.sessions_max, window=settings.replay_turns)
        self._sessions_max = settings.sessions_max
        self._sessions: OrderedDict[SessionKey, _Known] = OrderedDict()  # the idlest first
        self._clock = SaneClock()

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def is_cold(self) -> bool:
        """Too few sessions have come back to say more than `COLD`."""
        return self.counts.returns < RETURNS_MIN

    def arrived(self, session: SessionKey, at_s: float) -> None:
        """The session's next turn begins."""
        self.counts.came_back(session, self._clock.at(at_s))

    def ended(self, turn: Turn) -> Curves:
        """f32 `[EDGES]`, counted from the turn's end."""
        now_s = self._clock.at(turn.ended_s)
        known = self._sessions.pop(turn.session, None) or _Known(COLD)
        if len(self._sessions) >= self._sessions_max:
            self.forget(next(iter(self._sessions)))
        self._sessions[turn.session] = known
        known.turns += 1
        kind = kind_of(turn, known.turns)
        self.counts.began_idle(turn.session, kind, now_s)
        known.curve = COLD if self.is_cold else curve_of(self.counts.hazards(kind))
        known.since_s = now_s
        return known.curve

    def hint(self, hint: Hint) -> Curves | None:
        """f32 `[EDGES]`, counted from `hint.at_s`; None: an unknown session."""
        known = self._sessions.get(hint.session)
        if known is None:
            return None
        now_s = self._clock.at(hint.at_s)
        known.curve = hinted(known.curve, now_s - known.since_s, hint)
        known.since_s = now_s
        return known.curve

    def forget(self, session: SessionKey) -> None:
        """Nothing if it is unknown."""
        self._sessions.pop(session, None)
        self.counts.dropped(session)

    def check_integrity(self) -> None:
        """Raises `AssertionError` naming what is wrong."""
        assert len(self._sessions) <= self._sessions_max, "too many sessions are remembered"
        self.counts.check_integrity()
