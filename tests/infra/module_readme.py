"""Writes the tables of variables and outputs in terraform/'s READMEs, from the .tf files beside each.

`python -m tests.infra.module_readme` rewrites what stands between the two markers of every README.md;
`--check` writes nothing and ends with status 1 if one is out of date. It knows only those two kinds of block.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import hcl2

TREE = Path(__file__).resolve().parents[2] / "terraform"
BEGIN = "<!-- tables: make them with `python -m tests.infra.module_readme` -->"
END = "<!-- end of tables -->"
_OPTIONS = hcl2.SerializationOptions(
    strip_string_quotes=True, preserve_heredocs=False, explicit_blocks=False, with_comments=False
)


class BadReadme(Exception):
    """A README has no markers, or a variable no description; the text says which, and the fix."""


def tables(folder: Path) -> str:
    """Markdown of the variables and outputs of the module in `folder`. Raises `BadReadme`."""
    variables, outputs = _blocks(folder, "variable"), _blocks(folder, "output")
    lines = ["## Variables", "", "| name | type | default | what it is |", "| --- | --- | --- | --- |"]
    lines += [
        f"| `{name}` | {_type(block)} | {_default(block)} | {_description(folder, name, block)} |"
        for name, block in variables.items()
    ]
    lines += ["", "## Outputs", "", "| name | what it is |", "| --- | --- |"]
    lines += [f"| `{name}` | {_description(folder, name, block)} |" for name, block in outputs.items()]
    return "\n".join(lines)


def rewritten(readme: Path) -> str:
    """The text of `readme` with its tables as they should be. Raises `BadReadme`."""
    text = readme.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise BadReadme(f"{readme}: put the lines\n{BEGIN}\n{END}\nwhere the tables belong")
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{tables(readme.parent)}\n\n{END}{rest.split(END)[1]}"


def modules(tree: Path = TREE) -> list[Path]:
    """Every folder below `tree` that declares variables or outputs."""
    return sorted({file.parent for name in ("variables.tf", "outputs.tf") for file in tree.rglob(name)})


def outdated(tree: Path = TREE) -> list[str]:
    """What is wrong with the READMEs, a line each; empty = nothing."""
    wrong = []
    for folder in modules(tree):
        readme = folder / "README.md"
        if not readme.exists():
            wrong.append(f"{readme} is missing")
            continue
        try:
            if rewritten(readme) != readme.read_text(encoding="utf-8"):
                wrong.append(f"{readme} is out of date: run `python -m tests.infra.module_readme`")
        except BadReadme as problem:
            wrong.append(str(problem))
    return wrong


def _blocks(folder: Path, kind: str) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for file in sorted(folder.glob("*.tf")):
        with file.open(encoding="utf-8") as text:
            for block in hcl2.load(text, serialization_options=_OPTIONS).get(kind, []):
                found.update(block)
    return found


def _type(block: dict[str, Any]) -> str:
    words = str(block.get("type", "any")).removeprefix("${").removesuffix("}")
    outside = words.split("({")[0]  # the fields of an object are in the source
    return f"`{outside}{')' * outside.count('(')}`" if outside != words else f"`{words}`"


def _default(block: dict[str, Any]) -> str:
    return f"`{json.dumps(block['default'])}`" if "default" in block else "needed"


def _description(folder: Path, name: str, block: dict[str, Any]) -> str:
    text = " ".join(str(block.get("description", "")).replace('\\"', '"').split())
    if not text:
        raise BadReadme(f"{folder}: `{name}` has no description. Give it one")
    return text.replace("|", "\\|").replace("<", "&lt;")


def main() -> int:
    """Exit status: 1 with `--check` if a README is out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, only say what is out of date")
    parser.add_argument("--tree", type=Path, default=TREE)
    given = parser.parse_args()
    if given.check:
        wrong = outdated(given.tree)
        print("\n".join(wrong) or f"{len(modules(given.tree))} READMEs are up to date")
        return 1 if wrong else 0
    for folder in modules(given.tree):
        readme = folder / "README.md"
        readme.write_text(rewritten(readme), encoding="utf-8")
        print(f"wrote {readme}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
