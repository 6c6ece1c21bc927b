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


ENTRIES = {
    "Serve's proxy": ["router.proxy.proxy_guard", "router.proxy.ingress_router"],
    "ingress": ["router.ingress.app"],
    "replica (rank 0)": ["replicas.serving.deployment"],
    "replica of vLLM": ["replicas.vllm.deployment"],
    "rank above 0": ["replicas.ranks.worker"],
    "tier actor": ["cache_tiers.actors.tier"],
    "tiers without Ray": ["cache_tiers.command.main"],
    "vLLM's scheduler and worker": ["cache_tiers.vllm.connector", "cache_tiers.vllm.offloading.tier"],
    "session actor": ["cache_tiers.sessions.actor"],
    "key actor": ["cache_tiers.actors.keys"],
    "the `samovar` command": ["cluster.cli.main"],
}
"""Where each process of the page begins."""


def rooms_by_process(text: str) -> dict[str, list[str]]:
    """Process -> the folders in its row."""
    section = text.split("## Processes and rooms\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| [^|]+ \| ([^|]*`[^|]*/`[^|]*) \|$", section, re.MULTILINE)
    return {process: re.findall(r"`([\w/]+)/`", cell) for process, cell in rows}


def reachable(entries: list[str]) -> set[str]:
    """Folders of the modules that those modules import, and so on, also within functions."""
    paths = {house.module_of(path, ROOT): path for path in house.sources()}
    seen, left = set[str](), list(entries)
    while left:
        module = left.pop()
        while module and module not in paths:
            module = module.rpartition(".")[0]
        if module and module not in seen:
            seen.add(module)
            left += [name for _, name in house.imported(paths[module], ROOT)]
    return {str(paths[module].parent.relative_to(ROOT)) for module in seen}


def test_every_room_runs_in_a_process_that_reaches_it() -> None:
    told = rooms_by_process(PAGE.read_text(encoding="utf-8"))
    assert told.keys() == ENTRIES.keys()
    for process, rooms in told.items():
        assert set(rooms) - reachable(ENTRIES[process]) == set(), process
    rooms = {folder for folder in house.folders() if "/" in folder and not folder.startswith("configs/")}
    assert rooms - {room for named in told.values() for room in named} == set()


def test_a_room_in_the_wrong_process_is_found() -> None:
    text = "## Processes and rooms\n| tier actor | one a node | `cache_tiers/node/`, `router/proxy/` |\n"
    assert rooms_by_process(text) == {"tier actor": ["cache_tiers/node", "router/proxy"]}
    assert "router/proxy" not in reachable(ENTRIES["tier actor"])
