"""Builds the table that `samovar serve` prints at start: the model, and what its KV cache can hold.

It shows what a ready replica reports and what the settings say about the tiers, not whether the tiers work
(see `samovar status`).
"""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from configs.sections import GIB
from configs.settings import Settings
from replicas.messages import ReplicaInfo

SESSION_TOKENS = (2048, 8192, 32768)
SCRATCH_PAGES = 1  # page 0 takes the writes of padding and belongs to no session


def startup_table(info: ReplicaInfo, replicas: int, settings: Settings) -> Table:
    """Return the table: one replica's facts, the tiers, and how many sessions fit into all `replicas`."""
    table = Table(title="Samovar", show_header=False, title_justify="left")
    table.add_column("what", no_wrap=True)
    table.add_column("value", overflow="fold")
    rows = [
        ("model", info.model_name),
        ("device", f"{info.device}, {info.dtype}, {_count(info.threads, 'thread')}"),
        ("replicas", str(replicas)),
        ("exact", f"{'on' if info.exact else 'off'}: {info.exactness}"),
        ("attention", info.attention),
        ("loaded in", f"{info.load_s:.1f} s"),
        ("longest context", _count(info.context_tokens_max, "token")),
        ("KV cache", f"{info.bytes_per_token:,} bytes per token, blocks of {info.block_tokens} tokens"),
        ("KV pool", f"{info.pages - SCRATCH_PAGES:,} pages, {_gib(info.pool_bytes)} a replica"),
        *tier_rows(settings),
    ]
    for what, value in rows:
        table.add_row(what, Text(value))  # Text: a model's name is not markup
    for tokens in SESSION_TOKENS:
        table.add_row(f"sessions of {tokens // 1024}k", Text(_sessions(info, replicas, tokens)))
    return table


def tier_rows(settings: Settings) -> list[tuple[str, str]]:
    """Return (tier, its size and location) for every tier."""
    tiers = settings.tiers
    if not tiers.enabled:
        return [("tiers", "off (tiers.enabled): blocks are kept in their replica's pool only")]
    of_bucket = f"bucket {tiers.s3.bucket} at {tiers.s3.endpoint or f'AWS, {tiers.s3.region}'}"
    places = (
        ("cpu", tiers.cpu.bytes_max, "in Ray's object store"),
        ("nvme", tiers.nvme.bytes_max, f"in {settings.nvme_dir}"),
        ("s3", tiers.s3.bytes_max if tiers.s3.bucket else 0, of_bucket),
    )
    why_off = {"cpu": "tiers.cpu.bytes_max", "nvme": "tiers.nvme.bytes_max", "s3": "tiers.s3.bucket"}
    return [
        (f"tier {name}", f"{_gib(nbytes)} {where}" if nbytes else f"off ({why_off[name]})")
        for name, nbytes, where in places
    ]


def sessions_that_fit(info: ReplicaInfo, tokens: int) -> int | None:
    """Return how many sessions of `tokens` one replica's pages hold at once; None beyond its context."""
    if tokens > info.context_tokens_max:
        return None
    return (info.pages - SCRATCH_PAGES) // -(-tokens // info.block_tokens)


def _sessions(info: ReplicaInfo, replicas: int, tokens: int) -> str:
    fit = sessions_that_fit(info, tokens)
    if fit is None:
        return "-  (longer than the context)"
    return f"{fit:,}" if replicas == 1 else f"{fit:,} per replica, {fit * replicas:,} in total"


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:,.2f} GiB"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
