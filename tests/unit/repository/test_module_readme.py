"""The generator of the tables in terraform/'s READMEs: what it writes, and that `--check` notices."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("hcl2", reason="python-hcl2 is missing: pip install -e .[dev]")

from tests.infra.module_readme import BEGIN, END, BadReadme, main, outdated, rewritten, tables

VARIABLES = """
variable "pools" {
  description = "Pools | by name, <small>."
  type        = map(object({ size = optional(number, 1) }))
}

variable "prefix" {
  description = "Begins with it. Example: \\"kv\\"."
  type        = string
  default     = "kv"
}
"""


def _module(folder: Path, variables: str = VARIABLES) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "variables.tf").write_text(variables)
    (folder / "outputs.tf").write_text('output "id" {\n  description = "Its id."\n  value = var.prefix\n}\n')
    readme = folder / "README.md"
    readme.write_text(f"# it\n\n{BEGIN}\n{END}\nafter\n")
    return readme


def test_tables_say_type_default_and_description(tmp_path: Path) -> None:
    _module(tmp_path)
    rows = tables(tmp_path).splitlines()
    assert "| `pools` | `map(object)` | needed | Pools \\| by name, &lt;small>. |" in rows
    assert '| `prefix` | `string` | `"kv"` | Begins with it. Example: "kv". |' in rows
    assert "| `id` | Its id. |" in rows


def test_text_around_the_tables_is_kept_and_writing_twice_changes_nothing(tmp_path: Path) -> None:
    readme = _module(tmp_path)
    once = rewritten(readme)
    readme.write_text(once)
    assert once.startswith("# it\n")
    assert once.endswith("after\n")
    assert rewritten(readme) == once


def test_check_fires_on_a_new_variable_and_on_a_missing_readme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = _module(tmp_path / "one")
    monkeypatch.setattr(sys, "argv", ["module_readme", "--tree", str(tmp_path)])
    assert main() == 0
    assert outdated(tmp_path) == []

    (readme.parent / "variables.tf").write_text(VARIABLES.replace('"prefix"', '"suffix"'))
    _module(tmp_path / "two").unlink()
    monkeypatch.setattr(sys, "argv", ["module_readme", "--check", "--tree", str(tmp_path)])
    assert main() == 1
    said = capsys.readouterr().out
    assert "one/README.md is out of date" in said
    assert "two/README.md is missing" in said


def test_a_readme_without_markers_is_refused(tmp_path: Path) -> None:
    readme = _module(tmp_path)
    readme.write_text("# it\n")
    with pytest.raises(BadReadme, match="put the lines"):
        rewritten(readme)


def test_a_variable_without_description_is_refused(tmp_path: Path) -> None:
    _module(tmp_path, 'variable "x" {\n  type = string\n}\n')
    with pytest.raises(BadReadme, match="`x` has no description"):
        tables(tmp_path)
