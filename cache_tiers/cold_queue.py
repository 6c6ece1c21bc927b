"""The copies of one tier (or of one tenant in it), coldest first: whom to ask a policy about.

A policy ranks a few dozen candidates, not 100,000 copies. They are the least recently used of each
class of `keep_s`, because what is long unused but still kept must not hide what may go. Knows no
bytes, pins or quotas.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

from cache_tiers.held_extent import HeldCopy
from cache_tiers.lazy_heap import LazyHeap, Place

KEEP_CLASS_MAX = 24
"""Classes are powers of two of seconds, at most so many: a record may say anything about its `keep_s`."""

MOVES_PER_TAKEN = 64
"""Heap entries looked at for each copy taken: what was used since is put back in place, so many at a time."""


class ColdQueue:
    """Using an extent costs nothing here; adding or taking a copy O(log n)."""

    def __init__(self) -> None:
        self._classes: dict[int, LazyHeap[HeldCopy]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._classes.values()))

    @property
    def moves(self) -> int:
        """Heap entries looked at so far."""
        return sum(heap.moves for heap in self._classes.values())

    def add(self, copy: HeldCopy) -> None:
        self._classes.setdefault(_keep_class(copy), LazyHeap(_place)).add(copy)

    def discard(self, copy: HeldCopy) -> None:
        self._classes[_keep_class(copy)].discard(copy)

    def take(self, count: int) -> list[HeldCopy]:
        """Take out the `count` coldest of each class (nearly so, where very many were used since)."""
        return [copy for heap in self._classes.values() for copy in heap.take(count, MOVES_PER_TAKEN * count)]

    def give_back(self, copies: Iterable[HeldCopy]) -> None:
        for copy in copies:
            self.add(copy)

    def check_integrity(self, copies: Collection[HeldCopy]) -> None:
        """Raises `AssertionError` unless it has exactly `copies`, each in its class."""
        for heap in self._classes.values():
            heap.check_integrity()
        assert len(self) == len(copies), f"{len(self)} copies are queued, {len(copies)} are held"
        for copy in copies:
            assert copy in self._classes[_keep_class(copy)], "a copy is not in its queue"


def _place(copy: HeldCopy) -> Place:
    """Of equal use the deeper one goes first: a block is useless without its parents."""
    return copy.extent.last_used_s, -copy.extent.first_block


def _keep_class(copy: HeldCopy) -> int:
    keep_s = copy.extent.placement.keep_s
    return max(1, min(math.frexp(keep_s)[1], KEEP_CLASS_MAX)) if keep_s > 0 else 0
