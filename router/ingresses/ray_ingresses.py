"""Calls from one ingress to all, itself included: what was deleted must be gone at each of them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import DeploymentUnavailableError, RayServeException

from samovar.router.ingresses.all_ingresses import IngressesCleared
from samovar.router.routing import ray_clients

logger = logging.getLogger(__name__)


class RayIngresses:
    """`Ingresses` over the Serve handle of the ingresses' own deployment."""

    def __init__(self, handle: Any, timeout_s: float = 5.0) -> None:
        self._handle = handle
        self._timeout_s = timeout_s

    async def forget(self, tenant: str, sessions: Sequence[bytes] | None) -> IngressesCleared:
        told = await self._ask("forget_here", tenant, None if sessions is None else tuple(sessions))
        heard = [one for one in told if isinstance(one, tuple)]
        silent = max(1, len(told)) - len(heard)
        return IngressesCleared(
            sum(replies for replies, _ in heard), silent, sum(not whole for _, whole in heard)
        )

    async def forget_entries(self, tenant: str, entries: Sequence[str] | None) -> int:
        told = await self._ask("forget_entries_here", tenant, None if entries is None else tuple(entries))
        return max(1, len(told)) - sum(one is True for one in told)

    async def discard(self, tenant: str, response_id: str) -> int:
        told = await self._ask("discard_here", tenant, response_id)
        return max(1, len(told)) - sum(isinstance(one, bool) for one in told)

    async def metrics(self) -> dict[str, bytes]:
        told = await self._ask("metrics_here")
        return dict(one for one in told if isinstance(one, tuple))

    async def _ask(self, method: str, *args: object) -> list[Any]:
        """Return each ingress's answer or exception; empty if none can be asked."""
        try:
            told = await ray_clients.answers_of_all(self._handle, method, *args, timeout_s=self._timeout_s)
        except (TimeoutError, DeploymentUnavailableError, RayError, RayServeException) as failed:
            logger.warning("%s: the ingresses could not be asked: %s", method, type(failed).__name__)
            return []
        for one in told:
            if isinstance(one, BaseException):
                logger.warning("%s: an ingress did not answer: %s", method, type(one).__name__)
        return told
