"""Exact I/O on whole files: writes and reads complete to the last byte or fail.

System calls go through `Syscalls`, a seam where tests make them fail, come short, or record what a power cut
would leave. With `align > 1` reads and writes bypass the page cache (O_DIRECT) through aligned buffers.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
import secrets
import stat
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from samovar.cache_tiers.blocks import BadRecord, Bytes, TierError, TierFull
from samovar.cache_tiers.media.tier import Deadline
from samovar.configs.atomic_file import create_private, write_at
from samovar.configs.atomic_file import sync_dir as sync_dir

logger = logging.getLogger(__name__)

PAGE_BYTES = 4096
"""Alignment that satisfies O_DIRECT, and the unit in which a file's room is counted."""

CHUNK_BYTES = 4 * 1024 * 1024
"""Bytes per chunk; the deadline is checked between chunks."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # O_NONBLOCK: a pipe must not hang us

_LIBC = ctypes.CDLL(None, use_errno=True)


class Syscalls:
    """The system calls of a file tier, one method each."""

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

    def syncfs(self, fd: int) -> None:
        if _LIBC.syncfs(fd):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

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
        os.chmod(path, 0o700)  # regardless of the umask

    def rmdir(self, path: str) -> None:
        os.rmdir(path)

    def listdir(self, path: str) -> list[str]:
        return os.listdir(path)

    def utime(self, path: str, unix_s: float) -> None:
        os.utime(path, (unix_s, unix_s), follow_symlinks=False)

    def monotonic(self) -> float:
        return time.monotonic()


@dataclass(frozen=True, slots=True)
class FileSize:
    """Size of a file in bytes. `length`: readable bytes; `nbytes`: room it takes."""

    length: int
    nbytes: int


@contextmanager
def tier_errors(what: str) -> Iterator[None]:
    """Convert system errors to tier errors: `TierFull` if there is no room, else `TierError`."""
    try:
        yield
    except MemoryError as error:
        raise TierError(f"{what}: no memory") from error
    except OSError as error:
        kind = TierFull if is_full(error) else TierError
        raise kind(f"{what}: {error.strerror or error}") from error


def is_full(error: OSError) -> bool:
    """Return whether the error means that there is no room."""
    return error.errno in _FULL


def size_of(found: os.stat_result) -> FileSize:
    """Return the file's size; blocks not allocated yet count as well."""
    return FileSize(found.st_size, max(found.st_blocks * 512, found.st_size))


def aligned_empty(nbytes: int, align: int) -> Bytes:
    """Return an uninitialised u8 `[nbytes]` buffer whose address is a multiple of `align`."""
    raw = np.empty(nbytes + align - 1, dtype=np.uint8)
    start = -raw.ctypes.data % align
    return raw[start : start + nbytes]


def open_new(calls: Syscalls, path: str, align: int) -> int:
    """Create a file with mode 0600, open for `write_all`."""
    return create_private(calls, path, os.O_DIRECT if align > 1 else 0)


def open_old(calls: Syscalls, path: str, align: int) -> int:
    """Open a regular file for `read_range`. Raises `BadRecord` for anything else."""
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
    """Write all of `data` from offset 0, repeating short writes. Raises `OSError`, `TierError`."""
    bounce = aligned_empty(CHUNK_BYTES, align) if align > 1 else None
    for at in range(0, len(data), CHUNK_BYTES):
        chunk = data[at : at + CHUNK_BYTES]
        if bounce is not None:
            used = len(chunk)
            bounce[:used] = chunk
            chunk = bounce[: -(-used // align) * align]
            chunk[used:] = 0
        write_at(calls, fd, chunk.data, at, align=align, check=deadline.check)
    if len(data) % align:
        calls.ftruncate(fd, len(data))


def read_range(
    calls: Syscalls,
    fd: int,
    start: int,
    nbytes: int,
    *,
    align: int,
    deadline: Deadline,
    room: Bytes | None = None,
) -> Bytes:
    """Read exactly the bytes `[start, start + nbytes)`, into a new buffer or to the front of `room`.

    `room`: aligned, with place for what `align` adds at both ends. Raises `BadRecord("truncated")` if the
    file ends before, `OSError`, `TierError`.
    """
    low = start // align * align
    want = start + nbytes - low
    whole = -(-want // align) * align
    buffer = aligned_empty(whole, align) if room is None else room[:whole]
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


class TierBusy(TierError):
    """Another process has locked the medium; it may end."""


def sync_all(calls: Syscalls, path: str) -> None:
    """Flush all that the file system of a directory has in memory. Raises `OSError`."""
    fd = calls.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        calls.syncfs(fd)
    finally:
        calls.close(fd)


def take_lock(path: str) -> int:
    """Lock `path` and return the fd; the lock holds while it is open.

    Raises `TierBusy` naming the owner if it is taken, `TierError`, `OSError`.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.pread(fd, 20, 0).decode("ascii", "replace").strip()
            raise TierBusy(f"in use by pid {owner or 'unknown'} ({path})") from error
        if not holds_lock(path, fd):
            raise TierError(f"{path} was replaced while it was locked")
        try:
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        except OSError as error:  # full disk: the lock still holds, only the pid is missing
            logger.warning("cannot write our pid into %s: %s", path, error)
    except (OSError, TierError):
        os.close(fd)
        raise
    return fd


def lock_owner(path: str) -> str | None:
    """Return the pid in a lock file that someone holds ("unknown": it names none); None: it is free.

    Never creates it, and holds it for no longer than the look. Raises `OSError` if it cannot be looked at.
    """
    try:
        fd = os.open(path, _READ)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.pread(fd, 20, 0).decode("ascii", "replace").strip() or "unknown"
    finally:
        os.close(fd)
    return None


def holds_lock(path: str, fd: int) -> bool:
    """Return whether the file that `fd` has locked is still the one at `path`."""
    try:
        there = os.lstat(path)
    except FileNotFoundError:
        return False
    mine = os.fstat(fd)
    return (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)


MEASURE_S_MAX = 1.0
REPEATS = 3


def supports_direct_io(dir: Path, calls: Syscalls) -> bool:
    """Return whether a page written with O_DIRECT in `dir` can be read back."""
    path = str(dir / f"direct-{secrets.token_hex(4)}.tmp")
    page = np.frombuffer(secrets.token_bytes(PAGE_BYTES), dtype=np.uint8)
    try:
        _write(calls, path, page, PAGE_BYTES, Deadline(MEASURE_S_MAX, calls.monotonic))
        _, back = _timed_read(calls, path, PAGE_BYTES, PAGE_BYTES, Deadline(MEASURE_S_MAX, calls.monotonic))
    except (OSError, TierError, BadRecord) as error:
        logger.info("no direct I/O in %s: %s", dir, error)
        return False
    finally:
        _unlink(calls, path)
    return np.array_equal(back, page)


def measure_direct_io(dir: Path, nbytes: int = 32 * 1024 * 1024) -> bool:
    """Return whether a cold direct read of `nbytes` beats a cold buffered one.

    Takes about a second at most. Compares medians of three. False if direct I/O is not possible, the time
    runs out or the disk fails.
    """
    calls = Syscalls()
    if not supports_direct_io(dir, calls):
        return False
    path = str(dir / f"measure-{secrets.token_hex(4)}.tmp")
    deadline = Deadline(MEASURE_S_MAX, calls.monotonic)
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
    """Read with a cold page cache; return the seconds taken and the data."""
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
