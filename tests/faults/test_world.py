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
FIRST_SEED = 0
SEEDS_A_PART = 7


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
@pytest.mark.parametrize("part", range(3))
def test_no_seed_breaks_a_law(part: int) -> None:
    done = world("--seed", FIRST_SEED + SEEDS_A_PART * part, "--seeds", SEEDS_A_PART, "--no-shrink")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_seed_is_the_same_life_in_two_processes() -> None:
    digests = [re.findall(r"^digest (.+)$", world("--seed", 1, "--seeds", 2).stdout, re.M) for _ in range(2)]
    assert len(digests[0]) == 2
    assert digests[0] == digests[1]
