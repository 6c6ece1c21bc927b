"""Whether this ingress should get work: loading, ok or draining.

A background task asks the replicas who they are; nothing on the way of a request waits for it. Knows
a `ReplicaClient`; nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Literal

from replicas.messages import ReplicaInfo
from router.replica_client import ReplicaClient

logger = logging.getLogger("samovar.readiness")

State = Literal["loading", "ok", "draining"]

POLL_LOADING_S = 0.5
POLL_READY_S = 2.0
MISSES_MAX = 3  # polls without an answer before replicas that were there count as gone


class Readiness:
    """The state, kept up to date between `start` and `stop`."""

    def __init__(self, client: ReplicaClient, wanted: int = 1, *, start_s: float = 0.0) -> None:
        self.wanted = wanted
        """How many replicas there should be at least; 0: there are some when somebody asks."""
        self._client = client
        self._start_s = start_s
        self._seen = asyncio.Event()
        self._replicas: list[ReplicaInfo] = []
        self._was_ready = False
        self._misses = 0
        self._is_draining = False
        self._task: asyncio.Task[None] | None = None

    @property
    def state(self) -> State:
        """What /health says."""
        if self._is_draining:
            return "draining"
        return "ok" if self._replicas or self._may_sleep else "loading"

    @property
    def _may_sleep(self) -> bool:
        """There need not be a replica: a request brings one up."""
        return self.wanted == 0

    @property
    def takes_work(self) -> bool:
        """Whether requests are let in: not before the first replica was ready, if there must be one, not
        while draining.

        A replica that is too busy to answer the poll does not stop requests: the queue's own
        limit does.
        """
        return (self._was_ready or self._may_sleep) and not self._is_draining

    @property
    def replicas(self) -> list[ReplicaInfo]:
        """The replicas that are up."""
        return list(self._replicas)

    def drain(self) -> None:
        """Take no new work from now on, for good."""
        self._is_draining = True

    async def start(self) -> None:
        """Begin to poll, on the running event loop; with `start_s`, return at the first replica.

        Raises `TimeoutError` when there is none by then.
        """
        if self._task is None:
            self._task = asyncio.create_task(self._poll_forever())
        if self._start_s > 0:
            async with asyncio.timeout(self._start_s):
                await self._seen.wait()

    async def stop(self) -> None:
        """End the polling."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def poll(self) -> None:
        """Ask once. Raises whatever the client raises."""
        replicas = await self._client.describe()
        if replicas:
            self._replicas, self._misses, self._was_ready = replicas, 0, True
            self._seen.set()
        else:
            self._missed()

    def _missed(self) -> None:
        self._misses += 1
        if self._misses >= MISSES_MAX:
            self._replicas = []

    async def _poll_forever(self) -> None:
        while True:
            try:
                await self.poll()
            except Exception:  # any fault of the control plane: the next poll may see it healed
                logger.exception("asking the replicas who they are failed")
                self._missed()
            await asyncio.sleep(POLL_READY_S if self._replicas else POLL_LOADING_S)
