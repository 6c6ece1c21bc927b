"""Who owns which page: free, active (referenced) or cached (clean, reusable, in LRU order).

Page 0 is the trash page: padding writes there and nobody ever owns it. A page is handed out
with one reference; sequences that share it add theirs. A page whose last reference goes stays
as cache when it is published in the prefix index and is free otherwise; when the free pages
are used up the least recently used cached page is taken. Pure bookkeeping: the bytes are in
`kv_pool.py`. Not thread-safe: the engine's thread owns it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from replicas.prefix_index import ROOT_ENTRY, Entry, PrefixIndex

TRASH_PAGE = 0
OWNERS_MAX = 64
"""Owners of one page that are told apart. A page of more is common property: only its tenant clears it."""


class OutOfPages(Exception):
    """Every page is referenced by a running sequence."""


@dataclass(frozen=True, slots=True)
class Published:
    """A block is in the index, in `page`; `duplicate` when that is not the page that was offered."""

    entry: Entry
    duplicate: bool


class PagePool:
    """References and reuse of `pages - 1` usable pages of `block_tokens` slots each."""

    def __init__(self, pages: int, block_tokens: int) -> None:
        if pages < 2:
            raise ValueError(f"a pool needs the trash page and one more, not {pages} pages")
        self.pages = pages
        self.block_tokens = block_tokens
        self.index = PrefixIndex()
        self.evictions = 0
        self._refs = [0] * pages
        self._free = list(range(pages - 1, TRASH_PAGE, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._owners: dict[int, set[bytes]] = {}  # of published pages

    @property
    def usable(self) -> int:
        return self.pages - 1

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def available(self) -> int:
        """Pages that `allocate` can hand out before it raises."""
        return len(self._free) + len(self._cached)

    @property
    def active(self) -> int:
        return self.usable - self.available

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def refs(self, page: int) -> int:
        return self._refs[page]

    def allocate(self) -> int:
        """A page with one reference and no published content. Raises `OutOfPages`."""
        if self._free:
            page = self._free.pop()
        elif self._cached:
            page, _ = self._cached.popitem(last=False)
            self._unpublish(page)
            self.evictions += 1
        else:
            raise OutOfPages(f"all {self.usable} pages are in use")
        self._refs[page] = 1
        return page

    def acquire(self, page: int) -> None:
        """Add a reference to an active or cached page."""
        if self._refs[page] == 0:
            if page not in self._cached:
                raise ValueError(f"page {page} is free: nothing to share")
            del self._cached[page]
        self._refs[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Drop one reference of each page of a page table, given in the order of the sequence.

        The tail is let go first: a block is useless without its parents, so the parents must
        be the more recently used.
        """
        for page in reversed(list(pages)):
            if self._refs[page] <= 0:
                raise ValueError(f"page {page} is released more often than it was acquired")
            self._refs[page] -= 1
            if self._refs[page] == 0:
                if page in self.index:
                    self._cached[page] = None
                else:
                    self._free.append(page)

    def match(self, keys: Sequence[bytes], token_ids: Sequence[int]) -> list[Entry]:
        """The longest published prefix of the blocks with these `keys`; acquires nothing."""
        found: list[Entry] = []
        parent = ROOT_ENTRY
        for block, key in enumerate(keys):
            ids = token_ids[block * self.block_tokens : (block + 1) * self.block_tokens]
            entry = self.index.find(key, parent, ids)
            if entry is None:
                break
            found.append(entry)
            parent = entry.number
        return found

    def publish(self, key: bytes, parent: int, token_ids: Sequence[int], page: int) -> Published | None:
        """Make a fully computed, referenced page findable. None when its key collides with another block.

        When the block is there already, in another page, the caller should share that page (with
        `acquire`) and release its own.
        """
        if self._refs[page] <= 0:
            raise ValueError(f"page {page} is not referenced: its content may be anything")
        if len(token_ids) != self.block_tokens:
            raise ValueError(f"only full blocks are published, not {len(token_ids)} tokens")
        known = self.index.find(key, parent, token_ids)
        if known is not None:
            return Published(known, duplicate=known.page != page)
        entry = self.index.add(key, parent, token_ids, page)
        return None if entry is None else Published(entry, duplicate=False)

    def own(self, page: int, owner: bytes) -> None:
        """A published page is (also) `owner`'s: it is forgotten when its last owner is."""
        owners = self._owners.setdefault(page, set())
        if len(owners) <= OWNERS_MAX:
            owners.add(owner)

    def owned(self, owner: bytes) -> list[int]:
        """Published pages that are (also) this owner's."""
        return [page for page, owners in self._owners.items() if owner in owners]

    def cool(self, owner: bytes) -> int:
        """The owner's cached pages are the next to be taken; how many those are."""
        cooled = 0
        for page in reversed(self.owned(owner)):
            if page in self._cached and self._owners[page] == {owner}:
                self._cached.move_to_end(page, last=False)
                cooled += 1
        return cooled

    def forget(self, is_cleared: Callable[[bytes], bool]) -> int:
        """Nobody finds a page any more all of whose owners are cleared; how many pages that were.

        Pages in use are only unpublished: they are free when their sequences let go of them.
        """
        gone = []
        for page, owners in self._owners.items():
            is_common = len(owners) > OWNERS_MAX
            left = {owner for owner in owners if not is_cleared(owner)}
            if not left:
                gone.append(page)
            elif not is_common:
                self._owners[page] = left
        for page in gone:
            self._unpublish(page)
            if page in self._cached:
                del self._cached[page]
                self._free.append(page)
        return len(gone)

    def clear_cache(self) -> int:
        """Forget all cached pages (not those in use); how many there were."""
        forgotten = len(self._cached)
        for page in self._cached:
            self._unpublish(page)
            self._free.append(page)
        self._cached.clear()
        return forgotten

    def _unpublish(self, page: int) -> None:
        self.index.drop_page(page)
        self._owners.pop(page, None)

    def check_integrity(self, tables: Iterable[Sequence[int]] | None = None) -> None:
        """Raises `AssertionError` naming what is wrong. `tables`: all sequences' page tables, if known."""
        free, cached = set(self._free), set(self._cached)
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
        assert set(self._owners) <= published, "a page without content has an owner"
        self.index.check_integrity()
        if tables is not None:
            counted = [0] * self.pages
            for table in tables:
                for page in table:
                    counted[page] += 1
            assert counted == self._refs, "references differ from what the sequences' page tables say"
