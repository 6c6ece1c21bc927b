"""Connects a replica to its node's cache tiers: blocking calls, made from worker threads.

`RayLink` calls the node's actor; a `TierNode` in this process (tests, tools) needs no client. Transport
errors do not leave it: tiers that do not answer have no blocks and accept none.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from cache_tiers.actors import StagingBuffer, rpc
from cache_tiers.blocks import Clear
from cache_tiers.forecast import Forecast
from cache_tiers.messages import (
    BadReport,
    Cleared,
    Fetch,
    Fetched,
    FetchFailed,
    LoadReport,
    Lookup,
    LookupResult,
    NodeStats,
    StoreReply,
    StoreRequest,
    TurnEnded,
)
from cache_tiers.transport import PeerError, PeerLate
from configs.sections import TierSettings

logger = logging.getLogger(__name__)

T = TypeVar("T")

SIGN_S = 1.5
"""Timeout of a liveness check: shorter than the wait of a caller that checks all replicas."""


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


class RayLink:
    """Calls the node's tier actor, and finds it again after it died.

    `find`: returns the handle of the tier actor, creating the actor if there is none; called again when the
    actor is permanently dead, because its node had no replica for long. `source`: this replica's own handle,
    which the actor calls back.
    """

    def __init__(
        self,
        find: Callable[[], Any],
        source: Any,
        settings: TierSettings,
        control_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        # The first one at once: it starts while this replica loads its model.
        self._tiers = rpc.ActorRef(
            self._make, handle=find(), restart_backoff_s_max=settings.node.restart_backoff_s_max, clock=clock
        )
        self._find = find
        self._source = source
        self._clear_s = settings.store_s_max
        # Wait longer than the request does: a late answer still says what need not be stored.
        self._lookup_s = max(control_s, settings.lookup_s_max)
        self._control_s = control_s

    def lookup(self, lookup: Lookup) -> LookupResult | None:
        found: LookupResult | None = self._ask("lookup", lookup, timeout_s=self._lookup_s)
        return found

    def fetch(self, fetch: Fetch) -> Fetched | FetchFailed:
        try:
            reply: Fetched | FetchFailed = self._tiers.call("fetch", fetch, timeout_s=fetch.deadline_s)
            if isinstance(reply, Fetched) and reply.data is None:
                reply = replace(reply, data=rpc.answer(reply.ref[0], fetch.deadline_s), ref=[])
        except PeerLate:
            return FetchFailed("timeout", f"nothing within {fetch.deadline_s:.1f} s")
        except PeerError as error:
            return FetchFailed("gone", str(error))
        return reply

    def offer(self, offers: Sequence[StoreRequest]) -> StoreReply:
        reply: StoreReply | None = self._ask("offer", list(offers), [self._source], timeout_s=self._control_s)
        return reply or StoreReply(("refused:no answer",) * len(offers))

    def report(self, bad: Sequence[BadReport], loads: Sequence[LoadReport]) -> None:
        self._ask("report", list(bad), list(loads), timeout_s=self._control_s)

    def clear(self, clear: Clear) -> Cleared:
        cleared: Cleared | None = self._ask("clear", clear, timeout_s=self._clear_s)
        if cleared is None:
            raise TimeoutError("the cache tiers do not answer: the clear may not have reached them")
        return cleared

    def turn_over(self, over: TurnEnded) -> Forecast | None:
        forecast: Forecast | None = self._ask("turn_over", over, timeout_s=self._control_s)
        return forecast

    def stats(self) -> NodeStats | None:
        stats: NodeStats | None = self._ask("stats", timeout_s=SIGN_S)
        return stats

    def ping(self) -> str | None:
        incarnation: str | None = self._ask("ping", timeout_s=SIGN_S)
        return incarnation

    def _make(self) -> Any:
        logger.warning("the tier actor of this node is dead: making a new one")
        return self._find()

    def _ask(self, method: str, *args: object, timeout_s: float) -> Any:
        """Return the answer; None: there was none."""
        try:
            return self._tiers.call(method, *args, timeout_s=timeout_s)
        except PeerError as error:
            logger.info("the tier actor did not answer %s: %s", method, error)
            return None


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
    """Submit `work`. False: the executor is shut down, or no thread can be started."""
    try:
        lane.submit(work, *args)
    except RuntimeError as error:
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
