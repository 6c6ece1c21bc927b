"""The list of planted bugs does not rot, and the command that plants them tells caught from survived."""

from __future__ import annotations

import io
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from tests.mutants.__main__ import ROOT, main, run
from tests.mutants.mutant import Mutant, read_mutants
from tests.prove import TITLES

MUTANTS = read_mutants()
CAUGHT = Mutant(
    name="adds-one",
    guarantee="G1",
    why="sums are wrong",
    file="sums.py",
    find="return a + b",
    put="return a + b + 1",
    tests=("test_sums.py::test_sum",),
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_planted_bug_has_its_place_and_its_tests(mutant: Mutant) -> None:
    assert list(mutant.problems(ROOT)) == []
    assert mutant.guarantee in TITLES


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # quick
    (tmp_path / "sums.py").write_text("def add(a, b):\n    return a + b\n\n\ndef no():\n    return False\n")
    (tmp_path / "samovar").mkdir()
    (tmp_path / "samovar/__init__.py").touch()
    (tmp_path / "samovar/sums.py").symlink_to("../sums.py")
    (tmp_path / "test_sums.py").write_text(
        "from samovar import sums\n\n\ndef test_sum():\n    assert sums.add(1, 2) == 3\n\n\nclass TestNo:\n"
        "    def test_no(self):\n        assert not sums.no()\n"
    )
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    return tmp_path


def judged(tree: Path, *mutants: Mutant) -> tuple[int, str]:
    out = io.StringIO()
    code = run(mutants, Console(file=out, width=200), tree)
    return code, out.getvalue()


def test_a_bug_that_the_tests_see_is_caught_and_the_tree_is_left_as_it_was(tree: Path) -> None:
    text = (tree / "sums.py").read_text()
    code, out = judged(tree, CAUGHT)
    assert (code, "1 of 1 planted bugs were caught" in out) == (0, True), out
    assert (tree / "sums.py").read_text() == text


def test_a_bug_that_no_test_sees_and_one_that_ends_pytest_are_not_caught(tree: Path) -> None:
    unseen = replace(CAUGHT, name="unseen", tests=("test_sums.py::TestNo::test_no",))
    broken = replace(CAUGHT, name="broken", put="return (")
    code, out = judged(tree, unseen, broken)
    assert code == 1
    assert "unseen: SURVIVED" in out
    assert "broken: not judged: pytest ended with" in out
    assert "0 of 2" in out


def test_without_a_bug_the_tests_must_pass(tree: Path) -> None:
    (tree / "test_sums.py").write_text("def test_sum():\n    assert False\n")
    code, out = judged(tree, CAUGHT)
    assert code == 1
    assert "they must pass without a bug" in out


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"find": "return c"}, "occurs 0 times"),
        ({"find": "return"}, "occurs 2 times"),
        ({"put": "return ("}, "never closed"),
        ({"put": CAUGHT.find}, "it changes nothing"),
        ({"file": "product.py"}, "No such file"),
        ({"tests": ()}, "names no test"),
        ({"tests": ("test_sums.py::test_product",)}, "no test test_sums.py::test_product"),
        ({"tests": ("test_sums.py::TestNo::test_yes",)}, "no test test_sums.py::TestNo::test_yes"),
        ({"tests": ("test_sums.py",)}, "no test test_sums.py"),
        ({"tests": ("test_sums.py::test_sum[1-2]",)}, "names one case"),
    ],
)
def test_a_list_that_has_rotted_is_named(tree: Path, change: dict[str, object], named: str) -> None:
    (problem,) = replace(CAUGHT, **change).problems(tree)  # type: ignore[arg-type]
    assert named in problem


def test_a_list_with_a_typo_or_the_same_name_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('[[mutant]]\nname = "x"\ntest = []\n')
    with pytest.raises(ValueError, match=r"a\.toml: x lacks or has too much of: .*test, tests"):
        read_mutants(tmp_path)
    entry = '[[mutant]]\nname="x"\nguarantee="G1"\nwhy=""\nfile="f"\nfind="a"\nput="b"\ntests=["t"]\n'
    (tmp_path / "a.toml").write_text(entry + entry)
    with pytest.raises(ValueError, match="two mutants named x"):
        read_mutants(tmp_path)


def test_an_unknown_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["no-such-mutant"])
    assert "there is no mutant no-such-mutant; there are: " in capsys.readouterr().err
