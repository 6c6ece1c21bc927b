"""Whose turn it is where several tenants wait: deficit round robin (Shreedhar and Varghese, 1996). Pure.

Each tenant has a line of its own, first come first served. Turns go round: with its turn a tenant gets
`quantum` times its weight of credit, and is served while that pays for what is first in its line. So
tenants that always wait get service by their weights, whatever their items cost and however many they
send; one tenant alone is a plain queue. Used for sequences that wait for a replica (cost in tokens) and
for prompts that wait for the tokenizer (in bytes). Knows neither, and no clock.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)
Tenant = TypeVar("Tenant", bound=Hashable)


class _Line(Generic[Item]):
    """`costs`: what waits, in order. `has_turn`: its credit for this turn is in `credit` already."""

    __slots__ = ("costs", "credit", "has_turn", "share")

    def __init__(self, share: float) -> None:
        self.costs: OrderedDict[Item, float] = OrderedDict()
        self.credit = 0.0
        self.has_turn = False
        self.share = share

    def first(self, is_ready: Callable[[Item], bool] | None) -> Item | None:
        return next((item for item in self.costs if is_ready is None or is_ready(item)), None)


class FairQueue(Generic[Tenant, Item]):
    """Items are told apart by hash and eq. `weights`: tenant -> weight, 1 for those not in it."""

    def __init__(self, quantum: float, weights: Mapping[Tenant, float] | None = None) -> None:
        if quantum <= 0:
            raise ValueError(f"a turn must be worth something, not {quantum}")
        self._quantum = quantum
        self._weights = dict(weights or {})
        self._lines: OrderedDict[Tenant, _Line[Item]] = OrderedDict()  # in the order of their turns
        self._tenant_of: dict[Item, Tenant] = {}

    def __len__(self) -> int:
        return len(self._tenant_of)

    def __contains__(self, item: object) -> bool:
        return item in self._tenant_of

    def __iter__(self) -> Iterator[Item]:
        """Everything that waits, tenant by tenant."""
        for line in self._lines.values():
            yield from line.costs

    def of(self, tenant: Tenant) -> Iterator[Item]:
        """What waits of one tenant, in order."""
        line = self._lines.get(tenant)
        return iter(()) if line is None else iter(line.costs)

    def tenants(self, is_ready: Callable[[Item], bool] | None = None) -> set[Tenant]:
        """Who has something that waits and is ready."""
        return {tenant for tenant, line in self._lines.items() if line.first(is_ready) is not None}

    def put(self, tenant: Tenant, item: Item, cost: float) -> None:
        """At the end of its tenant's line."""
        self._line(tenant).costs[item] = cost
        self._tenant_of[item] = tenant

    def put_first(self, tenant: Tenant, item: Item) -> None:
        """Back to the front of the line; its tenant has paid for it."""
        self.put(tenant, item, 0.0)
        self._lines[tenant].costs.move_to_end(item, last=False)

    def pick(
        self, is_ready: Callable[[Item], bool] | None = None, passed: Collection[Tenant] = ()
    ) -> Item | None:
        """Who is next; None when nobody is ready. The same until it is taken, or gone, or not ready.

        Items that are not `is_ready` are passed over, without holding up those behind them, and so are the
        tenants in `passed`: nobody loses or gains credit by that.
        """
        ready = {
            tenant: (line, first, line.costs[first])
            for tenant, line in self._lines.items()
            if tenant not in passed and (first := line.first(is_ready)) is not None
        }
        while ready:
            for tenant, (line, first, cost) in ready.items():
                if line.credit < cost and not line.has_turn:
                    line.credit += line.share
                    line.has_turn = True
                if line.credit >= cost:
                    return first
                line.has_turn = False
                self._lines.move_to_end(tenant)
            # All are dearer than a turn: as many rounds at once as the nearest to its goal needs, but one.
            rounds = min(math.ceil((cost - line.credit) / line.share) for line, _, cost in ready.values())
            for line, _, _ in ready.values():
                line.credit += max(0, rounds - 1) * line.share
        return None

    def take(self, item: Item) -> None:
        """It is served: what it costs goes from its tenant's credit."""
        line = self._lines[self._tenant_of[item]]
        line.credit -= self._remove(item)

    def remove(self, item: Item) -> None:
        """It waits no longer, and was not served. Raises `KeyError` when it does not wait."""
        line = self._lines[self._tenant_of[item]]
        self._remove(item)
        line.credit = min(line.credit, line.share)  # what it had been given for this one is not for others

    def _remove(self, item: Item) -> float:
        tenant = self._tenant_of.pop(item)
        line = self._lines[tenant]
        cost = line.costs.pop(item)
        if not line.costs:
            del self._lines[tenant]  # and its credit: who does not wait saves nothing up
        return cost

    def _line(self, tenant: Tenant) -> _Line[Item]:
        if tenant not in self._lines:
            self._lines[tenant] = _Line(self._quantum * self._weights.get(tenant, 1.0))
        return self._lines[tenant]

    def check_integrity(self) -> None:
        """Raises `AssertionError` naming what is wrong."""
        listed = {item: tenant for tenant, line in self._lines.items() for item in line.costs}
        assert listed == self._tenant_of, "an item waits in no line, or in another's"
        for line in self._lines.values():
            assert line.costs, "an empty line is remembered"
            assert line.credit >= 0, "a tenant was served on credit that it did not have"
            most = max(line.costs.values()) + line.share
            assert line.credit <= most or math.isclose(line.credit, most), "a tenant saves credit up"
