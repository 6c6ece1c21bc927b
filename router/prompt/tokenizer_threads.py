"""The tokenizer threads: tenants take turns, by bytes of text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from samovar.configs.settings import LimitsSettings
from samovar.replicas.turns import PlacesTaken, TenantThreads
from samovar.router.openai import TooManyRequests

Result = TypeVar("Result")


class TokenizerThreads:
    """Bounded tokenizer work for one event loop.

    `tenant_share`: share of the waiting places that one tenant may have.
    """

    def __init__(self, limits: LimitsSettings, tenant_share: float = 1.0) -> None:
        self._limits = limits
        self._turns = TenantThreads(
            "tokenizer",
            limits.tokenizer_threads,
            places=limits.tokenizer_threads + limits.tokenizer_queue_max,
            tenant_share=tenant_share,
            quantum=limits.tokenizer_quantum_bytes,
            weights=limits.tenant_weights,
        )

    async def run(self, tenant: str, works: Sequence[tuple[Callable[[], Result], int]]) -> list[Result]:
        """Run `works` (each with the bytes of its text) one after the other; return their results.

        Raises `TooManyRequests` before the first of them if too many wait.
        """
        results: list[Result] = []
        for number, (work, nbytes) in enumerate(works):
            # Queued one by one: a request of many long prompts holds a thread for one prompt at a time.
            results.append(await self.one(tenant, work, nbytes, must_run=number > 0))
        return results

    async def one(
        self,
        tenant: str,
        work: Callable[[], Result],
        nbytes: int,
        *,
        is_long: bool = False,
        must_run: bool = False,
    ) -> Result:
        """Return what `work` returns. `is_long`, `must_run`: see `TenantThreads`."""
        try:
            return await self._turns.run(tenant, work, cost=nbytes, is_long=is_long, must_run=must_run)
        except PlacesTaken as taken:
            raise self._refusal(taken) from None

    def _refusal(self, taken: PlacesTaken) -> TooManyRequests:
        why = "Too many prompts wait for the tokenizer (limits.tokenizer_queue_max)."
        if taken.is_of_tenant:
            why = "Too many prompts of this API key wait for the tokenizer (limits.tenant_share)."
        message = f"{why} Try again later."
        return TooManyRequests(message, self._limits.retry_after_s, code="tokenizer_queue_full")

    @property
    def is_idle(self) -> bool:
        """Whether no work waits or runs."""
        return self._turns.is_idle

    def close(self) -> None:
        """Stop the threads. Work that has not started is dropped."""
        self._turns.close()

    def check_integrity(self) -> None:
        """Raise `AssertionError` if the state is inconsistent."""
        self._turns.check_integrity()
