"""Fair queue of several tenants: deficit round robin (Shreedhar and Varghese, 1996). Pure.

Each tenant has a line: by priority, the lowest number first, and within a priority FIFO. On its turn a tenant
gets `quantum` times its weight of credit and is served while the credit covers the cost of its first item. So
tenants that always have items waiting are served in proportion to their weights, whatever the cost and number
of their items; a single tenant has a plain FIFO queue. Priorities order a tenant's own items and are nothing
to others. An item of a worse one is due after better ones were served `PRIORITY_SHARE` times its size:
nothing waits for ever. Used for sequences that wait for a replica (cost in tokens), for prompts that wait for
the tokenizer (cost in bytes), and for work whose cost is known when it is done (seconds: see `charge`).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from typing import Generic, TypeVar

DEBT_ROUNDS_MAX = 100.0
"""Turns that a tenant may be behind at most: what costs more than them is not paid for in full."""

Item = TypeVar("Item", bound=Hashable)
Tenant = TypeVar("Tenant", bound=Hashable)


PRIORITY_SHARE = 32.0
"""How much of better priorities goes before an item of a worse one, in its own size."""


class _Lane(Generic[Item]):
    """One priority of a tenant's line.

    `costs`: waiting items, in order. `waited`: its part of what better priorities were served meanwhile.
    """

    __slots__ = ("costs", "waited")

    def __init__(self) -> None:
        self.costs: OrderedDict[Item, float] = OrderedDict()
        self.waited = 0.0


class _Line(Generic[Item]):
    """One tenant's line.

    `lanes`: by priority, the best first. `sizes`: of items whose cost is paid. `has_turn`: `credit` already
    includes this turn's share.
    """

    __slots__ = ("credit", "has_turn", "lanes", "share", "sizes")

    def __init__(self, share: float) -> None:
        self.lanes: dict[int, _Lane[Item]] = {}
        self.sizes: dict[Item, float] = {}
        self.credit = 0.0
        self.has_turn = False
        self.share = share

    def __iter__(self) -> Iterator[Item]:
        return (item for lane in self.lanes.values() for item in lane.costs)

    def lane(self, priority: int) -> _Lane[Item]:
        if priority not in self.lanes:
            self.lanes[priority] = _Lane()
            self.lanes = dict(sorted(self.lanes.items()))
        return self.lanes[priority]

    def priority_of(self, item: Item) -> int:
        return next(priority for priority, lane in self.lanes.items() if item in lane.costs)

    def size(self, item: Item, cost: float) -> float:
        return self.sizes.get(item, cost)

    def first(self, is_ready: Callable[[Item], bool] | None) -> tuple[Item, float] | None:
        """Return the next item and its cost: of a priority that is due, else of the best priority."""
        best: tuple[Item, float] | None = None
        for lane in self.lanes.values():
            if best is not None and not lane.waited:
                continue
            for item, cost in lane.costs.items():
                if is_ready is None or is_ready(item):
                    if best is None:
                        best = item, cost
                    elif lane.waited >= self.size(item, cost):
                        return item, cost
                    break
        return best

    def is_due(self, item: Item) -> bool:
        """Whether an item is due before better priorities."""
        lane = self.lanes[self.priority_of(item)]
        return 0 < self.size(item, lane.costs[item]) <= lane.waited

    def served(self, item: Item) -> None:
        """Count a served item, before it is removed: worse priorities have waited for it."""
        priority = self.priority_of(item)
        size = self.size(item, self.lanes[priority].costs[item])
        self.lanes[priority].waited = max(0.0, self.lanes[priority].waited - size)
        for other, lane in self.lanes.items():
            if other > priority:
                lane.waited += size / PRIORITY_SHARE

    def remove(self, item: Item) -> float:
        priority = self.priority_of(item)
        cost = self.lanes[priority].costs.pop(item)
        self.sizes.pop(item, None)
        if not self.lanes[priority].costs:
            del self.lanes[priority]
        return cost


class FairQueue(Generic[Tenant, Item]):
    """Orders items of several tenants by deficit round robin.

    Items are identified by hash and eq. `weights`: tenant -> weight, 1 by default.
    """

    def __init__(self, quantum: float, weights: Mapping[Tenant, float] | None = None) -> None:
        if quantum <= 0:
            raise ValueError(f"a turn must be worth something, not {quantum}")
        self._quantum = quantum
        self._weights = dict(weights or {})
        self._lines: OrderedDict[Tenant, _Line[Item]] = OrderedDict()  # in the order of their turns
        self._tenant_of: dict[Item, Tenant] = {}
        self._debts: dict[Tenant, float] = {}  # by tenants without a waiting item, while others have some

    def __len__(self) -> int:
        return len(self._tenant_of)

    def __contains__(self, item: object) -> bool:
        return item in self._tenant_of

    def __iter__(self) -> Iterator[Item]:
        """Iterate over all waiting items, tenant by tenant."""
        for line in self._lines.values():
            yield from line

    def of(self, tenant: Tenant) -> Iterator[Item]:
        """Iterate over one tenant's waiting items, in order."""
        line = self._lines.get(tenant)
        return iter(()) if line is None else iter(line)

    def tenants(self, is_ready: Callable[[Item], bool] | None = None) -> set[Tenant]:
        """Return the tenants that have a waiting item that is ready."""
        return {tenant for tenant, line in self._lines.items() if line.first(is_ready) is not None}

    def put(self, tenant: Tenant, item: Item, cost: float, priority: int = 0) -> None:
        """Append an item to its priority of its tenant's line."""
        self._line(tenant).lane(priority).costs[item] = cost
        self._tenant_of[item] = tenant

    def put_first(self, tenant: Tenant, item: Item, priority: int = 0, size: float = 0.0) -> None:
        """Return an item to the front of its priority, at no cost: its tenant has already paid for it.

        `size`: what it will take again, which better priorities of its tenant need not wait for.
        """
        self.put(tenant, item, 0.0, priority)
        line = self._lines[tenant]
        line.lane(priority).costs.move_to_end(item, last=False)
        if size:
            line.sizes[item] = size

    def is_due(self, item: Item) -> bool:
        """Whether an item goes before better priorities of its tenant: they have had their share."""
        return self._lines[self._tenant_of[item]].is_due(item)

    def pick(
        self, is_ready: Callable[[Item], bool] | None = None, passed: Collection[Tenant] = ()
    ) -> Item | None:
        """Return the next item, or None if none is ready.

        Returns the same item until it is taken, removed or no longer ready. Items that are not `is_ready` and
        the tenants in `passed` are skipped: they do not block the items behind them, and no tenant gains or
        loses credit by it.
        """
        ready = {
            tenant: (line, *found)
            for tenant, line in self._lines.items()
            if tenant not in passed and (found := line.first(is_ready)) is not None
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
            # Every item costs more than one turn: add at once all but the last of the rounds that the nearest
            # needs.
            rounds = min(math.ceil((cost - line.credit) / line.share) for line, _, cost in ready.values())
            for line, _, _ in ready.values():
                line.credit += max(0, rounds - 1) * line.share
        return None

    def take(self, item: Item) -> None:
        """Remove a served item and charge its cost to its tenant's credit."""
        line = self._lines[self._tenant_of[item]]
        line.served(item)
        line.credit -= self._remove(item)

    def charge(self, tenant: Tenant, cost: float) -> None:
        """Charge a tenant for what a served item has turned out to cost: others' turns come before its next.

        What a tenant is charged is forgotten when no item waits: it has kept no other tenant waiting.
        """
        line = self._lines.get(tenant)
        if line is not None:
            line.credit = max(line.credit - cost, -DEBT_ROUNDS_MAX * line.share)
        elif self._lines:
            most = DEBT_ROUNDS_MAX * self._quantum * self._weights.get(tenant, 1.0)
            self._debts[tenant] = min(self._debts.get(tenant, 0.0) + cost, most)

    def remove(self, item: Item) -> None:
        """Remove an item that was not served. Raises `KeyError` if it does not wait."""
        line = self._lines[self._tenant_of[item]]
        self._remove(item)
        line.credit = min(line.credit, line.share)  # credit given for this item is not for others

    def _remove(self, item: Item) -> float:
        tenant = self._tenant_of.pop(item)
        line = self._lines[tenant]
        cost = line.remove(item)
        if not line.lanes:
            del self._lines[tenant]  # and its credit: a tenant with no items saves none up
            if line.credit < 0:
                self._debts[tenant] = -line.credit
        if not self._lines:
            self._debts.clear()
        return cost

    def _line(self, tenant: Tenant) -> _Line[Item]:
        if tenant not in self._lines:
            self._lines[tenant] = _Line(self._quantum * self._weights.get(tenant, 1.0))
            self._lines[tenant].credit = -self._debts.pop(tenant, 0.0)
        return self._lines[tenant]

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is wrong."""
        listed = {item: tenant for tenant, line in self._lines.items() for item in line}
        assert listed == self._tenant_of, "an item waits in no line, or in another's"
        assert not self._debts.keys() & self._lines.keys(), "a charge is not in its tenant's line"
        for line in self._lines.values():
            assert line.lanes, "an empty line is remembered"
            assert list(line.lanes) == sorted(line.lanes), "priorities are out of order"
            assert all(lane.costs for lane in line.lanes.values()), "an empty priority is remembered"
            assert line.sizes.keys() <= set(line), "the size of an item that is gone"
            assert line.credit >= -DEBT_ROUNDS_MAX * line.share, "a tenant is charged more than it ever is"
            most = max(cost for lane in line.lanes.values() for cost in lane.costs.values()) + line.share
            assert line.credit <= most or math.isclose(line.credit, most), "a tenant saves credit up"
