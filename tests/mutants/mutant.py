"""A planted bug: where it goes, what it breaks, and the tests that must fail with it. Runs nothing."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Mutant:
    """`find`: text that occurs exactly once in `file`; `put`: what takes its place; `tests`: pytest node ids.

    `guarantee`: what the bug breaks; `why`: what a user would have of it.
    """

    name: str
    guarantee: str
    why: str
    file: str
    find: str
    put: str
    tests: tuple[str, ...]

    def planted(self, root: Path) -> str:
        """The text of `file` with the bug. Raises `ValueError` when its place is not found exactly once."""
        text = (root / self.file).read_text()
        if (count := text.count(self.find)) != 1:
            raise ValueError(f"{self.name}: its text occurs {count} times in {self.file}, not once")
        return text.replace(self.find, self.put)

    def problems(self, root: Path) -> Iterator[str]:
        """What keeps it from being planted and judged: the list rots where the code goes on without it."""
        try:
            text = self.planted(root)
            if self.file.endswith(".py"):
                compile(text, self.file, "exec")
        except (OSError, ValueError, SyntaxError) as error:
            yield f"{self.name}: {error}"
        if self.find == self.put:
            yield f"{self.name}: it changes nothing"
        if not self.tests:
            yield f"{self.name}: it names no test"
        for test in self.tests:
            if "[" in test:  # a case's name moves with its values, and only collecting it would notice
                yield f"{self.name}: {test} names one case: name the test"
            elif not _is_there(root, test):
                yield f"{self.name}: there is no test {test}"


def _is_there(root: Path, node_id: str) -> bool:
    """By reading the file, not by collecting: this is asked in every run of the unit tests."""
    file, *path = node_id.split("::")
    if not path or not (root / file).is_file():
        return False
    body: list[ast.stmt] = ast.parse((root / file).read_text()).body
    for name in path:
        named = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        found = next((node for node in body if isinstance(node, named) and node.name == name), None)
        if found is None:
            return False
        body = found.body
    return True


def read_mutants(folder: Path = FOLDER) -> list[Mutant]:
    """All mutants of the lists in `folder`. Raises `ValueError` naming the list and what is wrong in it."""
    wanted = {field.name for field in fields(Mutant)}
    mutants: dict[str, Mutant] = {}
    for path in sorted(folder.glob("*.toml")):
        for entry in tomllib.loads(path.read_text()).get("mutant", []):
            if entry.keys() != wanted:
                odd = ", ".join(sorted(entry.keys() ^ wanted))
                raise ValueError(
                    f"{path.name}: {entry.get('name', 'a mutant')} lacks or has too much of: {odd}"
                )
            mutant = Mutant(**{**entry, "tests": tuple(entry["tests"])})
            if mutant.name in mutants:
                raise ValueError(f"{path.name}: there are two mutants named {mutant.name}")
            mutants[mutant.name] = mutant
    return list(mutants.values())
