"""One tier as the directory keeps it: its bytes, its copies coldest first, and who must go for whom.

Knows no chains and no reservations; what is pinned it is told.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Literal

from cache_tiers.cold_queue import ColdQueue
from cache_tiers.extent import TierName
from cache_tiers.held_extent import HeldCopy
from cache_tiers.ledger import Ledger
from cache_tiers.policy import ResidencyPolicy
from cache_tiers.residency import Usage

CANDIDATES = 32
"""Copies of each `keep_s` class that a policy is asked about at a time."""


class TierBooks:
    """Budget, copies and victims of one tier."""

    def __init__(self, tier: TierName, budget: int, policy: ResidencyPolicy) -> None:
        self.tier = tier
        self.ledger = Ledger(budget)
        self.queue = ColdQueue()
        self._policy = policy
        self._tenant_queues: dict[bytes, ColdQueue] = {}
        self._blocks = 0
        self._tokens = 0

    def usage(self) -> Usage:
        return Usage(self.ledger.accounted, len(self.queue), self._blocks, self._tokens)

    def add(self, copy: HeldCopy) -> None:
        """A committed copy. Its bytes are in the ledger already."""
        self.queue.add(copy)
        self._tenant_queues.setdefault(copy.extent.address.tenant, ColdQueue()).add(copy)
        self._blocks += copy.extent.blocks
        self._tokens += copy.extent.tokens

    def evict(self, copy: HeldCopy) -> None:
        """The copy is held no longer; its bytes count until they are deleted."""
        tenant = copy.extent.address.tenant
        self.queue.discard(copy)
        self._tenant_queues[tenant].discard(copy)
        if not len(self._tenant_queues[tenant]):
            del self._tenant_queues[tenant]
        self._blocks -= copy.extent.blocks
        self._tokens -= copy.extent.tokens
        self.ledger.evict(tenant, copy.nbytes)

    def make_room(
        self,
        tenant: bytes,
        nbytes: int,
        tenant_bytes_max: int,
        now_s: float,
        may_go: Callable[[HeldCopy], bool],
        *,
        is_there: bool = False,
    ) -> tuple[list[HeldCopy], list[HeldCopy]] | Literal["quota", "full"]:
        """Who has to go for `nbytes` of `tenant`: (its own over its share, others). Nothing is changed.

        `is_there`: the record lies in the tier already, so that only the budget counts, not what is still
        to be deleted. O((candidates + those that may not go + uses since they were last looked at) log n).
        """
        own: list[HeldCopy] | None = []
        over = self.ledger.tenants[tenant] + nbytes - tenant_bytes_max
        if over > 0 and tenant_bytes_max < self.ledger.budget:
            queue = self._tenant_queues.get(tenant)
            own = self._choose(queue, over, now_s, may_go) if queue is not None else None
        if own is None:
            return "quota"
        in_use = self.ledger.held + self.ledger.reserved if is_there else self.ledger.charged
        short = in_use + nbytes - self.ledger.budget - sum(copy.nbytes for copy in own)
        others: list[HeldCopy] | None = []
        if short > 0:
            gone = set(own)
            others = self._choose(self.queue, short, now_s, lambda copy: copy not in gone and may_go(copy))
        return "full" if others is None else (own, others)

    def _choose(
        self, queue: ColdQueue, nbytes: int, now_s: float, may_go: Callable[[HeldCopy], bool]
    ) -> list[HeldCopy] | None:
        """The first to go of a queue, `nbytes` of them; None when there are not as many that may."""
        taken: list[HeldCopy] = []
        candidates: list[HeldCopy] = []
        chosen: list[HeldCopy] = []
        freed = 0
        try:
            while freed < nbytes:
                batch = queue.take(CANDIDATES)
                taken += batch
                candidates += filter(may_go, batch)
                if not batch and not candidates:
                    return None
                # Not more at a time than were taken of each class: the rest competes with colder ones
                # that were not seen yet.
                first = self.rank(candidates, now_s)[:CANDIDATES]
                for copy in first:
                    if freed < nbytes:
                        chosen.append(copy)
                        freed += copy.nbytes
                gone = set(first)
                candidates = [copy for copy in candidates if copy not in gone]
        finally:
            queue.give_back(taken)
        return chosen

    def rank(self, copies: Sequence[HeldCopy], now_s: float) -> list[HeldCopy]:
        """In the policy's order, the first to go first. Raises `ValueError` when its answer is no order."""
        order = self._policy.order([copy.resident() for copy in copies], self.tier, now_s)
        _check_order(order, len(copies))
        return [copies[index] for index in order]

    def coldest(self, nbytes: int, copies_max: int, now_s: float) -> Iterable[HeldCopy]:
        """What would go first for `nbytes` if no lower tier had anything, `copies_max` at most."""
        taken = self.queue.take(copies_max)
        self.queue.give_back(taken)
        candidates = [replace(copy.resident(), is_clean=False) for copy in taken]
        order = self._policy.order(candidates, self.tier, now_s)
        _check_order(order, len(taken))
        for index in order[:copies_max]:
            if nbytes <= 0:
                return
            nbytes -= taken[index].nbytes
            yield taken[index]

    def check_integrity(self, copies: Collection[HeldCopy]) -> None:
        """Raises `AssertionError` unless the books are those of exactly these copies."""
        self.ledger.check_integrity()
        self.queue.check_integrity(copies)
        assert self.ledger.held == sum(copy.nbytes for copy in copies), f"{self.tier}: bytes held are wrong"
        assert self._blocks == sum(copy.extent.blocks for copy in copies), f"{self.tier}: blocks are wrong"
        assert self._tokens == sum(copy.extent.tokens for copy in copies), f"{self.tier}: tokens are wrong"
        tenants = {copy.extent.address.tenant for copy in copies}
        assert self._tenant_queues.keys() == tenants, f"{self.tier}: queues of other tenants than those held"
        for tenant, queue in self._tenant_queues.items():
            queue.check_integrity([copy for copy in copies if copy.extent.address.tenant == tenant])


def _check_order(order: Sequence[int], count: int) -> None:
    if sorted(order) != list(range(count)):
        raise ValueError(f"a policy's order must name each of {count} candidates once, not {list(order)}")
