"""The limits of a tenant, where several front doors admit its requests.

A front door admits its share of a limit by itself, and asks the session directory for more: see
`cache_tiers/doors/quotas.py` for what that allows. If the directory does not answer, the share is all that
there is.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Protocol

from cache_tiers.doors import MANY, Use
from router.auth import CODE, ConcurrencyLimit
from router.openai import TooManyRequests
from router.routing import DirectoryLost

logger = logging.getLogger(__name__)

NAME_CHARS = 8
SILENT_S = 1.0
"""After a failed question nothing is asked for this long."""


class QuotaLink(Protocol):
    """The part of the directory's link that answers for limits. Raises `DirectoryLost`."""

    async def allow(self, door: str, asked: int, tenant: bytes, wanted: Use, limit: Use) -> bool: ...


class DoorShares:
    """This front door's share of each tenant's limits. Use it from one event loop.

    `door`: its name. `link`: None: there is no other front door. `open_here`: what tenants have open here.
    `tag_of`: a tenant's tag. `doors_at_start`: front doors until the directory has said how many there are.
    `wait_s`: how long a request waits for an answer.
    """

    def __init__(
        self,
        door: str,
        link: QuotaLink | None,
        open_here: ConcurrencyLimit,
        tag_of: Callable[[str], bytes],
        *,
        doors_at_start: int,
        wait_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.door = door
        self.asked = 0
        """How often more than the share was asked for."""
        self._link = link
        self._open_here = open_here
        self._tag_of = tag_of
        self._doors = max(1, doors_at_start)
        self._wait_s = wait_s
        self._clock = clock
        self._asks_again_s = 0.0
        self._is_told = False

    @property
    def limit(self) -> Use:
        """A tenant's limit at all front doors together."""
        limits = self._open_here.limits
        return Use(limits.concurrent_per_key, limits.sequences_per_key, limits.tokens_per_key)

    @property
    def name(self) -> str:
        """The front door's name as people see it."""
        return self.door[:NAME_CHARS]

    @property
    def doors(self) -> int:
        """Front doors that share the limits; `MANY`: this one has no share yet, and asks for all."""
        return self._doors

    def heard(self, doors: int) -> None:
        """Take in how many front doors there are; 0: the directory does not know yet."""
        self._doors = doors or self._doors
        self._is_told = True

    @property
    def told(self) -> int:
        """Front doors among which the limits are shared here; 0: the directory has not answered yet."""
        return self._doors if self._is_told else 0

    def uses(self) -> dict[bytes, Use]:
        """Return what tenants have open here, by their tags."""
        return {self._tag_of(tenant): self._open_here.use_of(tenant) for tenant in self._open_here.tenants}

    async def check(self, tenant: str) -> None:
        """Raise `TooManyRequests` unless a tenant may have open what it has, the new request included."""
        if self._link is None or self._doors == 1 or not self._open_here.has_keys:
            return
        use = self._open_here.use_of(tenant)
        if use.fits(self.limit.share(self._doors)):
            return
        if self._clock() >= self._asks_again_s:
            self.asked += 1
            try:
                async with asyncio.timeout(self._wait_s):
                    tag = self._tag_of(tenant)
                    if await self._link.allow(self.door, self.asked, tag, use, self.limit):
                        return
            except (DirectoryLost, TimeoutError) as lost:
                logger.info("limits are shared without asking for %g s: %s", SILENT_S, lost or "late")
                self._asks_again_s = self._clock() + SILENT_S
        limits = self._open_here.limits
        doors = "all" if self._doors == MANY else self._doors
        message = (
            f"This API key has as much open as it may, on {doors} front doors together: "
            f"{limits.concurrent_per_key} requests (limits.concurrent_per_key), {limits.sequences_per_key} "
            f"answers (limits.sequences_per_key), {limits.tokens_per_key} tokens (limits.tokens_per_key). "
            "Try again later."
        )
        raise TooManyRequests(message, limits.retry_after_s, code=CODE)
