"""The Makefile names tests that there are: a moved file would end a target that the gate does not run."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TARGETS = (
    "test",
    "test-bench",
    "test-chart",
    "test-dashboards",
    "test-kernels",
    "test-multinode",
    "test-oidc",
    "test-other-cpu",
    "test-page",
    "test-pure",
    "test-ray-up",
    "test-terraform",
    "test-units",
    "test-vllm-gpu",
    "test-wheel",
)


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_names_tests_that_there_are(target: str) -> None:
    command = ["make", "--no-print-directory", "-n", "-o", ".venv/.samovar-installed", target]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    named = set(re.findall(r"(?<![\w./-])tests/[\w./-]*\w", said))
    assert named
    assert sorted(path for path in named if not (ROOT / path).exists()) == []
