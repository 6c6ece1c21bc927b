"""F17: the node dies in any state of any move. What is found afterwards is whole; what is lost is a miss."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from samovar.cache_tiers.blocks.extent import Clear, Placement
from samovar.cache_tiers.media.memory import HeapTier
from samovar.cache_tiers.node.state import PendingDeletes
from samovar.configs.sections import FaultSettings
from tests.support.inside import state_of
from tests.support.nodes.node_faults import FAILING, faulty
from tests.support.nodes.node_harness import SESSION, TENANT, Bench, Sample, bench, nvme, sample

STATES = ("planned", "reserved", "copying", "verified", "committed", "dropping")
BEHIND = Placement(first="cpu", write_behind=("nvme",), min_ttl_s=0.0)
CLEARED = b"cleared!" * 2
NBYTES = sample(0).record.nbytes


class Crash(BaseException):
    """The process is gone: nobody catches this, nothing is cleaned up on a medium."""


class CrashPoint:
    """Raises at the n-th time a state is reached."""

    def __init__(self, state: str, nth: int) -> None:
        self._state, self._nth, self.seen = state, nth, Counter[str]()

    def __call__(self, state: str) -> None:
        self.seen[state] += 1
        if state == self._state and self.seen[state] == self._nth:
            raise Crash(state)


def life(node: Bench, stored: list[Sample], cleared: list[Sample]) -> None:
    """Stores, copies behind, sinks, evictions, a promotion and a clear. What happened is in the lists."""
    for number in range(6):
        node.clock.now_s += 1
        session = CLEARED if number == 3 else SESSION
        placement = BEHIND if number % 2 else Placement(write_behind=(), min_ttl_s=0.0)
        wanted = sample(number, session=session, placement=placement)
        stored.append(wanted)
        node.store(wanted)
    node.node.tick()
    node.work()
    node.load(stored[1])
    node.node.clear(Clear(TENANT, CLEARED))
    cleared.append(stored[3])
    for number in range(6, 9):
        node.clock.now_s += 1
        stored.append(sample(number, placement=BEHIND))
        node.store(stored[-1])


def crashed_at(path: Path, state: str, nth: int) -> tuple[list[Sample], list[Sample], set[str]] | None:
    """Lives until then and dies; None when it never comes to that. Also: extents safe on files by then."""
    point = CrashPoint(state, nth)
    files = nvme(path, bytes_max=5 * NBYTES)
    node = bench(
        [HeapTier(4 * NBYTES), files], reach=point, bytes_max=5 * NBYTES, pending_path=path / "owed.json"
    )
    stored: list[Sample] = []
    cleared: list[Sample] = []
    try:
        life(node, stored, cleared)
    except Crash:
        safe = {wanted.chain.hex() for wanted in stored if "nvme" in node.copies(wanted)}
        return stored, cleared, safe
    finally:
        files.close()  # a dead process holds no lock, and writes nothing any more
    return None


@pytest.mark.parametrize("state", STATES)
def test_f17_a_crash_in_any_state_costs_no_more_than_misses(tmp_path: Path, state: str) -> None:
    crashes = 0
    for nth in itertools.count(1):
        path = tmp_path / str(nth)
        outcome = crashed_at(path, state, nth)
        if outcome is None:
            break
        crashes += 1
        stored, cleared, safe = outcome
        files = nvme(path, bytes_max=5 * NBYTES)
        again = bench(
            [HeapTier(4 * NBYTES), files],
            incarnation="b",
            bytes_max=5 * NBYTES,
            pending_path=path / "owed.json",
        )
        again.node.check_integrity()
        assert files.bytes_held() == files.measure() <= 5 * (NBYTES + 4096)
        for wanted in stored:
            loaded = again.load(wanted)
            assert loaded is None or np.array_equal(loaded, wanted.payload)
            if wanted.chain.hex() in safe:
                assert loaded is not None, "a good copy got lost"
        assert all(again.look(wanted).spans == () for wanted in cleared), "what was cleared came back"
        for wanted in stored:  # no pin or reservation of the time before is in the way
            assert again.store(wanted) in ("taken", "held")
        again.node.check_integrity()
        again.node.close()
    assert crashes >= 2, f"only {crashes} crashes at {state}: the test does not test it"


def test_f17_without_a_crash_all_states_are_reached(tmp_path: Path) -> None:
    point = CrashPoint("", 0)
    node = bench([HeapTier(4 * NBYTES), nvme(tmp_path)], reach=point, bytes_max=5 * NBYTES)
    life(node, [], [])
    assert set(point.seen) == set(STATES)
    node.node.close()


def test_g12_a_clear_pending_in_a_dead_tier_does_not_come_back_after_a_restart(tmp_path: Path) -> None:
    pending = tmp_path / "owed.json"
    files = faulty(nvme(tmp_path / "kv"))
    node = bench([HeapTier(4 * NBYTES), files], pending_path=pending)
    wanted, kept = sample(1, placement=BEHIND), sample(2, session=b"session2" * 2, placement=BEHIND)
    node.store(wanted)
    node.store(kept)
    files.update(FAILING)
    assert node.node.clear(Clear(TENANT, SESSION)).unreachable == ("nvme",)
    assert node.look(wanted).spans == ()
    files.update(FaultSettings())
    files.inner.close()  # dies now, before the delete
    again = bench([HeapTier(4 * NBYTES), nvme(tmp_path / "kv")], pending_path=pending, incarnation="b")
    assert again.look(wanted).spans == ()
    assert again.tiers_of(kept) == ["nvme"]
    assert [found.header.session for found in again.tiers["nvme"].scan()] == [kept.header.session]
    again.node.tick()
    assert pending.read_text() == ""
    again.node.close()


def test_g12_what_is_pending_is_deleted_when_the_tier_is_back(tmp_path: Path) -> None:
    files = faulty(nvme(tmp_path / "kv"))
    node = bench([HeapTier(4 * NBYTES), files], pending_path=tmp_path / "owed.json")
    wanted = sample(1, placement=BEHIND)
    node.store(wanted)
    files.update(FAILING)
    node.node.clear(Clear(TENANT))
    node.node.check_integrity()
    assert node.store(wanted) == "taken"  # in main memory; not on the disk, where its delete is pending
    assert node.tiers_of(wanted) == ["cpu"]
    files.update(FaultSettings())
    node.clock.now_s += 3600
    node.node.tick()
    node.node.check_integrity()
    assert files.bytes_held() == 0
    node.node.close()


def test_g12_a_clear_is_pending_for_a_tier_that_was_not_known_yet(tmp_path: Path) -> None:
    node = bench([nvme(tmp_path / "kv")])
    wanted = sample(1)
    node.store(wanted)
    node.node.close()
    files = faulty(nvme(tmp_path / "kv"), FAILING)  # it cannot be looked through
    blind = bench([HeapTier(4 * NBYTES), files], pending_path=tmp_path / "owed.json", incarnation="b")
    assert blind.node.stats().tiers[1].state == "open"
    assert blind.node.clear(Clear(TENANT)).unreachable == ("nvme",)
    files.inner.close()
    again = bench([nvme(tmp_path / "kv")], pending_path=tmp_path / "owed.json", incarnation="c")
    assert again.look(wanted).spans == ()
    assert list(again.tiers["nvme"].scan()) == []
    again.node.close()


def test_g12_what_a_failed_write_may_have_left_is_pending_after_a_clear(tmp_path: Path) -> None:
    pending = tmp_path / "owed.json"
    files = faulty(nvme(tmp_path / "kv"))
    node = bench([files], pending_path=pending)
    wanted = sample(1)
    files.update(FAILING)
    assert node.store(wanted) == "taken"
    assert node.node.stats().stores["failed:write"] == 1
    assert state_of(node.node).catalog.usage("nvme").bytes_accounted == NBYTES, "it may be there"
    node.node.clear(Clear(TENANT))
    node.node.check_integrity()
    assert wanted.header.extent_id.hex() in pending.read_text(), "a restart could find it again"
    files.update(FaultSettings())
    node.clock.now_s += 3600
    for _ in range(2):  # a trial finds the tier well; what its quarantine may hold goes on with the next
        node.node.tick()
    node.node.check_integrity()
    assert pending.read_text() == ""
    assert state_of(node.node).catalog.usage("nvme").bytes_accounted == 0
    node.node.close()


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"version": 2}', '{"version": 1, "deletes": [["cpu"]], "clears": []}', "\x80"]
)
def test_a_file_of_pending_deletes_that_is_not_understood_is_put_aside(tmp_path: Path, text: str) -> None:
    path = tmp_path / "owed.json"
    path.write_bytes(text.encode("latin-1"))
    pending = PendingDeletes(path, 10)
    assert pending.read_failed
    assert len(pending) == 0
    assert path.with_suffix(".bad").exists()
    assert not path.exists()


def test_a_settled_delete_frees_its_room_once(tmp_path: Path) -> None:
    """A scan, too, that deletes the record and knows of no room."""
    pending, address, freed = PendingDeletes(None, 2), sample(1).header.address, list[str]()
    pending.add("nvme", address, cleared=False, when_gone=lambda: freed.append("room"))
    pending.add("nvme", address, cleared=True)
    pending.settle("nvme", address)
    pending.settle("nvme", address)
    assert freed == ["room"]


def test_pending_deletes_are_bounded_and_clears_go_before_room(tmp_path: Path) -> None:
    pending = PendingDeletes(tmp_path / "owed.json", 2)
    addresses = [sample(number).header.address for number in range(4)]
    pending.add("nvme", addresses[0], cleared=False)
    pending.add("nvme", addresses[1], cleared=True)
    pending.add("nvme", addresses[2], cleared=True)  # instead of the one that is only about room
    pending.add("nvme", addresses[3], cleared=True)
    pending.check_integrity()
    assert [pending.has("nvme", address) for address in addresses] == [False, True, True, False]
    assert pending.forgotten == 2
    assert pending.save(pending.text())
    again = PendingDeletes(tmp_path / "owed.json", 2)
    assert [pending.has("nvme", address) for address in addresses] == [
        again.has("nvme", address) for address in addresses
    ]
