"""`make prove`: what a test's name says, and that nothing that was not shown looks as if it was."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from tests import prove
from tests.prove import FAULTS, GUARANTEES, LATER, TITLES, Proof, failures, ids_in, table
from tests.world.laws import LAWS

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("name", "ids"),
    [
        ("test_g4_whole_or_none", ["G4"]),
        ("test_f07_the_directory_goes", ["F07"]),
        ("test_f7_the_directory_goes", ["F07"]),
        ("test_f36_g12_a_clear", ["F36", "G12"]),
        ("test_l14_tiers", ["G14"]),
        ("test_l14", ["G14"]),
        ("TestF33Auth", ["F33"]),
        ("TestG2F14", ["G2", "F14"]),
        ("test_f33ways", []),
        ("test_good_keys", []),
        ("test_a_g4_in_the_middle", []),
        ("TestFaults", []),
        ("TestG2x", []),
    ],
)
def test_names_say_what_they_prove(name: str, ids: list[str]) -> None:
    assert ids_in(name) == ids


def test_every_id_has_its_place() -> None:
    assert list(GUARANTEES) == [f"G{number}" for number in range(1, 15)]
    assert list(FAULTS) == [f"F{number:02d}" for number in range(1, 39)]
    assert set(LATER) <= set(FAULTS)


def proof_of(**outcomes: str) -> Proof:
    """Every id that has to have a test has one that passed, but for those named here."""
    proof = Proof()
    for name in TITLES:
        outcome = outcomes.get(name, "passed")
        if outcome == "no test" or (name in LATER and name not in outcomes):
            continue
        proof.add([name], f"tests/x.py::test_{name}", f"tests/x.py::test_{name}[1]")
        if outcome != "not run":
            proof.note(f"tests/x.py::test_{name}[1]", outcome)
    return proof


def printed(proof: Proof, *, is_listing: bool = False) -> dict[str, str]:
    """The first line of each id in both tables."""
    console = Console(width=150, record=True, file=io.StringIO())
    for names in (GUARANTEES, FAULTS):
        console.print(table(proof, "", names, is_listing=is_listing))
    cells = [[cell.strip() for cell in line.split("│")] for line in console.export_text().splitlines()]
    return {row[1]: row[4] for row in cells if len(row) > 4 and row[1]}


def test_a_proof_is_complete_when_every_id_has_a_test_that_passed() -> None:
    proof = proof_of()
    assert failures(proof) == []
    assert failures(proof, is_listing=True) == []
    assert printed(proof)["G4"] == "1 passed"
    assert printed(proof, is_listing=True)["G4"] == "1 case"
    assert printed(proof)["F38"] == "make soak"


def test_what_each_life_of_the_world_is_checked_for_stands_beside_its_promise() -> None:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(table(proof_of(), "", GUARANTEES))
    rows = [line for line in console.export_text().splitlines() if "each life of tests/world" in line]
    named = {name for ids in LAWS.values() for name in ids}
    assert named <= set(TITLES), "a law is about what is no promise and no fault"
    assert len(rows) == len(named & set(GUARANTEES))
    assert any("erased and there" in row and "one failure stopped others" in row for row in rows)


@pytest.mark.parametrize("outcome", ["failed", "skipped", "not run", "no test"])
@pytest.mark.parametrize("name", ["G4", "F07"])
def test_what_was_not_shown_is_no_proof(name: str, outcome: str) -> None:
    proof = proof_of(**{name: outcome})
    said = outcome if outcome == "no test" else f"1 {outcome}"
    assert printed(proof)[name] == said
    assert f"{name} is not proven: {said}" in failures(proof)


def test_a_skipped_case_beside_one_that_passed_is_shown() -> None:
    proof = proof_of()
    proof.add(["G4"], "tests/x.py::test_G4", "tests/x.py::test_G4[2]")
    proof.note("tests/x.py::test_G4[2]", "skipped")
    assert printed(proof)["G4"] == "1 skipped, 1 passed"
    assert failures(proof) == []


def test_an_id_of_a_later_issue_that_has_tests_must_pass() -> None:
    assert failures(proof_of(F18="passed")) == []
    assert any("F18" in line for line in failures(proof_of(F18="failed")))


def test_the_worst_of_setup_call_and_teardown_counts() -> None:
    for outcomes in (("passed", "failed"), ("failed", "passed"), ("skipped", "failed")):
        proof = Proof()
        proof.add(["G4"], "t.py::test_g4", "t.py::test_g4")
        for outcome in outcomes:
            proof.note("t.py::test_g4", outcome)
        assert proof.count(["t.py::test_g4"]) == {"failed": 1}


def test_an_id_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="F39"):
        Proof().add(["F39"], "t.py::test_f39", "t.py::test_f39")


SAMPLE = """
import pytest

def test_g1_good(): pass
def test_g2_bad(): assert False
@pytest.mark.skip
def test_g3_skipped(): pass
@pytest.mark.guarantee("G4", "F07")
def test_marked(): pass
def test_of_nothing(): assert False
@pytest.fixture
def broken():
    yield
    assert False
def test_g5_broken_behind(broken): pass
class TestF33Auth:
    @pytest.mark.parametrize("n", [1, 2])
    def test_case(self, n): assert n == 1
"""


def run(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_sample.py").write_text(SAMPLE)
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers\n")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # quick
    command = [sys.executable, "-m", "tests.prove", "-c", str(folder / "pytest.ini"), *flags, str(folder)]
    return subprocess.run(
        [*command, "-p", "tests.prove"], cwd=folder, env=env, capture_output=True, text=True, timeout=120
    )


def result_of(output: str, name: str) -> str:
    row = next(line for line in output.splitlines() if line.startswith(f"│ {name} "))
    return row.split("│")[4].strip()


def test_it_runs_what_has_a_name_or_a_marker_and_nothing_else(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 1
    for name, result in {
        "G1": "1 passed",
        "G2": "1 failed",
        "G3": "1 skipped",
        "G4": "1 passed",
        "F07": "1 passed",
        "G5": "1 failed",
        "F33": "1 failed, 1 passed",
        "G6": "no test",
        "F38": "make soak",
    }.items():
        assert result_of(done.stdout, name) == result, done.stdout
    assert "1 deselected" in done.stdout
    assert "failed: test_sample.py::TestF33Auth::test_case[2]" in done.stdout
    assert "test_of_nothing" not in done.stdout


def test_to_list_runs_nothing(tmp_path: Path) -> None:
    done = run(tmp_path, "--list")
    assert done.returncode == 1  # most have no test here
    assert result_of(done.stdout, "F33") == "2 cases"
    assert "test_sample.py::test_g2_bad" in done.stdout
    assert "failed" not in done.stdout
    assert "G6 has no test" in done.stdout


def test_tests_that_cannot_be_collected_are_no_proof(tmp_path: Path) -> None:
    (tmp_path / "test_broken.py").write_text("import nothing_of_that_name\n")
    done = run(tmp_path)
    assert done.returncode == 1
    assert "pytest did not get to the end: INTERRUPTED" in done.stdout


def test_the_marker_is_known_in_every_run(pytestconfig: pytest.Config) -> None:
    assert pytestconfig.pluginmanager.has_plugin("tests.prove")
    assert any(line.startswith("guarantee(") for line in pytestconfig.getini("markers"))
    assert prove.__name__ == "tests.prove"
