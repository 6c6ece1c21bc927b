"""Plain modern English: words that hide who does what do not come back into docs, docstrings and messages."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("configs", "cache_tiers", "replicas", "router", "cluster")
CODE = [ROOT / "samovar_cli.py", *(path for name in PACKAGES for path in (ROOT / name).rglob("*.py"))]
PAGES = [
    *(path for path in ROOT.glob("*.md") if path.name != "CHANGELOG.md"),  # history is left as it was written
    *(ROOT / "docs").glob("*.md"),
    *(path for path in (ROOT / "terraform").rglob("*") if path.suffix in (".md", ".tf")),
    *(ROOT / "configs" / "presets").glob("*.yaml"),
]
WORDS = re.compile(
    r"\b(whoever|whomever|nobody|somebody|anybody|everybody|anew|idlest|by and by|told of|owe|owes|debts?"
    r"|owed(?!\.json\b))\b",  # but for the file, whose name stays
    re.IGNORECASE,
)


def texts_of(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of each comment and each string, docstrings included."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def found_in(texts: Iterable[tuple[int, str]]) -> list[str]:
    return [f"line {line}: {match[0]}" for line, text in texts for match in WORDS.finditer(text)]


def test_code_is_documented_in_plain_english() -> None:
    found = []
    for path in CODE:
        name, words = path.relative_to(ROOT).as_posix(), found_in(texts_of(path.read_text(encoding="utf-8")))
        found += [f"{name}, {one}" for one in words]
    assert not found, "words that hide who does what: " + "; ".join(found)


def test_pages_are_in_plain_english() -> None:
    found = []
    for path in PAGES:
        lines = enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        found += [f"{path.relative_to(ROOT)}, {one}" for one in found_in(lines)]
    assert not found, "words that hide who does what: " + "; ".join(found)


def test_the_search_finds_words_in_comments_docstrings_and_messages() -> None:
    source = 'def f():\n    """Tell whoever asks."""\n    raise E(f"{x} is owed")  # nobody: owed.json\n'
    assert sorted(found_in(texts_of(source))) == ["line 2: whoever", "line 3: nobody", "line 3: owed"]
