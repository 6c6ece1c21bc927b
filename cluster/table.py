"""The table that `samovar serve` prints at start: the model, and what its KV cache can hold.

It only lays out what a ready replica says about itself; it does not know how that was measured.
"""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from replicas.messages import ReplicaInfo

SESSION_TOKENS = (2048, 8192, 32768)
SCRATCH_PAGES = 1  # page 0 takes the writes of padding and belongs to no session


def startup_table(info: ReplicaInfo, replicas: int) -> Table:
    """The facts of one replica, and how many sessions fit into it and into all `replicas` together."""
    table = Table(title="Samovar", show_header=False, title_justify="left")
    table.add_column("what", no_wrap=True)
    table.add_column("value", overflow="fold")
    gib = 1024**3
    rows = [
        ("model", info.model_name),
        ("device", f"{info.device}, {info.dtype}, {_count(info.threads, 'thread')}"),
        ("replicas", str(replicas)),
        ("exact", f"{'on' if info.exact else 'off'}: {info.exactness}"),
        ("attention", info.attention),
        ("loaded in", f"{info.load_s:.1f} s"),
        ("longest context", _count(info.context_tokens_max, "token")),
        ("KV cache", f"{info.bytes_per_token:,} bytes a token, blocks of {info.block_tokens} tokens"),
        ("KV pool", f"{info.pages - SCRATCH_PAGES:,} pages, {info.pool_bytes / gib:.2f} GiB a replica"),
    ]
    for what, value in rows:
        table.add_row(what, Text(value))  # Text: a model's name is not markup
    for tokens in SESSION_TOKENS:
        table.add_row(f"sessions of {tokens // 1024}k", Text(_sessions(info, replicas, tokens)))
    return table


def sessions_that_fit(info: ReplicaInfo, tokens: int) -> int | None:
    """How many sessions of so many tokens one replica's pages hold at once; None beyond its context."""
    if tokens > info.context_tokens_max:
        return None
    return (info.pages - SCRATCH_PAGES) // -(-tokens // info.block_tokens)


def _sessions(info: ReplicaInfo, replicas: int, tokens: int) -> str:
    fit = sessions_that_fit(info, tokens)
    if fit is None:
        return "-  (longer than the context)"
    return f"{fit:,}" if replicas == 1 else f"{fit:,} a replica, {fit * replicas:,} in all"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
