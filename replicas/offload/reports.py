"""Reports to the node's tiers: bad records, load times, distrusted data, ended turns.

Created on the engine's thread, sent from worker threads; no request waits for an answer.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import replace

from samovar.cache_tiers.blocks import PEER, TIERS, Clear, marks_of
from samovar.cache_tiers.forecast import Forecast, Stop
from samovar.cache_tiers.messages import BadReport, Fetch, LoadReport, TurnEnded
from samovar.replicas.kv import PagePool
from samovar.replicas.messages import GenerateRequest
from samovar.replicas.offload.tier_client import CompletionQueue, TierLink, begin
from samovar.replicas.scheduling import Restore, RestorePiece, Sequence

logger = logging.getLogger(__name__)


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

    def loads(self, restore: Restore) -> None:
        """Send one report per tier: its fetches ran in parallel, and the price covers all of them."""
        loads: list[LoadReport] = []
        for tier in (*TIERS, PEER):
            came = [piece for piece in restore.pieces if piece.source == tier and piece.arrived_s > 0]
            if came:
                seconds = max(_there_s(piece) for piece in came) - restore.started_s
                loads.append(LoadReport(tier, sum(piece.nbytes for piece in came), seconds))
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

        `tool`: the tool that it called.
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
            tool=tool or request.turn.tool,
            profile=request.turn.profile,
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
