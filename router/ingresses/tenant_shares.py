"""The limits of a tenant, where several ingresses admit its requests.

An ingress admits its share of a limit by itself, and asks the session directory for more: see
`cache_tiers/sessions/quotas.py` for what that allows. If the directory does not answer, the share is all that
there is. While it cannot say (it is new, or this ingress is), requests wait for it: not for
long, and one after the other.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Protocol

from samovar.cache_tiers.sessions import MANY, Use
from samovar.router.auth import CODE, ConcurrencyLimit
from samovar.router.openai import TooManyRequests
from samovar.router.routing import DirectoryLost

logger = logging.getLogger(__name__)

NAME_CHARS = 8
SILENT_S = 1.0
"""After a failed question nothing is asked for this long."""


class QuotaLink(Protocol):
    """The part of the directory's link that answers for limits. Raises `DirectoryLost`."""

    async def allow(
        self, ingress: str, asked: int, tenant: bytes, wanted: Use, limit: Use
    ) -> bool | None: ...


class IngressShares:
    """This ingress's share of each tenant's limits. Use it from one event loop.

    `ingress`: its name. `link`: None: there is no other ingress. `open_here`: what tenants have open here.
    `tag_of`: a tenant's tag. `ingresses_at_start`: ingresses until the directory has said how many there are.
    `wait_s`: how long a request waits for an answer; `unsettled_s`: and until the directory can say.
    """

    def __init__(
        self,
        ingress: str,
        link: QuotaLink | None,
        open_here: ConcurrencyLimit,
        tag_of: Callable[[str], bytes],
        *,
        ingresses_at_start: int,
        wait_s: float,
        unsettled_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.ingress = ingress
        self.asked = 0
        """How often more than the share was asked for."""
        self._link = link
        self._open_here = open_here
        self._tag_of = tag_of
        self._ingresses = max(1, ingresses_at_start)
        self._wait_s = wait_s
        self._unsettled_s = unsettled_s
        self._clock = clock
        self._asks_again_s = 0.0
        self._is_told = False
        self._is_settled = False  # the directory has said what this one's share is
        self._heard = asyncio.Event()  # replaced each time
        self._turn = asyncio.Lock()  # of those that wait: each asks for what is open when its turn comes

    @property
    def limit(self) -> Use:
        """A tenant's limit at all ingresses together."""
        limits = self._open_here.limits
        return Use(limits.concurrent_per_key, limits.sequences_per_key, limits.tokens_per_key)

    @property
    def name(self) -> str:
        """The ingress's name as people see it."""
        return self.ingress[:NAME_CHARS]

    @property
    def ingresses(self) -> int:
        """Ingresses that share the limits; `MANY`: this one has no share yet, and asks for all."""
        return self._ingresses

    def heard(self, ingresses: int) -> None:
        """Take in how many ingresses there are; 0: the directory does not know yet."""
        self._ingresses = ingresses or self._ingresses
        self._is_told = True
        self._is_settled = 0 < ingresses < MANY
        self._heard.set()
        self._heard = asyncio.Event()

    @property
    def told(self) -> int:
        """Ingresses among which the limits are shared here; 0: the directory has not answered yet."""
        return self._ingresses if self._is_told else 0

    async def settled(self, until_s: float) -> None:
        """Wait until this ingress's share is known, until `until_s` by the event loop's clock at most.

        Requests that come before would have to wait, or take their chance with less.
        """
        if self._link is None or not self._open_here.has_keys:
            return
        try:
            async with asyncio.timeout_at(until_s):
                while not self._is_settled:
                    await self._heard.wait()
        except TimeoutError:
            logger.info("this ingress's share of the limits is not known yet: it has asked for all")

    def uses(self) -> dict[bytes, Use]:
        """Return what tenants have open here, by their tags."""
        return {self._tag_of(tenant): self._open_here.use_of(tenant) for tenant in self._open_here.tenants}

    async def check(self, tenant: str) -> None:
        """Raise `TooManyRequests` unless a tenant may have open what it has, the new request included."""
        if self._link is None or self._ingresses == 1 or not self._open_here.has_keys:
            return
        use = self._open_here.use_of(tenant)
        if use.fits(self.limit.share(self._ingresses)):
            return
        allowed = await self._ask(self._link, tenant)
        if allowed is None:
            allowed = await self._wait(self._link, tenant)
        if allowed:
            return
        limits = self._open_here.limits
        ingresses = "all" if self._ingresses == MANY else self._ingresses
        message = (
            f"This API key has as much open as it may, on {ingresses} ingresses together: "
            f"{limits.concurrent_per_key} requests (limits.concurrent_per_key), {limits.sequences_per_key} "
            f"answers (limits.sequences_per_key), {limits.tokens_per_key} tokens (limits.tokens_per_key). "
            "Try again later."
        )
        raise TooManyRequests(message, limits.retry_after_s, code=CODE)

    async def _wait(self, link: QuotaLink, tenant: str) -> bool:
        """Ask again each time that the directory was heard of, until it can say."""
        try:
            async with asyncio.timeout(self._unsettled_s), self._turn:
                while True:
                    heard = self._heard
                    if self._open_here.use_of(tenant).fits(self.limit.share(self._ingresses)):
                        return True
                    allowed = await self._ask(link, tenant)
                    if allowed is not None:
                        return allowed
                    await heard.wait()
        except TimeoutError:
            return False

    async def _ask(self, link: QuotaLink, tenant: str) -> bool | None:
        """Ask the directory for what a tenant has open; None: it cannot say yet."""
        if self._clock() < self._asks_again_s:
            return False
        self.asked += 1
        use, tag = self._open_here.use_of(tenant), self._tag_of(tenant)
        try:
            async with asyncio.timeout(self._wait_s):
                return await link.allow(self.ingress, self.asked, tag, use, self.limit)
        except (DirectoryLost, TimeoutError) as lost:
            logger.info("limits are shared without asking for %g s: %s", SILENT_S, lost or "late")
            self._asks_again_s = self._clock() + SILENT_S
            return False
