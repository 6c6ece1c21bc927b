"""Tells the tiers of turns that vLLM has computed, and hears when their sessions are expected back."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Protocol

from samovar.cache_tiers.blocks import ChainMarks
from samovar.cache_tiers.forecast import Forecast, HintEvent
from samovar.cache_tiers.messages import TurnEnded
from samovar.cache_tiers.policy import IdleSessions
from samovar.cache_tiers.vllm.replica_turn import TurnTold
from samovar.replicas.messages import GenerateRequest
from samovar.replicas.vllm.answers import Job

logger = logging.getLogger(__name__)

ENDED_MAX = 4096
"""Turns of which one is known, the end or the marks, and not the other."""


class SessionReturns:
    """When sessions are expected back, for the autoscaler: as the tiers' forecasts say. Pure.

    Of at most `sessions_max` sessions. `clock`: that of the forecasts.
    """

    def __init__(self, sessions_max: int, clock: Callable[[], float]) -> None:
        self._sessions = IdleSessions(sessions_max)
        self._clock = clock

    def began(self, owner: bytes) -> None:
        """Note that a turn has begun."""
        self._sessions.started(owner, self._clock())

    def ended(self, owner: bytes, request: GenerateRequest, tokens: int, *, calls_tool: bool) -> float:
        """Note that a turn has ended, with prompt and answer of `tokens`; return when."""
        now_s = self._clock()
        new_tokens = float(max(0, len(request.prompt_token_ids) - request.route.cached_tokens))
        self._sessions.ended(owner, now_s, tokens=tokens, new_tokens=new_tokens, is_tool=calls_tool)
        return now_s

    def told(self, owner: bytes, forecast: Forecast, since_s: float) -> None:
        """Take in a forecast, counted from `since_s`."""
        if owner in self._sessions:
            self._sessions.told(owner, forecast, since_s)

    def hint(self, owner: bytes, event: HintEvent | None, expected_return_s: float | None) -> None:
        """Apply a client's hint about an idle session; ignored if it is unknown."""
        self._sessions.hint(owner, event, expected_return_s, self._clock())

    def forget(self, owner: bytes) -> None:
        """Forget a session."""
        self._sessions.forget(owner)

    def within(self, horizon_s: float) -> tuple[float, float]:
        """Return the expected resumptions within `horizon_s`, and the tokens of those."""
        return self._sessions.expected(self._clock(), horizon_s)


class TurnCalls(Protocol):
    """See `TierLink`."""

    def turn_over(self, over: TurnEnded) -> Forecast | None: ...


class TurnReports:
    """Tells the tiers of turns that ended, once the connector has told the marks of their chains.

    `reports`: None without tiers. A forecast comes back on the event loop.
    """

    def __init__(self, reports: TurnCalls | None, returns: SessionReturns, block_tokens: int) -> None:
        self._reports = reports
        self.returns = returns
        self._block_tokens = block_tokens
        self._lane = None if reports is None else ThreadPoolExecutor(1, "turn-reports")
        self._ended: OrderedDict[int, tuple[TurnEnded, float]] = OrderedDict()
        self._marks: OrderedDict[int, ChainMarks] = OrderedDict()  # that came before the end

    def over(self, job: Job, service_s: float) -> None:
        """Note that a turn is over."""
        request, last = job.request, job.choices[-1]
        tools = job.called_tools(last.index) if job.stop == "stop" else ""
        since_s = self.returns.ended(job.owner, request, len(last.tokens), calls_tool=bool(tools))
        if self._reports is None or request.placement is None:
            return
        over = TurnEnded(
            request.tenant,
            request.session,
            service_s,
            last.prompt_tokens,
            last.output_tokens,
            ChainMarks(),
            self._block_tokens,
            stop="tool_calls" if tools else job.stop,
            role=request.turn.role,
            tool=tools,
            profile=request.turn.profile,
            returns_s=request.turn.returns_s,
            is_final=request.turn.is_final,
        )
        self._ended[job.key] = over, since_s
        self._report(job.key)

    def marked(self, told: TurnTold) -> None:
        """Take in the marks of a turn's chain: before its end or after, as the two come by different ways."""
        self._marks[told.key] = told.marks
        self._report(told.key)

    def _report(self, key: int) -> None:
        """Report a turn that is over, if its marks are known."""
        for known in (self._ended, self._marks):
            if len(known) > ENDED_MAX:
                known.popitem(last=False)
        if key not in self._ended or key not in self._marks or self._lane is None or self._reports is None:
            return
        (over, since_s), marks = self._ended.pop(key), self._marks.pop(key)
        asked = self._lane.submit(self._reports.turn_over, replace(over, marks=marks))
        owner, loop = over.tenant + over.session, asyncio.get_running_loop()
        asked.add_done_callback(lambda done: loop.call_soon_threadsafe(self._heard, owner, done, since_s))

    def _heard(self, owner: bytes, done: Future[Forecast | None], since_s: float) -> None:
        if done.cancelled():
            return
        if (error := done.exception()) is not None:
            logger.info("a turn was not reported: %s", error)
        elif (forecast := done.result()) is not None:
            self.returns.told(owner, forecast, since_s)

    def close(self) -> None:
        """End the thread."""
        if self._lane is not None:
            self._lane.shutdown(wait=False, cancel_futures=True)
