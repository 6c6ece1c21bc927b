"""Shares the limits of a tenant among several front doors. Pure.

Each front door admits its share of a limit (the limit divided by the number of front doors, rounded down)
without asking. Above its share it asks, and is allowed what the others leave of the limit: they have reported
what they have open, or were allowed it since. What others have open within their own shares is known only
after their next report, so until then a tenant may have more open than its limit: less than twice as much
(docs/adr/016). For that the shares in force must not be more than the limit together while front doors come
and go: one gets a larger share only when the others have said that theirs are smaller.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

MANY = 1 << 40
"""Said to a front door among so many: that it has no share yet, and is to ask for all."""
BURIED_S = 60.0
"""What comes late from a dead front door is not heard for so long."""


@dataclass(frozen=True, slots=True)
class Use:
    """What a tenant has open at a front door, or may have."""

    requests: int = 0
    sequences: int = 0
    tokens: int = 0

    def __add__(self, other: Use) -> Use:
        return Use(
            self.requests + other.requests, self.sequences + other.sequences, self.tokens + other.tokens
        )

    def fits(self, limit: Use) -> bool:
        """Whether no part is above its limit."""
        return (
            self.requests <= limit.requests
            and self.sequences <= limit.sequences
            and self.tokens <= limit.tokens
        )

    def most(self, other: Use) -> Use:
        """Return the larger of each part."""
        return Use(
            max(self.requests, other.requests),
            max(self.sequences, other.sequences),
            max(self.tokens, other.tokens),
        )

    def share(self, doors: int) -> Use:
        """Return the share of each of `doors` front doors in this limit, rounded down."""
        return Use(self.requests // doors, self.sequences // doors, self.tokens // doors)


NO_USE = Use()


@dataclass(slots=True)
class _Door:
    """A front door. `allowed`: tenant -> what it was allowed, and the number of that question.

    `doors`: among how many it shares limits now, at least. `actor`: what runs it.
    """

    heard_s: float
    reported: Mapping[bytes, Use] = field(default_factory=dict)
    allowed: dict[bytes, tuple[int, Use]] = field(default_factory=dict)
    doors: int = 1
    actor: str = ""

    def use(self, tenant: bytes) -> Use:
        _, allowed = self.allowed.get(tenant, (0, NO_USE))
        return self.reported.get(tenant, NO_USE).most(allowed)


class Quotas:
    """What each front door has open, as it has told. `clock`: monotonic seconds.

    `silent_s`: a front door that was not heard of for so long is dead, and its requests with it. For as long
    after the start no front door is told whether it may have more than its share: not all have reported.
    """

    def __init__(self, silent_s: float, clock: Callable[[], float]) -> None:
        self._silent_s = silent_s
        self._clock = clock
        self._settled_s = clock() + silent_s
        self._doors: dict[str, _Door] = {}
        self._buried_s: dict[str, float] = {}

    @property
    def doors(self) -> int:
        """Front doors that live; 0 while it is not known."""
        self._forget_silent()
        return len(self._doors) if self._clock() >= self._settled_s else 0

    @property
    def actors(self) -> dict[str, str]:
        """Front door -> what runs it, of those that have said it."""
        return {name: door.actor for name, door in self._doors.items() if door.actor}

    def report(self, door: str, uses: Mapping[bytes, Use], asked: int, doors: int, actor: str = "") -> int:
        """Record what a front door has open; return among how many it shares limits from now on.

        `asked`: the number of its last question before it counted. `doors`: among how many it shares them so
        far; 0: it was never told, and has admitted nothing. Returns 0 while it is not known: it goes on as
        before.
        """
        known = self._heard(door)
        if known is None:
            return 0
        known.reported = dict(uses)
        known.allowed = {of: one for of, one in known.allowed.items() if one[0] > asked}
        known.actor = actor or known.actor
        count = self.doors
        if not count:
            known.doors = doors or 1
            return 0
        had = doors or MANY
        told = count if count >= had or self._shares_besides(door) + Fraction(1, count) <= 1 else had
        known.doors = min(had, told)
        return told

    def ask(self, door: str, asked: int, tenant: bytes, wanted: Use, limit: Use) -> bool | None:
        """Return whether a front door may have `wanted` of a tenant open in all. `asked`: counts up.

        None: it is not known yet, as not all others have said what they have, or that theirs is less.
        """
        known = self._heard(door)
        self._forget_silent()
        if known is None:
            return False
        if self._clock() < self._settled_s or self._shares_besides(door) >= 1:
            return None
        total = wanted
        for name, other in self._doors.items():
            if name != door:
                total += other.use(tenant)
        if not total.fits(limit):
            return False
        known.allowed[tenant] = asked, known.allowed.get(tenant, (0, NO_USE))[1].most(wanted)
        return True

    def bury(self, door: str) -> None:
        """Forget a front door that is known to be dead, and its requests with it."""
        if self._doors.pop(door, None) is not None:
            self._buried_s[door] = self._clock()

    def check_integrity(self) -> None:
        """Raise `AssertionError` if the state is inconsistent."""
        for door in self._doors.values():
            for use in (*door.reported.values(), *(use for _, use in door.allowed.values())):
                assert NO_USE.fits(use), "less than nothing is open"

    def _shares_besides(self, door: str) -> Fraction:
        """Return the part of a limit that all others may admit without asking."""
        return sum((Fraction(1, one.doors) for name, one in self._doors.items() if name != door), Fraction())

    def _heard(self, door: str) -> _Door | None:
        """Return what is known of a front door; None if it is dead."""
        now_s = self._clock()
        self._buried_s = {name: at_s for name, at_s in self._buried_s.items() if now_s - at_s < BURIED_S}
        if door in self._buried_s:
            return None
        known = self._doors.setdefault(door, _Door(now_s))
        known.heard_s = now_s
        return known

    def _forget_silent(self) -> None:
        now_s = self._clock()
        for name in [name for name, door in self._doors.items() if now_s - door.heard_s > self._silent_s]:
            del self._doors[name]
