"""The measurement of what a service costs without requests."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import psutil
import pytest

from bench import _report as report
from bench import footprint
from bench.footprint import Seen, look, role_of, rows_of

MB = 10**6


@pytest.mark.parametrize(
    ("command", "role"),
    [
        (["ray::ServeReplica:samovar:Ingress", ""], "ray::ServeReplica:samovar:Ingress"),
        (["/venv/bin/python3", "-u", "/site/ray/_private/log_monitor.py", "--x=1"], "log_monitor"),
        (["/venv/bin/python", "/venv/bin/samovar", "serve"], "samovar"),
        (["/site/ray/core/src/ray/raylet/raylet", "--head"], "raylet"),
        ([], "?"),
    ],
)
def test_a_process_has_a_short_name(command: list[str], role: str) -> None:
    assert role_of(command) == role


def test_rows_are_the_idle_share_of_each_and_their_sum() -> None:
    def seen(role: str, cpu_s: float, rss: int) -> Seen:
        return Seen(role, 0.0, cpu_s, rss * MB, rss * MB // 2, rss * MB // 4, 3)

    before = {1: seen("samovar", 4.0, 100), 2: seen("raylet", 1.0, 50), 3: seen("gone", 9.0, 10)}
    after = {1: seen("samovar", 4.5, 200), 2: seen("raylet", 2.0, 50), 4: seen("new", 7.0, 20)}
    rows = rows_of(before, after, 10.0)
    assert [(row["process"], row["idle_pct"], row["start_cpu_s"]) for row in rows] == [
        ("raylet", 10.0, 1.0),
        ("samovar", 5.0, 4.0),
        ("new", 0.0, 7.0),
        ("all", 15.0, 12.0),
    ]
    assert [rows[-1][key] for key in ("rss_mb", "pss_mb", "uss_mb", "threads")] == [270.0, 135.0, 67.5, 9]


def test_a_tree_is_seen_whole_and_with_its_libraries() -> None:
    code = (
        "import subprocess, sys; import tokenizers; print('up', flush=True)\n"
        "with subprocess.Popen([sys.executable, '-c', 'input()'], stdin=sys.stdin): pass"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        child.stdout.readline()
        found = look(psutil.Process(child.pid))
        child.stdin.close()
    assert child.pid in found
    assert found[child.pid].libraries == ("tokenizers",)
    assert 0 < found[child.pid].uss <= found[child.pid].pss <= found[child.pid].rss


class Sleeper:
    """Stands for a service: one process that does nothing."""

    def __init__(self, output: Path, *flags: str) -> None:
        self.flags = flags
        self.process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)

    def wait_ready(self) -> Sleeper:
        return self

    def stop(self) -> None:
        self.process.kill()
        self.process.communicate()


def test_each_start_is_written_down_with_its_sum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(footprint, "Service", Sleeper)
    monkeypatch.setattr(footprint, "SETTLE_S", 0.0)
    monkeypatch.setattr(footprint, "working_directory", lambda: nullcontext(tmp_path))
    monkeypatch.setattr(report, "OUT_DIR", tmp_path)
    assert footprint.main(["--starts", "2", "--idle-s", "0.01", "--engine.threads", "1"]) == 0
    rows = json.loads((tmp_path / "footprint.json").read_text())["rows"]
    assert [row["start"] for row in rows] == [1, 1, 2, 2]
    assert [row["process"] == "all" for row in rows] == [False, True] * 2
    assert all(row["ready_cpu_s"] >= 0 for row in rows if row["process"] == "all")
