"""Small files of ours that hold anything at all: no start fails over one, and it is kept for a look."""

from __future__ import annotations

import ast
import json
import os
from pathlib import Path

import pytest

from samovar.cache_tiers.blocks.extent import Clear
from samovar.cache_tiers.node.build import count_start
from samovar.cache_tiers.node.state import PendingDeletes, put_aside
from samovar.configs.json_text import TooDeep, parse_json
from tests.support.nodes.node_harness import TENANT, bench, nvme, sample
from tests.unit.repository.test_house_imports import ROOT, sources

DEEP = "[" * 5000
BAD_TEXTS = {
    "deep": DEEP,
    "deep in an object": '{"version":1,"deletes":' + DEEP,
    "deep and whole": '{"version":1,"clears":[],"deletes":' + DEEP + "]" * 5000 + "}",
    "cut": '{"version":1,',
    "a list": "[]",
    "null": "null",
    "a number": "1e999",
    "not ascii": "caf\u00e9",
    "nul": "\0",
}


@pytest.mark.parametrize("text", [DEEP, b"[" * 5000, '{"a":' * 5000])
def test_deep_json_is_an_error_like_any_other(text: str | bytes) -> None:
    with pytest.raises(TooDeep, match="too deeply"):
        parse_json(text)
    assert issubclass(TooDeep, ValueError)
    assert parse_json('{"a": [1]}') == {"a": [1]}


def test_all_json_is_read_by_the_one_reader() -> None:
    """`json.loads` answers deep nesting with `RecursionError`, and somebody forgets it."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sources()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and node.attr in ("load", "loads")
        and isinstance(node.value, ast.Name)
        and node.value.id == "json"
    ]
    assert [place.partition(":")[0] for place in found] == ["configs/json_text.py"]


@pytest.mark.guarantee("G12", "G13")
@pytest.mark.parametrize("text", BAD_TEXTS.values(), ids=BAD_TEXTS.keys())
def test_pending_deletes_that_cannot_be_read_are_put_aside_and_counted(tmp_path: Path, text: str) -> None:
    path = tmp_path / "owed.json"
    path.write_text(text, encoding="utf-8")
    path.chmod(0o644)
    node = bench([nvme(tmp_path / "kv")], pending_path=path)
    assert node.node.stats().bad_files == 1
    bad = tmp_path / "owed.bad"
    assert bad.read_text(encoding="utf-8") == text
    assert bad.stat().st_mode & 0o777 == 0o600
    assert not path.exists()
    node.store(sample(1))
    assert node.node.clear(Clear(TENANT)).unreachable == ()
    node.node.close()


def test_a_list_of_pending_deletes_is_read_as_before(tmp_path: Path) -> None:
    path = tmp_path / "owed.json"
    pending = PendingDeletes(path, 10)
    pending.add_clear("nvme", Clear(TENANT))
    assert pending.save(pending.text())
    again = PendingDeletes(path, 10)
    assert (len(again), again.read_failed) == (1, False)


@pytest.mark.parametrize(
    "text",
    [*BAD_TEXTS.values(), '{"actor": "me", "starts": "many"}', '{"actor": "me"}', '{"starts": 1}'],
)
def test_g13_a_count_of_starts_that_cannot_be_read_stops_no_start(tmp_path: Path, text: str) -> None:
    path = tmp_path / "starts.json"
    path.write_text(text, encoding="utf-8")
    assert count_start(path, "me") == (1, 1)
    assert path.with_suffix(".bad").read_text(encoding="utf-8") == text
    assert count_start(path, "me") == (2, 0)
    assert count_start(path, "somebody else") == (1, 0)
    assert json.loads(path.read_text()) == {"actor": "somebody else", "starts": 1}


def test_what_is_no_file_is_put_aside_as_it_is(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("not ours")
    target.chmod(0o644)
    link = tmp_path / "owed.json"
    link.symlink_to(target)
    assert put_aside(link) == tmp_path / "owed.bad"
    assert target.stat().st_mode & 0o777 == 0o644, "the mode of what a link points to is not ours to change"
    os.mkfifo(tmp_path / "pipe.json")
    assert put_aside(tmp_path / "pipe.json") == tmp_path / "pipe.bad"
    assert put_aside(tmp_path / "missing.json") is None
