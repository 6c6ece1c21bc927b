"""Shares the limits of a tenant among several ingresses. Pure.

Each ingress admits its share of a limit (the limit divided by the number of ingresses, rounded down)
without asking. Above its share it asks, and is allowed what the others leave of the limit: they have reported
what they have open, or were allowed it since. What others have open within their own shares is known only
after their next report, so until then a tenant may have more open than its limit: less than twice as much
(docs/adr/016). For that the shares in force must not be more than the limit together while ingresses come
and go: one gets a larger share only when the others have said that theirs are smaller.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

MANY = 1 << 40
"""Said to an ingress among so many: that it has no share yet, and is to ask for all."""
BURIED_S = 60.0
"""What comes late from a dead ingress is not heard for so long."""


@dataclass(frozen=True, slots=True)
class Use:
    """What a tenant has open at an ingress, or may have."""

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

    def share(self, ingresses: int) -> Use:
        """Return the share of each of `ingresses` ingresses in this limit, rounded down."""
        return Use(self.requests // ingresses, self.sequences // ingresses, self.tokens // ingresses)


NO_USE = Use()


@dataclass(slots=True)
class _Ingress:
    """An ingress. `allowed`: tenant -> what it was allowed, and the number of that question.

    `ingresses`: among how many it shares limits now, at least. `actor`: what runs it.
    """

    heard_s: float
    reported: Mapping[bytes, Use] = field(default_factory=dict)
    allowed: dict[bytes, tuple[int, Use]] = field(default_factory=dict)
    ingresses: int = 1
    actor: str = ""

    def use(self, tenant: bytes) -> Use:
        _, allowed = self.allowed.get(tenant, (0, NO_USE))
        return self.reported.get(tenant, NO_USE).most(allowed)


class Quotas:
    """What each ingress has open, as it has told. `clock`: monotonic seconds.

    `silent_s`: an ingress that was not heard of for so long is dead, and its requests with it. For as long
    after the start no ingress is told whether it may have more than its share: not all have reported.
    """

    def __init__(self, silent_s: float, clock: Callable[[], float]) -> None:
        self._silent_s = silent_s
        self._clock = clock
        self._settled_s = clock() + silent_s
        self._ingresses: dict[str, _Ingress] = {}
        self._buried_s: dict[str, float] = {}

    @property
    def ingresses(self) -> int:
        """Ingresses that live; 0 while it is not known."""
        self._forget_silent()
        return len(self._ingresses) if self._clock() >= self._settled_s else 0

    @property
    def actors(self) -> dict[str, str]:
        """Ingress -> what runs it, of those that have said it."""
        return {name: ingress.actor for name, ingress in self._ingresses.items() if ingress.actor}

    def report(
        self, ingress: str, uses: Mapping[bytes, Use], asked: int, ingresses: int, actor: str = ""
    ) -> int:
        """Record what an ingress has open; return among how many it shares limits from now on.

        `asked`: the number of its last question before it counted. `ingresses`: among how many it shares them
        so far; 0: it was never told, and has admitted nothing. Returns 0 while it is not known: it goes on
        as before.
        """
        known = self._heard(ingress)
        if known is None:
            return 0
        known.reported = dict(uses)
        known.allowed = {of: one for of, one in known.allowed.items() if one[0] > asked}
        known.actor = actor or known.actor
        count = self.ingresses
        if not count:
            known.ingresses = ingresses or 1
            return 0
        had = ingresses or MANY
        told = count if count >= had or self._shares_besides(ingress) + Fraction(1, count) <= 1 else had
        known.ingresses = min(had, told)
        return told

    def ask(self, ingress: str, asked: int, tenant: bytes, wanted: Use, limit: Use) -> bool | None:
        """Return whether an ingress may have `wanted` of a tenant open in all. `asked`: counts up.

        None: it is not known yet, as not all others have said what they have, or that theirs is less.
        """
        known = self._heard(ingress)
        self._forget_silent()
        if known is None:
            return False
        if self._clock() < self._settled_s or self._shares_besides(ingress) >= 1:
            return None
        total = wanted
        for name, other in self._ingresses.items():
            if name != ingress:
                total += other.use(tenant)
        if not total.fits(limit):
            return False
        known.allowed[tenant] = asked, known.allowed.get(tenant, (0, NO_USE))[1].most(wanted)
        return True

    def bury(self, ingress: str) -> None:
        """Forget an ingress that is known to be dead, and its requests with it."""
        if self._ingresses.pop(ingress, None) is not None:
            self._buried_s[ingress] = self._clock()

    def check_integrity(self) -> None:
        """Raise `AssertionError` if the state is inconsistent."""
        for ingress in self._ingresses.values():
            for use in (*ingress.reported.values(), *(use for _, use in ingress.allowed.values())):
                assert NO_USE.fits(use), "less than nothing is open"

    def _shares_besides(self, ingress: str) -> Fraction:
        """Return the part of a limit that all others may admit without asking."""
        return sum(
            (Fraction(1, one.ingresses) for name, one in self._ingresses.items() if name != ingress),
            Fraction(),
        )

    def _heard(self, ingress: str) -> _Ingress | None:
        """Return what is known of an ingress; None if it is dead."""
        now_s = self._clock()
        self._buried_s = {name: at_s for name, at_s in self._buried_s.items() if now_s - at_s < BURIED_S}
        if ingress in self._buried_s:
            return None
        known = self._ingresses.setdefault(ingress, _Ingress(now_s))
        known.heard_s = now_s
        return known

    def _forget_silent(self) -> None:
        now_s = self._clock()
        for name in [
            name for name, ingress in self._ingresses.items() if now_s - ingress.heard_s > self._silent_s
        ]:
            del self._ingresses[name]
