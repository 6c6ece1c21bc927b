"""Readers of traces: each schema from a small sample, bad files, and the real files where they are."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samovar.cache_tiers.forecast import tool_tags
from samovar.cluster.plan.traces import files as trace_file
from samovar.cluster.plan.traces.files import TraceError
from samovar.cluster.plan.traces.readers import TraceOptions, detect, open_trace
from samovar.cluster.plan.traces.trace import Trace, TraceTurn, assumed_service_s, common_blocks

TRACES = Path(__file__).resolve().parents[6] / "shared" / "traces"

WEKA = (
    "session,trace,is_subagent,model,turn,t,input_tokens,output_tokens,input_types,output_types,stop,api_s,"
    "think_s,arrival_gap_s,blocks64,lcp_blocks64_prev,tooltok,systok\n"
)
BURST_1 = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
BURST_2 = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
MOONCAKE_TURNS = "session,turn,t_s,input_tokens,output_tokens,shared_depth_blocks512,idle_after_s\n"


def written(folder: Path, text: str, name: str = "trace", *, packed: bool = False) -> Path:
    path = folder / name
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    return path


def opened(folder: Path, text: str, options: TraceOptions | None = None) -> tuple[Trace, list[TraceTurn]]:
    trace = open_trace(written(folder, text), options)
    turns = list(trace.turns())
    in_order(turns)
    assert list(trace.turns()) == turns  # once more from the beginning
    assert trace.counts().turns == len(turns)
    return trace, turns


def in_order(turns: Sequence[TraceTurn]) -> None:
    """What every trace promises."""
    assert all(one.started_s <= two.started_s for one, two in pairwise(turns))
    seen = -1
    for turn in turns:
        assert 0 <= turn.session <= seen + 1, "sessions are numbered as they appear"
        seen = max(seen, turn.session)
        assert len(turn.blocks) <= turn.input_tokens // turn.block_tokens
        assert 0 <= turn.kept_tokens <= turn.input_tokens


def mooncake_line(at_ms: int, input_tokens: int, output_tokens: int, ids: list[int]) -> str:
    row = {"timestamp": at_ms, "input_length": input_tokens, "output_length": output_tokens, "hash_ids": ids}
    return json.dumps(row) + "\n"


def test_mooncake_sessions_are_found_by_their_blocks(tmp_path: Path) -> None:
    text = (
        mooncake_line(1000, 1200, 50, [0, 1, 2])  # 2 full blocks and a part
        + mooncake_line(2000, 1100, 50, [0, 3, 4])  # the system prompt alone is not the same session
        + mooncake_line(5000, 2048, 7, [0, 1, 5, 6])  # the first one goes on
        + mooncake_line(9000, 1536, 7, [0, 1, 7])  # and asks again, otherwise
        + mooncake_line(9000, 100, 7, [8])
    )
    trace, turns = opened(tmp_path, text)
    assert (trace.kind, trace.block_tokens) == ("mooncake", 512)
    assert [turn.session for turn in turns] == [0, 1, 0, 0, 2]
    assert [turn.started_s for turn in turns] == [0.0, 1.0, 4.0, 8.0, 8.0]
    assert [turn.blocks for turn in turns] == [(0, 1), (0, 3), (0, 1, 5, 6), (0, 1, 7), ()]
    # All full blocks kept: the whole chain is taken to be. Two of four: those two are.
    assert [turn.kept_tokens for turn in turns] == [0, 0, 1250, 1024, 0]
    assert turns[0].service_s is None
    assert trace.counts().sessions == 3


def test_a_template_does_not_make_a_session(tmp_path: Path) -> None:
    text = "".join(mooncake_line(i, 2048, 5, [0, 1, 2, 100 + i]) for i in range(40))
    _, turns = opened(tmp_path, text)
    assert len({turn.session for turn in turns}) > 30


def test_mooncake_refuses_blocks_that_do_not_fit_the_length(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"line 1, field hash_ids: 2 blocks of 512 are not 100 tokens"):
        opened(tmp_path, mooncake_line(0, 100, 1, [1, 2]))


def test_derived_turns_share_what_the_table_says(tmp_path: Path) -> None:
    text = MOONCAKE_TURNS + "7,0,3.0,1100,50,0,9.0\n9,0,4.0,600,5,0,\n7,1,12.0,1600,50,2,\n"
    trace, turns = opened(tmp_path, text)
    assert trace.kind == "mooncake-turns"
    assert [turn.blocks for turn in turns] == [(0, 1), (2,), (0, 1, 3)]
    assert [turn.kept_tokens for turn in turns] == [0, 0, 1150]


def weka_line(session: int, turn: int, at_s: float, tokens: int, shared: int, rest: str = "") -> str:
    kinds = rest or "tool_result,text+tool_use,tool_use,7.5"
    return f"{session},t,False,m,{turn},{at_s},{tokens},100,{kinds},1.0,2.0,{tokens // 64},{shared},1,2\n"


def test_weka_sessions_are_superposed(tmp_path: Path) -> None:
    text = WEKA
    for session in range(3):
        text += weka_line(session, 0, 0.0, 640, 0, "text,text,tool_use,3.0")
        text += weka_line(session, 1, 10.0, 1280, 10)
        text += weka_line(session, 2, 5000.0, 1280, 5, "text,,,")
    text += "9,t,True,m,0,0,64,1,text,text,end_turn,1.0,,,1,0,1,2\n"
    trace, turns = opened(tmp_path, text, TraceOptions(seed=3, spread_h=2))
    assert trace.kind == "weka"
    assert trace.counts().skipped == 1  # the subagent's
    assert len(turns) == 9
    assert turns[0].started_s == 0.0
    mine = [turn for turn in turns if turn.session == 1]
    assert [len(turn.blocks) for turn in mine] == [10, 20, 20]
    assert common_blocks(mine[0].blocks, mine[1].blocks) == 10
    assert common_blocks(mine[1].blocks, mine[2].blocks) == 5
    assert [turn.kept_tokens for turn in mine] == [0, 740, 320]
    assert [turn.stop for turn in mine] == ["tool_calls", "tool_calls", "length"]
    assert [turn.role for turn in mine] == ["user", "tool", "user"]
    assert [turn.service_s for turn in mine] == [3.0, 7.5, None]
    others = {block for turn in turns if turn.session != 1 for block in turn.blocks}
    assert not others & {block for turn in mine for block in turn.blocks}
    again, _ = opened(tmp_path, text, TraceOptions(seed=4, spread_h=2))
    assert [turn.started_s for turn in again.turns()] != [turn.started_s for turn in turns]
    with_them, _ = opened(tmp_path, text, TraceOptions(subagents=True))
    assert with_them.counts().turns == 10


def test_weka_in_larger_blocks_is_the_same_content(tmp_path: Path) -> None:
    text = WEKA + weka_line(0, 0, 0, 6400, 0) + weka_line(0, 1, 9, 6464, 40) + weka_line(0, 2, 12, 9000, 95)
    fine, _ = opened(tmp_path, text)
    direct, _ = opened(tmp_path, text, TraceOptions(block_tokens=1024))
    for one, other in zip(fine.coarser(1024).turns(), direct.turns(), strict=True):
        assert len(one.blocks) == len(other.blocks) == one.input_tokens // 1024
        assert one.kept_tokens == other.kept_tokens
    shared = [common_blocks(a.blocks, b.blocks) for a, b in pairwise(fine.coarser(1024).turns())]
    assert shared == [common_blocks(a.blocks, b.blocks) for a, b in pairwise(direct.turns())] == [2, 5]
    with pytest.raises(ValueError, match="no multiple"):
        fine.coarser(100)
    with pytest.raises(ValueError, match="no multiple"):
        opened(tmp_path, text, TraceOptions(block_tokens=32))


def qwen_line(chat: int, parent: int, at_s: float, tokens: int, ids: list[int], kind: str = "text") -> str:
    row: dict[str, Any] = {"chat_id": chat, "parent_chat_id": parent, "timestamp": at_s, "type": kind}
    row |= {"input_length": tokens, "output_length": 3, "turn": 1, "hash_ids": ids}
    return json.dumps(row) + "\n"


def test_qwen_sessions_follow_their_parents_and_ids_are_chained(tmp_path: Path) -> None:
    text = (
        qwen_line(1, -1, 10.5, 40, [7, 8, 9])
        + qwen_line(2, -1, 11.0, 32, [6, 8], "search")  # block 8 again, after another beginning
        + qwen_line(3, 1, 60.0, 64, [7, 8, 4, 5])
        + qwen_line(4, 3, 70.0, 64, [7, 8, 4, 5])
        + qwen_line(5, 77, 71.0, 16, [7])  # the parent is not in the file
    )
    trace, turns = opened(tmp_path, text)
    assert trace.kind == "qwen-bailian"
    assert [turn.session for turn in turns] == [0, 1, 0, 0, 2]
    assert [len(turn.blocks) for turn in turns] == [2, 2, 4, 4, 1]
    assert turns[0].blocks == turns[2].blocks[:2]
    assert turns[0].blocks[1] != turns[1].blocks[1]
    assert turns[4].blocks == turns[0].blocks[:1]
    assert [turn.kept_tokens for turn in turns] == [0, 0, 43, 64, 0]
    assert turns[1].profile == "search"
    larger, _ = opened(tmp_path, text, TraceOptions(block_tokens=32))
    assert [len(turn.blocks) for turn in larger.turns()] == [1, 1, 2, 2, 0]


def test_burst_without_sessions_is_one_turn_each(tmp_path: Path) -> None:
    text = (
        BURST_1
        + "5,ChatGPT,472,18,490,Conversation log\n45,GPT-4,17,0,17,API log\n46,GPT-4,17,1,18,API log\n"
    )
    trace, turns = opened(tmp_path, text)
    assert trace.kind == "burstgpt"
    assert trace.counts().sessions == 2
    assert trace.counts().skipped == 1
    assert [(turn.started_s, turn.profile, turn.kept_tokens) for turn in turns] == [
        (0.0, "chat", 0),
        (41.0, "api", 0),
    ]
    assert any("one turn" in note for note in trace.notes)


def test_burst_with_sessions_goes_on_where_the_prompt_has_grown(tmp_path: Path) -> None:
    text = BURST_2 + (
        "19440110.0,a-1,43,GPT-4,906,446,1352,Conversation log\n"
        "19440161.0,b-2,2,ChatGPT,36,29,65,Conversation log\n"
        "19440170.0,,1.5,ChatGPT,36,29,65,API log\n"
        "19440200.0,a-1,20,GPT-4,1400,10,1410,Conversation log\n"
        "19440300.0,a-1,20,GPT-4,100,10,110,Conversation log\n"
    )
    _, turns = opened(tmp_path, text)
    assert [turn.session for turn in turns] == [0, 1, 2, 0, 0]
    assert [turn.kept_tokens for turn in turns] == [0, 0, 0, 1352, 0]
    assert [turn.service_s for turn in turns] == [43.0, 2.0, 1.5, 20.0, 20.0]
    assert turns[0].turn().ended_s == 43.0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "the file is empty"),
        ("a,b,c\n1,2,3\n", "line 1: is not the beginning of a known schema"),
        ('{"x": 1}\n', "line 1: is not the beginning of a known schema"),
        ("{nonsense\n", "line 1: is not JSON"),
        (mooncake_line(0, 10, 1, [1]) + "{\n", "line 2: is not JSON"),
        (mooncake_line(0, 10, 1, [1]) + "[1]\n", "line 2: is a JSON list, not an object"),
        (mooncake_line(0, 10, 1, [1]) + '{"timestamp": 1}\n', "line 2, field input_length: is missing"),
        (mooncake_line(0, -1, 1, []), "line 1, field input_length: -1 is not between 0"),
        (mooncake_line(0, 10, 1, [1]).replace("10", '"ten"'), "field input_length: 'ten' is not a number"),
        (
            mooncake_line(0, 10, 1, [1]).replace("10", "10.5"),
            "field input_length: 10.5 is not a whole number",
        ),
        (mooncake_line(0, 10, 1, [1]).replace("10", "true"), "field input_length: True is not a number"),
        (mooncake_line(0, 10, 1, [1]).replace("[1]", '["1"]'), "field hash_ids"),
        (mooncake_line(0, 10, 1, [1]).replace(": 0", ": NaN"), "field timestamp: nan is not a number"),
        (
            "".join(mooncake_line(at_ms, 1, 1, []) for at_ms in (1_000_000, 9_000_000, 1000)),
            "line 3: is 8999 s earlier than a line before it",
        ),
        (BURST_1 + "5,ChatGPT,472\n", "line 2: 3 values for the 6 columns"),
        (BURST_1 + '5,"Chat"GPT,472,18,490,Conversation log\n', "line 2: is not CSV"),
        (BURST_1 + '5,"ChatGPT,472,18,490,Conversation log\n', "line 2: is not CSV"),
        (BURST_1 + f"5,{'x' * 200_000},472,18,490,Conversation log\n", "line 2: is not CSV"),
        (WEKA + weka_line(0, 0, 5, 64, 0) + weka_line(0, 1, 4, 64, 0), "line 3, field t: is earlier"),
        (WEKA + weka_line(0, 0, 5, 64, 0, "text,text,exploded,1"), "line 2, field stop: 'exploded'"),
        (qwen_line(1, -1, 0, 16, [-5]), "line 1, field hash_ids: an id is not between"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, text: str, says: str) -> None:
    path = written(tmp_path, text, "bad.jsonl")
    with pytest.raises(TraceError) as caught:
        list(open_trace(path).turns())
    assert says in str(caught.value)
    assert str(path) in str(caught.value)


def test_lines_and_their_number_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, mooncake_line(0, 10, 1, [1]) * 3)
    monkeypatch.setattr(trace_file, "LINES_MAX", 2)
    with pytest.raises(TraceError, match="line 3: there are more than 2 lines"):
        list(open_trace(path).turns())
    monkeypatch.setattr(trace_file, "LINE_BYTES_MAX", 20)
    with pytest.raises(TraceError, match="line 1: the line is longer than 20 bytes"):
        open_trace(path)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    text = "".join(mooncake_line(i, 512, 1, [i * 977]) for i in range(300))
    whole = gzip.compress(text.encode())
    cut = tmp_path / "cut.gz"
    cut.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TraceError, match="damaged or cut off"):
        list(open_trace(cut).turns())
    broken = tmp_path / "broken.gz"
    broken.write_bytes(whole[:200] + bytes(60) + whole[260:])
    with pytest.raises(TraceError):
        list(open_trace(broken).turns())
    binary = tmp_path / "binary"
    binary.write_bytes(mooncake_line(0, 1, 1, [1]).encode() + b"\xff\xfe\xfd\n")
    with pytest.raises(TraceError, match="line 2: is not UTF-8"):
        list(open_trace(binary).turns())
    with pytest.raises(TraceError, match="No such file"):
        open_trace(tmp_path / "none")
    with pytest.raises(TraceError, match="directory"):
        open_trace(tmp_path)


def test_gz_is_told_by_its_content_and_a_bom_is_no_harm(tmp_path: Path) -> None:
    text = "\ufeff" + BURST_1 + "\n5,ChatGPT,472,18,490,Conversation log\r\n"
    for packed in (False, True):
        trace = open_trace(written(tmp_path, text, "t.csv", packed=packed))
        assert trace.counts().turns == 1


def test_a_value_may_be_quoted(tmp_path: Path) -> None:
    text = BURST_1.replace("Model", '"Model"') + '5,"Chat, the ""4th""",472,18,490,"API log"\n'
    _, turns = opened(tmp_path, text)
    assert [(turn.input_tokens, turn.profile) for turn in turns] == [(472, "api")]


def test_lines_a_little_out_of_order_are_sorted(tmp_path: Path) -> None:
    text = "".join(mooncake_line(at, 600, 1, [0, at]) for at in (1000, 3000, 2000, 2000, 50_000, 4000))
    _, turns = opened(tmp_path, text)
    assert [turn.started_s for turn in turns] == [0.0, 1.0, 1.0, 2.0, 3.0, 49.0]


def test_a_turn_ends_when_the_trace_says_or_as_is_assumed() -> None:
    turn = TraceTurn(1, 10.0, 20_000, 100, (), 16, 5, None, "length", "tool", "grep", "agent")
    as_seen = turn.turn()
    assert as_seen.ended_s == pytest.approx(10.0 + assumed_service_s(20_000, 100)) == pytest.approx(14.0)
    assert (as_seen.stop, as_seen.role, as_seen.tool, as_seen.kept_tokens) == (
        "length",
        "tool",
        tool_tags(["grep"]),
        5,
    )
    assert turn.turn(99.0).ended_s == 99.0


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.integers(0, 50), st.integers(0, 50), st.integers(0, 50))
def test_common_blocks_of_chained_ids(same: int, one: int, other: int) -> None:
    head = tuple(range(same))
    first = head + tuple(range(1000, 1000 + one))
    second = head + tuple(range(2000, 2000 + other))
    assert common_blocks(first, second) == same


@settings(derandomize=True, deadline=None, max_examples=150)
@given(data=st.binary(max_size=200), first=st.sampled_from(["", BURST_1, WEKA, mooncake_line(0, 1, 1, [1])]))
def test_anything_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, first: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "anything"
    path.write_bytes(first.encode() + data)
    with suppress(TraceError):  # and nothing else
        list(open_trace(path).turns())


needs_traces = pytest.mark.skipif(not TRACES.is_dir(), reason=f"the public traces are not in {TRACES}")


@needs_traces
def test_the_real_chat_trace() -> None:
    trace = open_trace(TRACES / "mooncake_conversation_first40min.jsonl.gz")
    derived = open_trace(TRACES / "mooncake_conversation_turns_first40min.csv.gz")
    assert (trace.kind, derived.kind) == ("mooncake", "mooncake-turns")
    ours, theirs = list(trace.turns()), list(derived.turns())
    in_order(ours)
    in_order(theirs)
    assert len(ours) == len(theirs) == 7851
    assert derived.counts().sessions == 4961
    assert abs(trace.counts().sessions - 4961) < 50
    assert [(t.input_tokens, t.output_tokens) for t in ours] == [
        (t.input_tokens, t.output_tokens) for t in theirs
    ]
    # Rebuilt and derived sessions agree on which turn each turn follows, but for one in a hundred.
    assert sum(a == b for a, b in zip(_before(ours), _before(theirs), strict=True)) > 0.99 * 7851
    assert _reusable(ours) == pytest.approx(0.357, abs=0.01)


@needs_traces
def test_the_real_agentic_trace() -> None:
    path = TRACES / "weka_claudecode_turns_dev.csv.gz"
    assert detect(path) == "weka"
    trace = open_trace(path, TraceOptions(block_tokens=1024))
    turns = list(trace.turns())
    in_order(turns)
    counts = trace.counts()
    assert (counts.turns, counts.sessions, counts.skipped) == (27_156, 409, 371)
    assert _reusable(turns) == pytest.approx(0.963, abs=0.01)
    tools = sum(turn.stop == "tool_calls" for turn in turns)
    assert 22_500 < tools <= 23_405  # less those of subagents
    assert sum(turn.role == "tool" for turn in turns) > 22_000


def _before(turns: list[TraceTurn]) -> list[int]:
    """For each turn, which one its session had before."""
    last: dict[int, int] = {}
    found = []
    for index, turn in enumerate(turns):
        found.append(last.get(turn.session, -1))
        last[turn.session] = index
    return found


def _reusable(turns: list[TraceTurn]) -> float:
    """Share of prompt tokens that an endless cache would have."""
    seen: set[int] = set()
    hit = 0
    for turn in turns:
        for block in turn.blocks:
            if block not in seen:
                break
            hit += turn.block_tokens
        seen.update(turn.blocks)
    return hit / sum(turn.input_tokens for turn in turns)
