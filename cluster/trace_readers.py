"""Opens a trace of whatever known schema: the file itself says which.

Each schema has a file of its own (`trace_mooncake.py`, ...); what is read with which options is decided here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cluster.trace import Trace, TraceKind
from cluster.trace_burst import COLUMNS as BURST_COLUMNS
from cluster.trace_burst import burst
from cluster.trace_file import TraceError, lines, parse_object
from cluster.trace_mooncake import TURN_COLUMNS, mooncake, mooncake_turns
from cluster.trace_qwen import qwen
from cluster.trace_recorded import recorded
from cluster.trace_weka import COLUMNS as WEKA_COLUMNS
from cluster.trace_weka import weka

_BY_KEYS: tuple[tuple[TraceKind, frozenset[str]], ...] = (
    ("samovar", frozenset({"samovar_trace"})),
    ("qwen-bailian", frozenset({"chat_id", "parent_chat_id", "timestamp", "hash_ids"})),
    ("mooncake", frozenset({"timestamp", "input_length", "output_length", "hash_ids"})),
)
_BY_COLUMNS: tuple[tuple[TraceKind, frozenset[str]], ...] = (
    ("mooncake-turns", TURN_COLUMNS),
    ("weka", WEKA_COLUMNS),
    ("burstgpt", BURST_COLUMNS),
)
KNOWN = "Mooncake requests or derived turns, WEKA turns, Qwen-Bailian, BurstGPT, a recording of Samovar"


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """`block_tokens`: None: as in the file; else a multiple of that.

    WEKA's: `seed`, `spread_h`: when sessions began is not in the data, and is drawn within so many hours.
    `subagents`: with theirs.
    """

    seed: int = 0
    spread_h: float = 24.0
    subagents: bool = False
    block_tokens: int | None = None


def open_trace(path: Path, options: TraceOptions | None = None) -> Trace:
    """The trace in `path`, plain or gz. Raises `TraceError`, `ValueError` for options that do not fit."""
    options = options or TraceOptions()
    kind = detect(path)
    if kind == "weka":
        trace = weka(path, options.block_tokens, options.seed, options.spread_h, subagents=options.subagents)
    elif kind == "qwen-bailian":
        trace = qwen(path, options.block_tokens)
    elif kind == "burstgpt":
        trace = burst(path)
    elif kind == "samovar":
        trace = recorded(path)
    else:
        trace = mooncake(path) if kind == "mooncake" else mooncake_turns(path)
    return trace if options.block_tokens is None else trace.coarser(options.block_tokens)


def detect(path: Path) -> TraceKind:
    """The schema, by the first line. Raises `TraceError`."""
    for number, line in lines(path):
        if not line.strip():
            continue
        if line.lstrip(b"\xef\xbb\xbf \t").startswith(b"{"):
            names, by = frozenset(parse_object(path, number, line)), _BY_KEYS
        else:
            names = frozenset(line.decode("utf-8", "replace").strip().lstrip("\ufeff").split(","))
            by = _BY_COLUMNS
        for kind, needed in by:
            if needed <= names:
                return kind
        raise TraceError(str(path), number, "", f"is not the beginning of a known schema: {KNOWN}")
    raise TraceError(str(path), 0, "", "the file is empty")
