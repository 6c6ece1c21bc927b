"""Calls of the node's tier actor: the one part of `offload` that needs Ray, imported where it is used.

Transport errors do not leave it: tiers that do not answer have no blocks and accept none.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from samovar.cache_tiers.actors import rpc
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
from samovar.cache_tiers.transport import PeerError, PeerLate
from samovar.configs.sections import TierSettings

logger = logging.getLogger(__name__)

SIGN_S = 1.5
"""Timeout of a liveness check: shorter than the wait of a caller that checks all replicas."""


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

    def sample(self, ask: SampleRequest) -> tuple[ExtentHeader, ...]:
        return self._ask("sample", ask, timeout_s=self._clear_s) or ()

    def measured(self, prices: Mapping[TierName, TierPrice], samples: Sequence[ExtentHeader]) -> None:
        self._ask("measured", dict(prices), list(samples), timeout_s=self._control_s)

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
