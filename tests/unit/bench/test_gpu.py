"""`bench.gpu` as a whole, in a tiny shape on a CPU: nothing but CUDA itself is untested."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.bare_machine import run_bare

TINY = """
import sys
from bench import gpu
sys.exit(gpu.main(["--tiny", "--device", "cpu", "--out", sys.argv[1]]))
"""


def test_all_sections_run_in_a_tiny_shape_without_ray_and_others(tmp_path: Path) -> None:
    """Exit code 0: every check holds, and no section failed or was skipped."""
    out = tmp_path / "gpu.json"
    printed = run_bare(TINY, "pytest", "_pytest", "hypothesis", arguments=[str(out)])
    document = json.loads(out.read_text())
    assert document["errors"] == {}
    assert all(set(row) == {"name", "shape", "value", "unit", "bar", "ok"} for row in document["rows"])
    assert all(row["shape"] for row in document["rows"]), "a section has no rows but a note"
    checks = [row["name"] for row in document["rows"] if row["ok"]]
    assert checks, "the checks are judged in a tiny shape, too"
    head, *_ = [line for line in printed.splitlines() if line.startswith("name ")]
    assert head.split() == ["name", "shape", "value", "unit", "bar", "ok"]


def test_the_laws_on_cuda_can_be_imported_without_ray() -> None:
    """So that a GPU machine that has pytest and no Ray can run them."""
    run_bare("import tests.conftest, tests.laws.test_cuda")
