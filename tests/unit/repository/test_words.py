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
CODE = [path for name in PACKAGES for path in (ROOT / name).rglob("*.py")]
PAGES = [
    *(path for path in ROOT.glob("*.md") if path.name != "CHANGELOG.md"),  # history is left as it was written
    *(ROOT / "docs").glob("*.md"),
    *(path for path in (ROOT / "terraform").rglob("*") if path.suffix in (".md", ".tf")),
    *(ROOT / "configs" / "presets").glob("*.yaml"),
]
WORDS = re.compile(
    r"\b(whoever|whomever|nobody|somebody|anybody|everybody|anew|idlest|by and by|told of|owe|owes|debts?"
    r"|owed(?!\.json\b)"  # but for the file, whose name stays
    r"|(?:front[ -])?doors?)\b",  # an ingress
    re.IGNORECASE,
)
STAYS = {"doors": "a section of settings until 2026", "front doors": "a place, in files of deletions"}
"""Strings that are names which others may have written down."""
NAMES = re.compile(r"[dD]oor|DOOR|Kept[A-Z]")


def texts_of(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of each comment and each string, docstrings included."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value not in STAYS:
            yield node.lineno, node.value


def names_of(source: str) -> set[str]:
    """The names that code defines."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
    return found


PAIRS = {
    ("books", "NodeState"),
    ("carrier", "TransferRunner"),
    ("news", "TurnReporter"),
    ("returns", "NodeResumption"),
    ("peers", "Ingresses"),
}
"""What a class was called before it had its name: (variable, class)."""


def pairs_of(source: str) -> Iterator[tuple[str, str]]:
    """Each name that code annotates, or makes an object for, with each class that it may be."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.arg(arg=name, annotation=kind) if kind is not None:
                pass
            case ast.AnnAssign(target=ast.Name(id=name) | ast.Attribute(attr=name), annotation=kind):
                pass
            case ast.Assign(
                targets=[ast.Name(id=name) | ast.Attribute(attr=name)], value=ast.Call(func=kind)
            ):
                pass
            case ast.keyword(arg=str(name), value=ast.Call(func=kind)):
                pass
            case _:
                continue
        yield from ((name.strip("_"), part.id) for part in ast.walk(kind) if isinstance(part, ast.Name))


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


def test_one_noun_has_one_name() -> None:
    """What takes requests is an ingress; a class says what it is: `Kept` was six nouns."""
    banned = {path.name: sorted(filter(NAMES.search, names_of(path.read_text("utf-8")))) for path in CODE}
    assert not {name: found for name, found in banned.items() if found}
    assert not [path.name for path in CODE if NAMES.search(path.stem)]


def test_variables_follow_their_classes() -> None:
    found = {path.name: PAIRS & set(pairs_of(path.read_text("utf-8"))) for path in CODE}
    assert not {name: pairs for name, pairs in found.items() if pairs}


def test_the_search_finds_pairs() -> None:
    source = (
        "def f(books: NodeState | None): self._news = TurnReporter(peers=Ingresses())\nself.returns: X = 1\n"
    )
    assert set(pairs_of(source)) & PAIRS == {
        ("books", "NodeState"),
        ("news", "TurnReporter"),
        ("peers", "Ingresses"),
    }


def test_the_search_finds_names() -> None:
    source = (
        "class KeptLog:\n    def shut_doors(self, a_door):\n        self.Door = [door for door in a_door]\n"
    )
    assert sorted(filter(NAMES.search, names_of(source))) == [
        "Door",
        "KeptLog",
        "a_door",
        "door",
        "shut_doors",
    ]


def test_the_search_finds_words_in_comments_docstrings_and_messages() -> None:
    source = 'def f():\n    """Tell whoever asks."""\n    raise E(f"{x} is owed")  # nobody: owed.json\n'
    source += "# A front door.\n"
    found = ["line 2: whoever", "line 3: nobody", "line 3: owed", "line 4: front door"]
    assert sorted(found_in(texts_of(source))) == found


def consoles_of(source: str) -> list[int]:
    """The lines where a console of Rich is made."""
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return [one.lineno for one in calls if re.search(r"\bConsole$", ast.unparse(one.func))]


def test_what_is_printed_loses_nothing() -> None:
    """By `console_of`: a console of Rich's own takes `samovar[s3]` for markup, and `:key:` for an emoji."""
    makers = [path for path in CODE if consoles_of(path.read_text(encoding="utf-8"))]
    assert makers == [ROOT / "cluster/serve/stages.py"]


def test_the_search_finds_consoles() -> None:
    assert consoles_of("import rich\nrich.console.Console()\nConsole(stderr=True).print('[x]')") == [2, 3]
