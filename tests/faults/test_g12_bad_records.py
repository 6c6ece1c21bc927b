"""G12: bad records that are kept for inspection hold a tenant's blocks, too: a clear reaches them."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import pytest

from samovar.cache_tiers.blocks.extent import Address, Clear
from samovar.cache_tiers.blocks.record import TierError
from samovar.cache_tiers.media.memory import HeapTier
from samovar.cache_tiers.media.s3 import LISTING_LAG_S, S3Ledger
from samovar.cache_tiers.media.tier import Deadline
from samovar.cache_tiers.messages import BadReport
from samovar.cache_tiers.node.manager import TierNode
from samovar.configs.sections import FaultSettings, TierSettings
from tests.support.clock import Clock
from tests.support.inside import clears_of
from tests.support.nodes.node_faults import FAILING, MemoryTier, faulty
from tests.support.nodes.node_harness import (
    MIB,
    OTHER_TENANT,
    SESSION,
    TENANT,
    Bench,
    Sample,
    bench,
    nvme,
    sample,
)
from tests.support.nodes.nvme_harness import make, open_tier, path_of
from tests.support.nodes.power_model import RecordingCalls, cut_power

CUTS = 12


def found_bad(node: Bench, wanted: Sample, tier: str = "nvme") -> None:
    """A replica says that a record is bad."""
    header = wanted.header
    node.node.report([BadReport(header.namespace, header.tenant, header.extent_id, tier, "checksum")])


def bad_files(path: Path) -> list[Path]:
    return sorted(path.rglob("*.bad"))


def test_g12_f05_what_was_cleared_does_not_come_back_with_the_power(tmp_path: Path) -> None:
    """Found by the world: the entry of a bad record that was removed was not flushed."""
    (tmp_path / "kv").mkdir()
    calls, sealed = RecordingCalls(tmp_path / "kv"), make(1)
    tier = open_tier(tmp_path / "kv", calls)
    tier.put(sealed.address, sealed.record, deadline=Deadline(5.0))
    tier.quarantine(sealed.address)
    assert len(bad_files(tmp_path / "kv")) == 1
    assert tier.purge_quarantine(sealed.address.tenant) == 1
    for seed in range(CUTS):
        cut_power(calls, tmp_path / f"cut {seed}", random.Random(seed))
        assert bad_files(tmp_path / f"cut {seed}") == []
    tier.close()


def comes_back(calls: RecordingCalls, folder: Path) -> list[Path]:
    """What a power cut brings back, of any record."""
    found: list[Path] = []
    for seed in range(CUTS):
        cut_power(calls, folder / f"cut {seed}", random.Random(seed))
        found += [path for path in (folder / f"cut {seed}").rglob("*") if path.suffix in (".kv", ".bad")]
    return found


def test_g12_f05_a_bad_record_that_had_no_room_does_not_come_back(tmp_path: Path) -> None:
    """Found by the world (41742903000047): it was removed as litter, and no clear knew of it any more."""
    (tmp_path / "kv").mkdir()
    calls, sealed = RecordingCalls(tmp_path / "kv"), make(1)
    tier = open_tier(tmp_path / "kv", calls, quarantine_bytes_max=0)
    tier.put(sealed.address, sealed.record, deadline=Deadline(5.0))
    tier.quarantine(sealed.address)
    assert tier.bytes_held() == 0
    assert tier.purge_quarantine(sealed.address.tenant) == 0
    assert comes_back(calls, tmp_path) == []
    tier.close()


def test_g12_f05_nor_does_one_that_could_not_be_put_aside(tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir()
    calls, sealed = NoRename(tmp_path / "kv"), make(1)
    tier = open_tier(tmp_path / "kv", calls)
    tier.put(sealed.address, sealed.record, deadline=Deadline(5.0))
    calls.is_sick = True
    tier.quarantine(sealed.address)
    assert tier.bytes_held() == 0
    assert comes_back(calls, tmp_path) == []
    tier.close()


class NoRename(RecordingCalls):
    is_sick = False

    def rename(self, old: str, new: str) -> None:
        if self.is_sick:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().rename(old, new)


@pytest.mark.parametrize("levels", [0, 1, 2, 3])
def test_g12_f05_what_was_deleted_does_not_come_back_with_its_folder(tmp_path: Path, levels: int) -> None:
    """A process removes its folder, and those above it, and is killed before it flushes the entry."""
    (tmp_path / "kv").mkdir()
    calls, sealed = RecordingCalls(tmp_path / "kv"), make(1)
    tier = open_tier(tmp_path / "kv", calls)
    tier.put(sealed.address, sealed.record, deadline=Deadline(5.0))
    path = path_of(tier, sealed.address)
    calls.unlink(str(path))
    for folder in list(path.parents)[:levels]:
        calls.rmdir(str(folder))
    if levels == 1:  # and makes it again
        calls.mkdir(str(path.parent))
    tier.close()
    again = open_tier(tmp_path / "kv", calls)
    again.delete(sealed.address)
    assert comes_back(calls, tmp_path) == []
    again.close()


def test_g12_f05_what_a_killed_process_deleted_does_not_come_back(tmp_path: Path) -> None:
    """It is not found, so a clear takes it for deleted; but nobody had flushed that."""
    (tmp_path / "kv").mkdir()
    calls, sealed = RecordingCalls(tmp_path / "kv"), make(1)
    tier = open_tier(tmp_path / "kv", calls)
    tier.put(sealed.address, sealed.record, deadline=Deadline(5.0))
    calls.unlink(str(path_of(tier, sealed.address)))
    tier.close()  # it is killed here
    again = open_tier(tmp_path / "kv", calls)
    assert list(again.scan()) == []
    assert comes_back(calls, tmp_path) == []
    again.close()


def test_g4_drafts_of_a_killed_process_are_removed_where_they_lie(tmp_path: Path) -> None:
    """Found by the world: a start failed over a draft beside the lock."""
    open_tier(tmp_path).close()
    (tmp_path / "probe.1-1.tmp").write_bytes(b"x")
    open_tier(tmp_path).close()
    assert not list(tmp_path.glob("*.tmp"))


def test_g12_a_clear_that_could_not_be_written_down_says_so(tmp_path: Path) -> None:
    """Found by the world (seed 5000037): the ingress left it to a node that forgot it when it died."""
    (tmp_path / "file").write_text("no folder")
    for name, is_noted in (("file", False), ("folder", True)):
        files = faulty(nvme(tmp_path / f"kv {name}"))
        node = bench([files], pending_path=tmp_path / name / "owed.json")
        node.store(sample(1))
        files.update(FAILING)
        cleared = node.node.clear(Clear(TENANT))
        assert (cleared.unreachable, cleared.is_noted) == (("nvme",), is_noted)
        files.update(FaultSettings())
        node.node.tick()
        assert node.node.clear(Clear(TENANT)).is_noted, "nothing is left that was to be noted"
        node.node.close()


def test_g12_a_clear_that_is_repeated_tells_what_the_first_one_has_left(tmp_path: Path) -> None:
    """Found by the world (seed 7000025): the books had nothing of it any more, so it was said to be done."""
    (tmp_path / "file").write_text("no folder")
    for name, is_noted in (("file", False), ("folder", True)):
        tier = Stuck("nvme", MIB)
        node = bench([tier], pending_path=tmp_path / name / "owed.json")
        node.store(sample(1))
        for _ in range(2):
            cleared = node.node.clear(Clear(TENANT, SESSION))
            assert (cleared.unreachable, cleared.is_noted) == (("nvme",), is_noted)
        assert node.node.clear(Clear(OTHER_TENANT)).unreachable == (), "another tenant's is done"
        tier.is_stuck = False
        node.node.tick()
        assert node.node.clear(Clear(TENANT, SESSION)).unreachable == ()
        node.node.close()


class Stuck(MemoryTier):
    is_stuck = True

    def delete(self, address: Address) -> None:
        if self.is_stuck:
            raise TierError("it cannot be deleted")
        super().delete(address)


def test_g12_a_clear_that_has_no_room_is_not_said_to_go_on(tmp_path: Path) -> None:
    files = faulty(nvme(tmp_path / "kv"))
    settings = TierSettings(tombstones_max=1)
    node = bench([files], settings=settings, pending_path=tmp_path / "owed.json")
    files.update(FAILING)
    for tenant, is_noted in ((TENANT, True), (OTHER_TENANT, False)):
        node.store(sample(1, tenant=tenant))
        cleared = node.node.clear(Clear(tenant))
        assert (cleared.unreachable, cleared.is_noted) == (("nvme",), is_noted)
    node.node.close()


def test_g12_bad_records_that_could_not_be_deleted_are_pending(tmp_path: Path) -> None:
    """Found by the world: nothing went on, though the answer said so."""
    files = faulty(nvme(tmp_path / "kv"))
    node = bench([files], pending_path=tmp_path / "owed.json")
    wanted = sample(1)
    node.store(wanted)
    found_bad(node, wanted)
    assert len(bad_files(tmp_path)) == 1
    files.update(FAILING)
    assert node.node.clear(Clear(TENANT)).unreachable == ("nvme",)
    assert node.node.stats().pending_deletes == 1
    node.node.tick()
    assert len(bad_files(tmp_path)) == 1
    files.update(FaultSettings())
    node.clock.now_s += 3600
    node.node.tick()
    node.node.tick()
    assert bad_files(tmp_path) == []
    assert node.node.stats().pending_deletes == 0
    node.node.close()


def test_g12_bad_records_that_could_not_be_deleted_are_after_a_restart(tmp_path: Path) -> None:
    pending = tmp_path / "owed.json"
    files = faulty(nvme(tmp_path / "kv"))
    node = bench([files], pending_path=pending)
    wanted = sample(1)
    node.store(wanted)
    found_bad(node, wanted)
    files.update(FAILING)
    assert node.node.clear(Clear(TENANT)).unreachable == ("nvme",)
    files.inner.close()  # dies now
    again = bench([nvme(tmp_path / "kv")], pending_path=pending, incarnation="b")
    assert bad_files(tmp_path) == []
    again.node.tick()
    assert pending.read_text() == ""
    again.node.close()


class Inspected(MemoryTier):
    """Keeps bad records. `node`: is cleared while one is put aside."""

    keeps_bad = True
    is_stuck = sticks = False
    node: TierNode | None = None

    def __init__(self) -> None:
        super().__init__("nvme", MIB)
        self.kept: set[Address] = set()

    def quarantine(self, address: Address) -> None:
        assert self.node is not None
        self.node.clear(Clear(TENANT))
        super().quarantine(address)
        self.kept.add(address)
        self.is_stuck = self.sticks

    def purge_quarantine(self, tenant: bytes) -> int:
        if self.is_stuck:
            raise TierError("stuck")
        self.kept = {address for address in self.kept if address.tenant != tenant}
        return 0


@pytest.mark.parametrize("sticks", [False, True])
def test_g12_a_record_that_is_put_aside_during_its_clear_is_not_kept(sticks: bool) -> None:
    """Nor where it cannot be deleted at once, or where who has found it has no more time for that."""
    tier = Inspected()
    tier.sticks = sticks
    node = bench([HeapTier(MIB), tier], bytes_max=MIB)
    wanted = sample(1)
    node.store(wanted)
    node.node.sessions.demote(TENANT, wanted.header.session)
    node.work()
    tier.node = node.node
    assert node.copies(wanted) == ("nvme",)
    found_bad(node, wanted)
    assert bool(tier.kept) == sticks
    tier.is_stuck = False
    node.node.tick()
    clears_of(node.node).join(20)
    assert tier.kept == set()
    node.node.close()


class Slow(Inspected):
    """Takes its time to put aside. `clock`: what it takes that from."""

    clock: Clock | None = None

    def __init__(self) -> None:
        super().__init__()
        self.purges, self.is_stuck = 0, False

    def quarantine(self, address: Address) -> None:
        super().quarantine(address)
        assert self.clock is not None
        self.clock.now_s += 1.0

    def purge_quarantine(self, tenant: bytes) -> int:
        self.purges += 1
        return super().purge_quarantine(tenant)

    def delete(self, address: Address) -> None:
        if self.is_stuck:
            raise TierError("stuck")
        super().delete(address)
        self.kept.discard(address)


def test_g9_a_fetch_waits_no_longer_for_bad_records_than_it_has_time(tmp_path: Path) -> None:
    """Found by the world: after a clear it purged as long as a delete may take, with no time left."""
    tier, pending = Slow(), tmp_path / "owed.json"
    node = bench([HeapTier(MIB), tier], bytes_max=MIB, pending_path=pending)
    wanted = sample(1)
    node.store(wanted)
    node.node.sessions.demote(TENANT, wanted.header.session)
    node.work()
    (span,) = node.look(wanted).spans
    address = wanted.header.address
    tier.spoil(address)
    tier.node, tier.clock = node.node, node.clock
    node.fetch(wanted, span, deadline_s=1.0)
    assert tier.purges == 1, "the clear's own: the fetch has no time for another"
    assert tier.kept == {address}
    tier.is_stuck = True
    node.node.tick()
    assert pending.read_text() != "", "a restart knows of it"
    tier.is_stuck = False
    node.node.tick()
    assert tier.kept == set()
    assert pending.read_text() == ""
    node.node.close()


def test_g12_a_bad_object_is_known_that_a_listing_did_not_see_yet() -> None:
    """Of the bucket: what is put aside while it is listed would else be found by no clear."""
    now = [0.0]
    ledger, first, second = S3Ledger(100, lambda: now[0]), sample(1).header.address, sample(2).header.address
    ledger.set_bad(second, 7)
    ledger.begin_listing()
    ledger.set_bad(first, 5)
    ledger.set_bad(second, None)
    ledger.end_listing({}, 0, {second: 7})
    assert ledger.bad_of(TENANT) == [first]
    assert ledger.bytes_held == 5
    ledger.begin_listing()
    ledger.end_listing({}, 0, {})
    assert ledger.bad_of(TENANT) == [first], "a listing may miss what is young"
    now[0] = LISTING_LAG_S + 1
    ledger.begin_listing()
    ledger.end_listing({}, 0, {})
    assert ledger.bad_count == 0
