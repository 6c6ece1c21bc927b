"""`make mutants`: plant known bugs one by one in a copy of the tree, and see that the tests fail with each.

The named tests run once without any bug and must pass; then once with each bug, and must fail: a failed
test (exit code 1), not a file that cannot be imported. Fails when a bug is not seen or finds no place.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from tests.mutants.mutant import FOLDER, Mutant, read_mutants

ROOT = Path(__file__).resolve().parents[2]
RUN_S_MAX = 300.0
WIDTH_IN_A_PIPE = 160
_STYLE = {"caught": "green"}


@dataclass(frozen=True, slots=True)
class Verdict:
    mutant: Mutant
    outcome: str
    seconds: float

    @property
    def is_caught(self) -> bool:
        return self.outcome == "caught"


def copy_tree(root: Path, target: Path) -> None:
    """What git knows of and what it does not ignore, as it stands in the working tree."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        check=True,
        capture_output=True,
        text=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (root / name).exists():  # else removed, and not yet in a commit
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, target / name, follow_symlinks=False)  # samovar/ is links


class Judge:
    """Runs tests in a copy of the tree, with a bug or without."""

    def __init__(self, copy: Path, run_s_max: float = RUN_S_MAX) -> None:
        self._copy = copy
        self._run_s_max = run_s_max
        self._environment = {
            **os.environ,
            "PYTHONPATH": str(copy),
            # Without compiled files: one of the same size and second would be taken for the planted source.
            "PYTHONDONTWRITEBYTECODE": "1",
            "TESTS_SLOW": "1",  # searches of random histories have all their examples
        }

    def foreign(self, packages: set[str]) -> list[str]:
        """Those of our packages that would be imported from elsewhere: then a planted bug is not run."""
        lines = "\n".join(f"import samovar.{name} as it; print(it.__file__)" for name in sorted(packages))
        done = self._run([sys.executable, "-c", lines])
        places = [line for line in done.stdout.splitlines() if not Path(line).is_relative_to(self._copy)]
        return places if done.returncode == 0 else [done.stderr]

    def test(self, tests: Sequence[str], run_s_max: float | None = None) -> subprocess.CompletedProcess[str]:
        """Run tests until one fails; without `run_s_max` each has its own bound, pytest's."""
        options = ["-x", "-q", "--no-header", "--tb=short", "-p", "no:cacheprovider"]
        return self._run([sys.executable, "-m", "pytest", *options, *tests], run_s_max)

    def judge(self, mutant: Mutant) -> Verdict:
        started_s = time.monotonic()
        path = self._copy / mutant.file
        text = path.read_text()
        try:
            path.write_text(mutant.planted(self._copy))
            outcome = _outcome(self.test(mutant.tests, self._run_s_max).returncode)
        except (OSError, ValueError) as error:
            outcome = f"not planted: {error}"
        except subprocess.TimeoutExpired:
            outcome = f"no verdict within {self._run_s_max:g} s"
        finally:
            path.write_text(text)
        return Verdict(mutant, outcome, time.monotonic() - started_s)

    def _run(self, command: list[str], run_s_max: float | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=self._copy,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=run_s_max,
            check=False,
        )


def _outcome(code: int) -> str:
    if code == pytest.ExitCode.TESTS_FAILED:
        return "caught"
    return "SURVIVED" if code == pytest.ExitCode.OK else f"not judged: pytest ended with {code}"


def table(verdicts: Sequence[Verdict]) -> Table:
    result = Table(title="Planted bugs", title_justify="left")
    for column in ("mutant", "breaks", "file", "result", "s"):
        result.add_column(column, overflow="fold")
    for verdict in verdicts:
        mutant, style = verdict.mutant, _STYLE.get(verdict.outcome, "red")
        seconds = f"{verdict.seconds:.1f}"
        result.add_row(mutant.name, mutant.guarantee, mutant.file, f"[{style}]{verdict.outcome}[/]", seconds)
    return result


def run(mutants: Sequence[Mutant], console: Console, root: Path = ROOT) -> int:
    """Judge all of them; 0 when each was caught."""
    with tempfile.TemporaryDirectory(prefix="samovar-mutants-") as folder:
        copy = Path(folder).resolve()
        copy_tree(root, copy)
        judge = Judge(copy)
        if places := judge.foreign({Path(mutant.file).parts[0].removesuffix(".py") for mutant in mutants}):
            console.print(f"the copy's own packages are not what Python imports: {places}", style="red")
            return 1
        tests = list(dict.fromkeys(test for mutant in mutants for test in mutant.tests))
        console.print(f"{len(tests)} tests without a bug ...")
        bare = judge.test(tests)
        if bare.returncode != pytest.ExitCode.OK:
            console.print(bare.stdout[-4000:], bare.stderr[-2000:], markup=False, highlight=False)
            console.print("they must pass without a bug, or they say nothing with one", style="red")
            return 1
        verdicts = []
        for number, mutant in enumerate(mutants, 1):
            verdicts.append(judge.judge(mutant))
            console.print(
                f"{number} of {len(mutants)}: {mutant.name}: {verdicts[-1].outcome}", highlight=False
            )
    console.print(table(verdicts))
    caught = sum(verdict.is_caught for verdict in verdicts)
    console.print(f"{caught} of {len(mutants)} planted bugs were caught")
    return 0 if caught == len(mutants) else 1


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="make mutants", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these; without any: all")
    args = parser.parse_args(argv)
    mutants = read_mutants(FOLDER)
    if unknown := set(args.names) - {mutant.name for mutant in mutants}:
        known = ", ".join(mutant.name for mutant in mutants)
        parser.error(f"there is no mutant {', '.join(sorted(unknown))}; there are: {known}")
    chosen = [mutant for mutant in mutants if not args.names or mutant.name in args.names]
    console = Console()
    return run(chosen, console if console.is_terminal else Console(width=WIDTH_IN_A_PIPE))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
