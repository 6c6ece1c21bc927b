"""`make prove`: which tests keep which guarantee and stand against which fault, and whether they pass.

A test says what it proves by its name (`test_g4_...`, `test_f36_g12_...`, `test_l14_...`: L is the same
as G), by the name of its module or class (`test_l14_tiers.py`, `TestF33Auth`), or by a marker
`@pytest.mark.guarantee("G2", "F14")`. Also the pytest plugin that knows that marker. Does not judge
whether a test is a good one.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tests.world.laws import LAWS

ROOT = Path(__file__).resolve().parents[1]
WIDTH_IN_A_PIPE = 200

GUARANTEES = {
    "G1": "never another block",
    "G2": "never another tenant's",
    "G3": "never another model's",
    "G4": "never torn: a whole record or none",
    "G5": "never rotten: every promotion is checked",
    "G6": "never early: only slots that were computed",
    "G7": "never a part as the whole",
    "G8": "a move is atomic",
    "G9": "a tier's fault is a miss",
    "G10": "everything is bounded and accounted",
    "G11": "clocks may jump",
    "G12": "what is forgotten is gone in every tier",
    "G13": "every failure is counted and kept for a look",
    "G14": "the same answer, cached and uncached",
}
FAULTS = {
    "F01": "bits flip in a file",
    "F02": "a file is short, empty, too long, all zeros",
    "F03": "a file lies in another one's place",
    "F04": "the writer is killed at any byte",
    "F05": "power cut: what was not flushed is lost",
    "F06": "the disk is full, the quota is reached",
    "F07": "the directory goes away or is read-only",
    "F08": "a slow tier, a late load",
    "F09": "S3 fails, hangs, refuses, is not there",
    "F10": "S3 acknowledges what it does not keep",
    "F11": "garbage or another's object at our key",
    "F12": "a malicious file as a block",
    "F13": "same model name, other weights or layout",
    "F14": "a tenant asks for another's conversation",
    "F15": "a tenant measures what another has cached",
    "F16": "hashes collide",
    "F17": "the tier actor is killed in each state of a move",
    "F18": "movers race; messages come twice or late",
    "F19": "an object's owner dies, the object store is full",
    "F20": "a replica is killed in mid-stream",
    "F21": "a replica freezes and comes back",
    "F22": "the ingress or the controller is killed",
    "F23": "clients hang up at any token",
    "F24": "a turn ends at any place of a page",
    "F25": "preemption and forks during stores and loads",
    "F26": "clocks jump",
    "F27": "scale-down and model update under traffic",
    "F28": "the network parts",
    "F29": "the predictor is corrupt or misled",
    "F30": "ten thousand sessions are predicted at once",
    "F31": "bad HTTP",
    "F32": "huge prompts, tokeniser bombs",
    "F33": "no key, a wrong key, ways round the key",
    "F34": "ids as paths, URLs as content",
    "F35": "a tenant floods the cache",
    "F36": "a clear during moves",
    "F37": "an open Ray cluster",
    "F38": "hours under random faults",
}
LATER = {
    "F38": "make soak",
}
"""Where the tests of an id come from, or the rest of them, if not all are here yet."""

TITLES = GUARANTEES | FAULTS

_NAME = re.compile(r"test_((?:[glf]\d+_)+)")
_CLASS = re.compile(r"Test((?:[GLF]\d+)+)(?=[A-Z]|$)")
_ID = re.compile(r"([glf])(\d+)", re.IGNORECASE)
_WORST_FIRST = ("failed", "not run", "skipped", "passed")
_STYLE = {"failed": "red", "not run": "red", "skipped": "yellow", "passed": "green"}


def pytest_configure(config: pytest.Config) -> None:
    """So that the marker is known in every run, see `conftest.py`."""
    config.addinivalue_line("markers", "guarantee(*ids): the guarantees and faults that a test is about")


def ids_in(name: str) -> list[str]:
    """The ids in the name of a function, a class or a module, as `GUARANTEES` and `FAULTS` spell them."""
    found = _NAME.match(name + "_") or _CLASS.match(name)
    return [_spelled(letter, number) for letter, number in _ID.findall(found[1])] if found else []


def _spelled(letter: str, number: str) -> str:
    return f"F{int(number):02d}" if letter in "fF" else f"G{int(number)}"


@dataclass
class Proof:
    """Test functions by what they prove, and what came of each of their cases."""

    tests: dict[str, set[str]] = field(default_factory=dict)  # id -> "file::function"
    outcomes: dict[str, dict[str, str]] = field(default_factory=dict)  # "file::function" -> case -> outcome

    def add(self, ids: Iterable[str], test: str, case: str) -> None:
        """Raises `ValueError` for an id that does not exist: a typo must not look like a proof."""
        for name in ids:
            if name not in TITLES:
                raise ValueError(f"{test} says that it proves {name}, which is no guarantee and no fault")
            self.tests.setdefault(name, set()).add(test)
        self.outcomes.setdefault(test, {})[case] = "not run"

    def note(self, case: str, outcome: str) -> None:
        """Setup, call and teardown of a case each have an outcome; the worst of them counts."""
        known = self.outcomes.get(_function_of(case), {})
        if case in known and (
            known[case] == "not run" or _WORST_FIRST.index(outcome) < _WORST_FIRST.index(known[case])
        ):
            known[case] = outcome

    def count(self, tests: Iterable[str]) -> Counter[str]:
        """Cases of these tests by outcome."""
        return Counter(outcome for test in tests for outcome in self.outcomes[test].values())

    def is_kept(self, name: str) -> bool:
        """Did a test of it pass, and none fail? Without a test: is it known where it will come from?"""
        tests = self.tests.get(name)
        if not tests:
            return name in LATER
        counts = self.count(tests)
        return counts["passed"] > 0 and not counts["failed"] and not counts["not run"]


class ProvePlugin:
    """Keeps the tests that prove something, drops the others, and collects what comes of them."""

    def __init__(self, *, is_listing: bool = False) -> None:
        self.proof = Proof()
        self._is_listing = is_listing

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        kept: list[pytest.Item] = []
        dropped: list[pytest.Item] = []
        for item in items:
            ids = _ids_of(item)
            (kept if ids else dropped).append(item)
            if ids:
                self.proof.add(ids, _function_of(item.nodeid), item.nodeid)
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept

    def pytest_runtestloop(self) -> bool | None:
        return True if self._is_listing else None  # True: that was all

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.proof.note(report.nodeid, report.outcome)


def _ids_of(item: pytest.Item) -> list[str]:
    marked = [name for marker in item.iter_markers("guarantee") for name in marker.args]
    parts = item.nodeid.partition("[")[0].split("::")
    named = [name for part in (Path(parts[0]).stem, *parts[1:]) for name in ids_in(part)]
    return list(dict.fromkeys([*marked, *named]))


def _function_of(nodeid: str) -> str:
    return nodeid.partition("[")[0]


def table(proof: Proof, title: str, names: dict[str, str], *, is_listing: bool = False) -> Table:
    """A row for every file with tests of an id, or, to list them, for every test."""
    result = Table(title=title, title_justify="left", show_lines=False)
    for column in ("", "promise" if names is GUARANTEES else "fault", "tests", "result"):
        result.add_column(column, overflow="fold")
    for name, promise in names.items():
        tests = sorted(proof.tests.get(name, ()))
        groups: dict[str, list[str]] = {}
        for test in tests:
            groups.setdefault(test if is_listing else test.partition("::")[0], []).append(test)
        head = (name, promise)
        for place, members in groups.items():
            result.add_row(*head, place.removeprefix("tests/"), _in_words(proof.count(members), is_listing))
            head = ("", "")
        if not tests:
            missing = Text(LATER[name], "yellow") if name in LATER else Text("no test", "red")
            result.add_row(*head, "", missing)
        elif name in LATER:
            result.add_row("", "", Text(f"more: {LATER[name]}", "yellow"), "")
        if laws := [law for law, ids in LAWS.items() if name in ids]:
            result.add_row("", "", "each life of tests/world", f"never: {', '.join(laws)}")
        result.add_section()
    return result


def _in_words(counts: Counter[str], is_listing: bool) -> Text:
    if is_listing:
        cases = counts.total()
        return Text(f"{cases} case{'s' * (cases != 1)}")
    words = [Text(f"{counts[word]} {word}", _STYLE[word]) for word in _WORST_FIRST if counts[word]]
    return Text(", ").join(words)


def failures(proof: Proof, *, is_listing: bool = False) -> list[str]:
    """What keeps this from being a proof, a line each."""
    if is_listing:
        return [f"{name} has no test" for name in TITLES if name not in LATER and name not in proof.tests]
    lines = [
        f"{outcome}: {case}"
        for cases in proof.outcomes.values()
        for case, outcome in cases.items()
        if outcome == "failed"
    ]
    for name in TITLES:
        if not proof.is_kept(name):
            counts = proof.count(proof.tests.get(name, ()))
            lines.append(f"{name} is not proven: {_in_words(counts, False).plain or 'no test'}")
    return lines


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="make prove", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="only say which tests there are")
    args, for_pytest = parser.parse_known_args(argv)
    plugin = ProvePlugin(is_listing=args.list)
    code = pytest.main(["-q", "--rootdir", str(ROOT), *for_pytest], plugins=[plugin])
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH_IN_A_PIPE)
    for title, names in (("Guarantees", GUARANTEES), ("Faults", FAULTS)):
        console.print(table(plugin.proof, title, names, is_listing=args.list))
    has_run = not args.list and code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    if has_run:
        from tests.support.engines import exactness  # loads torch: only where something was computed

        console.print(f"CPU: {exactness.cpu_in_words()}", highlight=False, markup=False)
        for line in exactness.verdicts_in_words():
            console.print(f"exact here? {line}", highlight=False, markup=False)
    lines = failures(plugin.proof, is_listing=args.list)
    for line in lines:
        console.print(line, style="red", highlight=False, markup=False)
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        console.print(f"pytest did not get to the end: {pytest.ExitCode(code).name}", style="red")
    return 0 if code == pytest.ExitCode.OK and not lines else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
