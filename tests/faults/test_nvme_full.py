"""No room, and no directory: F06 and F07."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from samovar.cache_tiers.blocks.record import TierError, TierFull, TierMiss
from samovar.cache_tiers.media.nvme import NvmeTier
from samovar.cache_tiers.media.tier import Deadline
from tests.support.nodes.nvme_harness import (
    DEADLINE_S,
    MIB,
    SHAPE,
    Sealed,
    SickCalls,
    check,
    fails,
    make,
    open_tier,
    path_of,
    read_all,
    temporaries,
    why_bad,
)

RECORD_ROOM = 12288  # a header page and 6,000 bytes of payload


def du(dir: Path) -> int:
    """What `du` says that the directory takes, in bytes."""
    said = subprocess.run(["du", "-s", "-B1", str(dir)], capture_output=True, text=True, check=True)
    return int(said.stdout.split()[0])


@contextmanager
def small_disk(dir: Path, options: str) -> Iterator[Path]:
    """A tmpfs of its own. Skips where we may not mount."""
    dir.mkdir()
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small disk")
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(dir)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"cannot mount a small disk: {done.stderr.strip()}")
    try:
        yield dir
    finally:
        subprocess.run(["umount", "--lazy", str(dir)], check=True)


def store_all(tier: NvmeTier, records: list[Sealed]) -> None:
    for sealed in records:
        tier.put(sealed.address, sealed.record, deadline=Deadline(DEADLINE_S))


@pytest.mark.parametrize("options", ["size=512k", "size=64m,nr_inodes=60"])
@pytest.mark.parametrize("direct_io", [False, True])
def test_f06_a_full_disk_is_told_and_the_room_is_accounted(
    tmp_path: Path, options: str, direct_io: bool
) -> None:
    with small_disk(tmp_path / "disk", options) as disk:
        tier = open_tier(disk / "kv", direct_io=direct_io)
        stored = []
        for seed in range(100):
            sealed = make(seed)
            try:
                tier.put(sealed.address, sealed.record, deadline=Deadline(DEADLINE_S))
            except TierFull:
                with pytest.raises(TierMiss):
                    read_all(tier, sealed)
                break
            stored.append(sealed)
        assert 5 < len(stored) < 100, "the disk was never full"
        check(tier)
        assert not temporaries(disk)
        assert abs(tier.bytes_held() - du(disk)) <= 4096 * len(stored)
        assert all(why_bad(tier, each) is None for each in stored)
        with pytest.raises(TierFull):  # and with many in the same folder
            tier.put(sealed.address, sealed.record, deadline=Deadline(DEADLINE_S))
        for each in stored[:3]:
            tier.delete(each.address)
        tier.put(sealed.address, sealed.record, deadline=Deadline(DEADLINE_S))
        assert why_bad(tier, sealed) is None
        check(tier)
        tier.close()


def test_f06_bad_records_yield_to_good_ones_on_a_full_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "size=512k") as disk:
        tier = open_tier(disk / "kv")
        stored = [make(seed) for seed in range(100)]
        with pytest.raises(TierFull):
            store_all(tier, stored)
        sealed = make(100)
        for each in stored[:4]:
            tier.quarantine(each.address)
        assert len(list(disk.rglob("*.bad"))) == 4
        check(tier)
        with pytest.raises(TierFull):
            tier.put(sealed.address, sealed.record, deadline=Deadline(DEADLINE_S))
        tier.put(sealed.address, sealed.record, deadline=Deadline(DEADLINE_S))  # once more: now there is room
        assert not list(disk.rglob("*.bad"))
        check(tier)
        tier.close()


def test_f06_a_file_that_may_not_grow_is_full(tmp_path: Path) -> None:
    tier, sealed = open_tier(tmp_path), make(1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
    try:
        with pytest.raises(TierFull):
            tier.put(sealed.address, sealed.record, deadline=Deadline(DEADLINE_S))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not temporaries(tmp_path)
    assert tier.bytes_held() == 0
    check(tier)
    tier.put(sealed.address, sealed.record, deadline=Deadline(DEADLINE_S))
    assert why_bad(tier, sealed) is None


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
@pytest.mark.parametrize("call", ["open", "pwrite", "fsync", "mkdir"])
def test_f06_no_room_has_several_names(tmp_path: Path, number: int, call: str) -> None:
    calls, sealed = SickCalls(), make(1)
    tier = open_tier(tmp_path, calls)

    def fault(sick: SickCalls, name: str, args: tuple[Any, ...]) -> Any:
        if name == call and not (name == "open" and not args[1] & os.O_CREAT):
            return fails(number)(sick, name, args)
        return sick.really(name, *args)

    calls.arm(fault, 1, 10_000)
    with pytest.raises(TierFull):
        tier.put(sealed.address, sealed.record, deadline=Deadline(DEADLINE_S))
    calls.heal()
    check(tier)
    assert tier.bytes_held() == 0


def test_g10_no_more_than_bytes_max_is_taken(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, bytes_max=3 * RECORD_ROOM)
    stored = [make(seed) for seed in range(3)]
    for sealed in stored:
        tier.put(sealed.address, sealed.record, deadline=Deadline(DEADLINE_S))
    assert tier.bytes_held() == 3 * RECORD_ROOM
    with pytest.raises(TierFull):
        tier.put(make(3).address, make(3).record, deadline=Deadline(DEADLINE_S))
    tier.put(stored[0].address, stored[0].record, deadline=Deadline(DEADLINE_S))  # it is there: needs no room
    tier.quarantine(stored[1].address)
    assert tier.bytes_held() == 3 * RECORD_ROOM
    tier.put(make(3).address, make(3).record, deadline=Deadline(DEADLINE_S))  # for which the bad one goes
    assert not list(tmp_path.rglob("*.bad"))
    check(tier)


def test_g13_the_quarantine_is_bounded_and_the_oldest_go_first(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, quarantine_bytes_max=2 * RECORD_ROOM)
    records = [make(seed) for seed in range(4)]
    for sealed in records:
        tier.put(sealed.address, sealed.record, deadline=Deadline(DEADLINE_S))
    for sealed in records:
        tier.quarantine(sealed.address)
        check(tier)
    bad = {path.stem for path in tmp_path.rglob("*.bad")}
    assert bad == {sealed.address.extent_id.hex() for sealed in records[2:]}
    tier.close()
    tier = open_tier(tmp_path, quarantine_bytes_max=RECORD_ROOM)  # also after a restart with less of it
    assert list(tier.scan()) == []
    assert [path.stem for path in tmp_path.rglob("*.bad")] == [records[3].address.extent_id.hex()]
    check(tier)
    tier.close()
    tier = open_tier(tmp_path, quarantine_bytes_max=0)
    assert list(tier.scan()) == []
    assert tier.bytes_held() == tier.measure() == 0


def test_g12_a_tenants_bad_records_are_purged(tmp_path: Path) -> None:
    tier, mine, other = open_tier(tmp_path), make(1, tenant=1), make(2, tenant=2)
    for sealed in (mine, other):
        tier.put(sealed.address, sealed.record, deadline=Deadline(DEADLINE_S))
        tier.quarantine(sealed.address)
    assert tier.purge_quarantine(mine.address.tenant) == 1
    assert [path.stem for path in tmp_path.rglob("*.bad")] == [other.address.extent_id.hex()]
    tier.delete(other.address)  # a delete takes the quarantined one with it
    assert not list(tmp_path.rglob("*.bad"))
    assert tier.bytes_held() == 0
    check(tier)


def test_f07_a_removed_directory_is_an_error_until_it_is_made_again(tmp_path: Path) -> None:
    tier, sealed = open_tier(tmp_path / "kv"), make(1)
    tier.put(sealed.address, sealed.record, deadline=Deadline(DEADLINE_S))
    shutil.rmtree(tmp_path / "kv")
    with pytest.raises(TierError) as read:
        read_all(tier, sealed)
    assert not isinstance(read.value, TierMiss)
    with pytest.raises(TierError):
        tier.put(sealed.address, sealed.record, deadline=Deadline(DEADLINE_S))
    with pytest.raises(TierError):
        list(tier.scan())
    tier.delete(sealed.address)  # gone is gone
    tier.touch(sealed.address)
    tier.check_integrity()
    tier.probe()  # makes it, and owns it again
    with pytest.raises(TierMiss):
        read_all(tier, sealed)
    assert tier.bytes_held() == 0
    tier.put(sealed.address, sealed.record, deadline=Deadline(DEADLINE_S))
    assert why_bad(tier, sealed) is None
    with pytest.raises(TierError, match="in use by pid"):
        open_tier(tmp_path / "kv")
    check(tier)


def test_f07_what_was_removed_is_no_longer_counted(tmp_path: Path) -> None:
    tier, one, other, bad = open_tier(tmp_path), make(1), make(2), make(3)
    for sealed in (one, other, bad):
        tier.put(sealed.address, sealed.record, deadline=Deadline(DEADLINE_S))
    tier.quarantine(bad.address)
    path_of(tier, one.address).unlink()
    with pytest.raises(TierMiss):
        read_all(tier, one)
    check(tier)
    shutil.rmtree(tmp_path / "v1")
    tier.probe()
    assert tier.bytes_held() == 0
    check(tier)


def test_f07_a_scan_recounts_what_others_removed(tmp_path: Path) -> None:
    tier, one, other = open_tier(tmp_path), make(1), make(2)
    for sealed in (one, other):
        tier.put(sealed.address, sealed.record, deadline=Deadline(DEADLINE_S))
    path_of(tier, one.address).unlink()
    assert [scanned.header.address for scanned in tier.scan()] == [other.address]
    check(tier)


def test_f07_a_file_in_place_of_a_directory_is_an_error(tmp_path: Path) -> None:
    tier, sealed = open_tier(tmp_path), make(1)
    tier.put(sealed.address, sealed.record, deadline=Deadline(DEADLINE_S))
    leaf = path_of(tier, sealed.address).parent
    shutil.rmtree(leaf)
    leaf.write_text("no directory")
    with pytest.raises(TierError):
        read_all(tier, sealed)
    with pytest.raises(TierError):
        tier.put(sealed.address, sealed.record, deadline=Deadline(DEADLINE_S))
    assert list(tier.scan()) == []
    leaf.unlink()
    tier.put(sealed.address, sealed.record, deadline=Deadline(DEADLINE_S))
    assert why_bad(tier, sealed) is None
    check(tier)
    shutil.rmtree(tmp_path / "v1")
    (tmp_path / "v1").write_text("no directory")
    for action in (
        lambda: read_all(tier, sealed),
        lambda: tier.put(sealed.address, sealed.record, deadline=Deadline(DEADLINE_S)),
        lambda: list(tier.scan()),
        tier.probe,
    ):
        with pytest.raises(TierError) as error:
            action()
        assert not isinstance(error.value, TierMiss)


def test_f07_a_read_only_disk_still_reads(tmp_path: Path) -> None:
    calls, sealed, other = SickCalls(), make(1), make(2)
    tier = open_tier(tmp_path, calls)
    tier.put(sealed.address, sealed.record, deadline=Deadline(DEADLINE_S))
    changing = {"pwrite", "rename", "unlink", "mkdir", "rmdir", "fchmod", "ftruncate", "utime"}

    def read_only(sick: SickCalls, name: str, args: tuple[Any, ...]) -> Any:
        if name in changing or (name == "open" and args[1] & os.O_CREAT):
            raise OSError(errno.EROFS, "read-only")
        return sick.really(name, *args)

    calls.arm(read_only, 1, 10_000)
    assert why_bad(tier, sealed) is None
    tier.touch(sealed.address)
    for action in (
        lambda: tier.put(other.address, other.record, deadline=Deadline(DEADLINE_S)),
        lambda: tier.delete(sealed.address),
        lambda: tier.quarantine(sealed.address),
        tier.probe,
    ):
        with pytest.raises(TierError) as error:
            action()
        assert not isinstance(error.value, TierFull)
    assert [scanned.header.address for scanned in tier.scan()] == [sealed.address]
    check(tier)
    assert why_bad(tier, sealed) is None
    calls.heal()
    tier.put(other.address, other.record, deadline=Deadline(DEADLINE_S))
    check(tier)


def test_f07_a_scan_that_cannot_look_fails_closed(tmp_path: Path) -> None:
    calls = SickCalls()
    tier = open_tier(tmp_path, calls)
    for seed in range(3):
        tier.put(make(seed).address, make(seed).record, deadline=Deadline(DEADLINE_S))
    for call in ("open", "listdir"):

        def fault(sick: SickCalls, name: str, args: tuple[Any, ...], call: str = call) -> Any:
            return fails(errno.EMFILE)(sick, name, args) if name == call else sick.really(name, *args)

        calls.arm(fault, 1, 10_000)
        with pytest.raises(TierError):
            list(tier.scan())
        calls.heal()
    assert len(list(tier.scan())) == 3
    check(tier)


def test_a_sector_that_cannot_be_read_costs_one_file(tmp_path: Path) -> None:
    calls = SickCalls()
    tier = open_tier(tmp_path, calls)
    for seed in range(3):
        tier.put(make(seed).address, make(seed).record, deadline=Deadline(DEADLINE_S))
    failed: list[str] = []

    def once(sick: SickCalls, name: str, args: tuple[Any, ...]) -> Any:
        if name == "preadv" and not failed:
            failed.append(name)
            raise OSError(errno.EIO, "a bad sector")
        return sick.really(name, *args)

    calls.arm(once, 1, 10_000)
    assert len(list(tier.scan())) == 2
    assert len(list(tmp_path.rglob("*.bad"))) == 1
    check(tier)


def test_the_room_of_a_record_is_what_these_tests_say() -> None:
    assert -(-make(1).record.nbytes // 4096) * 4096 == RECORD_ROOM
    assert SHAPE.block_bytes * 4 == 6000
    assert RECORD_ROOM < MIB
