"""Runs `samovar plan --live`: what fits the running service, and where loading beats computing.

Nothing is assumed: bytes, pages and prices are those that the service has measured and reports. All but
`run_live` is pure.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cache_tiers.pricing import PrefillPrice, TierPrice, break_even_tokens
from cluster.plan.runs import PlanRefused
from cluster.plan.sizing import in_bytes, in_seconds, in_tokens, parse_contexts
from cluster.serve.startup_table import TIER_WORDS, sessions_that_fit
from router.diagnosis import Snapshot, Window

CONTEXTS = "2k,8k,32k,128k"


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


def size_live(now: Snapshot, contexts: Sequence[int]) -> LiveSizing:
    """Return the sizing of the service in a snapshot. Raises `PlanRefused` if it does not say enough."""
    window = Window(now)
    if not now.serving or window.prefill is None:
        raise PlanRefused("no replica of this service reports its model and prices yet: is it ready?")
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
    fits = [sessions_that_fit(one, tokens) for one in now.serving]
    if any(fit is None for fit in fits):
        return LiveContext(tokens, kv_bytes, None, None, None, None, None)
    most = window.setting("engine.sequences_max")
    running = [min(fit or 0, most or fit or 0) for fit in fits]

    def per_s(sequences: int) -> float:
        if not sequences:
            return 0.0
        return sequences / prefill.step_seconds(sequences, sequences * (2 * tokens + 1))

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
            if tier.price is not None and tier.price.is_up and not tier.state.startswith("off"):
                before = found.get(tier.name)
                if before is None or tier.price.seconds(1 << 20) > before.seconds(1 << 20):
                    found[tier.name] = tier.price
    return found


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


def run_live(now: Snapshot, contexts: str | None, json_to: Path | None, console: Console) -> int:
    """Print the tables, write the JSON. Raises `PlanRefused`, `ValueError`, `OSError`."""
    sizing = size_live(now, parse_contexts(contexts or CONTEXTS))
    console.print(live_view_head(sizing), highlight=False, soft_wrap=True)
    console.print(fit_table(sizing))
    longer = [one.tokens for one in sizing.contexts if one.sequences is None]
    if longer:
        listed = ", ".join(map(in_tokens, longer))
        console.print(
            f"-: the context ends at {sizing.context_tokens_max:,} tokens ({listed})\n", highlight=False
        )
    console.print(load_table(sizing))
    if json_to is not None:
        json_to.write_text(json.dumps(as_json(sizing), indent=1) + "\n")
        console.print(f"written: {json_to}", highlight=False)
    return 0


def live_view_head(sizing: LiveSizing) -> str:
    """Return the lines above the tables."""
    pools = f"{sizing.replicas} x " if sizing.replicas > 1 else ""
    price = sizing.prefill
    return (
        f"{sizing.model_name}: {sizing.bytes_per_token:,} bytes of KV a token ({sizing.kv_dtype}), "
        f"{pools}{in_bytes(sizing.pool_bytes)} of pool, contexts of up to {sizing.context_tokens_max:,} "
        "tokens\n"
        f"measured while serving: a step takes {in_seconds(price.c0_s)}, and "
        f"{in_seconds(1000 * price.a_s)} for "
        "1,000 tokens of prompts in it, beside attention\n"
    )


FIT_HEAD = (
    "context",
    "KV of one",
    "sequences that fit",
    "run at a time",
    "one decodes",
    "all decode",
    "prefill",
)


def fit_table(sizing: LiveSizing) -> Table:
    """Return the table of contexts: how many fit, and the bounds on decoding."""
    table = _table("What fits, and how fast it decodes at most (tokens/s)", FIT_HEAD)
    for one in sizing.contexts:
        cells = [in_tokens(one.tokens), in_bytes(one.kv_bytes)]
        if one.sequences is None or one.running is None:
            cells += ["-"] * 5
        else:
            cells += [f"{one.sequences:,}", f"{one.running:,}"]
            cells += [
                _per_s(one.alone_tokens_per_s),
                _per_s(one.batch_tokens_per_s),
                in_seconds(one.compute_s),
            ]
        table.add_row(*map(Text, cells))
    return table


def _per_s(tokens: float | None) -> str:
    return f"{tokens:,.0f}" if tokens else "-"


def wins_in_words(tokens: int | None, context_tokens: int | None = None) -> str:
    """Return from which length on a load wins. `context_tokens`: no context is longer."""
    if tokens is None or (context_tokens and tokens > context_tokens):
        return "never"
    return "always" if tokens <= 1 else f"from {tokens:,} tokens on"


def load_table(sizing: LiveSizing) -> Table:
    """Return the table of tiers: price, from where on a load wins, and loads beside computing."""
    fitting = [at for at, one in enumerate(sizing.contexts) if one.sequences is not None]
    contexts = [sizing.contexts[at].tokens for at in fitting]
    head = ("from", "latency", "GB/s", "wins", *(in_tokens(tokens) for tokens in contexts))
    table = _table("Loading a context, or computing it", head)
    for tier in sizing.tiers:
        wins = wins_in_words(tier.wins_from, sizing.context_tokens_max)
        cells = [
            TIER_WORDS.get(tier.name, tier.name),
            in_seconds(tier.latency_s),
            f"{tier.bytes_per_s / 1e9:.3g}",
        ]
        table.add_row(*map(Text, [*cells, wins, *(in_seconds(tier.load_s[at]) for at in fitting)]))
    computing = [in_seconds(sizing.prefill.seconds(tokens, 0)) for tokens in contexts]
    table.add_row(*map(Text, ["computing", "", "", "", *computing]))
    return table


def _table(title: str, head: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for at, name in enumerate(head):
        table.add_column(name, justify="left" if at == 0 else "right")
    return table


def as_json(sizing: LiveSizing) -> dict[str, Any]:
    """Return the sizing as plain data, for `--json`; an infinite number is null."""
    found: dict[str, Any] = _finite(asdict(sizing))
    return found


def _finite(value: Any) -> Any:
    """Return plain data with null for infinities, which JSON has not."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
