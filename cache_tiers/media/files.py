"""Whole files, exactly: written to the last byte or not at all, read to the last byte or not at all.

System calls go through `Syscalls`, a seam where tests make them fail, come short, or record what a power
cut would leave. With `align > 1` reads and writes go past the page cache (O_DIRECT) through aligned
buffers. This module knows nothing of records, names of files or tiers' accounts.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import stat
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cache_tiers.blocks import BadRecord, Bytes, TierError, TierFull

logger = logging.getLogger(__name__)

PAGE_BYTES = 4096
"""Alignment that O_DIRECT is content with, and the unit a file's room is counted in."""

CHUNK_BYTES = 4 * 1024 * 1024
"""Between two chunks the deadline is looked at."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe put there must not hang us
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


class Syscalls:
    """The system calls that a tier of files makes, one method each."""

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        return os.open(path, flags, mode)

    def close(self, fd: int) -> None:
        os.close(fd)

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        return os.pwrite(fd, data, offset)

    def preadv(self, fd: int, buffer: memoryview, offset: int) -> int:
        return os.preadv(fd, [buffer], offset)

    def ftruncate(self, fd: int, nbytes: int) -> None:
        os.ftruncate(fd, nbytes)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def fchmod(self, fd: int, mode: int) -> None:
        os.fchmod(fd, mode)

    def fstat(self, fd: int) -> os.stat_result:
        return os.fstat(fd)

    def lstat(self, path: str) -> os.stat_result:
        return os.lstat(path)

    def rename(self, old: str, new: str) -> None:
        os.rename(old, new)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def mkdir(self, path: str) -> None:
        os.mkdir(path, 0o700)
        os.chmod(path, 0o700)  # whatever the umask is

    def rmdir(self, path: str) -> None:
        os.rmdir(path)

    def listdir(self, path: str) -> list[str]:
        return os.listdir(path)

    def utime(self, path: str, unix_s: float) -> None:
        os.utime(path, (unix_s, unix_s), follow_symlinks=False)

    def monotonic(self) -> float:
        return time.monotonic()


class Deadline:
    """`seconds` from now, by the monotonic clock."""

    def __init__(self, calls: Syscalls, seconds: float) -> None:
        self._calls = calls
        self._end = calls.monotonic() + seconds

    def left_s(self) -> float:
        """Never negative, and never more than a lock can be waited for."""
        return min(max(self._end - self._calls.monotonic(), 0.0), threading.TIMEOUT_MAX)

    def check(self) -> None:
        """Raises `TierError` when it has passed."""
        if self._calls.monotonic() >= self._end:
            raise TierError("the deadline has passed")


@dataclass(frozen=True, slots=True)
class FileSize:
    """`length`: as far as it can be read; `nbytes`: the room it takes."""

    length: int
    nbytes: int


@contextmanager
def tier_errors(what: str) -> Iterator[None]:
    """What the system says, as a tier says it: `TierFull` when there is no room, else `TierError`."""
    try:
        yield
    except MemoryError as error:
        raise TierError(f"{what}: no memory") from error
    except OSError as error:
        kind = TierFull if is_full(error) else TierError
        raise kind(f"{what}: {error.strerror or error}") from error


def is_full(error: OSError) -> bool:
    """Does it mean that there is no room?"""
    return error.errno in _FULL


def size_of(found: os.stat_result) -> FileSize:
    """Blocks that are not allocated yet count as well."""
    return FileSize(found.st_size, max(found.st_blocks * 512, found.st_size))


def aligned_empty(nbytes: int, align: int) -> Bytes:
    """u8 `[nbytes]` of anything, its address a multiple of `align`."""
    raw = np.empty(nbytes + align - 1, dtype=np.uint8)
    start = -raw.ctypes.data % align
    return raw[start : start + nbytes]


def open_new(calls: Syscalls, path: str, align: int) -> int:
    """A new file that only we may read and write, open for `write_all`."""
    fd = calls.open(path, _CREATE | (os.O_DIRECT if align > 1 else 0), 0o600)
    try:
        calls.fchmod(fd, 0o600)  # whatever the umask is
    except OSError:
        calls.close(fd)
        raise
    return fd


def open_old(calls: Syscalls, path: str, align: int) -> int:
    """A regular file, open for `read_range`. Anything else raises `BadRecord`."""
    try:
        fd = calls.open(path, _READ | (os.O_DIRECT if align > 1 else 0))
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise BadRecord("magic", "no file") from error
        raise
    try:
        if not stat.S_ISREG(calls.fstat(fd).st_mode):
            raise BadRecord("magic", "no file")
    except (OSError, BadRecord):
        calls.close(fd)
        raise
    return fd


def write_all(calls: Syscalls, fd: int, data: Bytes, *, align: int, deadline: Deadline) -> None:
    """All of `data` from offset 0 on, however short the single writes come. Raises `OSError`, `TierError`."""
    bounce = aligned_empty(CHUNK_BYTES, align) if align > 1 else None
    done = 0
    while done < len(data):
        deadline.check()
        at = done // align * align
        chunk = data[at : at + CHUNK_BYTES]
        if bounce is not None:
            used = len(chunk)
            bounce[:used] = chunk
            chunk = bounce[: -(-used // align) * align]
            chunk[used:] = 0
        try:
            written = calls.pwrite(fd, chunk.data, at)
        except InterruptedError:
            continue
        if at + written <= done:
            raise OSError(errno.EIO, "a write made no progress")
        done = at + written
    if done > len(data):
        calls.ftruncate(fd, len(data))


def read_range(calls: Syscalls, fd: int, start: int, nbytes: int, *, align: int, deadline: Deadline) -> Bytes:
    """Bytes `[start, start + nbytes)` in a buffer of their own, every one of them read.

    Raises `BadRecord("truncated")` when the file ends before, `OSError`, `TierError`.
    """
    low = start // align * align
    want = start + nbytes - low
    buffer = aligned_empty(-(-want // align) * align, align)
    filled = 0
    while filled < want:
        deadline.check()
        at = filled // align * align
        try:
            got = calls.preadv(fd, buffer[at : at + CHUNK_BYTES].data, low + at)
        except InterruptedError:
            continue
        if at + got <= filled:
            raise BadRecord("truncated", f"the file ends at {low + filled}, before {start + nbytes}")
        filled = at + got
    return buffer[start - low : start - low + nbytes]


def sync_dir(calls: Syscalls, path: str) -> None:
    """The directory's entries survive a power cut from now on."""
    fd = calls.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        calls.fsync(fd)
    finally:
        calls.close(fd)


def take_lock(path: str) -> int:
    """An fd that holds `path` locked while it is open. Raises `TierError` naming who has it, `OSError`."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.pread(fd, 20, 0).decode("ascii", "replace").strip()
            raise TierError(f"in use by pid {owner or 'unknown'} ({path})") from error
        if not holds_lock(path, fd):
            raise TierError(f"{path} was replaced while it was locked")
        try:
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        except OSError as error:  # a full disk: the lock holds all the same, only the name is missing
            logger.warning("cannot write our pid into %s: %s", path, error)
    except (OSError, TierError):
        os.close(fd)
        raise
    return fd


def holds_lock(path: str, fd: int) -> bool:
    """Is the file that `fd` has locked still the one at `path`?"""
    try:
        there = os.lstat(path)
    except FileNotFoundError:
        return False
    mine = os.fstat(fd)
    return (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)


# Is it possible, and is it faster, to read past the page cache (O_DIRECT) in this directory?

MEASURE_S_MAX = 1.0
REPEATS = 3


def supports_direct_io(dir: Path, calls: Syscalls) -> bool:
    """Does a page written and read with O_DIRECT come back?"""
    path = str(dir / f"direct-{secrets.token_hex(4)}.tmp")
    page = np.frombuffer(secrets.token_bytes(PAGE_BYTES), dtype=np.uint8)
    try:
        _write(calls, path, page, PAGE_BYTES, Deadline(calls, MEASURE_S_MAX))
        _, back = _timed_read(calls, path, PAGE_BYTES, PAGE_BYTES, Deadline(calls, MEASURE_S_MAX))
    except (OSError, TierError, BadRecord) as error:
        logger.info("no direct I/O in %s: %s", dir, error)
        return False
    finally:
        _unlink(calls, path)
    return np.array_equal(back, page)


def measure_direct_io(dir: Path, nbytes: int = 32 * 1024 * 1024) -> bool:
    """Is a cold direct read of `nbytes` faster than a cold buffered one? Takes about a second at most.

    Medians of three. False where direct I/O is not possible, the time runs out or the disk fails.
    """
    calls = Syscalls()
    if not supports_direct_io(dir, calls):
        return False
    path = str(dir / f"measure-{secrets.token_hex(4)}.tmp")
    deadline = Deadline(calls, MEASURE_S_MAX)
    try:
        _write(calls, path, np.random.default_rng(0).integers(0, 256, nbytes, np.uint8), 1, deadline)
        seconds: dict[int, list[float]] = {1: [], PAGE_BYTES: []}
        for _ in range(REPEATS):
            for align, taken in seconds.items():
                taken.append(_timed_read(calls, path, nbytes, align, deadline)[0])
    except (OSError, TierError, BadRecord) as error:
        logger.info("cannot measure direct I/O in %s: %s", dir, error)
        return False
    finally:
        _unlink(calls, path)
    return statistics.median(seconds[PAGE_BYTES]) < statistics.median(seconds[1])


def _write(calls: Syscalls, path: str, data: Bytes, align: int, until: Deadline) -> None:
    fd = open_new(calls, path, align)
    try:
        write_all(calls, fd, data, align=align, deadline=until)
        calls.fsync(fd)
    finally:
        calls.close(fd)


def _timed_read(calls: Syscalls, path: str, nbytes: int, align: int, until: Deadline) -> tuple[float, Bytes]:
    """Seconds that a read takes that finds nothing in the page cache, and what it read."""
    fd = open_old(calls, path, align)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        start_s = calls.monotonic()
        data = read_range(calls, fd, 0, nbytes, align=align, deadline=until)
        return calls.monotonic() - start_s, data
    finally:
        calls.close(fd)


def _unlink(calls: Syscalls, path: str) -> None:
    try:
        calls.unlink(path)
    except FileNotFoundError:
        return
    except OSError as error:  # the next owner of the directory sweeps it
        logger.warning("cannot remove %s: %s", path, error)
