"""What clients' hints are worth: how often they come true and how exact, by tenant, session and kind.

A hint that names a time is judged when its session returns, or when it is far too late; one that says that
nobody returns when somebody does, or when long nobody has. Each session begins with what its tenant's hints
of that kind were worth, and soon has a record of its own: a lie costs the liar. Pure; times come in.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Final, Literal, get_args

from samovar.cache_tiers.blocks import TAG_BYTES
from samovar.cache_tiers.forecast.turns import (
    ANYWHERE,
    RETURN_S,
    TRUST,
    Hint,
    HintReading,
    SessionKey,
    logistic,
)

HintKind = Literal["typing", "tool_finished", "return", "closed", "hidden"]
"""What a hint claims: a return after the time that its event implies or that it names, or none."""

Outcome = Literal["received", "true", "false"]

STAYS_S: Final = 1800.0
"""Nobody returned for so long: what said so was right."""
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


class _Worth:
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
class _Open:
    told_s: float
    expected_s: float
    until_s: float
    reading: HintReading


class HintRecord:
    """What became of the hints of all sessions, see the module. Bounded; not thread-safe.

    `open`: sessions with a hint that is not judged yet; `counts`: hints by kind and outcome.
    """

    def __init__(self) -> None:
        self.open: OrderedDict[SessionKey, dict[HintKind, _Open]] = OrderedDict()
        self.counts: Counter[tuple[HintKind, Outcome]] = Counter()
        self._tenants: OrderedDict[tuple[SessionKey, HintKind], _Worth] = OrderedDict()
        self._sessions: OrderedDict[tuple[SessionKey, HintKind], _Worth] = OrderedDict()

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
            of[kind] = _Open(hint.at_s, expected_s, until_s, reading)
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
            worth = table.setdefault((name, kind), _Worth())
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


def tenant_of(session: SessionKey) -> SessionKey:
    """Return whose session it is; in a trace all are one tenant's."""
    return session[:TAG_BYTES] if isinstance(session, bytes) else b""
