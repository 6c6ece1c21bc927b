"""G12: bad records that are kept for inspection hold a tenant's blocks, too: a clear reaches them."""

from __future__ import annotations

import random
from pathlib import Path

from samovar.cache_tiers.blocks.extent import Address, Clear
from samovar.cache_tiers.media.memory import HeapTier
from samovar.cache_tiers.media.s3 import S3Ledger
from samovar.cache_tiers.media.tier import Deadline
from samovar.cache_tiers.messages import BadReport
from samovar.cache_tiers.node.manager import TierNode
from samovar.configs.sections import FaultSettings
from tests.support.nodes.node_faults import FAILING, MemoryTier, faulty
from tests.support.nodes.node_harness import MIB, TENANT, Bench, Sample, bench, nvme, sample
from tests.support.nodes.nvme_harness import make, open_tier
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
    node: TierNode | None = None

    def __init__(self) -> None:
        super().__init__("nvme", MIB)
        self.kept: set[Address] = set()

    def quarantine(self, address: Address) -> None:
        assert self.node is not None
        self.node.clear(Clear(TENANT))
        super().quarantine(address)
        self.kept.add(address)

    def purge_quarantine(self, tenant: bytes) -> int:
        self.kept = {address for address in self.kept if address.tenant != tenant}
        return 0


def test_g12_a_record_that_is_put_aside_during_its_clear_is_not_kept() -> None:
    tier = Inspected()
    node = bench([HeapTier(MIB), tier], bytes_max=MIB)
    wanted = sample(1)
    node.store(wanted)
    node.node.sessions.demote(TENANT, wanted.header.session)
    node.work()
    tier.node = node.node
    assert node.copies(wanted) == ("nvme",)
    found_bad(node, wanted)
    assert tier.kept == set()
    node.node.close()


def test_g12_a_bad_object_is_known_that_a_listing_did_not_see_yet() -> None:
    """Of the bucket: what is put aside while it is listed would else be found by no clear."""
    ledger, first, second = S3Ledger(100), sample(1).header.address, sample(2).header.address
    ledger.set_bad(second, 7)
    ledger.begin_listing()
    ledger.set_bad(first, 5)
    ledger.set_bad(second, None)
    ledger.end_listing({}, 0, {second: 7})
    assert ledger.bad_of(TENANT) == [first]
    assert ledger.bytes_held == 5
    ledger.begin_listing()
    ledger.end_listing({}, 0, {})
    assert ledger.bad_count == 0
