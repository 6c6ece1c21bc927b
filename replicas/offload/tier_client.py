"""Connects a replica to its node's cache tiers: blocking calls, made from worker threads.

`NodeLink` calls a `TierNode` in this process (tests, tools); `RayLink` calls the node's actor. Transport
errors do not leave either: tiers that do not answer have no blocks and accept none.
"""

from __future__ import annotations

import contextvars
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError

from cache_tiers.actors import StagingBuffer
from cache_tiers.blocks import Clear
from cache_tiers.forecast import Curves
from cache_tiers.media import Breaker
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
from cache_tiers.node import TierNode
from configs.sections import TierSettings

logger = logging.getLogger(__name__)

T = TypeVar("T")

FIND_S = 1.0
"""A dead actor is replaced after this pause; it doubles for each actor that dies before answering."""

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

    def turn_over(self, over: TurnEnded) -> Curves | None:
        """Report a turn's end; return the session's survival curve, or None: no answer or no data."""
        ...

    def stats(self) -> NodeStats | None: ...

    def answers(self) -> bool:
        """Return whether the tiers answer a liveness check."""
        ...


class NodeLink:
    """Calls a node in this process; its `call_for` must look into `outbox`."""

    def __init__(self, node: TierNode, outbox: StagingBuffer) -> None:
        self._node = node
        self._outbox = outbox

    def lookup(self, lookup: Lookup) -> LookupResult | None:
        return self._node.lookup(lookup)

    def fetch(self, fetch: Fetch) -> Fetched | FetchFailed:
        return self._node.fetch(fetch)

    def offer(self, offers: Sequence[StoreRequest]) -> StoreReply:
        return self._node.offer(offers, self._outbox)

    def report(self, bad: Sequence[BadReport], loads: Sequence[LoadReport]) -> None:
        for one in bad:
            self._node.report_bad(one)
        for load in loads:
            self._node.report_load(load)

    def clear(self, clear: Clear) -> Cleared:
        return self._node.clear(clear)

    def turn_over(self, over: TurnEnded) -> Curves | None:
        return self._node.returns.turn_over(over)

    def stats(self) -> NodeStats | None:
        return self._node.stats()

    def answers(self) -> bool:
        return True


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
        self._find = find
        self._actor = find()
        self._finding = threading.Lock()
        self._remakes = Breaker(1, FIND_S, settings.node.restart_backoff_s_max, clock)
        self._source = source
        self._settings = settings
        self._control_s = control_s

    def lookup(self, lookup: Lookup) -> LookupResult | None:
        # Wait longer than the request does: a late answer still says what need not be stored.
        found: LookupResult | None = self._ask(
            "lookup", self._control_s, lambda: self._actor.lookup.remote(lookup)
        )
        return found

    def fetch(self, fetch: Fetch) -> Fetched | FetchFailed:
        try:
            reply: Fetched | FetchFailed = self._get(
                lambda: self._actor.fetch.remote(fetch), fetch.deadline_s
            )
            if isinstance(reply, Fetched) and reply.data is None:
                reply = replace(reply, data=ray.get(reply.ref[0], timeout=fetch.deadline_s), ref=[])
        except (GetTimeoutError, TimeoutError):
            return FetchFailed("timeout", f"nothing within {fetch.deadline_s:.1f} s")
        except RayError as error:
            return FetchFailed("gone", type(error).__name__)
        return reply

    def offer(self, offers: Sequence[StoreRequest]) -> StoreReply:
        reply: StoreReply | None = self._ask(
            "offer", self._control_s, lambda: self._actor.offer.remote(list(offers), [self._source])
        )
        return reply or StoreReply(("refused:no answer",) * len(offers))

    def report(self, bad: Sequence[BadReport], loads: Sequence[LoadReport]) -> None:
        self._ask("report", self._control_s, lambda: self._actor.report.remote(list(bad), list(loads)))

    def clear(self, clear: Clear) -> Cleared:
        cleared: Cleared | None = self._ask(
            "clear", self._settings.store_s_max, lambda: self._actor.clear.remote(clear)
        )
        if cleared is None:
            raise TimeoutError("the cache tiers do not answer: the clear may not have reached them")
        return cleared

    def turn_over(self, over: TurnEnded) -> Curves | None:
        curve: Curves | None = self._ask(
            "turn_over", self._control_s, lambda: self._actor.turn_over.remote(over)
        )
        return curve

    def stats(self) -> NodeStats | None:
        stats: NodeStats | None = self._ask("stats", SIGN_S, lambda: self._actor.stats.remote())
        return stats

    def answers(self) -> bool:
        return self._ask("ping", SIGN_S, lambda: self._actor.ping.remote()) is not None

    def _ask(self, what: str, timeout_s: float, call: Callable[[], Any]) -> Any:
        try:
            return self._get(call, timeout_s)
        except (RayError, TimeoutError) as error:
            logger.info("the tier actor did not answer %s: %s", what, type(error).__name__)
            return None

    def _get(self, call: Callable[[], Any], timeout_s: float) -> Any:
        # In an empty context: a call made for one request must not count as part of it (docs/adr/001).
        actor = self._actor
        try:
            answer = ray.get(contextvars.Context().run(call), timeout=timeout_s)
        except ActorDiedError:
            self._find_again(actor)
            raise
        if self._remakes.state != "closed":
            with self._finding:
                self._remakes.succeeded()
        return answer

    def _find_again(self, dead: Any) -> None:
        """Replace the handle of a dead actor. The current call is lost; later ones use the new actor.

        Ray does not restart an actor whose start failed: without a pause every call would create one.
        """
        if not self._finding.acquire(blocking=False):
            return
        try:
            if dead is not self._actor:
                return  # a late call to the previous actor
            self._remakes.failed()
            if self._remakes.allows():
                logger.warning("the tier actor of this node is dead: starting a new one")
                self._actor = contextvars.Context().run(self._find)
        except (RayError, ValueError) as error:
            logger.warning("no new tier actor yet: %s", error)
        finally:
            self._finding.release()


@dataclass(frozen=True, slots=True)
class WorkerPools:
    """Thread pools by task: a slow load must not delay a lookup, nor a store a load.

    Blocking work runs here; its result is posted to a `CompletionQueue` and taken in on the engine's thread
    between two steps, so the engine's state needs no lock.
    """

    lookup: Executor
    fetch: Executor
    store: Executor
    offer: Executor
    report: Executor
    returns: Executor

    @staticmethod
    def of_threads(lookup_threads: int, fetch_threads: int) -> WorkerPools:
        """Create the pools; their threads live as long as the process."""
        return WorkerPools(
            ThreadPoolExecutor(lookup_threads, "samovar-lookup"),
            ThreadPoolExecutor(fetch_threads, "samovar-fetch"),
            ThreadPoolExecutor(1, "samovar-store"),
            ThreadPoolExecutor(1, "samovar-offer"),
            ThreadPoolExecutor(1, "samovar-report"),
            ThreadPoolExecutor(1, "samovar-returns"),
        )

    def close(self) -> None:
        """Start no more work; running calls end by themselves."""
        for lane in (self.lookup, self.fetch, self.store, self.offer, self.report, self.returns):
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
