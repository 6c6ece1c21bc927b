"""Counts what each tenant's turns took and spared, and passes ended turns on to those who watch.

Prices are the replicas' own: what recomputing a prompt would take is told by `PrefillPrice`, not guessed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from samovar.cache_tiers.blocks import sources
from samovar.cache_tiers.pricing import PrefillPrice
from samovar.replicas.messages import FinishReason, Source
from samovar.router.generation.answer import Answer, AnswerReceipt

Finish = FinishReason | Literal["left"]
PriceOf = Callable[[str], PrefillPrice | None]


@dataclass(frozen=True, slots=True)
class EndedTurn:
    """A turn of `tenant` (its name) that has ended, and what it took.

    `lineage`: the tag of its first prompt's lineage. `ttft_s`: None if no token came. `recompute_s`: what
    computing all its prompts would have taken, None if no price is known; `saved_s`: the same of what was
    cached, less the load. `finish`: `left` if the client went away, or it failed.
    """

    tenant: str
    lineage: bytes
    request_id: str
    prompt_tokens: int
    output_tokens: int
    receipt: AnswerReceipt
    ttft_s: float | None
    e2e_s: float
    recompute_s: float | None
    saved_s: float
    finish: Finish
    ended_unix_s: float


@dataclass(slots=True)
class TenantUsage:
    """Sums over a tenant's turns; `tokens`: of prompts, by where their KV came from."""

    requests: int = 0
    output_tokens: int = 0
    saved_s: float = 0.0
    tokens: dict[Source, int] = field(default_factory=lambda: dict.fromkeys(sources(), 0))

    @property
    def prompt_tokens(self) -> int:
        return sum(self.tokens.values())

    @property
    def hit_rate(self) -> float | None:
        """Share of prompt tokens that were not computed; None before the first."""
        return 1.0 - self.tokens["compute"] / self.prompt_tokens if self.prompt_tokens else None

    def add(self, other: TenantUsage) -> None:
        """Add another's sums."""
        self.requests += other.requests
        self.output_tokens += other.output_tokens
        self.saved_s += other.saved_s
        for source, count in other.tokens.items():
            self.tokens[source] = self.tokens.get(source, 0) + count


class UsageBook:
    """The usage of all tenants since this ingress began. Not thread-safe: for the event loop.

    Tenants come from the configuration, so there are no more than it names. `listeners` are called with each
    ended turn; they must not block.
    """

    def __init__(self, wall_clock: Callable[[], float] = time.time) -> None:
        self.since_unix_s = wall_clock()
        self.wall_clock = wall_clock
        self.listeners: list[Callable[[EndedTurn], None]] = []
        self._of: dict[str, TenantUsage] = {}

    def count(
        self,
        answer: Answer,
        price_of: PriceOf,
        *,
        tenant: str,
        lineage: bytes,
        request_id: str,
        ttft_s: float | None,
        e2e_s: float,
    ) -> None:
        """Count an ended turn, if any of its prompts was computed, and pass it on: see `EndedTurn`."""
        if not answer.admissions:
            return
        recompute_s, saved_s = priced(answer, price_of)
        reason, receipt = answer.choices[0].finish_reason, answer.receipt
        turn = EndedTurn(
            tenant=tenant,
            lineage=lineage,
            request_id=request_id,
            prompt_tokens=sum(receipt.tokens.values()),
            output_tokens=answer.usage().completion_tokens,
            receipt=receipt,
            ttft_s=ttft_s,
            e2e_s=e2e_s,
            recompute_s=recompute_s,
            saved_s=saved_s,
            finish=reason if answer.is_over and reason is not None else "left",
            ended_unix_s=self.wall_clock(),
        )
        usage = self._of.setdefault(tenant, TenantUsage())
        usage.add(TenantUsage(1, turn.output_tokens, saved_s, dict(receipt.tokens)))
        for listener in self.listeners:
            listener(turn)

    def of(self, tenant: str) -> TenantUsage:
        """Return a copy of a tenant's usage."""
        return summed([self._of.get(tenant, TenantUsage())])

    def all(self) -> Mapping[str, TenantUsage]:
        """Return copies of every tenant's usage, by name."""
        return {tenant: self.of(tenant) for tenant in sorted(self._of)}


def summed(usages: Iterable[TenantUsage]) -> TenantUsage:
    """Return the sum of several tenants' usage."""
    total = TenantUsage()
    for usage in usages:
        total.add(usage)
    return total


def priced(answer: Answer, price_of: PriceOf) -> tuple[float | None, float]:
    """Return what computing the answer's prompts would take, and what of it was saved, in seconds.

    `price_of`: a replica's price. The former is None if a price is missing; such a prompt saves nothing.
    """
    recompute_s: float | None = 0.0
    saved_s = 0.0
    for tokens, admitted in answer.admissions:
        price = price_of(admitted.replica_id)
        if price is None:
            recompute_s = None
            continue
        whole_s = price.seconds(tokens, 0)
        cached = min(admitted.cached_tokens, tokens)
        rest_s = price.seconds(tokens - cached, cached)
        saved_s += max(0.0, whole_s - rest_s - admitted.receipt.load_s)
        recompute_s = None if recompute_s is None else recompute_s + whole_s
    return recompute_s, saved_s
