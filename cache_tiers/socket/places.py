"""How places that all clients share are given to each, so that none takes those of the others."""

from __future__ import annotations

import threading
from collections import Counter, deque


class SharedPlaces:
    """`most` places: bytes that wait, records that wait, fetches under way. A client is a process.

    Who holds some gets more only as long as it holds no more than what stays free then: alone a half, of n
    each a part of n + 1 in the end, and a client that comes finds a place. Who holds none gets any free one.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._held: Counter[int] = Counter()
        self._back: deque[tuple[int, int]] = deque()

    def take(self, pid: int, count: int) -> bool:
        """Take `count` places for a process, all or none; return whether they were there."""
        with self._lock:
            self._settle()
            held, free = self._held[pid], self._most - self._held.total() - count
            if free < 0 or not (held + count <= free or (not held and count <= max(1, self._most // 2))):
                return False
            self._held[pid] += count
            return True

    def give_back(self, pid: int, count: int) -> None:
        """Give places back. Takes no lock: finalizers call it, which may run within any line of a thread."""
        self._back.append((pid, count))

    @property
    def held(self) -> int:
        """How many are taken now, by all."""
        with self._lock:
            self._settle()
            return self._held.total()

    def _settle(self) -> None:
        while self._back:
            pid, count = self._back.popleft()
            self._held[pid] -= count
            if not self._held[pid]:
                del self._held[pid]
