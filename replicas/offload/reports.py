"""What a replica tells its node's tiers about what it saw: bad records, how loads went, what not to trust.

Made on the engine's thread, sent from a lane; nobody waits for an answer.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import replace
from typing import get_args

from cache_tiers.blocks import Clear, LoadSource, marks_of
from cache_tiers.forecast import Curves, Stop
from cache_tiers.messages import BadReport, Fetch, LoadReport, TurnEnded
from replicas.kv import PagePool
from replicas.messages import GenerateRequest
from replicas.offload.tier_client import CompletionQueue, TierLink, begin
from replicas.scheduling import Restore, Sequence

logger = logging.getLogger(__name__)


class TierReporter:
    """`verify_failures`: bad records by `tier:kind`."""

    def __init__(self, link: TierLink, lane: Executor) -> None:
        self.verify_failures: Counter[str] = Counter()
        self._link = link
        self._lane = lane

    def bad(self, fetch: Fetch, kind: str) -> None:
        """What came by `fetch` is not what it should be: have it quarantined."""
        self.verify_failures[f"{fetch.tier}:{kind}"] += 1
        logger.error("a bad record (%s) from %s: extent %s", kind, fetch.tier, fetch.extent_id.hex()[:12])
        report = BadReport(fetch.namespace, fetch.tenant, fetch.extent_id, fetch.tier, kind)
        begin(self._lane, self._link.report, [report], [])

    def loads(self, restore: Restore) -> None:
        """One report a tier: its fetches ran side by side, and the price is that of all of them together."""
        loads: list[LoadReport] = []
        for tier in get_args(LoadSource):
            came = [piece for piece in restore.pieces if piece.source == tier and piece.arrived_s > 0]
            if came:
                seconds = max(piece.arrived_s for piece in came) - restore.started_s
                loads.append(LoadReport(tier, sum(piece.nbytes for piece in came), seconds))
        if loads:
            begin(self._lane, self._link.report, [], loads)

    def distrust(self, clear: Clear) -> None:
        """Forget all of a tenant or a session: something of it was wrong, and more may follow from that."""
        begin(self._lane, self._clear, clear)

    def _clear(self, clear: Clear) -> None:
        """In the report lane."""
        try:
            self._link.clear(clear)
        except TimeoutError:
            logger.error("what is not to be trusted could not be cleared: the tiers do not answer")


# Telling of turns: to the pool at once, to the predictor soon, and what that forecasts back to the pool.
#
# Lives on the engine's thread; the node is asked in a lane, and nobody waits for its answer: until it comes,
# and when it never comes, a session's pages rank by recency. Knows nothing of blocks but their keys.

WAITING_MAX = 64
"""Turns whose forecast is awaited; of more the node is not told."""


class TurnReporter:
    """`clock`: the pool's. `rate`: how many of its seconds make one. `block_tokens`: of the pool's blocks."""

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
        """A turn of this session has come in."""
        self._pool.sessions.started(owner, self._clock())
        self._pool.session_changed(owner)

    def over(self, request: GenerateRequest, sequence: Sequence, stop: Stop, service_s: float) -> None:
        """A turn has ended, `service_s` real seconds after it came in; `sequence`: its last choice."""
        now_s, owner = self._clock(), sequence.owner
        self._pool.sessions.ended(
            owner,
            now_s,
            tokens=len(sequence.tokens),
            new_tokens=float(max(0, sequence.prompt_tokens - request.route.cached_tokens)),
            is_tool=stop == "tool_calls",
        )
        self._pool.session_changed(owner)
        if sequence.is_cleared or self._waiting >= WAITING_MAX:
            self.outcomes["not told"] += 1
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
            tool=request.turn.tool,
            profile=request.turn.profile,
        )
        if begin(self._lane, self._ask, owner, over, now_s):
            self._waiting += 1

    def _ask(self, owner: bytes, over: TurnEnded, ended_s: float) -> None:
        """In the returns lane."""
        curve: Curves | None = None
        try:
            ago_s = (self._clock() - ended_s) / self.rate
            curve = self._link.turn_over(replace(over, ago_s=ago_s))
        except Exception:  # a fault of the predictor costs a forecast
            logger.exception("the end of a turn could not be told")
        self._arrivals.post(lambda: self._told(owner, curve, ended_s))

    def _told(self, owner: bytes, curve: Curves | None, ended_s: float) -> None:
        self._waiting -= 1
        self.outcomes["no forecast" if curve is None else "forecast"] += 1
        if curve is not None:
            self._pool.sessions.told(owner, curve, ended_s)
            self._pool.session_changed(owner)

    def check_integrity(self) -> None:
        """Raises `AssertionError` naming what is wrong."""
        assert self._waiting >= 0, "more forecasts have come than were asked for"
