"""Shares the limits of a tenant among several front doors. Pure.

Each front door admits its share of a limit (the limit divided by the number of front doors, rounded down)
without asking. Above its share it asks, and is allowed what the others leave of the limit: they have reported
what they have open, or were allowed it since. What others have open within their own shares is known only
after their next report, so until then a tenant may have more open than its limit: less than twice as much, see
`docs/adr/016`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


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
    """A front door. `allowed`: tenant -> what it was allowed, and the number of that question."""

    heard_s: float
    reported: Mapping[bytes, Use] = field(default_factory=dict)
    allowed: dict[bytes, tuple[int, Use]] = field(default_factory=dict)

    def use(self, tenant: bytes) -> Use:
        _, allowed = self.allowed.get(tenant, (0, NO_USE))
        return self.reported.get(tenant, NO_USE).most(allowed)


class Quotas:
    """What each front door has open, as it has told. `clock`: monotonic seconds.

    `silent_s`: a front door that was not heard of for so long is dead, and its requests with it. For as long
    after the start nobody is allowed more than a share: those who live have not all told yet.
    """

    def __init__(self, silent_s: float, clock: Callable[[], float]) -> None:
        self._silent_s = silent_s
        self._clock = clock
        self._settled_s = clock() + silent_s
        self._doors: dict[str, _Door] = {}

    @property
    def doors(self) -> int:
        """Front doors that live; 0 while it is not known."""
        self._bury()
        return len(self._doors) if self._clock() >= self._settled_s else 0

    def report(self, door: str, uses: Mapping[bytes, Use], asked: int) -> None:
        """Record what a front door has open. `asked`: the number of its last question before it counted."""
        known = self._heard(door)
        known.reported = dict(uses)
        known.allowed = {of: one for of, one in known.allowed.items() if one[0] > asked}

    def ask(self, door: str, asked: int, tenant: bytes, wanted: Use, limit: Use) -> bool:
        """Return whether a front door may have `wanted` of a tenant open in all. `asked`: counts up."""
        known = self._heard(door)
        self._bury()
        total = wanted
        for name, other in self._doors.items():
            if name != door:
                total += other.use(tenant)
        if not total.fits(limit) or self._clock() < self._settled_s:
            return False
        known.allowed[tenant] = asked, known.allowed.get(tenant, (0, NO_USE))[1].most(wanted)
        return True

    def check_integrity(self) -> None:
        """Raise `AssertionError` if the state is inconsistent."""
        for door in self._doors.values():
            for use in (*door.reported.values(), *(use for _, use in door.allowed.values())):
                assert NO_USE.fits(use), "less than nothing is open"

    def _heard(self, door: str) -> _Door:
        known = self._doors.setdefault(door, _Door(self._clock()))
        known.heard_s = self._clock()
        return known

    def _bury(self) -> None:
        now_s = self._clock()
        for name in [name for name, door in self._doors.items() if now_s - door.heard_s > self._silent_s]:
            del self._doors[name]
