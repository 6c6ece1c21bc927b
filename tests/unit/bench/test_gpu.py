"""`bench.gpu` as a whole, in a tiny shape on a CPU: nothing but CUDA itself is untested."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.bare_machine import ROOT, run_bare

TINY = """
import sys
from bench import gpu
sys.exit(gpu.main(["--tiny", "--device", "cpu", "--limit-s", "3600", "--out", sys.argv[1]]))
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


@pytest.mark.parametrize("wheels", [(), ("one-1.0-py3-none-any.whl", "two-2.0-py3-none-any.whl")])
def test_the_script_installs_the_wheels_that_are_there_and_passes_arguments_on(
    wheels: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "bench").mkdir()
    shutil.copy(ROOT / "bench" / "gpu.sh", tmp_path / "bench")
    for wheel in wheels:
        (tmp_path / ".whl").mkdir(exist_ok=True)
        (tmp_path / ".whl" / wheel).touch()
    python = tmp_path / "bin" / "python3"
    python.parent.mkdir()
    python.write_text('#!/bin/sh\necho "$@" "[$PYTHONPATH]"\n')
    python.chmod(0o755)
    environment = {"PATH": f"{python.parent}:{os.environ['PATH']}"}
    script = [shutil.which("bash") or "bash", str(tmp_path / "bench" / "gpu.sh"), "--out", "a b.json"]
    done = subprocess.run(script, env=environment, cwd="/", capture_output=True, text=True, check=True)
    *installs, last = done.stdout.splitlines()
    site = f"{tmp_path}/build/gpu-site" if wheels else ""
    assert last == f"-m bench.gpu --out a b.json [{site}]"
    assert [
        install.endswith(" .whl/one-1.0-py3-none-any.whl .whl/two-2.0-py3-none-any.whl []")
        for install in installs
    ] == ([True] if wheels else [])
