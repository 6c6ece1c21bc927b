"""Connects a replica to its node's cache tiers: blocking calls, made from worker threads.

`ray_link.RayLink` calls the node's actor; a `TierNode` in this process (tests, tools) needs no client, and
no Ray. Reports (bad records, load times, distrusted data, ended turns) are created on the engine's thread and
sent from worker threads; no request waits for an answer.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Listing
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Protocol

from samovar.cache_tiers.actors import StagingBuffer
from samovar.cache_tiers.blocks import PEER, TIERS, Clear, ExtentHeader, TierName, marks_of
from samovar.cache_tiers.forecast import Forecast, Stop
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
from samovar.replicas.kv import PagePool
from samovar.replicas.messages import GenerateRequest
from samovar.replicas.scheduling import Restore, RestorePiece, Sequence

logger = logging.getLogger(__name__)


class TierLink(Protocol):
    """Calls of the cache tiers. Thread-safe; every method returns within its own time limit."""

    def lookup(self, lookup: Lookup) -> LookupResult | None:
        """Look up a prompt's blocks; None: no answer in time."""
        ...

    def fetch(self, fetch: Fetch) -> Fetched | FetchFailed:
        """Fetch blocks; `Fetched.data` is set."""
        ...

    def offer(self, offers: Listing[StoreRequest]) -> StoreReply: ...

    def report(self, bad: Listing[BadReport], loads: Listing[LoadReport]) -> None: ...

    def sample(self, ask: SampleRequest) -> tuple[ExtentHeader, ...]:
        """Put records into a tier, to measure a load with; empty: there is no room, or no tier."""
        ...

    def measured(self, prices: Mapping[TierName, TierPrice], samples: Listing[ExtentHeader]) -> None:
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


class TierReporter:
    """Sends reports about loaded records. `verify_failures`: bad records by `tier:kind`."""

    def __init__(self, link: TierLink, lane: Executor) -> None:
        self.verify_failures: Counter[str] = Counter()
        self._link = link
        self._lane = lane

    def bad(self, fetch: Fetch, kind: str) -> None:
        """Report a bad record, so that it is quarantined."""
        self.verify_failures[f"{fetch.tier}:{kind}"] += 1
        logger.error("a bad record (%s) from %s: extent %s", kind, fetch.tier, fetch.extent_id.hex()[:12])
        report = BadReport(fetch.namespace, fetch.tenant, fetch.extent_id, fetch.tier, kind)
        begin(self._lane, self._link.report, [report], [])

    def loads(self, restore: Restore, parallel: int) -> None:
        """Send one report per tier, of one round of its fetches, of which `parallel` ran at a time.

        So its latency counts once a round, as in a plan. Tiers share the threads that fetch: where there are
        several, each counts from its own first fetch.
        """
        loads: list[LoadReport] = []
        is_mixed = len({piece.source for piece in restore.pieces}) > 1
        for tier in (*TIERS, PEER):
            came = [piece for piece in restore.pieces if piece.source == tier and piece.arrived_s > 0]
            if came:
                began_s = restore.started_s
                if is_mixed:
                    began_s = min(piece.begun_s or began_s for piece in came)
                seconds = max(_there_s(piece) for piece in came) - began_s
                rounds = -(-len(came) // parallel)
                nbytes = sum(piece.nbytes for piece in came)
                loads.append(LoadReport(tier, nbytes // rounds, seconds / rounds))
        if loads:
            begin(self._lane, self._link.report, [], loads)

    def distrust(self, clear: Clear) -> None:
        """Clear all of a tenant or a session: a part was wrong, and more computed from it may be."""
        begin(self._lane, self._clear, clear)

    def _clear(self, clear: Clear) -> None:
        """Clear, on the report thread."""
        try:
            self._link.clear(clear)
        except TimeoutError:
            logger.error("possibly bad blocks could not be cleared: the tiers do not answer")


def _there_s(piece: RestorePiece) -> float:
    """Return when a piece was in its pages; of one that was overtaken, or was late, when it had come."""
    return piece.landed_s or piece.arrived_s


WAITING_MAX = 64
"""Limit of turns awaiting a forecast; more turns are not reported to the node."""


class TurnReporter:
    """Reports turns to the pool at once and to the predictor later, and passes forecasts back to the pool.

    Runs on the engine's thread; the node is called from a worker thread. Until its answer arrives, or if it
    never does, a session's pages are ranked by recency.

    `clock`: the pool's. `rate`: how many of its seconds make a real one. `block_tokens`: of the pool's
    blocks.
    """

    def __init__(
        self,
        link: TierLink,
        pool: PagePool,
        lane: Executor,
        arrivals: CompletionQueue,
        *,
        block_tokens: int,
        clock: Callable[[], float],
        rate: float,
    ) -> None:
        self.outcomes: Counter[str] = Counter()  # turns, by whether a forecast came
        self._link = link
        self._pool = pool
        self._lane = lane
        self._arrivals = arrivals
        self._block_tokens = block_tokens
        self._clock = clock
        self.rate = rate
        self._waiting = 0

    def began(self, owner: bytes) -> None:
        """Record that a turn of this session has started."""
        self._pool.sessions.started(owner, self._clock())
        self._pool.returns.changed(owner)

    def over(
        self, request: GenerateRequest, sequence: Sequence, stop: Stop, service_s: float, *, tool: str = ""
    ) -> None:
        """Record that a turn ended `service_s` real seconds after arrival; `sequence`: its last choice.

        `tool`: tags of the tools that it called.
        """
        now_s, owner = self._clock(), sequence.owner
        self._pool.sessions.ended(
            owner,
            now_s,
            tokens=len(sequence.tokens),
            new_tokens=float(max(0, sequence.prompt_tokens - request.route.cached_tokens)),
            is_tool=stop == "tool_calls",
        )
        self._pool.returns.changed(owner)
        if sequence.is_cleared or self._waiting >= WAITING_MAX:
            self.outcomes["not reported"] += 1
            return
        keys = sequence.keys_of(sequence.computed // self._block_tokens, self._block_tokens)
        over = TurnEnded(
            tenant=request.tenant,
            session=request.session,
            service_s=service_s,
            input_tokens=sequence.prompt_tokens,
            output_tokens=sequence.output_tokens,
            marks=marks_of(keys),
            block_tokens=self._block_tokens,
            stop=stop,
            role=request.turn.role,
            tool=tool,
            profile=request.turn.profile,
            returns_s=request.turn.returns_s,
            is_final=request.turn.is_final,
        )
        if begin(self._lane, self._ask, owner, over, now_s):
            self._waiting += 1

    def _ask(self, owner: bytes, over: TurnEnded, ended_s: float) -> None:
        """Report the turn to the node, on the returns thread."""
        forecast: Forecast | None = None
        try:
            ago_s = (self._clock() - ended_s) / self.rate
            forecast = self._link.turn_over(replace(over, ago_s=ago_s))
        except Exception:  # a fault of the predictor costs only this forecast
            logger.exception("the end of a turn could not be reported")
        self._arrivals.post(lambda: self._apply(owner, forecast, ended_s))

    def _apply(self, owner: bytes, forecast: Forecast | None, ended_s: float) -> None:
        self._waiting -= 1
        self.outcomes["no forecast" if forecast is None else "forecast"] += 1
        if forecast is not None:
            self._pool.returns.told(owner, forecast, ended_s)

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is wrong."""
        assert self._waiting >= 0, "more forecasts have come than were asked for"
