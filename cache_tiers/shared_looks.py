"""When a node falls silent, what it has put into shared tiers is worth a look before others compute it again.

One look serves all who ask meanwhile, and after a node is lost one is enough: nobody puts anything there for
it any more. A node that only does not answer may go on, so it is looked for again, but not all the time.
Decides; does not know what a look is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

AGAIN_S = 5.0
NODES_MAX = 4096
"""Lost nodes that are remembered, the latest."""


class SharedLooks:
    """`look`: looks, and waits so many seconds at most; True when all was seen. `clock`: monotonic."""

    def __init__(self, look: Callable[[float], bool], clock: Callable[[], float]) -> None:
        self._look = look
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: dict[str, None] = {}  # lost nodes, what they left is known; oldest first
        self._again_s: dict[str, float] = {}

    def after(self, silent: Mapping[str, bool], wait_s: float) -> bool:
        """Look if one of these nodes gives a reason to. `silent`: node -> is it lost for good?

        True when there was a look, and it was over in time: what is known may be more now.
        """
        now_s = self._clock()
        with self._lock:
            unseen = [node for node in silent if node not in self._seen]
            due = [node for node in unseen if silent[node] or now_s >= self._again_s.get(node, now_s)]
        if not due or not self._look(wait_s):
            return False
        with self._lock:
            for node in due:
                if silent[node]:
                    self._seen[node] = None
                    self._again_s.pop(node, None)
                else:
                    self._again_s[node] = now_s + AGAIN_S
            for book in (self._seen, self._again_s):
                while len(book) > NODES_MAX:
                    book.pop(next(iter(book)))
        return True

    def check_integrity(self) -> None:
        """Raises AssertionError when the books are wrong."""
        with self._lock:
            assert not self._seen.keys() & self._again_s.keys(), "a node is lost and is not"
            assert max(len(self._seen), len(self._again_s)) <= NODES_MAX, "too many nodes"
