"""One tier of the directory: its byte counts, its copies ranked by value, and its eviction victims.

Knows nothing of chains and reservations; the caller says which copies are pinned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Literal

from samovar.cache_tiers.blocks import TierName
from samovar.cache_tiers.directory.extents import HeldCopy
from samovar.cache_tiers.directory.types import TierUsage
from samovar.cache_tiers.forecast import SessionKey
from samovar.cache_tiers.policy import IdleSessions, Residence, ResidencyPolicy, ValueQueue
from samovar.configs.sections import PolicySettings


class Ledger:
    """Byte counts of one tier of `budget` bytes: held, reserved, evicted but not yet deleted; per tenant.

    Pure arithmetic. A reservation that evicts deletes its victims before it writes, so the two are never
    in the tier together: `promised` is what would otherwise be counted twice.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.held = 0
        self.reserved = 0
        self.dropping = 0
        self.promised = 0
        self.tenants: Counter[bytes] = Counter()  # tenant -> held + reserved

    @property
    def accounted(self) -> int:
        """Return an upper bound of the bytes in the tier now."""
        return self.held + self.reserved + self.dropping

    @property
    def charged(self) -> int:
        """Return the most bytes that can be in the tier if every reservation is used as agreed."""
        return self.accounted - self.promised

    def reserve(self, tenant: bytes, nbytes: int, victims_bytes: int) -> None:
        self.reserved += nbytes
        self.promised += min(nbytes, victims_bytes)
        self.tenants[tenant] += nbytes

    def victim_dropped(self, nbytes: int, before: int, after: int) -> None:
        """Record that of a live reservation's victims, `before` bytes were undeleted and now `after` are.

        `nbytes`: size of that reservation.
        """
        self.promised += min(nbytes, after) - min(nbytes, before)

    def end(self, tenant: bytes, nbytes: int, victims_bytes: int, *, is_held: bool) -> None:
        """End a reservation of `nbytes`: it became a copy, or was given back.

        `victims_bytes`: bytes of its victims that are not deleted yet.
        """
        self.reserved -= nbytes
        self.promised -= min(nbytes, victims_bytes)
        if is_held:
            self.held += nbytes
        else:
            self._less(tenant, nbytes)

    def adopt(self, tenant: bytes, nbytes: int) -> None:
        self.held += nbytes
        self.tenants[tenant] += nbytes

    def evict(self, tenant: bytes, nbytes: int) -> None:
        self.held -= nbytes
        self.dropping += nbytes
        self._less(tenant, nbytes)

    def _less(self, tenant: bytes, nbytes: int) -> None:
        self.tenants[tenant] -= nbytes
        if not self.tenants[tenant]:
            del self.tenants[tenant]

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is wrong."""
        for name in ("held", "reserved", "dropping", "promised"):
            assert getattr(self, name) >= 0, f"{name} is {getattr(self, name)}"
        assert self.held + self.reserved <= self.budget, "more is held and reserved than the budget allows"
        assert self.held + self.reserved == self.tenants.total(), "the tenants' bytes are not the tier's"
        assert all(nbytes > 0 for nbytes in self.tenants.values()), "a tenant without bytes is remembered"


class TierAccounting:
    """Budget, copies and victims of one tier. `sessions`: the copies' owners, see `HeldCopy.owners`."""

    def __init__(
        self,
        tier: TierName,
        budget: int,
        policy: ResidencyPolicy,
        sessions: IdleSessions,
        settings: PolicySettings,
    ) -> None:
        self.tier = tier
        self.ledger = Ledger(budget)
        self._policy = policy
        self._sessions = sessions
        self._rerank_s = settings.rerank_s
        self._queue = self._new_queue()
        self._tenant_queues: dict[bytes, ValueQueue[HeldCopy]] = {}
        self._residence = Residence(settings.horizon_s_min, settings.horizon_s_max)
        self._blocks = 0
        self._tokens = 0

    def usage(self) -> TierUsage:
        return TierUsage(self.ledger.accounted, len(self._queue), self._blocks, self._tokens)

    def add(self, copy: HeldCopy) -> None:
        """Add a committed copy. Its bytes are in the ledger already."""
        for queue in (self._queue, self._queue_of(copy)):
            queue.add(copy)
        self._blocks += copy.extent.blocks
        self._tokens += copy.extent.tokens

    def evict(self, copy: HeldCopy, now_s: float) -> None:
        """Remove a copy from those held; its bytes count until they are deleted."""
        tenant = copy.extent.address.tenant
        self._queue.discard(copy)
        self._tenant_queues[tenant].discard(copy)
        if not len(self._tenant_queues[tenant]):
            del self._tenant_queues[tenant]
        self._blocks -= copy.extent.blocks
        self._tokens -= copy.extent.tokens
        self.ledger.evict(tenant, copy.nbytes)
        self._residence.went(copy.nbytes, now_s)

    def requeue(self, copy: HeldCopy) -> None:
        """Re-queue a copy whose sessions changed, or that became clean or is clean no longer."""
        for queue in (self._queue, self._queue_of(copy)):
            queue.requeue(copy)

    def changed(self, session: SessionKey, tenant: bytes) -> None:
        """Tell the queues that what is known about a session changed."""
        self._queue.changed(session)
        if tenant in self._tenant_queues:
            self._tenant_queues[tenant].changed(session)

    def horizon_s(self, now_s: float) -> float:
        """Return how far ahead this tier looks: the residence time of what it holds."""
        return self._residence.horizon_s(self.ledger.held, now_s)

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
        """Choose the victims for `nbytes` of `tenant`: (its own over its share, others). Changes nothing.

        `is_there`: the record is in the tier already, so only the budget counts, not pending deletes.
        O((victims + those that `may_go` rejects) log n), and occasionally a scan of all sessions.
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
            others = self._choose(self._queue, short, now_s, lambda copy: copy not in gone and may_go(copy))
        return "full" if others is None else (own, others)

    def _choose(
        self, queue: ValueQueue[HeldCopy], nbytes: int, now_s: float, may_go: Callable[[HeldCopy], bool]
    ) -> list[HeldCopy] | None:
        """Return a queue's first copies to evict, `nbytes` or more; None if too few may go."""
        horizon_s = self.horizon_s(now_s)
        taken: list[HeldCopy] = []
        chosen: list[HeldCopy] = []
        freed = 0
        try:
            while freed < nbytes:
                copy = queue.take(now_s, horizon_s)
                if copy is None:
                    return None
                taken.append(copy)
                if may_go(copy):
                    chosen.append(copy)
                    freed += copy.nbytes
        finally:
            for copy in taken:
                queue.add(copy)
        return chosen

    def order(self, copies: Sequence[HeldCopy], now_s: float) -> list[HeldCopy]:
        """Return any copies, held here or not, in eviction order (first to go first)."""
        return self._queue.order(copies, now_s, self.horizon_s(now_s))

    def all_in_order(self, now_s: float) -> list[HeldCopy]:
        """Return all copies in eviction order. Scans everything."""
        return self.order(list(self._queue), now_s)

    def coldest(self, nbytes: int, copies_max: int, now_s: float) -> list[HeldCopy]:
        """Return what would be evicted first for `nbytes`, at most `copies_max` copies."""
        found: list[HeldCopy] = []
        horizon_s = self.horizon_s(now_s)
        while nbytes > 0 and len(found) < copies_max:
            copy = self._queue.take(now_s, horizon_s)
            if copy is None:
                break
            found.append(copy)
            nbytes -= copy.nbytes
        for copy in found:
            self._queue.add(copy)
        return found

    def check_integrity(self, copies: Collection[HeldCopy]) -> None:
        """Raise `AssertionError` unless the books match exactly these copies."""
        self.ledger.check_integrity()
        self._queue.check_integrity(copies)
        assert self.ledger.held == sum(copy.nbytes for copy in copies), f"{self.tier}: bytes held are wrong"
        assert self._blocks == sum(copy.extent.blocks for copy in copies), f"{self.tier}: blocks are wrong"
        assert self._tokens == sum(copy.extent.tokens for copy in copies), f"{self.tier}: tokens are wrong"
        tenants = {copy.extent.address.tenant for copy in copies}
        assert self._tenant_queues.keys() == tenants, f"{self.tier}: queues of other tenants than those held"
        for tenant, queue in self._tenant_queues.items():
            queue.check_integrity([copy for copy in copies if copy.extent.address.tenant == tenant])

    def _queue_of(self, copy: HeldCopy) -> ValueQueue[HeldCopy]:
        tenant = copy.extent.address.tenant
        if tenant not in self._tenant_queues:
            self._tenant_queues[tenant] = self._new_queue()
        return self._tenant_queues[tenant]

    def _new_queue(self) -> ValueQueue[HeldCopy]:
        return ValueQueue(self._sessions, self._policy, self._rerank_s)
