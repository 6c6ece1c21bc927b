"""How many requests may be open at the same time, for one tenant and for one ingress.

Pure counting, for one thread (the event loop). Knows nothing of HTTP or of what a request is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from configs.settings import LimitsSettings
from router.errors import TooManyRequests


class ConcurrencyLimit:
    """Counts open requests. `lease` blocks nobody: over a limit it raises at once."""

    def __init__(self, limits: LimitsSettings) -> None:
        self._limits = limits
        self._open_of: dict[str, int] = {}
        self._open_total = 0

    @property
    def open_total(self) -> int:
        """Requests open now."""
        return self._open_total

    def open_of(self, tenant: str) -> int:
        """Requests of `tenant` open now."""
        return self._open_of.get(tenant, 0)

    @contextmanager
    def lease(self, tenant: str) -> Iterator[None]:
        """Hold one place while the request is open.

        Raises `TooManyRequests` with `Retry-After` when the tenant or the ingress has none left.
        """
        if self.open_of(tenant) >= self._limits.concurrent_per_key:
            limit = self._limits.concurrent_per_key
            message = (
                f"{limit} requests of this API key are open (limits.concurrent_per_key). Try again later."
            )
            raise TooManyRequests(message, self._limits.retry_after_s, code="concurrency_limit")
        if self._open_total >= self._limits.concurrent_total:
            limit = self._limits.concurrent_total
            message = f"{limit} requests are open on this server (limits.concurrent_total). Try again later."
            raise TooManyRequests(message, self._limits.retry_after_s, code="concurrency_limit")
        self._open_of[tenant] = self.open_of(tenant) + 1
        self._open_total += 1
        try:
            yield
        finally:
            self._open_total -= 1
            self._open_of[tenant] -= 1
            if self._open_of[tenant] == 0:
                del self._open_of[tenant]  # tenants that left must not pile up

    def check_integrity(self) -> None:
        """Raises AssertionError when the counts do not add up."""
        assert all(count > 0 for count in self._open_of.values()), self._open_of
        assert self._open_total == sum(self._open_of.values()), (self._open_total, self._open_of)
