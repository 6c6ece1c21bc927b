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
NEW_CPU_S = 30
"""Seconds of one core that a gate gives to seeds of its own. `make world-night` takes an hour."""
MINUTES_MAX = 1.5
SEEDS_A_COMMIT = 1_000_000
LISTED = {
    "world-erasure-chain": 2,
    "world-store-after-erase": 2,
    "world-promoted-unverified": 2738,
    "world-one-line-for-all": 3,
    "world-resumed-from-the-start": 1951,
    "world-book-keeps-calls": 2,
    "world-copies-not-learned": 193,
    "world-rows-not-merged": 5,
    "world-clear-not-noted": 7000025,
    "world-repeated-clear-is-done": 7000025,
    "world-deletion-never-ends": 2,
    "world-lost-peer-is-waited-for": 9000012,
    "world-joins-while-reading": 10000118,
    "world-model-not-flushed": 10000000,
    "world-leaves-with-deletes": 10000098,
    "world-never-fewer-replicas": 10000098,
}
"""Planted bugs (`tests/mutants/world.toml`), and a seed that finds each: every gate lives through these."""
FOUND = (41742903000047, 5000037, 7000006)
"""Seeds that have found what was mended since: the gate lives through these as well."""


def world(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.world", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        check=False,
    )


def first_seed_of_the_commit() -> int:
    """The first of the seeds that belong to this commit: no two gates live the same lives."""
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return SEEDS_A_COMMIT * (1 + int(done.stdout.strip()[:7] or "0", 16))


@pytest.mark.guarantee("G1", "G2", "G4", "G5", "G8", "G9", "G10", "G11", "G12", "F14", "F36")
def test_no_listed_seed_breaks_a_law() -> None:
    done = world("--no-shrink", "--seed", *sorted({*LISTED.values(), *FOUND}))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.guarantee("G1", "G2", "G4", "G5", "G8", "G9", "G10", "G11", "G12", "F14", "F36")
def test_no_new_seed_breaks_a_law() -> None:
    first, bounds = first_seed_of_the_commit(), ("--cpu-s", NEW_CPU_S, "--minutes", MINUTES_MAX)
    done = world("--no-shrink", "--seed", first, *bounds)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_seed_is_the_same_life_in_two_processes() -> None:
    digests = [re.findall(r"^digest (.+)$", world("--seed", 2, "--seeds", 2).stdout, re.M) for _ in range(2)]
    assert len(digests[0]) == 2
    assert digests[0] == digests[1]
