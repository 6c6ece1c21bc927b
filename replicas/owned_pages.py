"""Which pages are whose: by owner, and by tenant. Finding what to forget looks at nothing of anybody else.

An owner is a tenant's and a session's tag, one behind the other; the first `TAG_BYTES` of it are the
tenant. Pure bookkeeping for `page_pool.py`; knows nothing of what a page is worth or who uses it now.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from cache_tiers.extent import TAG_BYTES


class OwnedPages:
    """Owners of at least one page. Every page may have several."""

    def __init__(self) -> None:
        self._pages: dict[bytes, dict[int, None]] = {}  # owner -> its pages, in the order they became its
        self._owners: dict[bytes, dict[bytes, None]] = {}  # tenant -> its owners

    def add(self, owner: bytes, page: int) -> None:
        self._pages.setdefault(owner, {})[page] = None
        self._owners.setdefault(owner[:TAG_BYTES], {})[owner] = None

    def remove(self, owner: bytes, page: int) -> None:
        """Raises `KeyError` when the page is not this owner's."""
        pages = self._pages[owner]
        del pages[page]
        if not pages:
            del self._pages[owner]
            owners = self._owners[owner[:TAG_BYTES]]
            del owners[owner]
            if not owners:
                del self._owners[owner[:TAG_BYTES]]

    def of(self, owner: bytes) -> list[int]:
        return list(self._pages.get(owner, ()))

    def owners(self, tags: Iterable[bytes]) -> set[bytes]:
        """Those who own a page, by their own tags or by their tenant's."""
        found: set[bytes] = set()
        for tag in tags:
            found.update(self._owners.get(tag, ()))
            if tag in self._pages:
                found.add(tag)
        return found

    def check_integrity(self, owners_of: Mapping[int, Collection[bytes]]) -> None:
        """Raises `AssertionError` naming what is wrong. `owners_of`: of every page that has any."""
        told = {(owner, page) for page, owners in owners_of.items() for owner in owners}
        filed = {(owner, page) for owner, pages in self._pages.items() for page in pages}
        assert filed == told, "a page is filed under another owner than it has"
        assert all(self._pages.values()), "an owner without pages is remembered"
        known = {(owner[:TAG_BYTES], owner) for owner in self._pages}
        grouped = {(tenant, owner) for tenant, owners in self._owners.items() for owner in owners}
        assert grouped == known, "an owner is filed under another tenant"
        assert all(self._owners.values()), "a tenant without owners is remembered"
