"""Resumption curves by kind of session: survival curves by counting, online.

Per bin of idle time, how many resumed in it of those idle at its beginning (Kaplan and Meier, 1958; in
bins: the life table). Sessions that are still idle count as survived as far as they have got, the bin they
are in by its share so far: waiting for an outcome would leave out those that never return. Each kind's
hazards are shrunk towards those of all, and these towards `survival.COLD`, by `SHRINKAGE` sessions each.
Clock values come in with the turns; if they jump, only the counts suffer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from samovar.cache_tiers.forecast.features import PROFILES, STOPS, TOKENS_MAX, SaneClock, bounded, is_again
from samovar.cache_tiers.forecast.lineages import Lineages, oldest_of
from samovar.cache_tiers.forecast.tool_times import ToolTimes
from samovar.cache_tiers.forecast.turns import (
    BINS,
    COLD,
    EDGES_S,
    LAST_S,
    WIDTHS_S,
    Curves,
    Floats,
    Hint,
    Opening,
    SessionKey,
    Turn,
    bin_of,
    curve_of,
    hinted,
    rest_of,
    times,
)
from samovar.configs.sections import PredictorSettings

SHRINKAGE: Final = 20.0
RETURNS_MIN: Final = 50
"""Returns needed before the counts are used instead of recency alone (`COLD`)."""

NOTICED: Final = 0.05
"""A forecast that changes by a smaller share is left as it is."""

TAIL_RETURNS_MIN: Final = 200.0
"""Returns needed in a bin, or in later ones, before kinds and features are told apart there."""

_DAYS: Final = bin_of(86_400.0)
_COLD_HAZARDS: Final[list[float]] = (-np.expm1(np.diff(COLD.astype(np.float64)))).tolist()
_BEGINS_S: Final[list[float]] = EDGES_S[:-1].tolist()
_ENDS_S: Final[list[float]] = EDGES_S[1:].tolist()
_WIDTHS_S: Final[list[float]] = WIDTHS_S.tolist()
_BACKWARDS: Final = tuple(range(BINS - 1, -1, -1))
_CROSSINGS_MAX: Final = 256
"""Bins closed per call at most, so that a clock jump blocks no caller."""


@dataclass(slots=True, eq=False)
class _TypeCounts:
    """Lists of `BINS` numbers, not arrays: they are changed one at a time, several per turn.

    `pool`: of all kinds that these are shrunk to.
    """

    pool: _TypeCounts | None = None
    came_back: list[float] = field(default_factory=lambda: [0.0] * BINS)
    survived: list[float] = field(default_factory=lambda: [0.0] * BINS)
    idle: list[int] = field(default_factory=lambda: [0] * BINS)  # sessions in this bin now
    sum_ended_s: list[float] = field(default_factory=lambda: [0.0] * BINS)  # sum of their `ended_s`
    returns: int = 0  # ever, of pools
    places: tuple[_Place, ...] = ()  # that its sessions share: one each would be half of what they take

    def __post_init__(self) -> None:
        self.places = tuple((self, place) for place in range(BINS))

    def enter(self, place: int, ended_s: float) -> None:
        self.idle[place] += 1
        self.sum_ended_s[place] += ended_s

    def leave(self, place: int, ended_s: float) -> None:
        self.idle[place] -= 1
        if self.idle[place]:
            self.sum_ended_s[place] -= ended_s
        else:
            self.sum_ended_s[place] = 0.0  # also clears the rounding error

    def crossed(self, place: int, ended_s: float) -> None:
        """Move a session that has survived this bin to the next."""
        idle, sum_ended_s, following = self.idle, self.sum_ended_s, place + 1
        idle[place] = left = idle[place] - 1  # as `leave` and `enter`: sessions cross ten bins a turn
        sum_ended_s[place] = sum_ended_s[place] - ended_s if left else 0.0
        self.survived[place] += 1.0
        if following < BINS:
            idle[following] += 1
            sum_ended_s[following] += ended_s

    def returned(self, place: int, landed: int, is_event: bool) -> None:
        for survived in range(place, landed):
            self.survived[survived] += 1.0
        self.came_back[landed] += is_event

    def hazards(self, now_s: float, prior: Sequence[float]) -> list[float]:
        """Return the hazards, shrunk to `prior`."""
        hazards = []
        for place, came_back in enumerate(self.came_back):
            seen = came_back + self.survived[place] + SHRINKAGE
            if self.idle[place]:
                seen += self.share(place, now_s)
            hazards.append((came_back + SHRINKAGE * prior[place]) / seen)
        return hazards

    def share(self, place: int, now_s: float) -> float:
        """Return the share of a bin survived so far, summed over the sessions in it."""
        idle = self.idle[place]
        share = ((now_s - _BEGINS_S[place]) * idle - self.sum_ended_s[place]) / _WIDTHS_S[place]
        return min(max(share, 0.0), idle)

    def fade(self, place: int) -> None:
        self.came_back[place] *= 0.5
        self.survived[place] *= 0.5


_Place = tuple[_TypeCounts, int]
"""A kind, and the bin of idle time that a session is in."""


class KaplanMeier:
    """Counts for `kinds` kinds of sessions; a kind is a number from 0 on.

    `sessions_max`: idle sessions followed; above it, the session without news the longest is dropped.
    `window`: a bin's counts are halved when twice as many sessions were counted in it, so that old data
    fade; in later bins, which few reach, they fade later. `pools`: of each kind, the number of the pool that
    it is shrunk to: kinds of other pools say nothing of it. By default there is one.
    """

    def __init__(self, kinds: int, *, sessions_max: int, window: int, pools: Sequence[int] = ()) -> None:
        self._sessions_max = sessions_max
        self._window = window
        self._pool_of = tuple(pools) or (0,) * kinds
        self._pools = [_TypeCounts() for _ in range(max(self._pool_of) + 1)]
        self._kinds = [_TypeCounts(self._pools[pool]) for pool in self._pool_of]
        self._members: dict[int, list[_TypeCounts]] = {}
        for kind, pool in zip(self._kinds, self._pool_of, strict=True):
            self._members.setdefault(id(self._pools[pool]), []).append(kind)
        self._bins: list[dict[SessionKey, float]] = [{} for _ in range(BINS)]  # sessions' `ended_s`
        self._place: dict[SessionKey, _Place] = {}  # longest without news first
        self._now_s = 0.0

    def __len__(self) -> int:
        return len(self._place)

    @property
    def returns(self) -> tuple[int, ...]:
        """How many sessions ever resumed, by pool."""
        return tuple(pool.returns for pool in self._pools)

    @returns.setter
    def returns(self, returns: Sequence[int]) -> None:
        for pool, count in zip(self._pools, returns, strict=True):
            pool.returns = count

    def follows(self, session: SessionKey) -> bool:
        """Return whether a session is followed."""
        return session in self._place

    def is_cold(self, kind: int) -> bool:
        """Return whether too few sessions of the kind's pool have resumed to say more than `COLD`."""
        return self._pools[self._pool_of[kind]].returns < RETURNS_MIN

    def began_idle(self, session: SessionKey, kind: int, now_s: float) -> None:
        """Follow a session as idle from `now_s` on, replacing what was known of it."""
        if session in self._place:
            self.dropped(session)
        elif len(self._place) >= self._sessions_max:
            for oldest in oldest_of(self._place):
                self.dropped(oldest)
        own = self._kinds[kind]
        self._place[session] = own.places[0]
        self._bins[0][session] = now_s
        own.enter(0, now_s)
        _pool(own).enter(0, now_s)
        self._now_s = now_s

    def came_back(self, session: SessionKey, now_s: float) -> None:
        """Count a return. No-op if not followed, or not idle by then: turns overlap, clocks jump."""
        self._advance(now_s)
        found = self._leave(session)
        if found is None or now_s < found[2]:
            return
        place, kind, ended_s = found
        idle_s = now_s - ended_s
        landed = bin_of(idle_s)
        pool = _pool(kind)
        for each in (kind, pool):
            each.returned(place, landed, idle_s < LAST_S)
        pool.returns += 1
        full = 2.0 * self._window
        for counted in range(place, landed + 1):
            if pool.came_back[counted] + pool.survived[counted] >= full:
                self._fade(pool, counted)

    def dropped(self, session: SessionKey) -> None:
        """Stop following a session; what it has survived stays counted."""
        self._leave(session)

    def hazards(self, kind: int) -> list[float]:
        """Return `[BINS]` in (0, 1): of the kind, or of its pool where too little was seen."""
        return self.hazards_of(kind)[0]

    def hazards_of(self, kind: int) -> tuple[list[float], list[float]]:
        """Return `hazards` of the kind, and those of all of its pool together.

        From a day on `COLD`'s where too little was seen, by which the longest unused goes first: forecasts
        live for days, and what one of today and one of last week made up for the tail would be compared.
        """
        pool = _pool(self._kinds[kind])
        pooled = pool.hazards(self._now_s, _COLD_HAZARDS)
        of_kind = self._kinds[kind].hazards(self._now_s, pooled)
        common = [*pooled[:_DAYS], *_COLD_HAZARDS[_DAYS:]]
        both, together = [], []
        for own, shared, other, is_seen in zip(of_kind, pooled, common, _seen(pool), strict=True):
            both.append(own if is_seen else other)
            together.append(shared if is_seen else other)
        return both, together

    def seen(self, kind: int = 0) -> list[bool]:
        """Return `[BINS]`: whether enough of its pool resumed in this or later bins to tell kinds apart.

        A tail with few survivors is the same for all: what a frozen forecast made up for it would keep
        its session for hours.
        """
        return _seen(self._pools[self._pool_of[kind]])

    @property
    def counts(self) -> Floats:
        """`[2, kinds + pools, BINS]`: returns in each bin, and survivals of it; the last rows: the pools."""
        kinds = self._rows
        return np.array([[each.came_back for each in kinds], [each.survived for each in kinds]])

    @counts.setter
    def counts(self, counts: Floats) -> None:
        for each, came_back, survived in zip(self._rows, *counts.tolist(), strict=True):
            each.came_back, each.survived = came_back, survived

    def counts_so_far(self) -> Floats:
        """Return `counts` plus the partial survival of idle sessions, to save without the sessions."""
        counts = self.counts
        for row, each in enumerate(self._rows):
            counts[1, row] += [each.share(place, self._now_s) for place in range(BINS)]
        return counts

    @property
    def _rows(self) -> tuple[_TypeCounts, ...]:
        return (*self._kinds, *self._pools)

    def _fade(self, pool: _TypeCounts, place: int) -> None:
        for each in (pool, *self._members[id(pool)]):
            each.fade(place)

    def _advance(self, now_s: float) -> None:
        """Move sessions that have passed their bin to the next one."""
        self._now_s = now_s
        left = _CROSSINGS_MAX
        for place in _BACKWARDS:  # a session moves at most one bin per call
            waiting = self._bins[place]
            if not waiting:
                continue
            ends_s, following = _ENDS_S[place], place + 1
            while waiting and left:
                session, ended_s = next(iter(waiting.items()))
                if now_s - ended_s < ends_s:
                    break
                left -= 1
                del waiting[session]
                kind = self._place[session][0]
                pool = _pool(kind)
                kind.crossed(place, ended_s)
                pool.crossed(place, ended_s)
                if pool.came_back[place] + pool.survived[place] >= 2.0 * self._window:
                    self._fade(pool, place)
                if following < BINS:
                    self._bins[following][session] = ended_s
                    self._place[session] = kind.places[following]
                else:
                    del self._place[session]

    def _leave(self, session: SessionKey) -> tuple[int, _TypeCounts, float] | None:
        """Stop following; return the bin it was in, its kind, and when it became idle."""
        found = self._place.pop(session, None)
        if found is None:
            return None
        kind, place = found
        ended_s = self._bins[place].pop(session)
        kind.leave(place, ended_s)
        _pool(kind).leave(place, ended_s)
        return place, kind, ended_s

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is wrong."""
        assert len(self._place) <= self._sessions_max, "too many sessions are followed"
        assert sum(map(len, self._bins)) == len(self._place), "a session is in two bins or none"
        assert all(session in self._bins[place] for session, (_, place) in self._place.items()), "a wrong bin"
        idle = [sum(counts) for counts in zip(*(pool.idle for pool in self._pools), strict=True)]
        assert [len(waiting) for waiting in self._bins] == idle, "an idle session is not counted"
        assert np.isfinite(self.counts).all(), "a count is not finite"
        assert (self.counts >= 0.0).all(), "a count is negative"


def _pool(kind: _TypeCounts) -> _TypeCounts:
    assert kind.pool is not None, "a pool is no kind"
    return kind.pool


def _seen(pool: _TypeCounts) -> list[bool]:
    later = 0.0
    seen = []
    for came_back in reversed(pool.came_back):
        later += came_back
        seen.append(later >= TAIL_RETURNS_MIN)
    return seen[::-1]


_TURNS: Final = 4
KINDS: Final = (len(PROFILES) + 1) * (len(STOPS) + 1) * _TURNS
"""Number of kinds: profile, stop, and which turn it was: first, second, later, first beside others."""
KINDS_WITHOUT_ASIDE: Final = KINDS // _TURNS * (_TURNS - 1)
"""Their number before the last of these was told apart."""
PROFILE_KINDS: Final = KINDS // (len(PROFILES) + 1)
POOLS: Final = tuple(2 * (kind // PROFILE_KINDS) + (kind % _TURNS == _TURNS - 1) for kind in range(KINDS))
"""Of each kind, its pool: one a profile for conversations, and one for what begins beside them."""
FORGETS: Final = 2000
"""Sessions that a bin's counts keep of what they had, when they are halved at twice as many."""


def kind_of(turn: Turn, turns: int, *, is_aside: bool = False) -> int:
    """Return 0..`KINDS - 1`. `turns`: of the session, this one included; `is_aside`: see `Standing`."""
    profile = PROFILES.get(turn.profile, len(PROFILES))
    stop = STOPS.get(turn.stop, len(STOPS))
    place = _TURNS - 1 if is_aside else min(max(turns, 1), _TURNS - 1) - 1
    return (profile * (len(STOPS) + 1) + stop) * _TURNS + place


def kinds_with_aside(kinds: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
    """Return kinds as numbered today, of `KINDS_WITHOUT_ASIDE` kinds."""
    return kinds // (_TURNS - 1) * _TURNS + kinds % (_TURNS - 1)


_COLD_BYTES: Final = COLD.tobytes()


@dataclass(slots=True)
class Known:
    """One session's curve, f32 `[EDGES]`, counted from `since_s`; as bytes: an array takes twice the room."""

    told: bytes = _COLD_BYTES
    since_s: float = 0.0


K = TypeVar("K", bound=Known)


class KindForecasts(Generic[K]):
    """Counts by kind of turn, the lineages of sessions, and each one's curve: what all predictors share.

    `make`: returns the record of a new session.
    """

    def __init__(self, settings: PredictorSettings, make: Callable[[], K]) -> None:
        self.counts = KaplanMeier(KINDS, sessions_max=settings.sessions_max, window=FORGETS, pools=POOLS)
        self.lineages = Lineages(settings)
        self.tools: ToolTimes | None = None
        """How long tools take; None: no turn has called one."""
        self._sessions_max = settings.sessions_max
        self._make = make
        self._sessions: dict[SessionKey, K] = {}  # longest idle first
        self._clock = SaneClock()

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def is_cold(self) -> bool:
        """Whether too few sessions have resumed to say more than `COLD`, of any profile."""
        return max(self.counts.returns) < RETURNS_MIN

    @property
    def left_share(self) -> float:
        """See `Lineages`."""
        return self.lineages.left_share

    def others(self, session: SessionKey, at_s: float) -> tuple[tuple[SessionKey, Curves], ...]:
        """Return other lineages whose forecast the session's last turn changes; curves count from `at_s`.

        Call it once after `ended`: those that this one follows (`Lineages.followed`), as far as known.
        """
        now_s = self._clock.sane(at_s)
        changed = []
        for other, cell in self.lineages.followed(session):
            known = self._sessions.get(other)
            if known is None:
                continue
            rest = rest_of(np.frombuffer(known.told, dtype=np.float32), now_s - known.since_s)
            ratio = self.lineages.follows(other, cell, rest, now_s)
            if abs(ratio - 1.0) >= NOTICED:
                curve = times(rest.astype(np.float32), ratio)
                known.told, known.since_s = curve.tobytes(), now_s
                changed.append((other, curve))
        return tuple(changed)

    def hint(self, hint: Hint) -> Curves | None:
        """Apply a hint; return f32 `[EDGES]`, counted from `hint.at_s`. None: an unknown session."""
        known = self._sessions.get(hint.session)
        if known is None:
            return None
        now_s = self._clock.at(hint.at_s)
        curve = hinted(np.frombuffer(known.told, dtype=np.float32), now_s - known.since_s, hint)
        known.told, known.since_s = curve.tobytes(), now_s
        return curve

    def forget(self, session: SessionKey) -> None:
        """Forget a session but not what was learned from it. No-op if it is unknown."""
        self._sessions.pop(session, None)
        self.counts.dropped(session)
        self.lineages.forget(session)
        if self.tools is not None:
            self.tools.dropped(session, self._clock.now_s)

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is wrong."""
        assert len(self._sessions) <= self._sessions_max, "too many sessions are remembered"
        self.counts.check_integrity()
        self.lineages.check_integrity()
        if self.tools is not None:
            self.tools.check_integrity()

    def _began(self, session: SessionKey, opening: Opening | None, now_s: float) -> None:
        """Record that a turn begins; None: nothing is known of its prompt."""
        if opening is not None:
            for other in self.lineages.arrived(session, now_s, opening):
                self.forget(other)

    def _with_tools(self, turn: Turn, curve: Curves, now_s: float) -> Curves:
        """Return the curve of a turn that has called tools, with what is known of their times."""
        if self.tools is None:
            self.tools = ToolTimes()
        return self.tools.ended(turn.session, turn.tool, curve, now_s)

    def _used(self, session: SessionKey) -> K:
        """Return the session's record as the latest one; above `sessions_max` the oldest is forgotten."""
        known = self._sessions.get(session)
        if known is None:
            if len(self._sessions) >= self._sessions_max:
                for oldest in oldest_of(self._sessions):
                    self.forget(oldest)
            known = self._sessions[session] = self._make()
        else:
            self._sessions[session] = self._sessions.pop(session)
        return known


@dataclass(slots=True)
class _Counted(Known):
    """`prompt`: tokens of its last turn's."""

    turns: int = 0
    prompt: float = 0.0


class TypeKm(KindForecasts[_Counted]):
    """Forecasts by kind of turn alone, with the interface of `predictor.Predictor` and its robustness."""

    def __init__(self, settings: PredictorSettings) -> None:
        super().__init__(settings, _Counted)

    def arrived(self, session: SessionKey, at_s: float, opening: Opening | None = None) -> None:
        """Record that the session's next turn begins."""
        now_s = self._clock.at(at_s)
        self.counts.came_back(session, now_s)
        if self.tools is not None:
            self.tools.came_back(session, now_s)
        self._began(session, opening, now_s)

    def ended(self, turn: Turn) -> Curves:
        """Record a finished turn; return its curve, f32 `[EDGES]`, counted from the turn's end."""
        now_s = self._clock.at(turn.ended_s)
        known = self._used(turn.session)
        inputs = bounded(turn.input_tokens, TOKENS_MAX)
        known.turns += not (known.turns and is_again(inputs, bounded(turn.kept_tokens, inputs), known.prompt))
        known.prompt = inputs
        standing = self.lineages.ended(turn, now_s)
        kind = kind_of(turn, known.turns, is_aside=standing.is_aside)
        self.counts.began_idle(turn.session, kind, now_s)
        curve = COLD if self.counts.is_cold(kind) else curve_of(self.counts.hazards(kind))
        self.lineages.expects(turn.session, standing, curve, now_s)
        curve = times(curve, standing.ratio)
        if turn.tool and not self.counts.is_cold(kind):
            curve = self._with_tools(turn, curve, now_s)
        known.told, known.since_s = curve.tobytes(), now_s
        return curve
