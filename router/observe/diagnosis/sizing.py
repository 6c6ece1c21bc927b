"""Sizes a running service: what fits its pools at a context's length, and where a load beats computing. Pure.

Nothing is assumed: bytes, pages and prices are those that the service has measured and reports.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from samovar.cache_tiers.pricing import PrefillPrice, TierPrice, break_even_tokens, in_digits
from samovar.router.observe.diagnosis.memory import decode_tokens_per_s
from samovar.router.observe.diagnosis.snapshot import Snapshot, Window


@dataclass(frozen=True, slots=True)
class LiveTier:
    """Loads from one tier, at its measured price. `wins_from`: tokens; None: never.

    `load_s`: of each context.
    """

    name: str
    latency_s: float
    bytes_per_s: float
    wins_from: int | None
    load_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class LiveContext:
    """A context of `tokens`. None: it is longer than the model's context.

    `sequences`: that fit all replicas' pools; `running`: of these, as many as the replicas run at a time.
    `alone_tokens_per_s`, `batch_tokens_per_s`: one sequence decoding, and all that run.
    """

    tokens: int
    kv_bytes: int
    compute_s: float | None
    sequences: int | None
    running: int | None
    alone_tokens_per_s: float | None
    batch_tokens_per_s: float | None


@dataclass(frozen=True, slots=True)
class LiveSizing:
    """What a running service can hold, and what it costs."""

    model_name: str
    kv_dtype: str
    replicas: int
    bytes_per_token: int
    pool_bytes: int
    context_tokens_max: int
    prefill: PrefillPrice
    contexts: tuple[LiveContext, ...]
    tiers: tuple[LiveTier, ...]


def size_live(now: Snapshot, contexts: Sequence[int]) -> LiveSizing | None:
    """Return the sizing of a service's first model; None: no replica of it reports its prices yet."""
    now = now.of_each_model[0]
    window = Window(now)
    if not now.serving or window.prefill is None:
        return None
    info, prefill = now.serving[0], window.prefill
    return LiveSizing(
        model_name=info.model_name,
        kv_dtype=info.kv_dtype,
        replicas=len(now.serving),
        bytes_per_token=info.bytes_per_token,
        pool_bytes=info.pool_bytes,
        context_tokens_max=info.context_tokens_max,
        prefill=prefill,
        contexts=tuple(_context(now, tokens, prefill, window) for tokens in contexts),
        tiers=load_prices(_prices(now), prefill, info.bytes_per_token, contexts),
    )


def _context(now: Snapshot, tokens: int, prefill: PrefillPrice, window: Window) -> LiveContext:
    info = now.serving[0]
    kv_bytes = -(-tokens // info.block_tokens) * info.block_tokens * info.bytes_per_token
    fits = [one.sessions_that_fit(tokens) for one in now.serving]
    if any(fit is None for fit in fits):
        return LiveContext(tokens, kv_bytes, None, None, None, None, None)
    most = window.setting("engine.sequences_max")
    running = [min(fit or 0, most or fit or 0) for fit in fits]

    def per_s(sequences: int) -> float:
        return decode_tokens_per_s(prefill, sequences, tokens) if sequences else 0.0

    return LiveContext(
        tokens=tokens,
        kv_bytes=kv_bytes,
        compute_s=prefill.seconds(tokens, 0),
        sequences=sum(fit or 0 for fit in fits),
        running=sum(running),
        alone_tokens_per_s=per_s(min(1, max(running))),
        batch_tokens_per_s=sum(per_s(one) for one in running),
    )


def _prices(now: Snapshot) -> dict[str, TierPrice]:
    """Return the price of each tier that works; of several nodes' the slowest."""
    found: dict[str, TierPrice] = {}
    for node in now.nodes:
        for tier in node.tiers:
            if tier.price is not None and tier.price.is_up and not tier.is_off:
                before = found.get(tier.name)
                if before is None or tier.price.seconds(1 << 20) > before.seconds(1 << 20):
                    found[tier.name] = tier.price
    return found


PRICED_TOKENS = 8192
"""The length of the context whose mean token is priced in words."""


def wins_in_words(tokens: int | None, context_tokens: int | None = None) -> str:
    """Return from which length on a load wins. `context_tokens`: no context is longer."""
    if tokens is None or (context_tokens and tokens > context_tokens):
        return "never"
    return "always" if tokens <= 1 else f"from {tokens:,} tokens on"


def computing_in_words(prefill: PrefillPrice) -> str:
    """Return what a token of a context costs to compute."""
    each_us = prefill.added_seconds(PRICED_TOKENS, 0) / PRICED_TOKENS * 1e6
    return f"{in_digits(each_us)} us a token of {PRICED_TOKENS // 1024}k"


def loading_in_words(price: TierPrice, bytes_per_token: int) -> str:
    """Return what a token costs to load, and what a load costs whatever its length."""
    each_us = bytes_per_token / price.bytes_per_s * 1e6
    return f"{in_digits(each_us)} us a token after {in_digits(1e3 * price.latency_s)} ms"


def load_prices(
    prices: Mapping[str, TierPrice], prefill: PrefillPrice, bytes_per_token: int, contexts: Sequence[int]
) -> tuple[LiveTier, ...]:
    """Return for each tier from which length on a load beats computing, and the loads of some contexts."""
    return tuple(
        LiveTier(
            name,
            price.latency_s,
            price.bytes_per_s,
            break_even_tokens(price, prefill, bytes_per_token),
            tuple(price.seconds(tokens * bytes_per_token) for tokens in contexts),
        )
        for name, price in prices.items()
    )
