"""What a node and a directory remember is freed as it goes: long collections look at none of it again."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.front_scale import fill
from samovar.cache_tiers.blocks import Placement
from samovar.cache_tiers.media.memory import HeapTier
from samovar.cache_tiers.sessions.session_table import SessionTable
from tests.support.nodes.node_harness import TENANT, bench, nvme, sample

EXTENTS, KEPT = 300, 60
CYCLES_MAX = 60
"""Objects in cycles, of whatever else ran meanwhile: far less than one for each extent that came and went."""


@contextmanager
def without_collector() -> Iterator[Callable[[], int]]:
    """Give what counts the objects in cycles since it was called last."""
    gc.collect()
    gc.disable()
    try:
        yield gc.collect
    finally:
        gc.enable()


def test_extents_that_were_evicted_leave_no_cycles(tmp_path: Path) -> None:
    def one(number: int):  # type: ignore[no-untyped-def]
        session = (number // 2).to_bytes(16, "big")
        behind = Placement(write_behind=("nvme",))
        return sample(number, 1, tenant=TENANT, session=session, placement=behind)

    nbytes = KEPT * one(0).record.nbytes
    node = bench([HeapTier(nbytes), nvme(tmp_path, 2 * nbytes)], budgets={"cpu": nbytes, "nvme": 2 * nbytes})

    def come_and_go(begin: int, end: int) -> None:
        for number in range(begin, end):
            assert node.offer(one(number)) == "taken"
            node.work()
            node.clock.now_s += 1.0
            node.node.tick()

    come_and_go(0, EXTENTS)
    with without_collector() as cycles:
        come_and_go(EXTENTS, 2 * EXTENTS)
        assert cycles() <= CYCLES_MAX


def test_sessions_that_were_forgotten_leave_no_cycles() -> None:
    sessions = SessionTable(KEPT, 8)
    fill(sessions, KEPT)
    with without_collector() as cycles:
        fill(sessions, EXTENTS)
        assert len(sessions) <= KEPT
        assert cycles() <= CYCLES_MAX
