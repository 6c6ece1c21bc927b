"""docs/ARCHITECTURE.md names what is there and draws the arrows that are there."""

from __future__ import annotations

import ast
import re

import pytest

from tests import house
from tests.house import ROOT

PAGE = ROOT / "docs" / "ARCHITECTURE.md"
QUOTED = re.compile(r"`([^`\n]+)`")
NO_NAMES = {"__init__.py", "block_tokens"}


def names_of(path: str) -> set[str]:
    """`Class`, `Class.method` and `function` of a file."""
    found = set()
    for node in house.tree_of(ROOT / path).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            found.add(node.name)
            if isinstance(node, ast.ClassDef):
                methods = (
                    one for one in node.body if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef))
                )
                found |= {f"{node.name}.{one.name}" for one in methods}
    return found


def unknown(text: str) -> list[str]:
    """What a page quotes and is not there: paths, and the names that follow a path on its line."""
    found = []
    for line in text.splitlines():
        path = ""
        for quoted in QUOTED.findall(line):
            if "/" in quoted and " " not in quoted:
                path = quoted
                found += [] if (ROOT / path).exists() else [path]
            elif path.endswith(".py") and (ROOT / path).exists() and re.fullmatch(r"[\w.]+", quoted):
                found += [] if quoted in names_of(path) | NO_NAMES else [f"{path} {quoted}"]
    return found


def test_every_path_and_name_on_the_page_exists() -> None:
    assert unknown(PAGE.read_text(encoding="utf-8")) == []


def test_a_wrong_path_and_a_wrong_name_are_found() -> None:
    text = (
        "see `router/routing/score.py` `rank`, `nowhere/at_all.py` and\n`router/routing/score.py` `Rank.no`"
    )
    assert unknown(text) == ["nowhere/at_all.py", "router/routing/score.py Rank.no"]


@pytest.mark.parametrize("package", house.PACKAGES[1:])
def test_the_arrows_are_those_of_the_imports(package: str) -> None:
    assert house.diagram(package) in PAGE.read_text(encoding="utf-8"), (
        f"paste the output of `python -m tests.house` for {package} into docs/ARCHITECTURE.md"
    )


def test_the_page_lists_all_folders() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert [folder for folder in house.folders() if f"| `{folder}/` |" not in text] == []
