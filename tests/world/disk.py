"""A node's disk: real files in memory behind the product's system calls, with what a power cut leaves."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path
from typing import Any

from samovar.cache_tiers.media import files
from tests.support.nodes.power_model import File, Folder, RecordingCalls, cut_power
from tests.world.faults import Faults, Kind
from tests.world.scheduler import Killed, Scheduler

SLOW_S = 3.0
RECORDS = f"{os.sep}v1{os.sep}"


class Disk(RecordingCalls):
    """Of node `number`, in `root`. A call is a point where others go first, and where a crash strikes."""

    def __init__(self, here: Scheduler, faults: Faults, number: int, root: Path) -> None:
        super().__init__(root)
        self._here = here
        self._faults = faults
        self._number = number
        self._locks: list[int] = []
        _take_stock(self.root, root)

    def after_power_cut(self, into: Path, rng: random.Random) -> Disk:
        """Return the disk as it is found when the power is back."""
        cut_power(self, into, rng)
        (into / "kv").mkdir(exist_ok=True)
        return Disk(self._here, self._faults, self._number, into)

    def take_lock(self, path: str) -> int:
        """As `files.take_lock`; remembered, for the locks of the dead are free."""
        fd = _really_take_lock(path)
        self._locks.append(fd)
        return fd

    def died(self) -> None:
        """Close what the process that died had open, as the system does."""
        for fd in (*self._locks, *self.fds):
            if self._is_ours(fd):
                os.close(fd)
        self._locks.clear()
        self.fds.clear()

    def _is_ours(self, fd: int) -> bool:
        """Whether it is still open here: who stops has closed it, and another node may have its number."""
        try:
            path = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            return False
        return path.startswith(os.path.realpath(self.base) + os.sep)

    def rot(self, rng: random.Random) -> str:
        """Flip a bit of a file that is there, for good; return which."""
        there = sorted(path for path in Path(self.base).rglob("*.kv") if path.stat().st_size)
        if not there:
            return "nothing"
        path = rng.choice(there)
        data = bytearray(path.read_bytes())
        at = rng.randrange(len(data) * 8)
        data[at // 8] ^= 1 << at % 8
        path.write_bytes(data)
        node = self._node(str(path))
        assert isinstance(node, File)
        node.writes.insert(node.flushed, (at // 8, bytes(data[at // 8 : at // 8 + 1])))
        node.flushed += 1
        return f"{path.name[:8]} at {at // 8}"

    # -- the calls --------------------------------------------------------------------------

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        self._pass(fills=bool(flags & os.O_CREAT))
        return super().open(path, flags, mode)

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        self._pass(fills=True)
        if len(data) > 1 and self._strikes("torn write"):
            data = data[: 1 + self._faults.below(len(data) - 1)]  # a short write; the rest may never come
        return super().pwrite(fd, data, offset)

    def preadv(self, fd: int, buffer: memoryview, offset: int) -> int:
        self._pass()
        got = super().preadv(fd, buffer, offset)
        if got and self._strikes("bad read"):
            at = self._faults.below(got * 8)
            buffer[at // 8] ^= 1 << at % 8
        return got

    def fsync(self, fd: int) -> None:
        self._pass(fills=True)
        node = self.fds[fd]
        is_record = isinstance(node, File) and RECORDS in os.readlink(f"/proc/self/fd/{fd}")
        if is_record and self._strikes("lost fsync"):
            return  # the drive says that it is done
        super().fsync(fd)
        if isinstance(node, Folder):  # what is on the disk needs no history
            node.changes = list(node.now().items())
            node.flushed = len(node.changes)

    def syncfs(self, fd: int) -> None:
        self._pass(fills=True)
        super().syncfs(fd)

    def fstat(self, fd: int) -> Any:
        return _Found(super().fstat(fd))

    def lstat(self, path: str) -> Any:
        self._alive()
        return _Found(super().lstat(path))

    def rename(self, old: str, new: str) -> None:
        self._pass()
        super().rename(old, new)

    def unlink(self, path: str) -> None:
        self._pass()
        super().unlink(path)

    def mkdir(self, path: str) -> None:
        self._alive()
        super().mkdir(path)

    def rmdir(self, path: str) -> None:
        self._alive()
        super().rmdir(path)

    def listdir(self, path: str) -> list[str]:
        self._pass()
        return sorted(super().listdir(path))

    def utime(self, path: str, unix_s: float) -> None:
        self._alive()
        super().utime(path, unix_s)

    def monotonic(self) -> float:
        return self._here.now_s

    def _alive(self) -> None:
        if self._here.current.process.is_dead:
            raise Killed

    def _strikes(self, kind: Kind) -> bool:
        return self._faults.strikes(kind, self._number)

    def _pass(self, *, fills: bool = False) -> None:
        slow_s = SLOW_S if self._strikes("disk slow") else 0.0005
        self._here.sleep(self._faults.uniform(0.0, slow_s))
        if self._strikes("disk error"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if fills and self._strikes("disk full"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class _Found:
    """What is known of a file, but for what the clock of the machine below has put there."""

    def __init__(self, found: os.stat_result) -> None:
        self.st_mode, self.st_size, self.st_blocks = found.st_mode, found.st_size, found.st_blocks
        self.st_uid, self.st_mtime, self.st_ctime = found.st_uid, found.st_mtime, 0.0


def _take_stock(folder: Folder, path: Path) -> None:
    """Begin with what is there, all of it on the disk."""
    for child in sorted(path.iterdir()):
        node: File | Folder
        if child.is_dir():
            node = Folder()
            _take_stock(node, child)
        else:
            node = File([(0, child.read_bytes())], 1)
        folder.changes.append((child.name, node))
    folder.flushed = len(folder.changes)


_really_take_lock = files.take_lock
