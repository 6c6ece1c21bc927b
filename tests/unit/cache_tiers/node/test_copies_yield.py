"""Copies to a slow tier leave room: for stores always, and nearly all of it while a request loads."""

from __future__ import annotations

import pytest

from samovar.cache_tiers.media.memory import HeapTier
from samovar.cache_tiers.node.store import QUIET_S
from samovar.configs.sections import MIB
from tests.support.nodes.node_faults import MemoryTier
from tests.support.nodes.node_harness import Bench, bench, sample
from tests.support.services.service import until
from tests.unit.cache_tiers.node.test_manager import BEHIND

WORKERS = 4
MORE_S = 0.3
"""So long nothing more begins."""


def behind_a_slow_disk() -> tuple[Bench, MemoryTier]:
    disk = MemoryTier("nvme", 64 * MIB)
    disk.gate.clear()
    return bench([HeapTier(64 * MIB), disk], workers=WORKERS, bytes_max=64 * MIB), disk


def begun(disk: MemoryTier, copies: int) -> None:
    """Wait until so many copies stand at the disk, and no more."""
    for _ in range(copies):
        assert disk.waiting.acquire(timeout=20)
    assert not disk.waiting.acquire(timeout=MORE_S)


def test_stores_find_a_worker_while_a_disk_hangs() -> None:
    node, disk = behind_a_slow_disk()
    try:
        first = [sample(number, placement=BEHIND) for number in range(8)]
        assert {node.offer(one) for one in first} == {"taken"}
        begun(disk, WORKERS // 2)
        assert node.offer(sample(20, placement=BEHIND)) == "taken"
        until("stored", lambda: node.node.stats().stores.get("stored") == 9)
    finally:
        disk.gate.set()
    until("copied", lambda: node.node.stats().moves.get("cpu>nvme:done") == 9)
    node.node.close()


@pytest.mark.parametrize("is_loading", [True, False])
def test_beside_a_load_one_copy_is_made_at_a_time(is_loading: bool) -> None:
    node, disk = behind_a_slow_disk()
    try:
        wanted = sample(1)
        node.offer(wanted)
        until("stored", lambda: node.copies(wanted) == ("cpu",))
        assert node.load(wanted) is not None
        if not is_loading:
            node.clock.now_s += 2 * QUIET_S
        for number in range(10, 18):
            node.offer(sample(number, placement=BEHIND))
        begun(disk, 1 if is_loading else WORKERS // 2)
        node.clock.now_s += 2 * QUIET_S
        if is_loading:
            begun(disk, 1)  # the second worker comes by itself when the load is over
    finally:
        disk.gate.set()
    until("copied", lambda: node.node.stats().moves.get("cpu>nvme:done") == 8)
    node.node.close()
