"""TraceLab's format is read: times, names of tools, prompts that go on. The rows here are made up."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from bench._tracelab import tracelab
from samovar.cache_tiers.forecast import tool_tags
from samovar.cluster.plan.traces.files import TraceError
from samovar.cluster.plan.traces.replay import ended_s, with_blocks
from samovar.cluster.plan.traces.trace import TraceTurn

INPUT, RESULT, THOUGHT, CALL = "user_message", "tool_result", "reasoning", "tool_call"


def row(session: str, index: int, tokens: int, events: list[tuple[str, int]], *tools: str) -> dict[str, Any]:
    """A model call; `events`: kinds and seconds after noon."""
    return {
        "provider": "claude",
        "session_id": f"claude:{session}",
        "round_index": index,
        "trace_key": f"{session}:{index}",
        "model": "some-model",
        "input_tokens_total": tokens,
        "prefix_tokens": tokens // 2,
        "newly_append_tokens": tokens - tokens // 2,
        "output_tokens": 100,
        "reasoning_output_tokens": None,
        "timing_events": [
            {"event_type": kind, "timestamp": f"2026-06-01T12:{at_s // 60:02}:{at_s % 60:02}.500Z"}
            for kind, at_s in events
        ],
        "tools": [
            {"tool_index": at, "tool_name": name, "tool_call_id": f"c{at}", "tool_wall_latency_ms": 5}
            for at, name in enumerate(tools)
        ],
    }


ROWS = [
    row("a", 0, 1000, [(INPUT, 0), (THOUGHT, 4), (CALL, 5), (CALL, 6)], "Bash", "Web Search"),
    row("a", 1, 1300, [(RESULT, 7), (RESULT, 26), (THOUGHT, 30), ("text", 31)]),
    row("a", 2, 500, [(INPUT, 90), ("text", 95), ("usage_report", 99)]),  # compacted
    row("b", 0, 700, [(INPUT, 10), (CALL, 12), (RESULT, 13)], "Read"),
]


def read(tmp_path: Path, rows: list[dict[str, Any]]) -> list[TraceTurn]:
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    return list(tracelab(path).turns())


def test_calls_are_read_in_order_of_time(tmp_path: Path) -> None:
    turns = read(tmp_path, ROWS)
    assert [(turn.session, turn.started_s, ended_s(turn)) for turn in turns] == [
        (0, 0.0, 6.0),
        (1, 10.0, 12.0),
        (0, 26.0, 31.0),
        (0, 90.0, 95.0),
    ]
    assert [turn.tool for turn in turns] == ["Bash Web_Search", "Read", "", ""]
    assert [turn.stop for turn in turns] == ["tool_calls", "tool_calls", "stop", "stop"]
    assert [turn.role for turn in turns] == ["user", "user", "tool", "user"]
    assert [turn.kept_tokens for turn in turns] == [0, 0, 1100, 0]
    assert turns[0].turn().tool == tool_tags(["Bash", "Web_Search"])
    blocks = [turn.blocks for turn in with_blocks(turns)]
    assert blocks[2][: len(blocks[0])] == blocks[0]


def test_what_is_there_twice_or_without_times_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [*ROWS, ROWS[0], row("c", 0, 10, []), row("c", 1, 10, [(INPUT, 1)])]
    path.write_text("\n".join(map(json.dumps, rows)))
    counts = tracelab(path).counts()
    assert (counts.turns, counts.sessions, counts.skipped) == (4, 2, 3)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"timing_events": [{"event_type": INPUT, "timestamp": "noon"}]}, "'noon' is not a time"),
        ({"timing_events": {}}, "timing_events: is not a list"),
        ({"tools": ["Bash"]}, "tools: is not a list of objects"),
        ({"input_tokens_total": -1}, "input_tokens_total"),
        ({"session_id": 3}, "session_id"),
    ],
)
def test_a_bad_row_is_told_by_line_and_field(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    with pytest.raises(TraceError, match=f"line 2.*{words}"):
        read(tmp_path, [ROWS[0], ROWS[1] | change])


def test_a_row_without_a_field_is_told(tmp_path: Path) -> None:
    short = {name: value for name, value in ROWS[1].items() if name != "trace_key"}
    with pytest.raises(TraceError, match="trace_key: is missing"):
        read(tmp_path, [short])
