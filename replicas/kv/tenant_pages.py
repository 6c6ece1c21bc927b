"""Ranks cached pages by value; pages of a tenant above its share are evicted first.

A tenant's share counts all its published pages, including those in use. While no tenant is above its share,
or the tenants above it have no cached pages, all pages are ranked together, as in a plain `ValueQueue`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Generic, TypeVar

from samovar.cache_tiers.blocks import TAG_BYTES
from samovar.cache_tiers.forecast import SessionKey
from samovar.cache_tiers.policy import IdleSessions, ResidencyPolicy, Thing, ValueQueue

T = TypeVar("T", bound=Thing)


class TenantPages(ValueQueue[T], Generic[T]):
    """Ranks cached pages with a limit per tenant.

    `pages_max`: pages of one tenant before its own are evicted first; None: no limit.
    """

    def __init__(
        self, sessions: IdleSessions, policy: ResidencyPolicy, rerank_s: float, pages_max: int | None
    ) -> None:
        super().__init__(sessions, policy, rerank_s)
        self._pages_max = pages_max
        self._queues: dict[bytes, ValueQueue[T]] = {}
        self._cached_of: dict[T, bytes] = {}
        self._published: Counter[bytes] = Counter()
        self._over: set[bytes] = set()  # few: their shares together exceed all pages

    def gained(self, owners: Collection[SessionKey]) -> None:
        """Count a page published for these owners."""
        self._count(tenant_of(owners), 1)

    def lost(self, owners: Collection[SessionKey]) -> None:
        """Count a page of these owners as unpublished."""
        self._count(tenant_of(owners), -1)

    def _count(self, tenant: bytes, pages: int) -> None:
        if self._pages_max is None:
            return
        self._published[tenant] += pages
        count = self._published[tenant]
        if not count:
            del self._published[tenant]
        if tenant and count > self._pages_max:
            self._over.add(tenant)
        else:
            self._over.discard(tenant)

    def add(self, thing: T) -> None:
        super().add(thing)
        if self._pages_max is None:
            return
        tenant = tenant_of(thing.owners)
        queue = self._queues.get(tenant)
        if queue is None:
            queue = self._queues[tenant] = ValueQueue(self._sessions, self._policy, self._rerank_s)
        queue.add(thing)
        self._cached_of[thing] = tenant

    def discard(self, thing: T) -> None:
        super().discard(thing)
        self._gone(thing)

    def _gone(self, thing: T) -> None:
        tenant = self._cached_of.pop(thing, None)
        if tenant is None:
            return
        self._queues[tenant].discard(thing)
        if not len(self._queues[tenant]):
            del self._queues[tenant]

    def changed(self, session: SessionKey) -> None:
        super().changed(session)
        queue = self._queues.get(tenant_of((session,)))
        if queue is not None:
            queue.changed(session)

    def take(self, now_s: float, horizon_s: float) -> T | None:
        """Evict from the tenant furthest above its share, if any; else from all pages."""
        for tenant in sorted(self._over, key=self._published.__getitem__, reverse=True):
            if tenant in self._queues:
                thing = self._queues[tenant].take(now_s, horizon_s)
                assert thing is not None, "a tenant without cached pages has a queue"
                super().discard(thing)
                self._gone(thing)
                return thing
        thing = super().take(now_s, horizon_s)
        if thing is not None:
            self._gone(thing)
        return thing

    def check_integrity(self, things: Collection[T] | None = None) -> None:
        """Raise `AssertionError` naming what is wrong."""
        super().check_integrity(things)
        if self._pages_max is None:
            return
        assert set(self._cached_of) == set(self), "the tenants' pages are others than all pages"
        for tenant, queue in self._queues.items():
            queue.check_integrity([thing for thing, of in self._cached_of.items() if of == tenant])
        over = {tenant for tenant, count in self._published.items() if tenant and count > self._pages_max}
        assert self._over == over, "other tenants have more than their share"

    def check_published(self, owners: Collection[Collection[SessionKey]]) -> None:
        """Check the counts, as `check_integrity`, against the owners of every published page with any."""
        if self._pages_max is not None:
            counted = Counter(map(tenant_of, owners))
            assert +self._published == counted, "published pages are counted wrong"


def tenant_of(owners: Collection[SessionKey]) -> bytes:
    """Return the tag of a page's tenant: all its owners have the same one. Empty without owners."""
    for owner in owners:
        assert isinstance(owner, bytes)
        return owner[:TAG_BYTES]
    return b""
