"""The `nvme` tier without faults: records come back, nobody else gets in, accounts are exact."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samovar.cache_tiers.blocks.extent import Address, BlockShape
from samovar.cache_tiers.blocks.record import BadRecord, Record, TierError, TierMiss
from samovar.cache_tiers.media import Room, files
from samovar.cache_tiers.media import files as direct_io
from samovar.cache_tiers.media.nvme import measure_direct_io
from samovar.cache_tiers.media.tier import Deadline
from tests.support.nodes.nvme_harness import (
    DEADLINE_S,
    MIB,
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

ROOT = Path(__file__).resolve().parents[2]
LARGE = BlockShape(layers=4, layer_bytes=500_001, block_tokens=16)


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("durability", ["crash", "none"])
def test_records_come_back_in_any_piece(tmp_path: Path, asked: bool, durability: str) -> None:
    tier = open_tier(tmp_path, direct_io=asked, durability=durability)
    sealed = make(1, blocks=5, shape=LARGE)  # 10 MB: several chunks, the last one odd
    tier.put(sealed.address, sealed.record, deadline=Deadline(DEADLINE_S))
    total = sealed.record.nbytes
    assert path_of(tier, sealed.address).stat().st_size == total
    chunk = files.CHUNK_BYTES
    pieces = [(0, total), (0, 0), (0, 1), (total - 1, 1), (total, 0), (4095, 2), (4096, 4096)]
    pieces += [(1, chunk), (chunk - 1, 2), (chunk, chunk), (4097, total - 5000), (2 * chunk - 3, 7)]
    for start, nbytes in pieces:
        data = tier.read(sealed.address, start, nbytes, deadline=Deadline(DEADLINE_S))
        assert data.dtype == np.uint8
        assert np.array_equal(data, sealed.data[start : start + nbytes])
    room = Room.made(total + 5 * 4096).data
    for nbytes in (total, 1, 4096, 2 * chunk + 3):
        room[:] = 0xEE
        data = tier.read(sealed.address, 0, nbytes, deadline=Deadline(DEADLINE_S), room=room)
        assert np.array_equal(room[:nbytes], sealed.data[:nbytes])
        assert (data.nbytes, data.ctypes.data) == (nbytes, room.ctypes.data)
        assert (room[-(-nbytes // 4096) * 4096 :] == 0xEE).all()
    with pytest.raises(BadRecord, match="truncated"):
        tier.read(sealed.address, 0, total + 1, deadline=Deadline(DEADLINE_S), room=room)
    with pytest.raises(BadRecord, match="truncated"):
        tier.read(sealed.address, 1, total, deadline=Deadline(DEADLINE_S))
    for start, nbytes in ((-1, 2), (0, -1)):
        with pytest.raises(TierError):
            tier.read(sealed.address, start, nbytes, deadline=Deadline(DEADLINE_S))
    check(tier)


def test_the_room_on_the_disk_is_known_from_the_start_and_after_each_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier(tmp_path)
    assert tier.medium_free_bytes() == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.2)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=4096))
    assert tier.medium_free_bytes() != 4096, "asking looks at the disk, which may hang"
    tier.put(make(1).address, make(1).record, deadline=Deadline(DEADLINE_S))
    assert tier.medium_free_bytes() == 4096
    check(tier)


def test_a_record_that_was_never_put_is_a_miss(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    with pytest.raises(TierMiss):
        read_all(tier, make(1))
    for _ in range(2):  # and may be deleted and quarantined as often as one likes
        tier.delete(make(1).address)
        tier.quarantine(make(1).address)
        tier.touch(make(1).address)
    check(tier)


def test_a_restart_finds_everything_and_the_time_of_its_last_use(tmp_path: Path) -> None:
    now_s = 1_800_000_000.0
    tier = open_tier(tmp_path, wall_clock=lambda: now_s)
    records = [make(seed, tenant=seed % 2) for seed in range(6)]
    for number, sealed in enumerate(records):
        tier.put(sealed.address, sealed.record, deadline=Deadline(DEADLINE_S))
        now_s += 1
        tier.touch(sealed.address)
        assert path_of(tier, sealed.address).stat().st_mtime == 1_800_000_001.0 + number
    held = tier.bytes_held()
    tier.close()
    tier = open_tier(tmp_path, wall_clock=lambda: now_s - 2)  # the clock was set back
    assert tier.bytes_held() == 0
    scanned = {each.header.address: each for each in tier.scan()}
    assert tier.bytes_held() == held
    check(tier)
    for number, sealed in enumerate(records):
        found = scanned[sealed.address]
        assert found.nbytes == sealed.record.nbytes
        assert found.header.keys == sealed.header.keys
        assert found.last_used_unix_s == 1_800_000_001.0 + min(number, 3)
        assert why_bad(tier, sealed) is None
    assert len(scanned) == 6


@pytest.mark.parametrize("now_s", [-1e18, -1.0, 1e18, float("inf")])
def test_g11_no_clock_hurts(tmp_path: Path, now_s: float) -> None:
    tier, sealed = open_tier(tmp_path, wall_clock=lambda: now_s), make(1)
    tier.put(sealed.address, sealed.record, deadline=Deadline(DEADLINE_S))
    tier.touch(sealed.address)
    (scanned,) = tier.scan()
    assert 0 <= scanned.last_used_unix_s <= max(now_s, 0)


def test_g4_the_same_record_is_not_written_twice_and_another_takes_its_place(tmp_path: Path) -> None:
    calls, sealed = SickCalls(), make(1)
    tier = open_tier(tmp_path, calls)
    tier.put(sealed.address, sealed.record, deadline=Deadline(DEADLINE_S))
    calls.arm(fails(1), 100_000)
    tier.put(sealed.address, sealed.record, deadline=Deadline(DEADLINE_S))
    assert "pwrite" not in calls.seen
    tier.close()
    tier = open_tier(tmp_path, calls)
    calls.arm(fails(1), 100_000)
    tier.put(sealed.address, sealed.record, deadline=Deadline(DEADLINE_S))
    assert "pwrite" not in calls.seen
    assert calls.seen.count("fsync") == 5  # whoever wrote it may have been killed before its flushes
    again = sealed.data.copy()
    again[200] ^= 1  # another header, as if sealed at another time
    tier.put(sealed.address, Record(again), deadline=Deadline(DEADLINE_S))
    assert np.array_equal(read_all(tier, sealed), again)
    tier.put(sealed.address, Record(again[:-1]), deadline=Deadline(DEADLINE_S))
    assert path_of(tier, sealed.address).stat().st_size == len(again) - 1
    check(tier)


def test_only_one_owner_at_a_time(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    with pytest.raises(TierError, match=f"^in use by pid {os.getpid()} "):
        open_tier(tmp_path)
    tier.close()
    tier.close()
    for action in (lambda: read_all(tier, make(1)), tier.probe, lambda: tier.delete(make(1).address)):
        with pytest.raises(TierError, match="closed"):
            action()
    tier.touch(make(1).address)
    open_tier(tmp_path).close()


def test_a_killed_owner_leaves_the_lock(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from tests.support.nodes.nvme_harness import open_tier\n"
        f"tier = open_tier(Path({str(tmp_path)!r})); print('owned', flush=True); sys.stdin.read()"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"owned\n"
        with pytest.raises(TierError, match=f"in use by pid {owner.pid} "):
            open_tier(tmp_path)
        owner.kill()
        owner.wait()
    open_tier(tmp_path).close()


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777])
def test_files_are_private_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        tier, sealed = open_tier(tmp_path), make(1)
        tier.put(sealed.address, sealed.record, deadline=Deadline(DEADLINE_S))
    finally:
        os.umask(before)
    found = [*(tmp_path / "v1").rglob("*"), tmp_path / "v1"]
    assert len(found) == 5
    for path in found:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    allowed = {
        sealed.address.tenant.hex(),
        sealed.address.namespace.hex(),
        sealed.address.extent_id.hex()[:2],
    }
    assert {path.name for path in found if path.is_dir()} == {*allowed, "v1"}


def test_g2_an_address_is_digests_only(tmp_path: Path) -> None:
    tier, good = open_tier(tmp_path), make(1).address
    for bad in (
        Address(b"", good.namespace, good.extent_id),
        Address(b"../" * 5 + b"x", b"..", good.extent_id),
        Address(good.tenant, good.namespace, b"/etc/passwd"),
    ):
        with pytest.raises(TierError, match="address"):
            tier.put(bad, make(1).record, deadline=Deadline(DEADLINE_S))
    assert list((tmp_path / "v1").iterdir()) == []


def test_what_is_no_file_is_no_record(tmp_path: Path) -> None:
    """Links are not followed, pipes are not waited for, directories are not read."""
    tier, secret = open_tier(tmp_path / "kv"), tmp_path / "secret"
    records = [make(seed) for seed in range(3)]
    secret.write_bytes(records[0].data.tobytes())
    paths = [path_of(tier, sealed.address) for sealed in records]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
    paths[0].symlink_to(secret)
    os.mkfifo(paths[1])
    paths[2].mkdir()
    for sealed in records:
        with pytest.raises(BadRecord, match="magic"):
            read_all(tier, sealed)
    assert list(tier.scan()) == []
    assert not any(path.exists() for path in paths)
    assert secret.exists()
    check(tier)
    for sealed in records:
        tier.put(sealed.address, sealed.record, deadline=Deadline(DEADLINE_S))
        assert why_bad(tier, sealed) is None
    secret_now = secret.read_bytes()
    paths[0].unlink()
    paths[0].symlink_to(secret)
    changed = records[0].data.copy()
    changed[0] ^= 1
    tier.put(records[0].address, Record(changed), deadline=Deadline(DEADLINE_S))  # replaces the link
    assert secret.read_bytes() == secret_now
    assert not paths[0].is_symlink()


def test_the_directory_of_somebody_else_is_not_used(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a directory away")
    (tmp_path / "v1").mkdir()
    os.chown(tmp_path / "v1", 65534, 65534)
    with pytest.raises(TierError, match="not a directory of this service"):
        open_tier(tmp_path)
    os.rmdir(tmp_path / "v1")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "v1").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(TierError, match="not a directory of this service"):
        open_tier(tmp_path)


def test_foreign_files_are_left_alone_and_not_counted(tmp_path: Path) -> None:
    foreign = tmp_path / "v1" / "lost+found" / "by" / "me" / "x.kv"
    foreign.parent.mkdir(parents=True)
    foreign.write_text("mine")
    (tmp_path / "owed.json").write_text("[]")
    (tmp_path / "probe-old.tmp").write_text("left by a kill")
    tier = open_tier(tmp_path)
    assert list(tier.scan()) == []
    assert tier.bytes_held() == tier.measure() == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "owed.json", "v1"]
    assert foreign.read_text() == "mine"


def test_empty_folders_go(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    for tenant in (1, 2):
        sealed = make(1, tenant=tenant)
        tier.put(sealed.address, sealed.record, deadline=Deadline(DEADLINE_S))
    tier.delete(make(1, tenant=1).address)
    assert [path.name for path in (tmp_path / "v1").iterdir()] == ["02" * 16]
    tier.put(make(1, tenant=1).address, make(1, tenant=1).record, deadline=Deadline(DEADLINE_S))
    assert why_bad(tier, make(1, tenant=1)) is None
    check(tier)


def test_g4_a_folder_that_is_made_again_is_flushed_again(tmp_path: Path) -> None:
    calls, sealed = SickCalls(), make(1)
    tier = open_tier(tmp_path, calls)
    flushes = []
    for _ in range(3):
        calls.arm(fails(1), 100_000)
        tier.put(sealed.address, sealed.record, deadline=Deadline(DEADLINE_S))
        flushes.append(calls.seen.count("fsync"))
        if len(flushes) == 1:
            shutil.rmtree(tmp_path / "v1" / sealed.address.tenant.hex())  # by somebody else
        else:
            tier.delete(sealed.address)
            assert not tier._files.dirs._dirs, "folders that are gone are still remembered"
    assert flushes == [5, 5, 5]  # the file, its folder, and where each of the three folders is named


def test_g13_what_cannot_be_quarantined_is_deleted(tmp_path: Path) -> None:
    calls, sealed = SickCalls(), make(1)
    tier = open_tier(tmp_path, calls)
    tier.put(sealed.address, sealed.record, deadline=Deadline(DEADLINE_S))

    def full(sick: SickCalls, name: str, args: tuple[Any, ...]) -> Any:
        return fails(errno.ENOSPC)(sick, name, args) if name == "rename" else sick.really(name, *args)

    calls.arm(full, 1, 1000)
    tier.quarantine(sealed.address)
    with pytest.raises(TierMiss):
        read_all(tier, sealed)
    assert tier.bytes_held() == 0
    check(tier)


def test_a_scan_leaves_writes_in_flight_alone(tmp_path: Path) -> None:
    """The scan runs in the middle of a put: between its write and its rename."""
    calls, sealed = SickCalls(), make(1)
    tier = open_tier(tmp_path, calls)
    scans: list[int] = []

    def scan_now(sick: SickCalls, name: str, args: tuple[Any, ...]) -> Any:
        if name == "rename" and not scans:
            scans.append(0)
            assert temporaries(tmp_path)
            scans[0] = len(list(tier.scan()))
        return sick.really(name, *args)

    calls.arm(scan_now, 1, 100_000)
    tier.put(sealed.address, sealed.record, deadline=Deadline(DEADLINE_S))
    assert scans == [0]
    assert why_bad(tier, sealed) is None
    check(tier)


def test_direct_io_where_it_is_refused_is_buffered(tmp_path: Path) -> None:
    calls = SickCalls()

    def refuse(sick: SickCalls, name: str, args: tuple[Any, ...]) -> Any:
        if name == "open" and args[1] & os.O_DIRECT:
            return fails(22)(sick, name, args)
        return sick.really(name, *args)

    calls.arm(refuse, 1, 100_000)
    tier, sealed = open_tier(tmp_path, calls, direct_io=True), make(1)
    assert not tier.direct_io
    tier.put(sealed.address, sealed.record, deadline=Deadline(DEADLINE_S))
    assert why_bad(tier, sealed) is None
    assert not temporaries(tmp_path)


def test_direct_io_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever is faster here: both answers come of the times, and nothing is left behind."""
    assert measure_direct_io(tmp_path, MIB) in (True, False)
    assert list(tmp_path.iterdir()) == []
    if not direct_io.supports_direct_io(tmp_path, files.Syscalls()):
        pytest.skip("no direct I/O in this file system")
    for faster in (True, False):

        def timed(calls: Any, path: str, nbytes: int, align: int, until: Any, faster: bool = faster) -> Any:
            return float((align > 1) != faster), None

        monkeypatch.setattr(direct_io, "supports_direct_io", lambda dir, calls: True)
        monkeypatch.setattr(direct_io, "_timed_read", timed)
        assert measure_direct_io(tmp_path, MIB) == faster
    monkeypatch.setattr(direct_io, "MEASURE_S_MAX", 0.0)  # no time at all
    assert measure_direct_io(tmp_path, MIB) is False
    assert measure_direct_io(tmp_path / "missing", MIB) is False
    assert list(tmp_path.iterdir()) == []


def test_a_probe_that_reads_something_else_fails(tmp_path: Path) -> None:
    calls = SickCalls()
    tier = open_tier(tmp_path, calls)

    def lies(sick: SickCalls, name: str, args: tuple[Any, ...]) -> Any:
        result = sick.really(name, *args)
        if name == "preadv":
            args[1][7] ^= 1
        return result

    tier.probe()
    calls.arm(lies, 1, 1000)
    with pytest.raises(TierError, match="not what was written"):
        tier.probe()
    calls.heal()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "v1"]
