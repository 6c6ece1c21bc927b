"""A queue of things whose place only ever moves back: the smallest first, and moving costs nothing.

A place that grew since its entry was made is noticed when the entry comes to the front: it goes back into
the heap then. So using a thing is O(1), and taking one out O(log n) for each use since it was last looked at.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")
Place = tuple[float, int]

DEAD_MAX = 64
"""Dead entries that are left in a heap in any case; beyond, they may be half of it."""


class LazyHeap(Generic[Item]):
    """`place(item)` may grow while the item is in, never shrink. Items are told apart by hash and eq."""

    def __init__(self, place: Callable[[Item], Place]) -> None:
        self._place = place
        self._entries: list[tuple[Place, int, Item]] = []
        self._serials: dict[Item, int] = {}  # which entry of an item is the living one
        self._serial = 0
        self.moves = 0  # entries that were looked at: what taking things out has cost so far

    def __len__(self) -> int:
        return len(self._serials)

    def __iter__(self) -> Iterator[Item]:
        """In no order."""
        return iter(self._serials)

    def __contains__(self, item: Item) -> bool:
        return item in self._serials

    def add(self, item: Item) -> None:
        """O(log n). Raises `ValueError` when it is in already."""
        if item in self._serials:
            raise ValueError("the item is in the heap already")
        self._serial += 1
        self._serials[item] = self._serial
        heapq.heappush(self._entries, (self._place(item), self._serial, item))

    def discard(self, item: Item) -> None:
        """O(1) on average; nothing when it is not in."""
        if self._serials.pop(item, None) is not None:
            self._sweep()

    def first(self, moves_max: int) -> Item | None:
        """The item with the smallest place; it stays in.

        None when there is none, or when looking at `moves_max` entries did not show which it is: the next
        call goes on from there.
        """
        for _ in range(moves_max):
            if not self._entries:
                return None
            if self._is_settled():
                return self._entries[0][2]
        return None

    def take(self, count: int, moves_max: int) -> list[Item]:
        """Take out the `count` items with the smallest places (or all), smallest first.

        After `moves_max` entries what stands in front is taken as the smallest: it was, once.
        """
        taken: list[Item] = []
        moves_end = self.moves + moves_max
        while len(taken) < count and self._entries:
            _, serial, item = self._entries[0]
            is_late = self.moves >= moves_end and self._serials.get(item) == serial
            if is_late or self._is_settled():
                heapq.heappop(self._entries)
                del self._serials[item]
                taken.append(item)
        self._sweep()
        return taken

    def _is_settled(self) -> bool:
        """The front entry is an item in its place. If not, it is put where it belongs: one step."""
        self.moves += 1
        place, serial, item = self._entries[0]
        if self._serials.get(item) != serial:
            heapq.heappop(self._entries)
            return False
        place_now = self._place(item)
        if place_now == place:
            return True
        heapq.heapreplace(self._entries, (place_now, serial, item))
        return False

    def _sweep(self) -> None:
        """Make the heap anew when most of it is dead: O(n), once in n removals."""
        if len(self._entries) - len(self._serials) > max(DEAD_MAX, len(self._serials)):
            self._entries = [(self._place(item), serial, item) for item, serial in self._serials.items()]
            heapq.heapify(self._entries)

    def check_integrity(self) -> None:
        """Raises `AssertionError` naming what is wrong."""
        living = {item: place for place, serial, item in self._entries if self._serials.get(item) == serial}
        assert living.keys() == self._serials.keys(), "an item of the heap has no entry"
        dead = len(self._entries) - len(self._serials)
        assert 0 <= dead <= max(DEAD_MAX, len(self._serials)), f"{dead} dead entries"
        for item, place in living.items():
            assert place <= self._place(item), "the place of an item has shrunk"
