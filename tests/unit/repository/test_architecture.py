"""docs/ARCHITECTURE.md names what is there and draws the arrows that are there; links lead somewhere."""

from __future__ import annotations

import ast
import re
from pathlib import Path

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


def broken_links(page: Path) -> list[str]:
    """Relative links of a Markdown page that lead nowhere."""
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    return [target for target in targets if "://" not in target and not (page.parent / target).exists()]


PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "terraform/README.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("[here](page.md#a), [there](gone.md), [out](https://example.com/x.md)")
    assert broken_links(page) == ["gone.md"]


def test_the_readme_stays_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < 120
