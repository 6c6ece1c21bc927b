"""Reads traces of TraceLab (uw-syfi/TraceLab, data CC BY 4.0): model calls of coding agents, tools by name.

JSON, a model call a line, as that project's own pages and example sessions describe them:
`session_id`, `input_tokens_total`, `output_tokens`, `timing_events` (`event_type`, `timestamp`), `tools`
(`tool_name`), `trace_key`. A call begins with its latest `user_message` or `tool_result` and ends with its
last `reasoning`, `text` or `tool_call`. Block ids are not recorded. Sessions follow one another in a file:
all of it is in memory at once, about 200 bytes a call.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from samovar.cache_tiers.forecast import Role
from samovar.cluster.plan.traces.files import Row, json_rows
from samovar.cluster.plan.traces.trace import ReadTally, SessionChains, Trace, TraceTurn

BLOCK_TOKENS = 64
INPUTS = ("user_message", "tool_result")
OUTPUTS = ("reasoning", "text", "tool_call")
NOTES = (
    "block ids are not recorded: a prompt at least as long as its session's chain counts as its continuation",
    "what is there twice, or has no times, is left out",
)


@dataclass(frozen=True, slots=True)
class _Call:
    session: str
    started_s: float
    ended_s: float
    input_tokens: int
    output_tokens: int
    role: Role
    tools: str


def tracelab(path: Path, block_tokens: int = BLOCK_TOKENS) -> Trace:
    """The trace in a JSONL file, plain or gz. Reading it raises `TraceError`."""

    def read(tally: ReadTally) -> Iterator[TraceTurn]:
        seen: set[str] = set()
        calls: list[_Call] = []
        for row in json_rows(path):
            key = row.text("trace_key")
            call = None if key in seen else _call(row)
            seen.add(key)
            if call is None:
                tally.skipped += 1
            else:
                calls.append(call)
        calls.sort(key=lambda call: call.started_s)
        chains = SessionChains()
        for call in calls:
            session = chains.number(call.session)
            yield TraceTurn(
                session=session,
                started_s=call.started_s - calls[0].started_s,
                input_tokens=call.input_tokens,
                output_tokens=call.output_tokens,
                blocks=(),
                block_tokens=block_tokens,
                kept_tokens=chains.follow_unknown(session, call.input_tokens, call.output_tokens),
                service_s=call.ended_s - call.started_s,
                stop="tool_calls" if call.tools else "stop",
                role=call.role,
                tool=call.tools,
                profile="agent",
            )

    return Trace(path.name, "tracelab", block_tokens, read, NOTES)


def _call(row: Row) -> _Call | None:
    """None: it has no times."""
    inputs: dict[float, str] = {}
    ended_s: float | None = None
    for event in _objects(row, "timing_events"):
        kind, at = event.get("event_type"), event.get("timestamp")
        if at is None or kind not in (*INPUTS, *OUTPUTS):
            continue
        at_s = _seconds(row, at)
        if kind in INPUTS and ended_s is None:  # what comes later is the next call's
            inputs[at_s] = kind
        elif kind in OUTPUTS:
            ended_s = at_s if ended_s is None else max(ended_s, at_s)
    if not inputs or ended_s is None:
        return None
    started_s = max(inputs)
    names = ["_".join(str(tool.get("tool_name") or "unknown").split()) for tool in _objects(row, "tools")]
    return _Call(
        row.text("session_id"),
        started_s,
        max(ended_s, started_s),
        row.whole("input_tokens_total"),
        row.whole("output_tokens"),
        "tool" if inputs[started_s] == "tool_result" else "user",
        " ".join(names),
    )


def _objects(row: Row, field: str) -> list[dict[str, Any]]:
    value = row.get(field)
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise row.error(field, "is not a list of objects")
    return value


def _seconds(row: Row, at: object) -> float:
    try:
        return datetime.fromisoformat(str(at)).timestamp()
    except ValueError:
        raise row.error("timing_events", f"{str(at)[:40]!r} is not a time") from None
