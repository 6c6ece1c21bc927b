"""A node whose tiers fail, fill up, hang, rot or answer late: misses, and the books stay right."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samovar.cache_tiers.blocks.extent import Address, Clear, Placement
from samovar.cache_tiers.blocks.record import Record
from samovar.cache_tiers.media.faults import FaultyTier
from samovar.cache_tiers.media.memory import HeapTier
from samovar.cache_tiers.media.tier import Deadline
from samovar.cache_tiers.messages import BadReport, Fetch, FetchFailed
from samovar.configs.sections import FaultSettings, TierSettings
from tests.support.constants import tuned
from tests.support.inside import join_scans, records_in, state_of
from tests.support.nodes.node_faults import FAILING, FULL, HANGING, MemoryTier, faulty
from tests.support.nodes.node_harness import MIB, TENANT, Bench, Sample, bench, heap_bench, nvme, sample
from tests.support.nodes.nvme_harness import SickCalls

BEHIND = Placement(first="cpu", write_behind=("nvme",))
LOW = Placement(first="nvme", write_behind=())
NBYTES = sample(0).record.nbytes


def fetch_from(node: Bench, wanted: Sample, tier: str, deadline_s: float) -> FetchFailed | None:
    header = wanted.header
    fetch = Fetch(
        header.namespace,
        header.tenant,
        header.extent_id,
        0,
        header.blocks,
        tier,  # type: ignore[arg-type]
        deadline_s,
    )
    fetched = node.node.fetch(fetch)
    return fetched if isinstance(fetched, FetchFailed) else None


def eventually(node: Bench, holds: str) -> None:
    """Waits, with the node's own events as the only clock, until its books are quiet."""
    ends_s = time.monotonic() + 10
    while len(state_of(node.node).catalog.transfers) or not state_of(node.node).lock.acquire(timeout=0.1):
        assert time.monotonic() < ends_s, holds
        threading.Event().wait(0.005)
    state_of(node.node).lock.release()


def test_f06_no_room_after_all_makes_room_once_then_goes_on(tmp_path: Path) -> None:
    """The medium is smaller than its budget: evicted until it fits, and never more than fits."""
    medium = MemoryTier("nvme", 3 * NBYTES)
    node = bench([medium], bytes_max=100 * NBYTES)
    for number in range(8):
        node.clock.now_s += 1
        assert node.store(sample(number, placement=LOW)) == "taken"
        assert medium.bytes_held() <= 3 * NBYTES
        assert node.look(sample(number)).spans, "the newest is there"
    assert node.node.stats().tiers[1].state == "up"
    assert node.look(sample(0)).spans == ()


def test_f06_full_for_good_is_read_only_until_a_probe_works(tmp_path: Path) -> None:
    files = faulty(nvme(tmp_path))
    node = bench([files])
    node.store(sample(1, placement=LOW))
    files.update(FULL)
    assert node.store(sample(2, placement=LOW)) == "taken"
    assert node.node.stats().tiers[1].state == "read-only"
    assert node.load(sample(1)) is not None or node.look(sample(1)).spans == ()
    assert node.offer(sample(3, placement=LOW)) == "refused:down"
    assert state_of(node.node).catalog.usage("nvme").bytes_accounted >= 0
    files.update(FaultSettings())
    node.node.tick()
    assert node.node.stats().tiers[1].state == "up"
    assert node.store(sample(3, placement=LOW)) == "taken"
    assert node.load(sample(3)) is not None
    node.node.close()


def test_f07_a_directory_that_goes_away_opens_the_breaker(tmp_path: Path) -> None:
    node = bench([HeapTier(4 * MIB), nvme(tmp_path / "kv")])
    for number in range(4):
        node.store(sample(number, placement=LOW))
    shutil.rmtree(tmp_path / "kv")
    for number in range(4):
        assert node.load(sample(number)) is None
    assert node.node.stats().tiers[1].state == "open"
    assert not node.look(sample(9)).prices["nvme"].is_up
    assert node.store(sample(9, placement=LOW)) == "taken"  # main memory takes it
    assert node.tiers_of(sample(9)) == ["cpu"]
    node.clock.now_s += 3600
    node.node.tick()
    assert node.node.stats().tiers[1].state == "up"
    assert node.store(sample(10, placement=LOW)) == "taken"
    assert node.load(sample(10)) is not None
    node.node.check_integrity()
    node.node.close()


def test_f08_a_slow_tier_ends_at_the_deadline_and_no_threads_pile_up() -> None:
    slow = faulty(MemoryTier("nvme", MIB))
    node = bench([slow], settings=tuned(TierSettings(io_threads=2), breaker_failures=100))
    node.store(sample(1, placement=LOW))
    slow.update(HANGING)
    before = threading.active_count()
    for _ in range(6):
        began_s = time.monotonic()
        failed = fetch_from(node, sample(1), "nvme", 0.05)
        assert failed is not None
        assert failed.reason == "timeout"
        assert time.monotonic() - began_s < 20.0
    assert threading.active_count() <= before + 2
    assert node.node.stats().tiers[1].read_errors == 6
    slow.update(FaultSettings())
    slow.close()
    node.node.check_integrity()


class Watched(HeapTier):
    """Main memory that notes how long each write may take."""

    def __init__(self) -> None:
        super().__init__(MIB)
        self.given_s: list[float] = []

    def put(self, address: Address, record: Record, *, deadline: Deadline) -> None:
        self.given_s.append(deadline.seconds)
        super().put(address, record, deadline=deadline)


def test_f08_a_promotion_has_no_more_time_than_its_fetch() -> None:
    """It had that of a store: where main memory hung, the request waited for so long."""
    memory = Watched()
    node, wanted = bench([memory, MemoryTier("nvme", MIB)]), sample(1, placement=LOW)
    node.store(wanted)
    assert fetch_from(node, wanted, "nvme", 0.5) is None
    assert node.copies(wanted) == ("cpu", "nvme")
    assert memory.given_s == [pytest.approx(0.5)]


def test_f08_failures_in_a_row_open_the_breaker_and_a_probe_closes_it() -> None:
    slow = faulty(MemoryTier("nvme", MIB))
    node = bench([slow])
    node.store(sample(1, placement=LOW))
    slow.update(FAILING)
    assert [failed.reason for _ in range(4) if (failed := fetch_from(node, sample(1), "nvme", 1.0))] == [
        *["error"] * 3,
        "down",
    ]
    assert node.look(sample(1)).spans == ()
    assert node.node.stats().tiers[1].breaker_opened == 1
    slow.update(FaultSettings())
    node.node.tick()
    assert node.look(sample(1)).spans == ()  # not yet
    node.clock.now_s += 10
    node.node.tick()
    assert node.load(sample(1)) is not None


def test_a_delete_does_not_take_the_one_trial_of_a_tier() -> None:
    """It said nothing of how it went, and the tier stayed away for as long as before."""
    slow = faulty(MemoryTier("nvme", MIB))
    node = bench([slow])
    kept, brief = sample(1, placement=LOW), sample(2, placement=Placement("nvme", (), ttl_s=5.0))
    node.store(kept)
    node.store(brief)
    slow.update(FAILING)
    for _ in range(3):
        assert fetch_from(node, kept, "nvme", 1.0) is not None
    assert node.node.stats().tiers[1].state == "open"
    slow.update(FaultSettings())
    node.clock.now_s += 10  # its time is over, and a trial is due
    node.node.tick()
    assert node.node.stats().tiers[1].state == "up"
    assert slow.bytes_held() == kept.record.nbytes, "what was pending is deleted"
    assert node.load(kept) is not None
    node.node.check_integrity()


@pytest.mark.parametrize("shown_by", ["another record", "a probe"])
def test_f07_a_bad_sector_costs_its_record_and_not_the_disk(tmp_path: Path, shown_by: str) -> None:
    """It was found again with each lookup, and three loads of it took the disk down."""
    calls = SickCalls()
    node = bench([nvme(tmp_path, calls=calls)])
    wanted, other = sample(1, placement=LOW), sample(2, placement=LOW)
    node.store(wanted)
    node.store(other)
    (path,) = tmp_path.rglob(f"{wanted.header.extent_id.hex()}.kv")
    sick_file = path.stat().st_ino

    def bad_sector(sick: SickCalls, name: str, args: tuple[Any, ...]) -> Any:
        if name == "preadv" and os.fstat(args[0]).st_ino == sick_file:
            raise OSError(errno.EIO, "a bad sector")
        return sick.really(name, *args)

    calls.arm(bad_sector, 1, 10**9)
    for _ in range(2):  # the whole disk may be at fault
        failed = fetch_from(node, wanted, "nvme", 5.0)
        assert failed is not None
        assert failed.reason == "error"
        assert node.copies(wanted) == ("nvme",)
    if shown_by == "a probe":
        node.node.tick()
    else:
        assert fetch_from(node, other, "nvme", 5.0) is None
    assert fetch_from(node, wanted, "nvme", 5.0) is not None
    assert node.copies(wanted) == ()
    disk = node.node.stats().tiers[1]
    assert (disk.state, disk.breaker_opened, disk.verify_failures) == ("up", 0, {"unreadable": 1})
    assert node.store(wanted) == "taken", "in another place"
    assert node.load(wanted) is not None
    assert node.load(other) is not None
    node.node.check_integrity()
    node.node.close()


def test_more_fetches_than_allowed_are_refused() -> None:
    tier = MemoryTier("nvme", MIB)
    node = bench([tier], settings=TierSettings(fetch_max=1))
    node.store(sample(1, placement=LOW))
    tier.gate.clear()
    first = threading.Thread(target=fetch_from, args=(node, sample(1), "nvme", 30.0))
    first.start()
    tier.waiting.acquire()
    failed = fetch_from(node, sample(1), "nvme", 30.0)
    assert failed is not None
    assert failed.reason == "refused"
    tier.gate.set()
    first.join()
    assert fetch_from(node, sample(1), "nvme", 30.0) is None


def test_f18_a_write_that_ends_too_late_is_taken_back() -> None:
    tier = MemoryTier("nvme", MIB)
    node = bench([tier], settings=TierSettings(store_s_max=0.05))
    tier.gate.clear()
    assert node.store(sample(1, placement=LOW)) == "taken"
    assert node.look(sample(1)).spans == ()
    assert state_of(node.node).catalog.usage("nvme").bytes_accounted == NBYTES  # it may come to that yet
    assert node.offer(sample(1, placement=LOW)) == "refused:busy"
    tier.gate.set()
    eventually(node, "the late write is taken back")
    assert tier.bytes_held() == 0
    assert state_of(node.node).catalog.usage("nvme").bytes_accounted == 0
    assert node.store(sample(1, placement=LOW)) == "taken"
    assert node.load(sample(1)) is not None


def test_f18_two_workers_store_the_same_things_at_the_same_time() -> None:
    tier = MemoryTier("nvme", 64 * MIB)
    node = bench([HeapTier(64 * MIB), tier], workers=4, bytes_max=64 * MIB)
    samples = [sample(number, placement=BEHIND) for number in range(8)]

    def offer_all() -> None:
        for wanted in samples:
            node.offer(wanted)

    offering = [threading.Thread(target=offer_all) for _ in range(4)]
    for thread in offering:
        thread.start()
    for thread in offering:
        thread.join()
    ends_s = time.monotonic() + 20
    while any(len(node.copies(wanted)) < 2 for wanted in samples):
        assert time.monotonic() < ends_s, "all copies are made"
        threading.Event().wait(0.005)
    eventually(node, "all is quiet")
    node.node.check_integrity()
    assert len(node.called) == len(samples)
    assert node.tiers["cpu"].bytes_held() == tier.bytes_held() == sum(s.record.nbytes for s in samples)
    node.node.close()


def test_f36_clear_fences_what_is_being_written(tmp_path: Path) -> None:
    tier = MemoryTier("nvme", MIB)
    node = bench([tier], workers=1, pending_path=tmp_path / "owed.json")
    tier.gate.clear()
    assert node.offer(sample(1, placement=LOW)) == "taken"
    tier.waiting.acquire()
    node.node.clear(Clear(TENANT))
    node.node.tick()  # does not delete what is being written
    assert "deletes" in (tmp_path / "owed.json").read_text()  # should it die now, it must not come back
    tier.gate.set()
    eventually(node, "the fenced write is over")
    assert node.look(sample(1)).spans == ()
    assert tier.bytes_held() == 0
    node.node.tick()
    node.node.check_integrity()
    assert (tmp_path / "owed.json").read_text() == ""
    node.node.close()


def test_f36_what_was_promised_before_a_clear_is_refused_after_it() -> None:
    node = heap_bench()
    found = node.look(sample(1))
    node.node.clear(Clear(TENANT))
    assert node.offer(sample(1), found) == "refused:tombstone"
    assert node.offer(sample(1)) == "taken"


def test_f36_a_clear_between_the_promise_and_the_copy_behind_it() -> None:
    tier = MemoryTier("nvme", MIB)
    node = bench([HeapTier(MIB), tier])
    node.offer(sample(1, placement=BEHIND))
    assert node.node.work()  # stored; its copy waits
    node.node.clear(Clear(TENANT))
    node.work()
    assert tier.bytes_held() == node.tiers["cpu"].bytes_held() == 0


@pytest.mark.parametrize("promoting", [True, False])
def test_g5_rotten_bytes_are_never_promoted(promoting: bool) -> None:
    tier = MemoryTier("nvme", MIB)
    node = bench([HeapTier(MIB) if promoting else MemoryTier("s3", MIB), tier])
    wanted = sample(1, placement=Placement(first="nvme", write_behind=() if promoting else ("s3",)))
    node.offer(wanted)
    assert node.node.work()
    tier.spoil(wanted.header.address)
    if promoting:
        # Handed out all the same: the replica, which checks it, uses the blocks in front of the bad one.
        assert fetch_from(node, wanted, "nvme", 1.0) is None
    node.work()
    assert node.look(wanted).spans == ()
    row = node.node.stats().tiers[1]
    assert row.verify_failures == {"checksum": 1}
    assert row.quarantined == 1
    assert sum(tier.bytes_held() for tier in node.tiers.values()) == 0


def test_a_bad_report_is_quarantined_once(tmp_path: Path) -> None:
    node = bench([nvme(tmp_path)])
    wanted = sample(1, placement=LOW)
    node.store(wanted)
    report = BadReport(wanted.header.namespace, TENANT, wanted.header.extent_id, "nvme", "checksum")
    node.node.report([report])
    node.node.report([report])
    assert node.look(wanted).spans == ()
    assert node.node.stats().tiers[1].quarantined == 1
    assert len(list(tmp_path.rglob("*.bad"))) == 1
    node.node.clear(Clear(TENANT))
    assert list(tmp_path.rglob("*.bad")) == []  # they hold the tenant's blocks, too
    node.node.check_integrity()
    node.node.close()


def test_g8_a_file_that_is_not_what_was_written_is_not_committed(tmp_path: Path) -> None:
    class Liar(MemoryTier):
        def put(self, address, record, *, deadline):  # type: ignore[no-untyped-def]
            data = record.data.copy()
            data[10 if self.lies == "header" else -1] ^= 1
            super().put(address, Record(data), deadline=deadline)

        lies = "header"

    tier = Liar("nvme", MIB)
    cpu = HeapTier(10 * NBYTES)
    node = bench([cpu, tier], bytes_max=10 * NBYTES)
    node.store(sample(0, placement=BEHIND))
    assert node.copies(sample(0)) == ("cpu",)
    tier.lies = "payload"
    for number in range(1, 10):
        node.clock.now_s += 1
        node.store(sample(number))
    node.node.tick()
    node.work()  # sinking drops its source: then all of it is read back first
    assert all(node.copies(sample(number)) == ("cpu",) for number in range(10))
    assert tier.bytes_held() == 0
    assert node.node.stats().tiers[1].verify_failures["checksum"] >= 1


def test_f19_a_replica_that_does_not_hand_over_costs_nothing() -> None:
    node = heap_bench()
    wanted = sample(1)
    found = node.look(wanted)
    assert node.offer(wanted, found) == "taken"
    for ticket in range(1, 3):
        node.outbox.drop(ticket)
    node.work()
    assert node.node.stats().stores["failed:call"] == 1
    assert state_of(node.node).catalog.usage("cpu").bytes_accounted == 0
    assert node.store(wanted) == "taken"


def test_a_lost_record_is_a_miss_and_another_tier_helps_out() -> None:
    tier = MemoryTier("nvme", MIB)
    node = bench([HeapTier(MIB), tier])
    wanted = sample(1, placement=BEHIND)
    node.store(wanted)
    node.tiers["cpu"].delete(wanted.header.address)
    loaded = node.load(wanted)
    assert loaded is not None
    assert np.array_equal(loaded, wanted.payload)
    assert node.copies(wanted) == ("cpu", "nvme")  # promoted again
    node.node.check_integrity()


def test_s3_is_looked_through_behind_the_services_back(tmp_path: Path) -> None:
    bucket = MemoryTier("s3", MIB)
    node = bench([bucket])
    low = Placement(first="s3", write_behind=())
    for number in range(2):
        node.store(sample(number, placement=low))
    again = bench([HeapTier(MIB), bucket], incarnation="b")
    join_scans(again.node, 10)
    assert again.tiers_of(sample(0)) == ["s3"]
    assert again.load(sample(1)) is not None
    again.node.check_integrity()
    bucket_down = faulty(bucket, FAILING)
    third = bench([HeapTier(MIB), bucket_down], incarnation="c")
    join_scans(third.node, 10)
    assert third.look(sample(0)).spans == ()
    cleared = third.node.clear(Clear(TENANT))
    assert cleared.unreachable == ("s3",)
    bucket_down.update(FaultSettings())
    third.clock.now_s += 3600
    third.node.tick()
    join_scans(third.node, 10)
    assert third.look(sample(0)).spans == ()
    third.node.tick()
    assert bucket.bytes_held() == 0
    third.node.check_integrity()


def test_f36_a_clear_that_does_not_mean_what_is_being_written(tmp_path: Path) -> None:
    tier = MemoryTier("nvme", MIB)
    node = bench([tier], workers=1, pending_path=tmp_path / "owed.json")
    tier.gate.clear()
    node.offer(sample(1, placement=LOW))
    tier.waiting.acquire()
    node.node.clear(Clear(TENANT, b"session2" * 2))
    tier.gate.set()
    eventually(node, "the write is over")
    node.node.tick()
    assert node.load(sample(1)) is not None
    node.node.close()


def test_f03_a_whole_record_of_another_extent_is_bad() -> None:
    tier = MemoryTier("nvme", MIB)
    node = bench([HeapTier(MIB), tier])
    for number in (1, 2):
        node.store(sample(number, placement=LOW))
    records_in(tier)[sample(1).header.address] = sample(2).record
    failed = fetch_from(node, sample(1), "nvme", 5.0)
    assert failed is not None
    assert node.look(sample(1)).spans == ()
    assert node.node.stats().tiers[1].verify_failures == {"key": 1}
    assert node.load(sample(2)) is not None


def test_g12_nothing_is_stored_where_its_delete_is_pending(tmp_path: Path) -> None:
    low = Placement(first="s3", write_behind=())
    bucket = faulty(MemoryTier("s3", MIB))
    node = bench([bucket], pending_path=tmp_path / "owed.json")
    join_scans(node.node, 10)
    node.store(sample(1, placement=low))
    bucket.update(FAILING)
    node.node.clear(Clear(TENANT))
    again = bench([bucket], pending_path=tmp_path / "owed.json", incarnation="b")  # its scan fails
    join_scans(again.node, 10)
    bucket.update(FaultSettings())
    assert again.offer(sample(1, placement=low)) == "refused:busy"
    again.node.tick()
    assert bucket.bytes_held() == 0
    assert again.store(sample(1, placement=low)) == "taken"
    again.node.tick()
    assert again.load(sample(1, placement=low)) is not None


def test_what_is_used_while_it_sinks_stays_where_it_was() -> None:
    tier = MemoryTier("nvme", MIB)
    node = bench([HeapTier(10 * NBYTES), tier], bytes_max=10 * NBYTES)
    for number in range(10):
        node.clock.now_s += 1
        node.store(sample(number))
    node.node.tick()
    node.clock.now_s += 1
    node.look(sample(0))
    node.work()
    assert node.copies(sample(0)) == ("cpu", "nvme")
    node.node.check_integrity()


def test_a_source_that_lost_it_is_forgotten() -> None:
    node = bench([HeapTier(MIB), MemoryTier("nvme", MIB)])
    node.offer(sample(1, placement=BEHIND))
    assert node.node.work()
    node.tiers["cpu"].delete(sample(1).header.address)
    node.work()
    assert node.copies(sample(1)) == ()
    assert state_of(node.node).catalog.usage("cpu").bytes_accounted == 0


@pytest.mark.parametrize(("offset", "blocks"), [(-1, 1), (0, 0), (0, 4), (3, 1), (2, -1)])
def test_blocks_that_an_extent_does_not_have_are_a_miss(offset: int, blocks: int) -> None:
    node = bench([MemoryTier("nvme", MIB)])
    wanted = sample(1, placement=LOW)
    node.store(wanted)
    header = wanted.header
    fetch = Fetch(header.namespace, TENANT, header.extent_id, offset, blocks, "nvme", 1.0)
    assert isinstance(node.node.fetch(fetch), FetchFailed)
    assert node.load(wanted) is not None, "and the extent is still there"


def test_a_fetch_that_finds_nothing_forgets_it_and_frees_its_bytes() -> None:
    node = heap_bench()
    node.store(sample(1))
    node.tiers["cpu"].delete(sample(1).header.address)
    assert node.load(sample(1)) is None
    assert node.look(sample(1)).spans == ()
    assert state_of(node.node).catalog.usage("cpu").bytes_accounted == 0


@pytest.mark.guarantee("F01", "F02")
def test_g13_bad_records_that_the_start_scan_finds_are_counted(tmp_path: Path) -> None:
    disk = nvme(tmp_path)
    first = bench([disk])
    for number in range(5):
        first.store(sample(number, placement=LOW))
    first.node.close()
    disk.close()
    flipped, short, empty, swapped = sorted(tmp_path.rglob("*.kv"))[:4]
    flipped.write_bytes(flipped.read_bytes()[:100] + b"x" + flipped.read_bytes()[101:])
    short.write_bytes(short.read_bytes()[:-1])
    empty.write_bytes(b"")
    swapped.write_bytes(sorted(tmp_path.rglob("*.kv"))[4].read_bytes())
    disk = nvme(tmp_path)
    again = bench([FaultyTier(disk, FaultSettings())], incarnation="again")
    row = next(row for row in again.node.stats().tiers if row.name == "nvme")
    assert row.verify_failures == {"header": 1, "truncated": 2, "key": 1}
    assert (row.quarantined, row.extents) == (4, 1)
    assert len(list(tmp_path.rglob("*.bad"))) == 4
    disk.close()


def test_g13_what_a_reader_finds_later_comes_on_top(tmp_path: Path) -> None:
    disk = nvme(tmp_path)
    first = bench([disk])
    for number in range(2):
        first.store(sample(number, placement=LOW))
    first.node.close()
    disk.close()
    path = next(iter(tmp_path.rglob("*.kv")))
    path.write_bytes(b"")
    disk = nvme(tmp_path)
    again = bench([disk], incarnation="again")
    (left,) = [number for number in range(2) if again.look(sample(number)).spans]
    wanted = sample(left)
    again.node.report(
        [BadReport(wanted.header.namespace, TENANT, wanted.header.extent_id, "nvme", "truncated")]
    )
    row = next(row for row in again.node.stats().tiers if row.name == "nvme")
    assert (row.verify_failures, row.quarantined) == ({"truncated": 2}, 2)
    disk.close()


class SlowToPutAside(MemoryTier):
    """`aside`: until it is set, a bad record is on its way to where it is kept for inspection."""

    def __init__(self) -> None:
        super().__init__("nvme", MIB)
        self.aside = threading.Event()

    def quarantine(self, address: Address) -> None:
        assert self.aside.wait(LATE_S), "the test waits for it"
        super().quarantine(address)


LATE_S = 20.0


def test_g9_a_fetch_does_not_wait_for_a_bad_record_to_be_put_aside() -> None:
    medium = SlowToPutAside()
    settings = TierSettings(load_s_max=2 * LATE_S, store_s_max=2 * LATE_S)
    node = bench([HeapTier(MIB), medium], bytes_max=MIB, settings=settings)
    wanted = sample(1, placement=LOW)
    assert node.store(wanted) == "taken"
    assert node.copies(wanted) == ("nvme",)
    medium.spoil(wanted.header.address)
    fetch_from(node, wanted, "nvme", 0.2)
    state = state_of(node.node)
    assert state.catalog.transfers.is_busy("nvme", wanted.header.address), "nothing may be stored there yet"
    medium.aside.set()
    ends_s = time.monotonic() + LATE_S
    while state.catalog.transfers.is_busy("nvme", wanted.header.address):
        assert time.monotonic() < ends_s, "it is never done"
        node.node.tick()
        threading.Event().wait(0.005)
    assert node.store(wanted) == "taken"
    node.node.check_integrity()
    node.node.close()
