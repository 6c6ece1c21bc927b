"""Recordings: what goes in comes out as numbers, nothing more does, and nothing waits for the disk."""

from __future__ import annotations

import json
import logging
import os
import stat
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samovar.cache_tiers import recording
from samovar.cache_tiers.recording import (
    Numbers,
    RecordedTurn,
    RecordingError,
    TurnRecorder,
    read_header,
    read_row,
    runs,
)
from samovar.cluster.plan.traces.files import TraceError
from samovar.cluster.plan.traces.readers import open_trace

MIB = 1 << 20


def turn(
    session: str, at_s: float, keys: list[bytes], *, took_s: float = 1.0, kept: int = 0, **more: Any
) -> RecordedTurn:
    tokens = 16 * len(keys) + 5
    return RecordedTurn(session, at_s, at_s + took_s, tokens, 7, kept, keys, **more)


def keys(*names: str) -> list[bytes]:
    return [name.encode() * 8 for name in names]


def record(path: Path, turns: list[RecordedTurn], bytes_max: int = MIB, **options: Any) -> TurnRecorder:
    recorder = TurnRecorder(path, 16, bytes_max, **options)
    for one in turns:
        recorder.turn(one)
    recorder.close()
    recorder.check_integrity()
    return recorder


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_recording_is_read_back_as_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    recorder = record(
        path,
        [
            turn("ann", 1000.0, keys("s", "a")),
            turn("bob", 1000.5, keys("s", "b", "c"), took_s=3.0, stop="tool_calls", tool="grep"),
            turn("ann", 999.0, keys("s", "a", "d"), took_s=9.0, kept=39, role="tool", profile="agent"),
        ],
    )
    assert (recorder.recorded, recorder.dropped, recorder.stopped) == (3, 0, "closed")
    trace = open_trace(path)
    first, second, third = trace.turns()
    assert (trace.kind, trace.block_tokens) == ("samovar", 16)
    assert [one.started_s for one in (first, second, third)] == [0.0, 1.0, 1.5]  # by their beginnings
    assert [one.service_s for one in (first, second, third)] == [9.0, 1.0, 3.0]
    assert [one.session for one in (first, second, third)] == [0, 0, 1]
    assert (first.blocks, second.blocks, third.blocks) == ((0, 1, 4), (0, 1), (0, 2, 3))
    assert (first.kept_tokens, first.role, first.profile) == (39, "tool", "profile-1")
    assert (third.stop, third.tool, third.profile) == ("tool_calls", "tool-1", "chat")
    assert third.input_tokens == 53
    assert third.turn().ended_s == 4.5


def test_a_recording_tells_lineages_and_an_old_one_has_none(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    record(path, [turn("ann", 0.0, keys("a")), turn("ann", 2.0, keys("t"), lineage=1)])
    main, side = open_trace(path).turns()
    assert [(one.lineage, one.is_main) for one in (main, side)] == [(0, True), (1, False)]
    assert main.key == main.session != side.key
    old = rows(path)[1]
    assert "lineage" not in old  # as every row before there were lineages
    row = read_row(old, 16)
    assert row is not None
    assert row.lineage == 0
    with pytest.raises(RecordingError, match="field lineage"):
        read_row({**old, "lineage": -1}, 16)


def test_a_title_that_ended_before_the_first_answer_is_not_taken_for_the_conversation(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    said = [("t", 0), ("a", 1), ("u", 2), ("b", 1), ("c", 1)]
    record(path, [turn("ann", 2.0 * at, keys(key), lineage=of) for at, (key, of) in enumerate(said)])
    assert [(one.lineage, one.is_main) for one in open_trace(path).turns()] == [
        *((1, False), (0, True), (2, False), (0, True), (0, True))
    ]


def test_nothing_that_people_wrote_is_in_it(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    secret = turn("session-of-ann", 1.7e9, keys("PRIVATE"), tool="ask_my_bank", profile="doctor")
    record(path, [secret, secret])
    text = path.read_text()
    for word in ("ann", "PRIVATE", "bank", "doctor", keys("PRIVATE")[0].hex(), "1700000000"):
        assert word not in text
    other = tmp_path / "other.jsonl"
    record(other, [secret])
    assert rows(path)[1]["session"] == rows(path)[2]["session"] != rows(other)[1]["session"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_the_file_ends_at_its_limit_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "trace.jsonl"
    with caplog.at_level(logging.WARNING, "samovar.cache_tiers.recording"):
        recorder = record(path, [turn(f"s{i}", i, keys(f"k{i}")) for i in range(100)], 2000)
    assert path.stat().st_size <= 2000
    assert recorder.stopped == "bytes_max"
    assert 0 < recorder.recorded < 100
    assert recorder.recorded + recorder.dropped == 100
    assert rows(path)[-1] == {"ended": "bytes_max", "turns": recorder.recorded, "dropped": recorder.dropped}
    assert sum("has ended: bytes_max" in message for message in caplog.messages) == 1
    assert open_trace(path).counts().turns == recorder.recorded
    recorder.turn(turn("late", 1, []))
    assert recorder.recorded + recorder.dropped == 101


def test_an_old_file_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("precious")
    with pytest.raises(FileExistsError):
        TurnRecorder(path, 16, MIB)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        TurnRecorder(tmp_path / "link", 16, MIB)
    assert path.read_text() == "precious"


def test_a_slow_disk_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread is held in its first row; what does not fit the queue is counted and left out."""
    inside, go_on = threading.Event(), threading.Event()
    whole = recording._RowMaker.row

    def held(self: Any, one: RecordedTurn) -> dict[str, object]:
        inside.set()
        assert go_on.wait(20)
        return whole(self, one)

    monkeypatch.setattr(recording._RowMaker, "row", held)
    recorder = TurnRecorder(tmp_path / "trace.jsonl", 16, MIB, queue_max=3)
    recorder.turn(turn("a", 0, []))
    assert inside.wait(20)
    began_s = time.monotonic()
    for i in range(10):
        recorder.turn(turn("a", i, []))
    assert time.monotonic() - began_s < 5
    assert recorder.dropped == 7
    go_on.set()
    recorder.close()
    assert (recorder.recorded, recorder.dropped) == (4, 7)
    assert rows(tmp_path / "trace.jsonl")[-1] == {"ended": "closed", "turns": 4, "dropped": 7}


def test_a_full_disk_ends_it_with_whole_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "trace.jsonl"
    recorder = TurnRecorder(path, 16, MIB)
    whole = recorder._file

    class Full:
        """Half of a line still fits."""

        def write(self, data: memoryview) -> int:
            if len(data) < 100:
                raise OSError(28, "No space left on device")
            return whole.write(data[: len(data) - 50])

        def fileno(self) -> int:
            return whole.fileno()

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: object) -> None:
            whole.close()

    monkeypatch.setattr(recorder, "_file", Full())
    with caplog.at_level(logging.WARNING, "samovar.cache_tiers.recording"):
        recorder.turn(turn("a", 0, keys("x")))
        recorder.turn(turn("a", 1, keys("x")))
        recorder.close()
    assert recorder.recorded == 0
    assert recorder.dropped == 2
    assert any("No space left" in message for message in caplog.messages)
    assert len(rows(path)) == 1
    assert open_trace(path).counts().turns == 0


def test_a_recording_that_was_cut_off_is_read_to_there(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    record(path, [turn("a", i, keys("x")) for i in range(3)])
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:3]) + lines[3][:40])
    counts = open_trace(path).counts()
    assert (counts.turns, counts.skipped) == (2, 1)
    path.write_bytes(b"".join(lines[:2]) + lines[2][:40] + b"\n" + lines[3])
    with pytest.raises(TraceError, match="line 3: is not JSON"):
        open_trace(path).counts()


def test_turns_without_a_sensible_length_are_left_out(tmp_path: Path) -> None:
    odd = [turn("a", 0, [], took_s=took_s) for took_s in (-1.0, float("nan"), 3601.0)]
    recorder = record(tmp_path / "trace.jsonl", odd)
    assert (recorder.recorded, recorder.dropped) == (0, 3)


def test_what_is_more_than_the_prompt_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    answered = RecordedTurn("a", 0.0, 1.0, 33, 40, 73, keys("x", "y", "of the answer"))
    record(path, [answered])
    (one,) = open_trace(path).turns()
    assert (one.blocks, one.kept_tokens) == ((0, 1), 33)


def test_memory_of_keys_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    turns = [turn(f"s{i % 7}", i, keys("system", f"{i}")) for i in range(60)]
    recorder = record(path, turns, keys_max=8)
    recorder.check_integrity()
    found = [one.blocks for one in open_trace(path).turns()]
    assert {blocks[0] for blocks in found} == {0}  # always in use, never forgotten
    assert len({blocks[1] for blocks in found}) == 60


def test_closing_twice_and_from_many_threads(tmp_path: Path) -> None:
    recorder = TurnRecorder(tmp_path / "trace.jsonl", 16, MIB, queue_max=10_000)
    threads = [
        threading.Thread(target=lambda: [recorder.turn(turn("a", i, keys("x"))) for i in range(50)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recorder.close()
    recorder.close()
    assert recorder.recorded == 200
    assert len(rows(tmp_path / "trace.jsonl")) == 202
    assert not [fd for fd in os.listdir("/proc/self/fd") if _points_to(fd, "trace.jsonl")]


def _points_to(fd: str, name: str) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{fd}").endswith(name)
    except FileNotFoundError:  # of the listing itself
        return False


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.lists(st.integers(0, 60), max_size=60))
def test_runs_are_unrolled_to_what_they_were(numbers: list[int]) -> None:
    row = good_row() | {"blocks": list(runs(numbers)), "input_tokens": 16 * len(numbers)}
    parsed = read_row(row, 16)
    assert parsed is not None
    assert parsed.blocks == tuple(numbers)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(things=st.lists(st.integers(0, 12), max_size=200), kept_max=st.integers(1, 30))
def test_numbers_stay_the_same_while_they_are_remembered(things: list[int], kept_max: int) -> None:
    given_out = iter(range(10_000))
    numbers = Numbers(kept_max, lambda: next(given_out))
    first: dict[int, int] = {}
    for thing in things:
        number = numbers.of(thing)
        numbers.check_integrity()
        assert len(numbers) <= max(2, kept_max)
        if kept_max >= 26:  # all of them fit half of it
            assert first.setdefault(thing, number) == number


def test_the_integrity_check_fires(tmp_path: Path) -> None:
    recorder = record(tmp_path / "trace.jsonl", [turn("a", 0, keys("x"))])
    recorder._rows._blocks._old[keys("x")[0]] = 9
    with pytest.raises(AssertionError, match="two numbers"):
        recorder.check_integrity()


def good_row() -> dict[str, Any]:
    return {
        **{"session": 1, "started_s": 0.5, "service_s": 1.0, "input_tokens": 40, "output_tokens": 3},
        **{"kept_tokens": 0, "blocks": [0, 2], "stop": "stop", "role": "user", "tool": 0, "profile": 0},
    }


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"session": -1}, "session"),
        ({"session": "ann"}, "session"),
        ({"started_s": float("nan")}, "started_s"),
        ({"service_s": -1}, "service_s"),
        ({"service_s": 1e6}, "service_s"),
        ({"input_tokens": 1.5}, "input_tokens"),
        ({"input_tokens": True}, "input_tokens"),
        ({"kept_tokens": 41}, "kept_tokens"),
        ({"blocks": [0, 3]}, "blocks"),  # 40 tokens have two full blocks
        ({"blocks": [0, 10**12]}, "blocks"),
        ({"blocks": [0]}, "blocks"),
        ({"blocks": [0, 0]}, "blocks"),
        ({"blocks": [-1, 1]}, "blocks"),
        ({"blocks": "0 2"}, "blocks"),
        ({"stop": "bored"}, "stop"),
        ({"role": None}, "role"),
        ({"tool": "grep"}, "tool"),
    ],
)
def test_a_bad_row_is_refused_by_field(change: dict[str, Any], field: str, tmp_path: Path) -> None:
    assert read_row(good_row(), 16) is not None
    with pytest.raises(RecordingError) as caught:
        read_row(good_row() | change, 16)
    assert caught.value.field == field
    path = tmp_path / "bad.jsonl"
    header = {"samovar_trace": 1, "block_tokens": 16}
    path.write_text(f"{json.dumps(header)}\n{json.dumps(good_row() | change)}\n")
    with pytest.raises(TraceError, match=rf"bad\.jsonl, line 2, field {field}"):
        list(open_trace(path).turns())


@pytest.mark.parametrize("header", [{"samovar_trace": 2, "block_tokens": 16}, {"samovar_trace": 1}])
def test_a_header_of_another_version_is_refused(header: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(RecordingError):
        read_header(header)
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(header) + "\n")
    with pytest.raises(TraceError, match="line 1, field"):
        open_trace(path)
