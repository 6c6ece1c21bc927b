"""The way from a tier: so many bytes a second, which demand takes first and guesses get what is left of.

A fluid model: demands go one after the other, each as quick as the link; what was prefetched a moment ago
gives way to the next demand at once. Pure; the clock comes in.
"""

from __future__ import annotations

import math
from collections import OrderedDict

from cache_tiers.extent import LoadSource
from cache_tiers.messages import TierPrice

Move = tuple[int, LoadSource]
"""Whose blocks, and from where."""


class Link:
    """`demand_bytes`, `guess_bytes`: moved so far."""

    def __init__(self, price: TierPrice) -> None:
        self.price = price
        self.demand_bytes = 0
        self.guess_bytes = 0
        self._demand_until_s = 0.0
        self._at_s = 0.0
        self._guesses: OrderedDict[Move, float] = OrderedDict()  # what is left to move, the first first

    @property
    def demand_until_s(self) -> float:
        return self._demand_until_s

    def price_now(self, now_s: float) -> TierPrice:
        """What a load that begins now is expected to take: after the demands before it."""
        wait_s = max(0.0, self._demand_until_s - now_s)
        return TierPrice(self.price.latency_s + wait_s, self.price.bytes_per_s)

    def demand(self, nbytes: int, now_s: float) -> float:
        """When a load that begins now is through."""
        self._advance(now_s)
        self._demand_until_s = max(now_s, self._demand_until_s) + nbytes / self.price.bytes_per_s
        self.demand_bytes += nbytes
        return self._demand_until_s + self.price.latency_s

    def guess(self, what: Move, nbytes: int, now_s: float) -> None:
        """Move so much when nobody needs the link."""
        self._advance(now_s)
        self._guesses[what] = self._guesses.get(what, 0.0) + nbytes

    def cancel(self, what: Move, now_s: float) -> int:
        """Bytes of it that had not moved; nothing when it is not on its way."""
        self._advance(now_s)
        return round(self._guesses.pop(what, 0.0))

    def arrived(self, now_s: float) -> list[Move]:
        """What was guessed and is through now."""
        self._advance(now_s)
        through = []
        while self._guesses:
            what, left = next(iter(self._guesses.items()))
            if left > 0.5:
                break
            del self._guesses[what]
            through.append(what)
        return through

    def next_s(self, now_s: float) -> float:
        """When the first guess is through if no demand comes; infinity without one."""
        self._advance(now_s)
        for left in self._guesses.values():
            return max(self._at_s, self._demand_until_s) + left / self.price.bytes_per_s
        return math.inf

    def _advance(self, now_s: float) -> None:
        """What the time since the last call has moved."""
        free_s = now_s - max(self._at_s, self._demand_until_s)
        self._at_s = max(self._at_s, now_s)
        can = free_s * self.price.bytes_per_s
        for what, left in self._guesses.items():
            if can <= 0:
                break
            moved = min(left, can)
            self._guesses[what] = left - moved
            self.guess_bytes += round(moved)
            can -= moved

    def check_integrity(self) -> None:
        """Raises `AssertionError` naming what is wrong."""
        assert all(left >= 0 for left in self._guesses.values()), "less than nothing is left to move"
