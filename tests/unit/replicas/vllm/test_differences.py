"""The page's table of what differs is that of the tests, and each row has a test."""

from __future__ import annotations

import ast
import re

from tests.house import ROOT
from tests.vllm_serve.differences import DIFFERENCES

SUITE = ROOT / "tests/vllm_serve"


def test_the_page_says_what_differs() -> None:
    page = (ROOT / "docs/engines.md").read_text(encoding="utf-8")
    section = page.partition("\n## Answers\n")[2].partition("\n## ")[0]
    rows = [tuple(re.split(r" \| ", line.strip("| "))) for line in section.splitlines() if line[:1] == "|"]
    assert rows[2:] == [(what, *told) for what, told in DIFFERENCES.items()]


def test_each_row_has_a_test() -> None:
    named = [
        ast.literal_eval(mark.args[0])
        for path in sorted(SUITE.glob("test_*.py"))
        for test in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(test, ast.FunctionDef)
        for mark in test.decorator_list
        if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "differs"
    ]
    assert sorted(named) == sorted(DIFFERENCES)
