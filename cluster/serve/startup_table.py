"""Builds what `samovar serve` prints when it is ready: the model, what its KV cache can hold, the next steps.

A replica reports the model, the tiers of this node what they are: one that is off says why.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping

from rich.table import Table
from rich.text import Text

from samovar.cache_tiers.blocks import CPU, NVME, PEER, S3
from samovar.cache_tiers.pricing import TierPrice, break_even_tokens
from samovar.configs.sections import GIB
from samovar.configs.settings import Settings
from samovar.replicas.messages import SCRATCH_PAGES, ReplicaInfo

SESSION_TOKENS = (2048, 8192, 32768)
TIER_WORDS = {"gpu": "pool", CPU.name: "RAM", NVME.name: "disk", S3.name: "S3", PEER: "other node"}
"""What people call the places of blocks, by the names that the API and the settings use."""
WELL = ("up", "read-only")
"""States of a tier that serves; all others are told in yellow."""

# Without a limit, a small model may generate to the end of its context, for minutes.
FIRST_LIMITS = {"max_tokens": 60, "temperature": 0}
FIRST_QUESTION = {"role": "user", "content": "What is the capital of France?"}
ANOTHER_MODEL = "samovar serve Qwen/Qwen3-0.6B"


def startup_table(
    info: ReplicaInfo,
    replicas: int,
    settings: Settings,
    states: Mapping[str, str] | None = None,
    prices: Mapping[str, TierPrice] | None = None,
) -> Table:
    """Return the table: one replica's facts, the tiers, and how many sessions fit into all `replicas`.

    `states`, `prices`: tier -> `TierStats.state` and `TierStats.price`, as this node's tiers report it; None:
    not known.
    """
    table = Table(title="Samovar", show_header=False, title_justify="left")
    table.add_column("what", no_wrap=True)
    table.add_column("value", overflow="fold")
    rows = [
        ("model", info.model_name),
        ("device", f"{info.device}, {info.dtype}, {_count(info.threads, 'thread')}"),
        ("replicas", str(replicas)),
        ("exact", f"{'on' if info.exact else 'off'}: {info.exactness}"),
        ("step", info.step),
        ("dtype", info.dtype_sentence),
        ("attention", info.attention),
        *([("graphs", info.graphs)] if info.graphs else []),
        ("loaded in", f"{info.load_s:.1f} s{_stages(info)}"),
        ("longest context", _count(info.context_tokens_max, "token")),
        (
            "KV cache",
            f"{info.kv_dtype}, {info.bytes_per_token:,} bytes per token, {info.block_tokens} a block",
        ),
        ("KV pool", f"{info.pages - SCRATCH_PAGES:,} pages, {_gib(info.pool_bytes)} a replica"),
    ]
    for what, value in rows:
        table.add_row(what, Text(value))  # Text: a model's name is not markup
    for what, value in tier_rows(settings, states):
        is_well = states is None or what not in _troubled(settings, states)
        table.add_row(what, Text(value, style="" if is_well else "yellow"))
    if settings.tiers.enabled and (
        why := smaller_than_pools(settings.tiers.cpu.bytes_planned, replicas * info.pool_bytes)
    ):
        table.add_row("", Text(why))
    for what, value in load_rows(info, prices or {}):
        table.add_row(what, Text(value))
    for tokens in SESSION_TOKENS:
        table.add_row(f"sessions of {tokens // 1024}k", Text(_sessions(info, replicas, tokens)))
    return table


def smaller_than_pools(tier_bytes: int, pools_bytes: int) -> str:
    """Return what to know of a RAM tier that is smaller than the pools in front of it; "" if it is not."""
    if not 0 < tier_bytes < pools_bytes:
        return ""
    return (
        f"less RAM than the {_gib(pools_bytes)} of pool in front of it: much of what it holds, the pool "
        "holds as well (tiers.cpu.bytes_max; /dev/shm must hold it)"
    )


def load_rows(info: ReplicaInfo, prices: Mapping[str, TierPrice]) -> list[tuple[str, str]]:
    """Return (row, from how many tokens on a load pays, and both prices) for each tier with a price."""
    from samovar.router.observe.diagnosis import computing_in_words, loading_in_words, wins_in_words

    if info.prefill is None:
        return []
    rows = []
    for name, price in prices.items():
        wins = wins_in_words(
            break_even_tokens(price, info.prefill, info.bytes_per_token), info.context_tokens_max
        )
        loading = f"pays {wins}: loading {loading_in_words(price, info.bytes_per_token)}"
        if math.isinf(price.bytes_per_s):
            loading = "not measured yet, its first loads tell"
        value = f"{loading}, computing {computing_in_words(info.prefill)}"
        rows.append((f"load from {TIER_WORDS.get(name, name)}", value))
    return rows


def tier_rows(settings: Settings, states: Mapping[str, str] | None = None) -> list[tuple[str, str]]:
    """Return (tier, its size and location) for every tier; a configured one that does not work says why."""
    tiers = settings.tiers
    if not tiers.enabled:
        return [("tiers", "off (tiers.enabled): blocks are kept in their replica's pool only")]
    of_bucket = f"bucket {tiers.s3.bucket} at {tiers.s3.endpoint or f'AWS, {tiers.s3.region}'}"
    places = {
        CPU.name: ("in Ray's object store", "tiers.cpu.bytes_max"),
        NVME.name: (f"in {settings.nvme_dir}", "tiers.nvme.bytes_max"),
        S3.name: (of_bucket, "tiers.s3.bucket"),
        tiers.more.name: (f"by {tiers.more.medium}", "tiers.more.medium"),
    }
    troubled = {} if states is None else _troubled(settings, states)
    rows = []
    for name, nbytes in tiers.sizes.items():
        where, why_off = places[name]
        row = _row_name(name)
        value = f"{_gib(nbytes)} {where}" if nbytes else f"off ({why_off})"
        rows.append((row, f"{troubled[row]} ({value})" if row in troubled else value))
    return rows


def _row_name(tier: str) -> str:
    return f"tier {TIER_WORDS.get(tier, tier)}"


def _troubled(settings: Settings, states: Mapping[str, str]) -> dict[str, str]:
    """Return row -> state, of the tiers that are configured and do not serve."""
    return {
        _row_name(name): state_in_words(states[name])
        for name, nbytes in settings.tiers.sizes.items()
        if nbytes and name in states and states[name] not in WELL
    }


def state_in_words(state: str) -> str:
    """Return a tier's state (`TierStats.state`) as people say it."""
    words = {"open": "not in use: it does not answer, and is tried again"}
    return words.get(state, state.replace("open: ", "not yet: ", 1))


def next_steps(info: ReplicaInfo, url: str, *, has_keys: bool, toy: str) -> str:
    """Return what to try first, as lines of at most 80 columns. `toy`: the default model's name."""
    key = ' -H "Authorization: Bearer $SAMOVAR_API_KEY"' if has_keys else ""
    head, messages = (
        json.dumps(part, ensure_ascii=False)
        for part in ({"model": info.model_name, **FIRST_LIMITS}, {"messages": [FIRST_QUESTION]})
    )
    body = f"{head[:-1]},\n {messages[1:]}"  # in two lines, still one object
    lines = [
        "  chat in the terminal   samovar chat",
        "  what is cached where   samovar status",
        f"  for OpenAI's clients   base_url={url}/v1",
        "",
        f"  curl -s {url}/v1/chat/completions{key} \\",
        "    -H 'Content-Type: application/json' \\",
        f"    -d {shlex.quote(body)} \\",
        "    | python3 -m json.tool",
    ]
    if info.model_name == toy:
        lines += [
            "",
            f"  {toy} is a 4-bit toy, to see the cache work.",
            f"  For real answers: {ANOTHER_MODEL}",
        ]
    return "\n".join(lines)


def _stages(info: ReplicaInfo) -> str:
    """Return the seconds of the stages of a replica's start; empty if it has told none."""
    parts = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in info.stages)
    return f" ({parts})" if parts else ""


def _sessions(info: ReplicaInfo, replicas: int, tokens: int) -> str:
    fit = info.sessions_that_fit(tokens)
    if fit is None:
        return "-  (longer than the context)"
    return f"{fit:,}" if replicas == 1 else f"{fit:,} per replica, {fit * replicas:,} in total"


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:,.2f} GiB"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
