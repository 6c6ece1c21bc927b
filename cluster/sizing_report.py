"""What `samovar plan --model DIR --gpu 80GB` prints: what fits, and what is loaded quicker than computed.

The arithmetic is `kv_sizing.py`'s.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from cluster.kv_shape import KvShape
from cluster.kv_sizing import ContextSizing, Sizing, TierBreakEven
from configs.section import GIB, MIB

CONTEXT_HEAD = (
    *("context", "KV of one", "sequences that fit", "one decodes (tokens/s)", "all decode (tokens/s)"),
    "prefill",
)
TIER_HEAD = ("context", "tier", "load", "compute", "quicker", "loading wins from", "needs at least")


def in_bytes(nbytes: float) -> str:
    """`4.00 GiB`, `512 MiB`."""
    return f"{nbytes / GIB:,.2f} GiB" if nbytes >= GIB else f"{nbytes / MIB:,.1f} MiB"


def in_seconds(seconds: float | None) -> str:
    """`1.25 s`, `35.0 ms`; a dash where nobody can tell."""
    if seconds is None:
        return "-"
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{1e3 * seconds:,.1f} ms"


def in_tokens(tokens: int) -> str:
    """`8k` where it is a round number."""
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else f"{tokens:,}"


def lines(sizing: Sizing, shape: KvShape, gpu_bytes: int) -> list[str]:
    """What stands above the tables."""
    return [
        f"{sizing.token_bytes:,} bytes of KV a token ({shape.itemsize} bytes an element)",
        f"{in_bytes(gpu_bytes)} of GPU memory, {in_bytes(sizing.weights_bytes)} of weights: "
        f"{in_bytes(sizing.kv_room_bytes)} for KV",
        f"one sequence decodes at {sizing.weights_tokens_per_s:,.0f} tokens/s at most (bandwidth / weights)",
        *(f"note: {note}" for note in sizing.notes),
    ]


def context_rows(sizing: Sizing) -> list[tuple[str, ...]]:
    """Of `CONTEXT_HEAD`."""
    return [
        (
            in_tokens(one.tokens),
            in_bytes(one.kv_bytes),
            f"{one.sequences:,}",
            f"{one.alone_tokens_per_s:,.0f}",
            f"{one.batch_tokens_per_s:,.0f}",
            in_seconds(one.compute_s),
        )
        for one in sizing.contexts
    ]


def tier_rows(sizing: Sizing) -> list[tuple[str, ...]]:
    """Of `TIER_HEAD`."""
    return [_tier_row(context, tier) for context in sizing.contexts for tier in context.tiers]


def _tier_row(context: ContextSizing, tier: TierBreakEven) -> tuple[str, ...]:
    needed = tier.gb_per_s_needed
    return (
        in_tokens(context.tokens),
        tier.tier,
        in_seconds(tier.load_s),
        in_seconds(context.compute_s),
        "load" if tier.is_quicker else "compute",
        "never" if tier.tokens is None else f"{tier.tokens:,} tokens",
        "-" if needed is None else f"{needed:,.2f} GB/s",
    )


def as_json(sizing: Sizing) -> dict[str, Any]:
    """For programs."""
    return asdict(sizing)
