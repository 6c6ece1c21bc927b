"""Which page holds which block, found by key and confirmed by token ids.

A key is only a hash: a hit counts when the page's own token ids are the wanted ones *and* it
was computed behind the very entry that the walk came from (GHSA-rm76-4mrf-v9r8; fault test
F16). So even a broken hash costs a miss, never a foreign block. Pure; the index knows nothing
of reference counts or tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ROOT_ENTRY = 0
"""The entry number that a conversation's first block has as its parent."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A published block. `number` is never given twice, so it stands for the whole prefix."""

    number: int
    parent: int
    key: bytes
    token_ids: tuple[int, ...]
    page: int


class PrefixIndex:
    """key -> entry and page -> entry, one to one."""

    def __init__(self) -> None:
        self._by_key: dict[bytes, Entry] = {}
        self._by_page: dict[int, Entry] = {}
        self._next_number = ROOT_ENTRY + 1

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, page: int) -> bool:
        return page in self._by_page

    def find(self, key: bytes, parent: int, token_ids: Sequence[int]) -> Entry | None:
        """The entry of this very block, or None. A key that collides is None too."""
        entry = self._by_key.get(key)
        if entry is None or entry.parent != parent or entry.token_ids != tuple(token_ids):
            return None
        return entry

    def add(self, key: bytes, parent: int, token_ids: Sequence[int], page: int) -> Entry | None:
        """Publish `page` as this block; None when another block has the key already."""
        if page in self._by_page:
            raise ValueError(f"page {page} is published already")
        if key in self._by_key:
            return None
        entry = Entry(self._next_number, parent, key, tuple(token_ids), page)
        self._next_number += 1
        self._by_key[key] = entry
        self._by_page[page] = entry
        return entry

    def drop_page(self, page: int) -> None:
        """Forget the block that `page` holds. Raises `KeyError` when it holds none."""
        entry = self._by_page.pop(page)
        del self._by_key[entry.key]

    def of_page(self, page: int) -> Entry | None:
        """The block that `page` holds."""
        return self._by_page.get(page)

    def chains(self) -> list[list[Entry]]:
        """Every chain from its first block to one that none follows; not those without a beginning."""
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
        """Raises `AssertionError` naming what is wrong."""
        assert len(self._by_key) == len(self._by_page), "key and page maps differ in size"
        for key, entry in self._by_key.items():
            assert entry.key == key, f"entry {entry.number} is filed under a foreign key"
            assert self._by_page.get(entry.page) is entry, f"page {entry.page} has another entry"
            assert entry.parent < entry.number < self._next_number, "an entry is older than its parent"
