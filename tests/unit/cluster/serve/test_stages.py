"""The stages of a start, from a replica's note to a line with its seconds."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from samovar.cluster.serve.stages import IN_WORDS, StartStages
from samovar.replicas.start.start_notes import REPLICA_STAGES, StartNotes, forget_notes, stage_noted
from tests.support.clock import Clock


def test_each_stage_is_one_line_with_its_seconds() -> None:
    clock, out = Clock(0.0), io.StringIO()
    with StartStages(Console(file=out, width=80), clock) as stages:
        for stage, seconds in (("ray", 6.0), ("probe", 31.25), ("probe", 1.0), ("measure", 0.0)):
            stages.begin(stage)
            clock.now_s += seconds
        stages.end()
        stages.end()
    lines = out.getvalue().splitlines()
    assert [line.split()[:3] for line in lines] == [
        *(["ray", "6.0", "s"], ["probe", "32.2", "s"], ["measure", "0.0", "s"])
    ]
    assert stages.total_s == 38.25


def test_a_spinner_ends_with_a_start_that_fails() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    try:
        with StartStages(console) as stages:
            stages.begin("ray")
            raise TimeoutError
    except TimeoutError:
        assert console._live_stack == []
    assert "ray" not in console.file.getvalue().rpartition("\n")[2]  # type: ignore[attr-defined]


def test_what_a_stage_does_is_shown_on_a_terminal_alone() -> None:
    for is_terminal in (True, False):
        console = Console(file=io.StringIO(), width=80, force_terminal=is_terminal)
        with StartStages(console) as stages:
            stages.note("nothing yet")
            stages.begin("packages")
            stages.note("Downloading [torch]")
        assert ("Downloading [torch]" in console.file.getvalue()) == is_terminal  # type: ignore[attr-defined]


def test_the_replica_furthest_behind_is_shown(tmp_path: Path) -> None:
    folder, clock = tmp_path / "starting", Clock(0.0)
    first, second = (StartNotes(folder, "8000", name, clock) for name in ("a", "b"))
    StartNotes(folder, "9000", "other", clock).begin("tiers")
    assert stage_noted(folder, "8000") is None
    first.begin("weights")
    second.begin("weights")
    clock.now_s += 2.0
    second.begin("measure")
    assert stage_noted(folder, "8000") == "weights"
    first.begin("measure")
    clock.now_s += 3.0
    first.end()
    assert stage_noted(folder, "8000") == "measure"
    assert first.seconds == (("weights", 2.0), ("measure", 3.0))
    forget_notes(folder, "8000")
    assert stage_noted(folder, "8000") is None
    assert stage_noted(folder, "9000") == "tiers"


def test_without_a_folder_for_the_note_the_seconds_are_there_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    notes = StartNotes(tmp_path / "file" / "starting", "8000", "a", Clock(0.0))
    for stage in REPLICA_STAGES:
        notes.begin(stage)
    notes.end()
    assert [stage for stage, _ in notes.seconds] == list(REPLICA_STAGES)


def test_every_stage_has_words() -> None:
    assert set(REPLICA_STAGES) <= IN_WORDS.keys()
