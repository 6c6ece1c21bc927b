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
    "world-rollout-not-put-back": 15,
}
"""Planted bugs (`tests/mutants/world.toml`), and a seed that finds each: every gate lives through these."""
TWINS = (9, 11, 14)
"""Nodes with little memory and disks that fail: what is found afterwards is what was written behind."""
BAD, PEERS = "tests/faults/test_g12_bad_records.py", "tests/unit/cache_tiers/node/test_peers.py"
FOUND_BY: tuple[tuple[int | None, str], ...] = (
    (31, f"{PEERS}::test_g9_a_fetch_waits_no_longer_for_the_disk_that_keeps_it_than_it_has_time"),
    (None, f"{BAD}::test_g12_f05_what_was_cleared_does_not_come_back_with_the_power"),
    (None, f"{BAD}::test_g4_drafts_of_a_killed_process_are_removed_where_they_lie"),
    (None, f"{BAD}::test_g12_bad_records_that_could_not_be_deleted_are_pending"),
    (
        None,
        "tests/unit/cache_tiers/catalog/test_catalog.py"
        "::test_a_medium_with_less_room_than_its_budget_evicts_whatever_the_tenants_share",
    ),
    (
        None,
        "tests/unit/cache_tiers/test_session_table.py"
        "::test_who_has_taken_the_blocks_of_a_node_that_left_is_known_though_the_row_is_full",
    ),
    (41742903000047, f"{BAD}::test_g12_f05_a_bad_record_that_had_no_room_does_not_come_back"),
    (5000037, f"{BAD}::test_g12_a_clear_that_could_not_be_written_down_says_so"),
    (7000025, f"{BAD}::test_g12_a_clear_that_is_repeated_tells_what_the_first_one_has_left"),
    (
        7000006,
        "tests/faults/test_g12_forgotten.py"
        "::test_g12_what_was_cleared_before_a_scan_is_not_taken_in_though_that_is_settled_meanwhile",
    ),
    (9000012, f"{PEERS}::test_a_node_that_is_gone_takes_no_other_ones_place_among_those_asked"),
    (
        10000118,
        "tests/unit/cache_tiers/forecast/test_predictor_restart.py"
        "::test_what_the_file_held_is_said_once_it_is_read",
    ),
    (10000098, "tests/unit/cache_tiers/node/test_leave.py::test_it_stays_where_there_is_no_other_place"),
    (
        207155818000013,
        "tests/unit/cache_tiers/node/test_scan.py"
        "::test_two_lookups_may_see_one_node_before_and_behind_its_loss",
    ),
    (
        136559751000023,
        "tests/faults/test_s3_lies.py::test_g10_what_a_listing_does_not_show_yet_counts",
    ),
    (10000000, f"{PEERS}::test_what_was_erased_is_not_read_from_s3_by_its_address"),
    (911000000239, f"{BAD}::test_g9_a_fetch_waits_no_longer_for_bad_records_than_it_has_time"),
    (911000000938, f"{PEERS}::test_g9_nor_for_the_room_that_is_made_there"),
    (
        88001056000025,
        "tests/unit/cluster/deploy/test_deploy.py"
        "::test_an_exchange_that_its_deployer_left_is_gone_on_with_once_what_it_began_runs",
    ),
    (
        177000000512,
        "tests/faults/test_g12_forgotten.py"
        "::test_g12_what_is_to_make_room_when_it_is_cleared_does_not_come_back",
    ),
    (
        377000000208,
        "tests/unit/cache_tiers/node/test_scan.py::test_what_has_gone_between_two_looks_is_not_held",
    ),
    (
        377000000846,
        "tests/unit/cache_tiers/node/test_scan.py"
        "::test_what_a_bucket_says_was_erased_meanwhile_is_heard_before_a_disk_is_served",
    ),
    (
        577000000979,
        "tests/faults/test_g12_forgotten.py::test_g12_a_name_that_found_no_room_is_left_of_a_clear",
    ),
    (
        677000001102,
        "tests/faults/test_g12_forgotten.py::test_g12_what_a_listing_could_not_read_is_looked_at_again_soon",
    ),
    (
        778000000581,
        "tests/faults/test_g12_forgotten.py::test_g10_a_record_is_deleted_once_at_a_time",
    ),
)
"""What the world found: a seed (None: the commit does not say it), and what tests it since."""
FOUND = tuple(seed for seed, _ in FOUND_BY if seed is not None and seed > 1000)
"""The gate lives through these as well. Of the first, lives have changed since."""


def world(*arguments: object, module: str = "tests.world") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)],
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


@pytest.mark.guarantee("G1", "G2", "G4", "G5", "G8", "G9", "G10", "G11", "G12", "F14", "F27", "F36")
def test_no_listed_seed_breaks_a_law() -> None:
    done = world("--no-shrink", "--seed", *sorted({*LISTED.values(), *FOUND}))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.guarantee("G1", "G2", "G4", "G5", "G8", "G9", "G10", "G11", "G12", "F14", "F36")
def test_no_new_seed_breaks_a_law() -> None:
    first, bounds = first_seed_of_the_commit(), ("--cpu-s", NEW_CPU_S, "--minutes", MINUTES_MAX)
    done = world("--no-shrink", "--seed", first, *bounds)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.guarantee("G4", "G9")
def test_after_faults_as_much_is_found_again_as_without_any() -> None:
    done = world("--no-shrink", "--twins", "--seed", *TWINS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^after the faults [1-9].* without any [1-9]", done.stdout, re.M)


def test_a_seed_is_the_same_life_in_two_processes() -> None:
    digests = [re.findall(r"^digest (.+)$", world("--seed", 2, "--seeds", 2).stdout, re.M) for _ in range(2)]
    assert len(digests[0]) == 2
    assert digests[0] == digests[1]


@pytest.mark.parametrize("test", [test for _, test in FOUND_BY], ids=lambda test: test.split("::")[1])
def test_what_was_found_has_a_test(test: str) -> None:
    path, name = test.split("::")
    assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.guarantee("G10")
def test_in_six_hours_nothing_grows() -> None:
    done = world("--hours", 6, module="tests.world.soak")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("leak", "hours", "grows"),
    [
        ("memory", 0.25, "objects of the product"),
        ("files", 0.25, "open files"),
        ("threads", 0.25, "threads"),
        ("rows", 0.25, "rows of fronts"),
        ("marks", 0.75, "left in the bucket"),
    ],
)
def test_what_grows_is_noticed(leak: str, hours: float, grows: str) -> None:
    done = world("--hours", hours, "--leak", leak, module="tests.world.soak")
    assert done.returncode == 1, done.stdout + done.stderr
    (line,) = re.findall(r"^grown: .*$", done.stdout, re.M)
    assert f"{grows}: " in line
