"""What a replica tells its node's tiers about what it saw: bad records, how loads went, what not to trust.

Made on the engine's thread, sent from a lane; nobody waits for an answer.
"""

from __future__ import annotations

import logging
from collections import Counter
from concurrent.futures import Executor
from typing import get_args

from cache_tiers.extent import LoadSource
from cache_tiers.messages import BadReport, Clear, Fetch, LoadReport
from replicas.lanes import begin
from replicas.restore import Restore
from replicas.tier_link import TierLink

logger = logging.getLogger("samovar.offload")


class TierReports:
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
