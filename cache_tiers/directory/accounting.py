"""One tier as the directory keeps it: its bytes, its copies by worth, and who must go for whom.

Knows no chains and no reservations; what is pinned it is told.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Literal

from cache_tiers.blocks import TierName
from cache_tiers.directory.extents import HeldCopy
from cache_tiers.directory.types import TierUsage
from cache_tiers.forecast import SessionKey
from cache_tiers.policy import IdleSessions, Residence, ResidencyPolicy, ValueQueue
from configs.sections import PolicySettings

# A tier's bytes: held, reserved, and evicted but not yet deleted. Also what of it is whose.
#
# Pure arithmetic; whom to evict is decided elsewhere.


class Ledger:
    """The books of one tier of `budget` bytes.

    A reservation that evicts deletes its victims before it writes, so the two never lie in the tier
    together: `promised` is what would otherwise be counted twice.
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
        """At least what lies in the tier now."""
        return self.held + self.reserved + self.dropping

    @property
    def charged(self) -> int:
        """At most what may ever lie there when everybody goes on as agreed."""
        return self.accounted - self.promised

    def reserve(self, tenant: bytes, nbytes: int, victims_bytes: int) -> None:
        self.reserved += nbytes
        self.promised += min(nbytes, victims_bytes)
        self.tenants[tenant] += nbytes

    def victim_dropped(self, nbytes: int, before: int, after: int) -> None:
        """Of the victims of a live reservation of `nbytes`, `before` bytes were undeleted, now `after`."""
        self.promised += min(nbytes, after) - min(nbytes, before)

    def end(self, tenant: bytes, nbytes: int, victims_bytes: int, *, is_held: bool) -> None:
        """A reservation became a copy, or was given back. `victims_bytes`: of its, still undeleted."""
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
        """Raises `AssertionError` naming what is wrong."""
        for name in ("held", "reserved", "dropping", "promised"):
            assert getattr(self, name) >= 0, f"{name} is {getattr(self, name)}"
        assert self.held + self.reserved <= self.budget, "more is held and reserved than the budget allows"
        assert self.held + self.reserved == self.tenants.total(), "the tenants' bytes are not the tier's"
        assert all(nbytes > 0 for nbytes in self.tenants.values()), "a tenant without bytes is remembered"


class TierAccounting:
    """Budget, copies and victims of one tier. `sessions`: whose copies they are, see `HeldCopy.owners`."""

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
        """A committed copy. Its bytes are in the ledger already."""
        for queue in (self._queue, self._queue_of(copy)):
            queue.add(copy)
        self._blocks += copy.extent.blocks
        self._tokens += copy.extent.tokens

    def evict(self, copy: HeldCopy, now_s: float) -> None:
        """The copy is held no longer; its bytes count until they are deleted."""
        tenant = copy.extent.address.tenant
        self._queue.discard(copy)
        self._tenant_queues[tenant].discard(copy)
        if not len(self._tenant_queues[tenant]):
            del self._tenant_queues[tenant]
        self._blocks -= copy.extent.blocks
        self._tokens -= copy.extent.tokens
        self.ledger.evict(tenant, copy.nbytes)
        self._residence.went(copy.nbytes, now_s)

    def refile(self, copy: HeldCopy) -> None:
        """Its sessions are others now, or it has become clean, or is clean no longer."""
        for queue in (self._queue, self._queue_of(copy)):
            queue.refile(copy)

    def changed(self, session: SessionKey, tenant: bytes) -> None:
        """There is news of a session."""
        self._queue.changed(session)
        if tenant in self._tenant_queues:
            self._tenant_queues[tenant].changed(session)

    def horizon_s(self, now_s: float) -> float:
        """How far ahead this tier looks: as long as what it holds stays."""
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
        """Who has to go for `nbytes` of `tenant`: (its own over its share, others). Nothing is changed.

        `is_there`: the record lies in the tier already, so that only the budget counts, not what is still
        to be deleted. O((victims + those that may not go) log n), and now and then a look at all sessions.
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
        """The first to go of a queue, `nbytes` of them; None when there are not as many that may."""
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
        """Any copies, held here or not, the first to go first."""
        return self._queue.order(copies, now_s, self.horizon_s(now_s))

    def all_in_order(self, now_s: float) -> list[HeldCopy]:
        """All copies, the first to go first. Looks at everything."""
        return self.order(list(self._queue), now_s)

    def coldest(self, nbytes: int, copies_max: int, now_s: float) -> list[HeldCopy]:
        """What would go first for `nbytes`, `copies_max` at most."""
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
        """Raises `AssertionError` unless the books are those of exactly these copies."""
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
