"""Worker threads beside the engine's, and the way back to it.

Whatever blocks runs in a lane; what it brings is posted, and taken in on the engine's thread between
two steps. So nothing that the engine owns needs a lock.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger("samovar.offload")


@dataclass(frozen=True, slots=True)
class Lanes:
    """A pool each: a slow load must not hold up a lookup, nor a store a load."""

    lookup: Executor
    fetch: Executor
    store: Executor
    offer: Executor
    report: Executor
    returns: Executor

    @staticmethod
    def of_threads(lookup_threads: int, fetch_threads: int) -> Lanes:
        """Threads that live as long as the process does."""
        return Lanes(
            ThreadPoolExecutor(lookup_threads, "samovar-lookup"),
            ThreadPoolExecutor(fetch_threads, "samovar-fetch"),
            ThreadPoolExecutor(1, "samovar-store"),
            ThreadPoolExecutor(1, "samovar-offer"),
            ThreadPoolExecutor(1, "samovar-report"),
            ThreadPoolExecutor(1, "samovar-returns"),
        )

    def close(self) -> None:
        """Begin nothing new; what is running ends by itself."""
        for lane in (self.lookup, self.fetch, self.store, self.offer, self.report, self.returns):
            lane.shutdown(wait=False, cancel_futures=True)


def begin(lane: Executor, work: Callable[..., Any], *args: Any) -> bool:
    """Submit `work`. False: the lane takes nothing any more, or the process has no thread left for it."""
    try:
        lane.submit(work, *args)
    except RuntimeError as error:
        logger.warning("work for the cache tiers could not begin: %s", error)
        return False
    return True


class Arrivals:
    """`post` from any thread; `take_in` on the engine's. `wake` is called after each post."""

    def __init__(self) -> None:
        self.wake: Callable[[], None] = lambda: None
        self._waiting: deque[Callable[[], None]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def post(self, take_in: Callable[[], None]) -> None:
        self._waiting.append(take_in)
        self.wake()

    def take_in(self) -> None:
        while self._waiting:
            self._waiting.popleft()()
