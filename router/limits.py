"""How much may be open at the same time, for one tenant and for one ingress: requests, answers, tokens.

Pure counting, for one thread (the event loop). Knows nothing of HTTP or of what a request is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from configs.settings import LimitsSettings
from router.errors import InvalidValue, TooManyRequests

CODE = "concurrency_limit"


@dataclass(frozen=True, slots=True)
class Need:
    """What a request takes while it is open. `param`: the field that would have to be smaller.

    `sequences`: answers, of all its prompts. `tokens`: prompts, and answers at full length; at least.
    """

    sequences: int
    tokens: int
    sequences_param: str = "n"
    tokens_param: str = "max_tokens"


NOTHING = Need(0, 0)


class ConcurrencyLimit:
    """Counts what is open. `lease` blocks nobody: over a limit it raises at once.

    `per_key`: the setting that says how many requests one tenant may have open.
    """

    def __init__(
        self,
        limits: LimitsSettings,
        per_key: Literal["concurrent_per_key", "reads_per_key"] = "concurrent_per_key",
    ) -> None:
        self._limits = limits
        self._per_key = per_key
        self._open_of: dict[str, list[Lease]] = {}
        self._open_total = 0

    @property
    def open_total(self) -> int:
        """Requests open now."""
        return self._open_total

    def open_of(self, tenant: str) -> int:
        """Requests of `tenant` open now."""
        return len(self._open_of.get(tenant, ()))

    @contextmanager
    def lease(self, tenant: str) -> Iterator[Lease]:
        """Hold one place while the request is open; what it needs besides is told to the lease.

        Raises `TooManyRequests` with `Retry-After` when the tenant or the ingress has none left.
        """
        limit: int = getattr(self._limits, self._per_key)
        if self.open_of(tenant) >= limit:
            message = f"{limit} requests of this API key are open (limits.{self._per_key}). Try again later."
            raise TooManyRequests(message, self._limits.retry_after_s, code=CODE)
        if self._open_total >= self._limits.concurrent_total:
            limit = self._limits.concurrent_total
            message = f"{limit} requests are open on this server (limits.concurrent_total). Try again later."
            raise TooManyRequests(message, self._limits.retry_after_s, code=CODE)
        lease = Lease(self, tenant)
        self._open_of.setdefault(tenant, []).append(lease)
        self._open_total += 1
        try:
            yield lease
        finally:
            self._open_total -= 1
            self._open_of[tenant].remove(lease)
            if not self._open_of[tenant]:
                del self._open_of[tenant]  # tenants that left must not pile up

    def check(self, lease: Lease, need: Need) -> None:
        """Raises unless what `lease` needs is left to its tenant: 429, or 400 when it can never be."""
        limits = self._limits
        others = [other.need for other in self._open_of[lease.tenant] if other is not lease]
        for name, what, asked, taken, limit, param in (
            (
                "sequences_per_key",
                "answers (prompts x n)",
                need.sequences,
                sum(other.sequences for other in others),
                limits.sequences_per_key,
                need.sequences_param,
            ),
            (
                "tokens_per_key",
                "tokens (prompts and max_tokens)",
                need.tokens,
                sum(other.tokens for other in others),
                limits.tokens_per_key,
                need.tokens_param,
            ),
        ):
            if asked > limit:
                message = (
                    f"The request asks for {asked} {what}, and one API key may have {limit} under way "
                    f"(limits.{name}). Lower {param}."
                )
                raise InvalidValue(param, message)
            if taken + asked > limit:
                message = (
                    f"{taken} {what} of this API key are under way and the request asks for {asked}: "
                    f"together more than {limit} (limits.{name}). Try again later."
                )
                raise TooManyRequests(message, limits.retry_after_s, code=CODE)

    def check_integrity(self) -> None:
        """Raises AssertionError when the counts do not add up."""
        assert all(self._open_of.values()), "a tenant without requests is remembered"
        counted = sum(map(len, self._open_of.values()))
        assert self._open_total == counted, (self._open_total, counted)


class Lease:
    """An open request's part of its tenant's limits."""

    def __init__(self, limit: ConcurrencyLimit, tenant: str) -> None:
        self.tenant = tenant
        self.need = NOTHING
        self._limit = limit

    def ask(self, need: Need) -> None:
        """This is what it needs, as far as is known now. Raises `ApiError`; then it keeps what it had."""
        self._limit.check(self, need)
        self.need = need
