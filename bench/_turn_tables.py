"""Tables of turns (`shared/traces`, `*.csv.gz`) as the turns a server would have seen, in the order of time.

Two schemas, told apart by their header: Mooncake's conversation with its sessions rebuilt (chat), and
WEKA's coding sessions (agentic). What a table does not say is assumed here, once:

* chat: an answer takes `OUTPUT_S` a token and its prompt `1 / INPUT_PER_S` a token;
* agentic: the sessions' starts are not in the data: they are drawn, seeded, over `SPREAD_S`, and the
  recording ends when the last session has begun; subagents' turns are sessions of their own;
* agentic, answers that were not recorded (`stop` empty, no `api_s`): what follows them is a human's message
  (2,487 of 2,508) and not a tool's result, so they are taken for full answers, "stop", their time from
  their lengths.
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

import numpy as np

from bench._trace_patterns import Patterns, mixed
from samovar.cache_tiers.forecast.turns import SessionKey, Stop, Turn
from samovar.cluster.plan.traces.readers import TraceOptions, open_trace
from samovar.cluster.plan.traces.trace import TraceKind

Kind = Literal["chat", "agentic"]

OUTPUT_S: Final = 0.03
INPUT_PER_S: Final = 20_000.0
SPREAD_S: Final = 24 * 3600.0
_CHAT_BLOCK, _AGENTIC_BLOCK = 512, 64
_STOPS: Final[dict[str, Stop]] = {"tool_use": "tool_calls", "end_turn": "stop", "max_tokens": "length"}

KINDS: Final[dict[TraceKind, Kind]] = {"mooncake": "chat", "mooncake-turns": "chat", "weka": "agentic"}

Row = dict[str, str]


@dataclass(frozen=True)
class TurnTable:
    """`turns`: by their beginning, none that begins after `end_s`, when the recording ends.

    `beside`: indices of those that are no turns of the conversations themselves.
    """

    kind: Kind
    turns: list[Turn]
    end_s: float
    beside: frozenset[int] = frozenset()

    def events(self) -> Iterator[tuple[float, bool, int]]:
        """In the order of time: when, is it a turn's end, and which turn's."""
        begun = [(turn.started_s, False, index) for index, turn in enumerate(self.turns)]
        ended = [(turn.ended_s, True, index) for index, turn in enumerate(self.turns)]
        # At one instant an end comes first: the session's next turn may begin with it.
        return iter(sorted(begun + ended, key=lambda event: (event[0], not event[1], event[2])))

    def idle_s(self) -> list[float]:
        """After each turn, until the session's next one begins; infinite when there is none."""
        idle = [float("inf")] * len(self.turns)
        last: dict[SessionKey, int] = {}
        for index, turn in enumerate(self.turns):
            if turn.session in last:
                idle[last[turn.session]] = turn.started_s - self.turns[last[turn.session]].ended_s
            last[turn.session] = index
        return idle


def read(path: Path, *, seed: int = 0) -> TurnTable:
    """Raises `ValueError` for a table of neither schema, `OSError`."""
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    rows = list(csv.DictReader(text.splitlines()))
    if not rows:
        raise ValueError(f"{path}: no turns")
    if "shared_depth_blocks512" in rows[0]:
        return _table("chat", _chat(rows), float("inf"))
    if "lcp_blocks64_prev" in rows[0]:
        return _table("agentic", _agentic(rows, np.random.default_rng(seed)), SPREAD_S)
    raise ValueError(f"{path}: a table of another schema: {', '.join(rows[0])}")


def read_beside(path: Path, patterns: Patterns, *, seed: int = 0) -> TurnTable:
    """The same conversations with what clients send beside them; each lineage is a session of its own.

    Raises `ValueError` for another kind of trace, `TraceError`.
    """
    trace = open_trace(path, TraceOptions(seed=seed, spread_h=SPREAD_S / 3600.0))
    if trace.kind not in KINDS:
        raise ValueError(f"{path}: a trace of {trace.kind}: choose one of {', '.join(KINDS)}")
    end_s = SPREAD_S if trace.kind == "weka" else float("inf")
    turns = [turn for turn in mixed(trace, patterns, seed=seed).turns() if turn.started_s <= end_s]
    beside = frozenset(index for index, turn in enumerate(turns) if turn.is_side)
    table = _table(KINDS[trace.kind], [turn.turn() for turn in turns], end_s)
    return replace(table, beside=beside)


def _table(kind: Kind, turns: list[Turn], end_s: float) -> TurnTable:
    """Turns of one session never overlap: one that begins ends the last."""
    turns = sorted((turn for turn in turns if turn.started_s <= end_s), key=lambda turn: turn.started_s)
    last: dict[SessionKey, int] = {}
    for index, turn in enumerate(turns):
        before = last.get(turn.session)
        if before is not None and turns[before].ended_s > turn.started_s:
            turns[before] = replace(turns[before], ended_s=turn.started_s)
        last[turn.session] = index
    return TurnTable(kind, turns, min(end_s, turns[-1].started_s))


def _chat(rows: list[Row]) -> list[Turn]:
    turns = []
    for row in rows:
        inputs, outputs = int(row["input_tokens"]), int(row["output_tokens"])
        started_s = float(row["t_s"])
        turns.append(
            Turn(
                session=row["session"],
                started_s=started_s,
                ended_s=started_s + OUTPUT_S * outputs + inputs / INPUT_PER_S,
                input_tokens=inputs,
                output_tokens=outputs,
                kept_tokens=min(inputs, int(row["shared_depth_blocks512"] or 0) * _CHAT_BLOCK),
            )
        )
    return turns


def _agentic(rows: list[Row], rng: np.random.Generator) -> list[Turn]:
    starts: dict[str, float] = {}
    turns = []
    for row in rows:
        session = row["session"]
        if session not in starts:
            # Of a subagent's session the clock is its parent's: only how it goes on counts.
            starts[session] = rng.uniform(0.0, SPREAD_S) - float(row["t"])
        inputs, outputs = int(row["input_tokens"]), int(row["output_tokens"])
        kept = min(inputs, int(row["lcp_blocks64_prev"] or 0) * _AGENTIC_BLOCK)
        started_s = starts[session] + float(row["t"])
        took_s = float(row["api_s"] or OUTPUT_S * outputs + (inputs - kept) / INPUT_PER_S)
        turns.append(
            Turn(
                session=session,
                started_s=started_s,
                ended_s=started_s + took_s,
                input_tokens=inputs,
                output_tokens=outputs,
                kept_tokens=kept,
                stop=_STOPS.get(row["stop"], "stop"),
                role="tool" if "tool_result" in row["input_types"] else "user",
                profile="code",
            )
        )
    return turns
