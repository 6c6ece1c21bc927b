"""What `make bench-autoscale` makes of what it has seen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench import _report, autoscale
from bench._autoscale_events import Change, Run, changes_of, homeless, replicas_by_time, summary
from bench._service_player import Played

TURN = Played(session=1, number=1, at_s=12.0, ttft_s=0.5, prompt_tokens=100, tokens={"compute": 20}, text="a")
RUN = Run(
    "drain",
    [
        replace(TURN, number=0, at_s=1.0, tokens={"compute": 100}),
        TURN,
        replace(TURN, number=2, at_s=55.0, ttft_s=2.0, tokens={"compute": 90, "cpu": 10}),
    ],
    [(0.0, 1), (10.0, 2), (20.0, 2), (50.0, 1)],
)


def test_replicas_by_time_are_those_that_run_while_the_trace_is_played() -> None:
    looks = [
        {"at_s": 99.0, "states": {"RUNNING": 3}},
        {"at_s": 100.5, "states": {"RUNNING": 1, "STARTING": 1}},
        {"at_s": 101.0, "states": {"STARTING": 1}},
        {"at_s": 120.0, "states": {"RUNNING": 3}},
    ]
    assert replicas_by_time(looks, 100.0, 10.0) == [(0.5, 1), (1.0, 0)]


def test_events_and_the_hits_near_them() -> None:
    assert changes_of(RUN.replicas) == [Change(10.0, 1, 2), Change(50.0, 2, 1)]
    assert RUN.hit_rate(0.0, 100.0) == pytest.approx(0.45)
    assert RUN.hit_rate(0.0, 5.0) is None
    row = summary(RUN)
    assert (row["ups"], row["downs"], row["most"], row["turns"]) == (1, 1, 2, 3)
    assert row["hits_near"] == pytest.approx(0.45)
    assert row["hits_down"] == pytest.approx(0.1)
    assert row["homeless"] == 0


def test_who_comes_back_after_his_replica_was_sent_away_is_homeless() -> None:
    at = replace(TURN, session=7, replica="old")
    played = [
        replace(at, number=0, at_s=20.0),
        replace(at, number=1, at_s=52.0, replica="new", tokens={"compute": 30}),  # its replica has gone
        replace(at, number=2, at_s=53.0, replica="new"),
        replace(at, session=8, number=0, at_s=30.0, replica="other"),
        replace(at, session=8, number=1, at_s=60.0, replica="new"),  # moved, as the other was busy
        replace(at, session=9, number=0, at_s=70.0, replica="other"),
    ]
    run = replace(RUN, played=played)
    assert homeless(run) == [played[1]]
    assert summary(run)["hits_homeless"] == 0.7


def test_a_text_that_differs_between_runs_is_wrong() -> None:
    other = Run("drop", [RUN.played[0], replace(TURN, text="b")], RUN.replicas)
    assert autoscale.wrong_texts([RUN, RUN]) == []
    assert autoscale.wrong_texts([RUN, other]) == [(1, 1)]


def test_replicas_that_never_follow_fail_the_bench(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_report, "OUT_DIR", tmp_path)
    monkeypatch.setattr(autoscale, "script_of", lambda _: [])
    runs = {"drain": RUN, "drop": replace(RUN, name="drop", replicas=[(0.0, 1), (60.0, 1)])}
    monkeypatch.setattr(autoscale, "play", lambda _args, _sessions, name, drops: runs[name])
    assert autoscale.main([]) == 1
    assert "in the run drop the replicas did not follow" in capsys.readouterr().out
    assert (tmp_path / "autoscale.png").exists()
    runs["drop"] = replace(RUN, name="drop")
    assert autoscale.main([]) == 0
