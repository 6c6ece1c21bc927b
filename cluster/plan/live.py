"""Runs `samovar plan --live`: tables of what fits the running service, and where loading beats computing.

The sizing itself is that of `router/observe/diagnosis`, whose numbers the live page shows too. All but
`run_live` is pure.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from samovar.cache_tiers.messages import as_json
from samovar.cluster.plan.runs import PlanRefused
from samovar.cluster.plan.sizing import in_bytes, in_seconds, in_tokens, parse_contexts
from samovar.cluster.serve.startup_table import TIER_WORDS
from samovar.router.observe.diagnosis import LiveSizing, Snapshot, size_live, wins_in_words

CONTEXTS = "2k,8k,32k,128k"


def run_live(now: Snapshot, contexts: str | None, json_to: Path | None, console: Console) -> int:
    """Print the tables, write the JSON. Raises `PlanRefused`, `ValueError`, `OSError`."""
    sizing = size_live(now, parse_contexts(contexts or CONTEXTS))
    if sizing is None:
        raise PlanRefused("no replica of this service reports its model and prices yet: is it ready?")
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


def load_table(sizing: LiveSizing) -> Table:
    """Return the table of tiers: price, from where on a load wins, and loads beside computing."""
    fitting = [at for at, one in enumerate(sizing.contexts) if one.sequences is not None]
    contexts = [sizing.contexts[at].tokens for at in fitting]
    head = ("from", "latency", "GB/s", "wins", *(in_tokens(tokens) for tokens in contexts))
    table = _table("Loading a context, or computing it", head)
    for tier in sizing.tiers:
        wins = wins_in_words(tier.wins_from, sizing.context_tokens_max)
        cells = [in_seconds(tier.latency_s), f"{tier.bytes_per_s / 1e9:.3g}", wins]
        cells += [in_seconds(tier.load_s[at]) for at in fitting]
        if math.isinf(tier.bytes_per_s):  # no load has come from it yet
            cells = ["-", "-", "not measured", *("-" for _ in fitting)]
        table.add_row(*map(Text, [TIER_WORDS.get(tier.name, tier.name), *cells]))
    computing = [in_seconds(sizing.prefill.seconds(tokens, 0)) for tokens in contexts]
    table.add_row(*map(Text, ["computing", "", "", "", *computing]))
    return table


def _table(title: str, head: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for at, name in enumerate(head):
        table.add_column(name, justify="left" if at == 0 else "right")
    return table
