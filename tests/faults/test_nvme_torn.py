"""Writes that do not end: F04 killed writers, and every system call failing in its turn."""

from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from samovar.cache_tiers.blocks.record import BadRecord, TierError, TierMiss
from samovar.cache_tiers.media.nvme import NvmeTier
from samovar.cache_tiers.media.tier import Deadline
from tests.support.nodes.nvme_harness import (
    DEADLINE_S,
    FAULTS,
    Sealed,
    SickCalls,
    check,
    fails,
    make,
    memory_dir,
    open_tier,
    outcome,
    path_of,
    read_all,
    temporaries,
)

ROOT = Path(__file__).resolve().parents[2]
KILLS = 200


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with memory_dir() as dir:
        yield dir


def test_f04_killed_writers_leave_whole_records_or_none(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.nvme_torn_writer", tmp_path / "kv", str(KILLS), "7"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    seen = dict(pair.split("=") for pair in done.stdout.split())
    assert int(seen["killed"]) == KILLS
    assert int(seen["torn"]) > KILLS * 0.1, "the writers were not killed within their writes"
    assert int(seen["found"]) > KILLS


def holds(tier: NvmeTier, sealed: Sealed) -> bool:
    """Is the whole record there? Anything but that or nothing fails."""
    try:
        data = read_all(tier, sealed)
    except TierMiss:
        return False
    assert np.array_equal(data, sealed.data)
    return True


def each_call(
    tier: NvmeTier,
    calls: SickCalls,
    fault: str,
    action: Callable[[], object],
    after: Callable[[str], None],
    *,
    sticky: bool = False,
) -> int:
    """Call `action` with its n-th system call at fault, n = 1.. until it comes through without one.

    `sticky`: so are all that follow the n-th. `after` is the oracle, the disk being well again.
    """
    for nth in range(1, 1000):
        calls.arm(FAULTS[fault], nth, 10_000 if sticky else None)
        result = outcome(action)
        fired = calls.heal()
        tier.check_integrity()
        if fired and fault == "short":
            assert result == "done"
        if fired and fault == "EINTR" and calls.seen[nth - 1] in ("pwrite", "preadv"):
            assert result == "done"
        after(result)
        if not fired:
            assert result == "done"
            return nth - 1
    raise AssertionError("it never comes through")


@pytest.mark.parametrize("sticky", [False, True])
@pytest.mark.parametrize("direct_io", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_each_call_of_a_put_fails(tmp_path: Path, fault: str, direct_io: bool, sticky: bool) -> None:
    calls, sealed, other = SickCalls(), make(1), make(2)
    tier = open_tier(tmp_path, calls, direct_io=direct_io)
    tier.put(other.address, other.record, deadline=Deadline(DEADLINE_S))

    def after(result: str) -> None:
        there = holds(tier, sealed)
        # Where even the unlink of what could not be flushed fails, the record is there, whole.
        stuck = sticky and "rename" in calls.seen[: calls.first - 1]
        assert there == (result == "done") or (there and stuck), f"{result}, there: {there}"
        assert holds(tier, other)
        tier.probe()  # the disk is well: what could not be removed is removed now
        assert not temporaries(tmp_path)
        assert not tier.ledger.litter
        check(tier)
        tier.delete(sealed.address)
        check(tier)

    total = each_call(
        tier,
        calls,
        fault,
        lambda: tier.put(sealed.address, sealed.record, deadline=Deadline(DEADLINE_S)),
        after,
        sticky=sticky,
    )
    assert total >= 12  # mkdir x 3, open, fchmod, pwrite, fsync, fstat, close, rename, open, fsync, close


@pytest.mark.parametrize("sticky", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_each_call_of_a_put_over_another_record_fails(tmp_path: Path, fault: str, sticky: bool) -> None:
    """The same extent, sealed at another time: afterwards it is the new one, the old one or none."""
    calls, old = SickCalls(), make(1)
    tier = open_tier(tmp_path, calls)
    new = make(1)
    content = new.data.copy()
    content[-1] ^= 1
    path = path_of(tier, old.address)

    def before() -> None:
        tier.delete(old.address)
        tier.put(old.address, old.record, deadline=Deadline(DEADLINE_S))
        path.write_bytes(b"\0" + content[1:].tobytes())  # same size, another beginning

    def after(result: str) -> None:
        there = path.exists() and path.read_bytes() == new.data.tobytes()
        assert there or result != "done"
        tier.probe()
        assert not temporaries(tmp_path)
        check(tier)
        before()

    before()
    each_call(
        tier,
        calls,
        fault,
        lambda: tier.put(new.address, new.record, deadline=Deadline(DEADLINE_S)),
        after,
        sticky=sticky,
    )


@pytest.mark.parametrize("direct_io", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_each_call_of_a_read_fails(tmp_path: Path, fault: str, direct_io: bool) -> None:
    calls, sealed = SickCalls(), make(1)
    tier = open_tier(tmp_path, calls, direct_io=direct_io)
    tier.put(sealed.address, sealed.record, deadline=Deadline(DEADLINE_S))
    got: list[object] = []

    def read() -> None:
        got.clear()
        got.append(tier.read(sealed.address, 100, 6000, deadline=Deadline(DEADLINE_S)))

    def after(result: str) -> None:
        assert (result == "done") == bool(got)
        assert not got or np.array_equal(got[0], sealed.data[100:6100])  # type: ignore[arg-type]
        assert result in ("done", "TierError", "TierFull")
        check(tier)

    assert each_call(tier, calls, fault, read, after) >= 4
    fds = len(list(Path("/proc/self/fd").iterdir()))
    each_call(tier, calls, fault, read, after)
    assert len(list(Path("/proc/self/fd").iterdir())) <= fds, "file descriptors leak"


@pytest.mark.parametrize("action", ["delete", "quarantine", "scan", "probe", "touch"])
@pytest.mark.parametrize("fault", ["EIO", "ENOSPC", "EINTR"])
@pytest.mark.parametrize("sticky", [False, True])
def test_each_call_of_the_rest_fails(tmp_path: Path, action: str, fault: str, sticky: bool) -> None:
    calls, sealed, other, rotten = SickCalls(), make(1), make(2), make(3)
    tier = open_tier(tmp_path, calls)

    def before() -> None:
        for each in (sealed, other, rotten):
            tier.put(each.address, each.record, deadline=Deadline(DEADLINE_S))

    def act() -> object:
        if action == "scan":
            path_of(tier, rotten.address).write_bytes(b"rotten")
            return list(tier.scan())
        if action == "probe":
            return tier.probe()
        return {"delete": tier.delete, "quarantine": tier.quarantine, "touch": tier.touch}[action](
            sealed.address
        )

    def after(result: str) -> None:
        gone = action in ("delete", "quarantine") and result == "done"
        if action != "scan" and not (action in ("delete", "quarantine") and result != "done"):
            assert holds(tier, sealed) != gone
        if action != "scan":
            assert holds(tier, other)
        assert action != "touch" or result == "done"
        tier.probe()
        list(tier.scan())
        check(tier)
        before()

    before()
    assert each_call(tier, calls, fault, act, after, sticky=sticky) >= 1


def test_g12_a_delete_that_was_not_flushed_is_flushed_when_it_is_tried_again(tmp_path: Path) -> None:
    calls, sealed = SickCalls(), make(1)
    tier = open_tier(tmp_path, calls)
    tier.put(sealed.address, sealed.record, deadline=Deadline(DEADLINE_S))
    tier.put(make(2).address, make(2).record, deadline=Deadline(DEADLINE_S))
    path_of(tier, sealed.address).with_name("keep").touch()  # so that the directory stays
    calls.arm(
        lambda c, name, args: fails(errno.EIO)(c, name, args) if name == "fsync" else c.really(name, *args),
        1,
        99,
    )
    with pytest.raises(TierError):
        tier.delete(sealed.address)
    calls.arm(fails(errno.EIO), 1000)
    tier.delete(sealed.address)
    assert "fsync" in calls.seen


def test_g4_a_record_is_published_by_rename_only_after_its_bytes_are_flushed(tmp_path: Path) -> None:
    for durability, flushed in (("crash", True), ("none", False)):
        calls, sealed = SickCalls(), make(1)
        tier = open_tier(tmp_path / durability, calls, durability=durability)
        calls.arm(fails(errno.EIO), 10_000)
        tier.put(sealed.address, sealed.record, deadline=Deadline(DEADLINE_S))
        order = calls.seen
        assert order.index("pwrite") < order.index("rename")
        assert ("fsync" in order[: order.index("rename")]) == flushed
        assert ("fsync" in order[order.index("rename") :]) == flushed


def test_a_write_that_makes_no_progress_is_an_error(tmp_path: Path) -> None:
    calls, sealed = SickCalls(), make(1)
    tier = open_tier(tmp_path, calls)
    calls.arm(lambda c, name, args: 0 if name == "pwrite" else c.really(name, *args), 1, 1000)
    with pytest.raises(TierError, match="progress"):
        tier.put(sealed.address, sealed.record, deadline=Deadline(DEADLINE_S))
    calls.heal()
    check(tier)


class SlowCalls(SickCalls):
    """Each read and write takes a second of a clock of our own; interrupted ones as well."""

    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


def test_g9_the_deadline_is_kept_between_the_pieces(tmp_path: Path) -> None:
    calls, sealed = SlowCalls(), make(1)
    tier = open_tier(tmp_path, calls)

    def slow(c: SickCalls, name: str, args: tuple[object, ...]) -> object:
        if name in ("pwrite", "preadv"):
            calls.now_s += 1
            raise InterruptedError(errno.EINTR, "interrupted")
        return c.really(name, *args)

    calls.arm(slow, 1, 10_000)
    with pytest.raises(TierError, match="deadline"):
        tier.put(sealed.address, sealed.record, deadline=Deadline(5.0, calls.monotonic))
    assert calls.now_s == 5.0
    calls.heal()
    check(tier)
    assert not holds(tier, sealed)
    tier.put(sealed.address, sealed.record, deadline=Deadline(5.0, calls.monotonic))
    calls.arm(slow, 1, 10_000)
    with pytest.raises(TierError, match="deadline"):
        tier.read(sealed.address, 0, sealed.record.nbytes, deadline=Deadline(30.0, calls.monotonic))
    assert calls.now_s == 5.0 + 30.0


def test_g9_a_put_that_took_too_long_is_not_published(tmp_path: Path) -> None:
    calls, sealed = SlowCalls(), make(1)
    tier = open_tier(tmp_path, calls)

    def slow(c: SickCalls, name: str, args: tuple[object, ...]) -> object:
        calls.now_s += 100.0 * (name == "fsync")
        return c.really(name, *args)

    calls.arm(slow, 1, 10_000)
    with pytest.raises(TierError, match="deadline"):
        tier.put(sealed.address, sealed.record, deadline=Deadline(5.0, calls.monotonic))
    calls.heal()
    assert not holds(tier, sealed)
    check(tier)


def test_a_file_that_ends_while_it_is_read_is_truncated(tmp_path: Path) -> None:
    calls, sealed = SickCalls(), make(1)
    tier = open_tier(tmp_path, calls)
    tier.put(sealed.address, sealed.record, deadline=Deadline(DEADLINE_S))
    calls.arm(lambda c, name, args: 0 if name == "preadv" else c.really(name, *args), 1, 1000)
    with pytest.raises(BadRecord, match="truncated"):
        read_all(tier, sealed)
