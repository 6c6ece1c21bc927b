"""What comments and docstrings cite is there: files of the repository, decisions, promises and faults."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.house import PACKAGES
from tests.prove import FAULTS, GUARANTEES, TITLES
from tests.support.pages import PAGES, ROOT
from tests.unit.repository.test_pages import proven_by

PLACES = (*PACKAGES, "bench", "docs", "terraform", "tests")
CITING = [
    *sorted((ROOT / "tests").glob("*.py")),
    *(path for place in (*PACKAGES, "bench") for path in sorted((ROOT / place).rglob("*.py"))),
    *sorted((ROOT / "replicas").rglob("*.h")),
    *sorted((ROOT / "replicas").rglob("*.cpp")),
]
OF_RAY = {"_private/client.py", "handle.py"}
"""Files of Ray's that comments name, with its version."""
FILE = re.compile(r"(?<![\w./<{*-])(?:\.\./)*([\w.-]+(?:/[\w.-]+)*\.(?:py|md))(?![\w/])")
DECISION = re.compile(r"docs/adr/(\d{3})")
CODE = re.compile(r"(?<![\w-])([GF]\d{1,2})(?!\w)")
NO_LIST = re.compile(r"\blaws? [A-Z]\d+|\b[sS]1\d\b")
"""Codes of lists that nobody has."""


@cache
def names_there() -> set[str]:
    """Every file's path, and each of its ends: `a/b/c.py`, `b/c.py` and `c.py`."""
    found = {path.name for path in ROOT.iterdir()}
    for place in PLACES:
        for path in (ROOT / place).rglob("*.*"):
            parts = path.relative_to(ROOT).parts
            found |= {"/".join(parts[start:]) for start in range(len(parts))}
    return found


def said_in(path: Path) -> str:
    """Comments and docstrings of a file; all of it, if it is no Python."""
    text = path.read_text(encoding="utf-8")
    return "\n".join(_told(text)) if path.suffix == ".py" else text


def _told(text: str) -> Iterator[str]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield str(node.value.value)


def missing_files(text: str) -> list[str]:
    """Files and decisions that a text cites and that are not there."""
    files = [name for name in FILE.findall(text) if name not in names_there() | OF_RAY]
    decisions = {path.name[:3] for path in (ROOT / "docs/adr").glob("*.md")}
    return files + [f"docs/adr/{number}" for number in DECISION.findall(text) if number not in decisions]


def unknown_codes(text: str) -> list[str]:
    """Codes without a page that has them: that there are not, or whose page the text does not name."""
    found = NO_LIST.findall(text)
    for code in CODE.findall(text):
        page = "docs/guarantees.md" if code in GUARANTEES else "docs/faults.md"
        if code not in TITLES or page not in text:
            found.append(code)
    return found


def test_what_code_cites_is_there() -> None:
    missing = {str(path.relative_to(ROOT)): missing_files(said_in(path)) for path in CITING}
    assert {path: names for path, names in missing.items() if names} == {}


def test_codes_in_the_product_have_a_page() -> None:
    product = [path for path in CITING if path.suffix == ".py" and not path.is_relative_to(ROOT / "tests")]
    unknown = {str(path.relative_to(ROOT)): unknown_codes(said_in(path)) for path in product}
    assert {path: codes for path, codes in unknown.items() if codes} == {}, (
        "name docs/guarantees.md or docs/faults.md beside it, or say the thing"
    )


def test_codes_of_pages_exist() -> None:
    codes = {
        (str(page.relative_to(ROOT)), code)
        for page in PAGES
        for code in re.findall(r"(?<![\w-])(G\d{1,2}|F[0-3]\d)(?!\w)", page.read_text(encoding="utf-8"))
    }
    assert {code for code in codes if code[1] not in TITLES} == set()


def test_wrong_citations_are_found(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text(
        '"""See NOWHERE.md and `router/gone.py`, docs/adr/999 (F77, law L2, laws L1-L5, s15)."""\n'
        "# G9, and docs/adr/001 in `score.py` and docs/ARCHITECTURE.md\n"
        "dtype = 'F16, UNSAID.md'\n"
    )
    text = said_in(module)
    assert missing_files(text) == ["NOWHERE.md", "router/gone.py", "docs/adr/999"]
    assert sorted(unknown_codes(text)) == ["F77", "G9", "law L2", "laws L1", "s15"]
    assert unknown_codes("G9 in docs/guarantees.md, F07 in docs/faults.md") == []


def test_the_page_of_faults_has_each_with_a_test_that_proves_it() -> None:
    page = ROOT / "docs/faults.md"
    rows = re.findall(r"^\| (F\d+) \| ([^|]+) \|.*\| ([^|]+) \|$", page.read_text(encoding="utf-8"), re.M)
    assert {code: title for code, title, _ in rows} == FAULTS
    for code, _, cell in rows:
        linked = re.findall(r"\]\(([^)]+)\)", cell)
        assert linked or "`make " in cell, code
        assert [one for one in linked if code not in proven_by((page.parent / one).resolve())] == [], code
