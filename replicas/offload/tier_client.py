"""Connects a replica to its node's cache tiers: blocking calls, made from worker threads.

`ray_link.RayLink` calls the node's actor; a `TierNode` in this process (tests, tools) needs no client, and
no Ray.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from samovar.cache_tiers.actors import StagingBuffer
from samovar.cache_tiers.blocks import Clear, ExtentHeader, TierName
from samovar.cache_tiers.forecast import Forecast
from samovar.cache_tiers.messages import (
    BadReport,
    Cleared,
    Fetch,
    Fetched,
    FetchFailed,
    LoadReport,
    Lookup,
    LookupResult,
    NodeStats,
    SampleRequest,
    StoreReply,
    StoreRequest,
    TurnEnded,
)
from samovar.cache_tiers.pricing import TierPrice

logger = logging.getLogger(__name__)


class TierLink(Protocol):
    """Calls of the cache tiers. Thread-safe; every method returns within its own time limit."""

    def lookup(self, lookup: Lookup) -> LookupResult | None:
        """Look up a prompt's blocks; None: no answer in time."""
        ...

    def fetch(self, fetch: Fetch) -> Fetched | FetchFailed:
        """Fetch blocks; `Fetched.data` is set."""
        ...

    def offer(self, offers: Sequence[StoreRequest]) -> StoreReply: ...

    def report(self, bad: Sequence[BadReport], loads: Sequence[LoadReport]) -> None: ...

    def sample(self, ask: SampleRequest) -> tuple[ExtentHeader, ...]:
        """Put records into a tier, to measure a load with; empty: there is no room, or no tier."""
        ...

    def measured(self, prices: Mapping[TierName, TierPrice], samples: Sequence[ExtentHeader]) -> None:
        """Tell what this replica's start has measured, and delete the records of `sample`."""
        ...

    def clear(self, clear: Clear) -> Cleared:
        """Clear records. Raises `TimeoutError` without an answer: they may not have been cleared."""
        ...

    def turn_over(self, over: TurnEnded) -> Forecast | None:
        """Report a turn's end; return the session's survival curve, or None: no answer or no data."""
        ...

    def stats(self) -> NodeStats | None: ...

    def ping(self) -> str | None:
        """Return the tiers' incarnation; None: they do not answer a liveness check."""
        ...


@dataclass(frozen=True, slots=True)
class WorkerPools:
    """Thread pools by task: a slow load must not delay a lookup, nor a store a load.

    Blocking work runs here; its result is posted to a `CompletionQueue` and taken in on the engine's thread
    between two steps, so the engine's state needs no lock. `moves`: copies of blocks, see `PageMoves`.
    """

    lookup: Executor
    fetch: Executor
    store: Executor
    offer: Executor
    report: Executor
    returns: Executor
    moves: Executor

    @staticmethod
    def of_threads(lookup_threads: int, io_threads: int) -> WorkerPools:
        """Create the pools; their threads live as long as the process."""
        return WorkerPools(
            ThreadPoolExecutor(lookup_threads, "samovar-lookup"),
            ThreadPoolExecutor(io_threads, "samovar-fetch"),
            ThreadPoolExecutor(1, "samovar-store"),
            ThreadPoolExecutor(1, "samovar-offer"),
            ThreadPoolExecutor(1, "samovar-report"),
            ThreadPoolExecutor(1, "samovar-returns"),
            ThreadPoolExecutor(io_threads, "samovar-moves"),
        )

    def close(self) -> None:
        """Start no more work; running calls end by themselves."""
        lanes = self.lookup, self.fetch, self.store, self.offer, self.report, self.returns, self.moves
        for lane in lanes:
            lane.shutdown(wait=False, cancel_futures=True)


def begin(lane: Executor, work: Callable[..., Any], *args: Any) -> bool:
    """Submit `work`. False: the executor is shut down, or no thread can be started, and it will never run."""
    wanted = [work]

    def once() -> None:
        try:
            run = wanted.pop()
        except IndexError:  # taken back
            return
        run(*args)

    try:
        lane.submit(once)
    except RuntimeError as error:
        # Python's executor keeps what it had no thread for: a thread that comes free would run it.
        try:
            wanted.pop()
        except IndexError:  # one has begun it
            return True
        logger.warning("work for the cache tiers could not start: %s", error)
        return False
    return True


class CompletionQueue:
    """Carries results to the engine's thread.

    `post` from any thread; `take_in` on the engine's. `wake` is called after each post.
    """

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


@dataclass(frozen=True, slots=True)
class TierAccess:
    """Connects this replica to its node's tiers. `outbox`: staged records that the tier actor fetches."""

    link: TierLink
    outbox: StagingBuffer
    lanes: WorkerPools
    clock: Callable[[], float] = time.monotonic
    wall_clock: Callable[[], float] = time.time
