"""The simulated world (`tests/world`): lives of small clusters from seeds, under faults, by one scheduler.

Each runs in a process of its own, whose order of sets is fixed, and whose modules get the world's threads.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SEEDS = 5
"""From 0 on: half a minute of one core. `make world-night` takes new ones."""


def world(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.world", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.guarantee("G1", "G2", "G4", "G5", "G8", "G9", "G10", "G11", "G12")
def test_no_seed_breaks_a_law() -> None:
    done = world("--seeds", SEEDS, "--no-shrink")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_seed_is_the_same_life_in_two_processes() -> None:
    digests = [re.findall(r"^digest (.+)$", world("--seeds", 2).stdout, re.M) for _ in range(2)]
    assert len(digests[0]) == 2
    assert digests[0] == digests[1]
