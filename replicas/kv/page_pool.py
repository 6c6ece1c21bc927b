"""Page ownership: free, active (referenced) or cached (clean, reusable, ranked by value).

Page 0 is the trash page: padding writes there and it is never owned. A page is allocated with one reference;
sequences that share it add theirs. When its last reference is released, a page stays as cache if it is
published in the prefix index and is free otherwise; when no page is free, the cached page that the policy
values least is evicted. Pure bookkeeping: the bytes are in `kv_pool.py`. Not thread-safe: only the engine's
thread uses it.
"""

from __future__ import annotations

import itertools
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from samovar.cache_tiers.blocks import TAG_BYTES, session_owner
from samovar.cache_tiers.events.feed import POOL, BlocksRemoved, BlocksStored, EventFeed, hash_of
from samovar.cache_tiers.forecast import Forecast, HintEvent, SessionKey
from samovar.cache_tiers.policy import (
    IdleSessions,
    LeastRecentlyUsed,
    Residence,
    ResidencyPolicy,
    Thing,
    ValueQueue,
    faded_rate,
    used_rate,
)
from samovar.configs.sections import PolicySettings

ROOT_ENTRY = 0
"""The parent entry number of a conversation's first block."""


@dataclass(frozen=True, slots=True)
class PrefixEntry:
    """A published block. `number` is never reused, so it identifies the whole prefix."""

    number: int
    parent: int
    key: bytes
    token_ids: array[int]
    page: int


class PrefixIndex:
    """Maps key -> entry and page -> entry, one to one.

    A key is only a hash: a hit counts if the page's own token ids match *and* it was computed behind the same
    entry that the walk came from (GHSA-rm76-4mrf-v9r8; F16 in docs/faults.md). So even a broken hash costs a
    miss, never a foreign block. Pure.
    """

    def __init__(self) -> None:
        self._by_key: dict[bytes, PrefixEntry] = {}
        self._by_page: dict[int, PrefixEntry] = {}
        self._numbers = {ROOT_ENTRY}  # of what is published
        self._next_number = ROOT_ENTRY + 1

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, page: int) -> bool:
        return page in self._by_page

    def find(self, key: bytes, parent: int, token_ids: array[int]) -> PrefixEntry | None:
        """Return the entry of exactly this block, or None, also if its key collides."""
        entry = self._by_key.get(key)
        if entry is None or entry.parent != parent or entry.token_ids != token_ids:
            return None
        return entry

    def add(self, key: bytes, parent: int, token_ids: array[int], page: int) -> PrefixEntry | None:
        """Publish `page` as this block; None if another block already has the key."""
        if page in self._by_page:
            raise ValueError(f"page {page} is published already")
        if key in self._by_key:
            return None
        entry = PrefixEntry(self._next_number, parent, key, token_ids, page)
        self._next_number += 1
        self._numbers.add(entry.number)
        self._by_key[key] = entry
        self._by_page[page] = entry
        return entry

    def drop_page(self, page: int) -> None:
        """Forget the block that `page` holds. Raises `KeyError` if it holds none."""
        entry = self._by_page.pop(page)
        del self._by_key[entry.key]
        self._numbers.remove(entry.number)

    def orphan(self, key: bytes) -> PrefixEntry | None:
        """Return the block that has the key if its parent is published no more: no walk finds it again."""
        entry = self._by_key.get(key)
        return None if entry is None or entry.parent in self._numbers else entry

    def of_page(self, page: int) -> PrefixEntry | None:
        """Return the block that `page` holds."""
        return self._by_page.get(page)

    def chains(self) -> list[list[PrefixEntry]]:
        """Return every chain from its first to a last block; skip chains without a beginning."""
        by_number = {entry.number: entry for entry in self._by_page.values()}
        followed = {entry.parent for entry in by_number.values()}
        found = []
        for last in by_number.values():
            if last.number in followed:
                continue
            chain, at = [last], last
            while at.parent in by_number:
                at = by_number[at.parent]
                chain.append(at)
            if at.parent == ROOT_ENTRY:
                found.append(chain[::-1])
        return found

    def pages(self) -> set[int]:
        return set(self._by_page)

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is wrong."""
        assert len(self._by_key) == len(self._by_page), "key and page maps differ in size"
        for key, entry in self._by_key.items():
            assert entry.key == key, f"entry {entry.number} is filed under a foreign key"
            assert self._by_page.get(entry.page) is entry, f"page {entry.page} has another entry"
            assert entry.parent < entry.number < self._next_number, "an entry is older than its parent"
        numbers = {ROOT_ENTRY, *[entry.number for entry in self._by_page.values()]}
        assert self._numbers == numbers, "another number than an entry's counts as published"


FADES_S = 30.0
"""A use that lasted for less leaves a page's rate, which is of ten minutes, as it is: else a long history
costs an exponential for each page at each turn's end."""


class OwnedPages:
    """Pages by owner, and owners by session and tenant: forgetting visits no other owner's pages.

    An owner is a tenant's tag followed by a lineage's tag; its first `TAG_BYTES` are the tenant, and the tag
    of a whole session names all owners of it. Every page may have several owners; only owners of at least one
    page are kept. Pure bookkeeping for `page_pool.py`.
    """

    def __init__(self) -> None:
        self._pages: dict[bytes, dict[int, None]] = {}  # owner -> its pages, in the order it came to own them
        self._owners: dict[bytes, dict[bytes, None]] = {}  # tenant, or whole session of it -> its owners

    def add(self, owner: bytes, page: int) -> None:
        self._pages.setdefault(owner, {})[page] = None
        for group in _groups(owner):
            self._owners.setdefault(group, {})[owner] = None

    def remove(self, owner: bytes, page: int) -> None:
        """Remove a page from an owner. Raises `KeyError` if the page is not this owner's."""
        pages = self._pages[owner]
        del pages[page]
        if not pages:
            del self._pages[owner]
            for group in _groups(owner):
                owners = self._owners[group]
                del owners[owner]
                if not owners:
                    del self._owners[group]

    def of(self, owner: bytes) -> list[int]:
        """Return the pages of an owner, or of all owners of a whole session."""
        return list(dict.fromkeys(page for one in self.owners((owner,)) for page in self._pages[one]))

    def owners(self, tags: Iterable[bytes]) -> set[bytes]:
        """Return the owners of a page that match `tags`: owner's, whole session's or tenant's tags."""
        found: set[bytes] = set()
        for tag in tags:
            found.update(self._owners.get(tag, ()))
            if tag in self._pages:
                found.add(tag)
        return found

    def check_integrity(self, owners_of: Mapping[int, Collection[bytes]]) -> None:
        """Raise `AssertionError` naming what is wrong. `owners_of`: of every page that has any."""
        told = {(owner, page) for page, owners in owners_of.items() for owner in owners}
        filed = {(owner, page) for owner, pages in self._pages.items() for page in pages}
        assert filed == told, "a page is filed under another owner than it has"
        assert all(self._pages.values()), "an owner without pages is remembered"
        known = {(group, owner) for owner in self._pages for group in _groups(owner)}
        grouped = {(group, owner) for group, owners in self._owners.items() for owner in owners}
        assert grouped == known, "an owner is filed under another tenant or session"
        assert all(self._owners.values()), "a tenant or session without owners is remembered"


def _groups(owner: bytes) -> tuple[bytes, bytes]:
    return owner[:TAG_BYTES], session_owner(owner)


TRASH_PAGE = 0
OWNERS_MAX = 64
"""Limit of separate owners of one page. A page with more is shared: only its tenant clears it."""


NO_OWNER: frozenset[bytes] = frozenset()


class OutOfPages(Exception):
    """Every page is referenced by a running sequence."""


@dataclass(frozen=True, slots=True)
class Published:
    """A block in the index, in `page`; `duplicate` if that is not the page that was offered."""

    entry: PrefixEntry
    duplicate: bool


@dataclass(frozen=True, slots=True)
class ExpectedReturns:
    """Sums over idle sessions of P(resumes within the horizon): of 1, and of the session's tokens."""

    sessions: float
    tokens: float


@dataclass(slots=True, eq=False)
class CachedPage:
    """A published page as its queue ranks it (a `Thing`). `owners`: tenant's and session's tags."""

    page: int
    owners: frozenset[bytes] = NO_OWNER
    used_s: float = 0.0
    end_tokens: int = 0
    saved_s: float = 1.0
    rate_per_s: float = 0.0
    min_ttl_s: float = 0.0
    is_clean: bool = True


class PoolReturns:
    """When the owners of cached pages are expected back: what is learnt of it, and ranks their pages again.

    `sessions`: what the policy knows of the owners: update it, then call `changed`.
    """

    def __init__(
        self, sessions: IdleSessions, queue: TenantPages[CachedPage], clock: Callable[[], float]
    ) -> None:
        self._sessions = sessions
        self._queue = queue
        self._clock = clock

    def hint(self, owner: bytes, event: HintEvent | None, expected_return_s: float | None) -> None:
        """Apply a client's hint about an idle lineage (its owner tags); ignored if the owner is unknown."""
        if self._sessions.hint(owner, event, expected_return_s, self._clock()):
            self.changed(owner)

    def told(self, owner: bytes, forecast: Forecast, since_s: float) -> None:
        """Apply a forecast for an owner, and for others that it changes, counted from `since_s`."""
        for changed in self._sessions.told(owner, forecast, since_s):
            self._queue.changed(changed)

    def changed(self, owner: bytes) -> None:
        """Rank an owner's pages again after a change in `sessions`."""
        self._queue.changed(owner)

    def within(self, horizon_s: float) -> ExpectedReturns:
        """Return the expected resumptions; `horizon_s` by the pool's clock."""
        return ExpectedReturns(*self._sessions.expected(self._clock(), horizon_s))

    @property
    def now_s(self) -> float:
        """The time by the clock that `sessions` uses."""
        return self._clock()


class PagePool:
    """Tracks references and reuse of `pages - 1` usable pages of `block_tokens` slots each.

    `policy`: which cached page is evicted first; least recently used by default. `clock`: monotonic seconds,
    by default a count of releases. `saved_s`: seconds saved by having a block that ends at this many tokens;
    equal for all by default. `tenant_share`: cached pages of a tenant with more than this share of the pool
    go first.
    """

    def __init__(
        self,
        pages: int,
        block_tokens: int,
        *,
        policy: ResidencyPolicy | None = None,
        settings: PolicySettings | None = None,
        clock: Callable[[], float] | None = None,
        sessions_max: int = 100_000,
        saved_s: Callable[[int], float] | None = None,
        tenant_share: float = 1.0,
    ) -> None:
        if pages < 2:
            raise ValueError(f"a pool needs the trash page and one more, not {pages} pages")
        self.pages = pages
        self.block_tokens = block_tokens
        self.index = PrefixIndex()
        self.evictions = 0
        self._refs = [0] * pages
        self._free = list(range(pages - 1, TRASH_PAGE, -1))
        settings = settings or PolicySettings()
        self.sessions = IdleSessions(sessions_max)
        """What the policy knows of the owners: update it, then call `returns.changed`."""
        self._clock = clock or itertools.count(1).__next__
        self._saved_s = saved_s
        pages_max = None if tenant_share >= 1 else int(tenant_share * self.usable)
        self._queue: TenantPages[CachedPage] = TenantPages(
            self.sessions, policy or LeastRecentlyUsed(), settings.rerank_s, pages_max
        )
        self.returns = PoolReturns(self.sessions, self._queue, self._clock)
        self._residence = Residence(settings.horizon_s_min, settings.residence_s_max)
        self._first_to_evict: dict[int, None] = {}  # cached pages that are evicted before all others
        self._published: dict[int, CachedPage] = {}
        self._owned = OwnedPages()

    @property
    def usable(self) -> int:
        return self.pages - 1

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        return len(self._queue) + len(self._first_to_evict)

    @property
    def available(self) -> int:
        """Pages that `allocate` can return before it raises."""
        return len(self._free) + self.cached

    @property
    def active(self) -> int:
        return self.usable - self.available

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def refs(self, page: int) -> int:
        return self._refs[page]

    def allocate(self) -> int:
        """Return a page with one reference and no published content. Raises `OutOfPages`."""
        page = self._free.pop() if self._free else self._evict()
        self._refs[page] = 1
        return page

    def _evict(self) -> int:
        now_s = self._clock()
        if self._first_to_evict:
            page = next(iter(self._first_to_evict))
            del self._first_to_evict[page]
        else:
            gone = self._queue.take(now_s, self._residence.horizon_s(self.cached, now_s))
            if gone is None:
                raise OutOfPages(f"all {self.usable} pages are in use")
            page = gone.page
        self._residence.went(1, now_s)
        self._drop(page)
        self.evictions += 1
        return page

    def acquire(self, *pages: int) -> None:
        """Add a reference to active or cached pages; a long history has thousands."""
        idle = [page for page in pages if self._refs[page] == 0]
        free = [page for page in idle if not self._is_cached(page)]
        if free:
            raise ValueError(f"page {free[0]} is free: nothing to share")
        self._uncache(idle)
        for page in pages:
            self._refs[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Release one reference of each page of a page table, given in the order of the sequence.

        The tail is released first: a block is useless without its parents, so the parents must be the more
        recently used.
        """
        table, refs, cached = list(pages), self._refs, list[CachedPage]()
        now_s = self._clock()
        for block in range(len(table) - 1, -1, -1):
            page = table[block]
            if refs[page] <= 0:
                raise ValueError(f"page {page} is released more often than it was acquired")
            refs[page] -= 1
            if refs[page] == 0:
                of = self._published.get(page)
                if of is None:
                    self._free.append(page)
                    continue
                if now_s - of.used_s > FADES_S:
                    of.rate_per_s = faded_rate(of.rate_per_s, now_s - of.used_s)
                of.used_s = now_s
                of.end_tokens = (block + 1) * self.block_tokens
                if self._saved_s is not None:
                    of.saved_s = self._saved_s(of.end_tokens)
                cached.append(of)
        if cached:
            self._queue.add(*cached)

    def _uncache(self, pages: Iterable[int]) -> None:
        self._queue.discard(*[self._published[page] for page in pages])
        if self._first_to_evict:
            for page in pages:
                self._first_to_evict.pop(page, None)

    def _is_cached(self, page: int) -> bool:
        return page in self._first_to_evict or self._published.get(page) in self._queue

    def match(self, keys: Sequence[bytes], token_ids: Sequence[int]) -> list[PrefixEntry]:
        """Return the longest published prefix of the blocks with these `keys`; acquires no page."""
        found: list[PrefixEntry] = []
        parent, token_ids = ROOT_ENTRY, array("I", token_ids)
        for block, key in enumerate(keys):
            ids = token_ids[block * self.block_tokens : (block + 1) * self.block_tokens]
            entry = self.index.find(key, parent, ids)
            if entry is None:
                break
            found.append(entry)
            parent = entry.number
        return found

    def publish(self, key: bytes, parent: int, token_ids: Sequence[int], page: int) -> Published | None:
        """Make a fully computed, referenced page findable. None if its key collides with another block.

        If the block is already in another page, the caller should share that page (with `acquire`) and
        release its own.
        """
        if self._refs[page] <= 0:
            raise ValueError(f"page {page} is not referenced: its content may be anything")
        if len(token_ids) != self.block_tokens:
            raise ValueError(f"only full blocks are published, not {len(token_ids)} tokens")
        token_ids = array("I", token_ids)
        known = self.index.find(key, parent, token_ids)
        if known is not None:
            return Published(known, duplicate=known.page != page)
        entry = self.index.add(key, parent, token_ids, page)
        if entry is None and (orphan := self.index.orphan(key)) is not None:
            self.unpublish([orphan.page])  # it stayed for longer than its parent, which was published again
            entry = self.index.add(key, parent, token_ids, page)
        if entry is None:
            return None
        self._published[page] = CachedPage(page)
        return Published(entry, duplicate=False)

    def own(self, owner: bytes, *pages: int) -> None:
        """Add an owner to published pages; a page is forgotten with its last owner."""
        now_s = self._clock()
        for page in pages:
            of = self._published[page]
            of.rate_per_s = used_rate(of.rate_per_s, now_s - of.used_s)
            of.used_s = now_s
            if owner not in of.owners and len(of.owners) <= OWNERS_MAX:
                if not of.owners:
                    self._queue.gained((owner,))
                of.owners |= {owner}
                self._owned.add(owner, page)
                self._queue.requeue(of)

    def owned(self, owner: bytes) -> list[int]:
        """Return the published pages that are (also) this owner's, or any owner's of a whole session."""
        return self._owned.of(owner)

    def evict_first(self, owner: bytes) -> int:
        """Make the owner's cached pages the next to evict; return their number.

        Pages with other owners are left out.
        """
        pages = [page for page in self.owned(owner) if self._is_cached(page)]
        owners = self._owned.owners((owner,))
        alone = [page for page in reversed(pages) if self._published[page].owners <= owners]
        self._uncache(alone)
        self._first_to_evict = {**dict.fromkeys(alone), **self._first_to_evict}
        return len(alone)

    def owners_of(self, page: int) -> frozenset[bytes]:
        """Return a page's owners; empty if it is not published."""
        return self._published[page].owners if page in self._published else NO_OWNER

    def forget(self, tags: Collection[bytes]) -> int:
        """Unpublish the pages whose owners are all cleared; return their number.

        `tags`: of owners, or of sessions or tenants with all their owners. Pages in use are only unpublished:
        they are free when their sequences release them. Visits no other owner's pages.
        """
        cleared = self._owned.owners(tags)
        gone = []
        for page in {page: None for owner in cleared for page in self._owned.of(owner)}:
            of = self._published[page]
            left = of.owners - cleared
            if not left:
                gone.append(page)
            elif len(of.owners) <= OWNERS_MAX:  # else shared by too many to track
                for owner in of.owners & cleared:
                    self._owned.remove(owner, page)
                of.owners = left
                self._queue.requeue(of)
        return self.unpublish(gone)

    def unpublish(self, pages: Iterable[int]) -> int:
        """Let no prompt find these pages any more, with all their owners; return how many were published."""
        gone = [page for page in pages if page in self._published]
        for page in gone:
            if self._is_cached(page):
                self._uncache([page])
                self._free.append(page)
            self._drop(page)
        return len(gone)

    def clear_cache(self) -> int:
        """Forget all cached pages (not those in use); return their number."""
        cached = [page for page in self._published if self._is_cached(page)]
        self._uncache(cached)
        for page in cached:
            self._drop(page)
            self._free.append(page)
        return len(cached)

    def _drop(self, page: int) -> None:
        self.index.drop_page(page)
        owners = self._published.pop(page).owners
        for owner in owners:
            self._owned.remove(owner, page)
        if owners:
            self._queue.lost(owners)

    def check_integrity(self, tables: Iterable[Sequence[int]] | None = None) -> None:
        """Raise `AssertionError` naming what is wrong. `tables`: all sequences' page tables, if known."""
        free, queued = set(self._free), {cached.page for cached in self._queue}
        cached = queued | set(self._first_to_evict)
        assert not queued & set(self._first_to_evict), "a page is to go by its worth, and before all others"
        assert len(free) == len(self._free), "a page is in the free list twice"
        assert not free & cached, f"pages both free and cached: {sorted(free & cached)}"
        assert TRASH_PAGE not in free | cached, "the trash page is up for use"
        assert self._refs[TRASH_PAGE] == 0, "the trash page has an owner"
        for page in range(1, self.pages):
            refs = self._refs[page]
            assert refs >= 0, f"page {page} has {refs} references"
            assert (refs == 0) == (page in free or page in cached), (
                f"page {page} with {refs} references is lost"
            )
        published = self.index.pages()
        assert cached <= published, "a cached page has no content"
        assert not free & published, "a free page is still published"
        assert set(self._published) == published, "a page without content has an owner"
        for page, of in self._published.items():
            assert of.page == page, f"page {page} is ranked as another"
        self._owned.check_integrity({page: of.owners for page, of in self._published.items()})
        self._queue.check_integrity()
        self._queue.check_published([of.owners for of in self._published.values() if of.owners])
        self.sessions.check_integrity()
        self.index.check_integrity()
        if tables is not None:
            counted = [0] * self.pages
            for table in tables:
                for page in table:
                    counted[page] += 1
            assert counted == self._refs, "references differ from what the sequences' page tables say"


T = TypeVar("T", bound=Thing)


class TenantPages(ValueQueue[T], Generic[T]):
    """Ranks cached pages by value; pages of a tenant above its share are evicted first.

    A tenant's share counts all its published pages, including those in use. While no tenant is above its
    share, or the tenants above it have no cached pages, all pages are ranked together, as in a plain
    `ValueQueue`.

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

    def add(self, *things: T) -> None:
        super().add(*things)
        if self._pages_max is None:
            return
        for thing in things:
            tenant = tenant_of(thing.owners)
            queue = self._queues.get(tenant)
            if queue is None:
                queue = self._queues[tenant] = ValueQueue(self._sessions, self._policy, self._rerank_s)
            queue.add(thing)
            self._cached_of[thing] = tenant

    def discard(self, *things: T) -> None:
        super().discard(*things)
        if self._pages_max is not None:
            for thing in things:
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


class AnnouncedPool(PagePool):
    """A pool that tells `feed` which blocks are published in it, and which are no longer.

    `is_salted`: there are tenants, who find only their own blocks: a chain's first block says whose it is.
    """

    def __init__(
        self, feed: EventFeed, is_salted: bool, pages: int, block_tokens: int, **options: Any
    ) -> None:
        super().__init__(pages, block_tokens, **options)
        self._feed = feed
        self._is_salted = is_salted
        self._told: dict[int, int] = {}  # number of an entry -> the hash that it was told by
        self._untold: dict[int, PrefixEntry] = {}  # by page, until it is known whose it is
        self._is_erasing = False

    def publish(self, key: bytes, parent: int, token_ids: Sequence[int], page: int) -> Published | None:
        published = super().publish(key, parent, token_ids, page)
        if published is not None and published.entry.number not in self._told:
            self._untold[published.entry.page] = published.entry
        return published

    def own(self, owner: bytes, *pages: int) -> None:
        super().own(owner, *pages)
        for page in pages if self._untold else ():
            entry = self._untold.pop(page, None)
            if entry is not None:
                self._tell(entry, owner)

    def _tell(self, entry: PrefixEntry, owner: bytes) -> None:
        parent = self._told.get(entry.parent)
        if parent is None and entry.parent != ROOT_ENTRY:
            return  # what is before it has left: no prompt finds it
        self._told[entry.number] = own = hash_of(entry.key)
        salt = owner[:TAG_BYTES].hex() if self._is_salted else ""
        self._feed.tell(BlocksStored((own,), parent, entry.token_ids, self.block_tokens, POOL, salt))

    def forget(self, tags: Collection[bytes]) -> int:
        self._is_erasing = True
        try:
            return super().forget(tags)
        finally:
            self._is_erasing = False

    def _drop(self, page: int) -> None:
        entry = self.index.of_page(page)
        super()._drop(page)
        self._untold.pop(page, None)
        own = None if entry is None else self._told.pop(entry.number, None)
        if own is not None:
            self._feed.tell(BlocksRemoved((own,), POOL, self._is_erasing))
