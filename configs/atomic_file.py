"""Writes a small file whole or not at all, whatever happens meanwhile."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

DRAFT = ".tmp"
"""End of the name of a file that is being written, beside its final name; a kill may leave it."""


LOCK_PAUSE_S = 0.02


class FileCalls(Protocol):
    """The system calls of a write; as in `os`."""

    def open(self, path: str, flags: int, mode: int = ..., /) -> int: ...
    def close(self, fd: int, /) -> None: ...
    def pwrite(self, fd: int, data: memoryview, offset: int, /) -> int: ...
    def fsync(self, fd: int, /) -> None: ...
    def fchmod(self, fd: int, mode: int, /) -> None: ...
    def rename(self, old: str, new: str, /) -> None: ...
    def unlink(self, path: str, /) -> None: ...


def atomic_write(
    path: Path, data: bytes, *, replace: bool = True, durable: bool = True, calls: FileCalls = os
) -> None:
    """Write a file with mode 0600; a crash or a power cut at any point leaves the old one or the new one.

    `replace`: False keeps an existing file, so that of several writers one wins. `durable`: on return the new
    file survives a power cut; False where a file system need not be able to flush a directory. Creates no
    directory. Raises `OSError`; the draft is then removed.
    """
    draft = f"{path}.{secrets.token_hex(8)}{DRAFT}"
    try:
        fd = create_private(calls, draft)
        try:
            write_at(calls, fd, memoryview(data), 0)
            calls.fsync(fd)
        finally:
            calls.close(fd)
        if replace:
            calls.rename(draft, str(path))
        else:
            with suppress(FileExistsError):
                os.link(draft, path)  # unlike rename, it does not replace what is there
            calls.unlink(draft)
    except BaseException:
        with suppress(OSError):
            calls.unlink(draft)
        raise
    if durable:
        sync_dir(calls, str(path.parent))


@contextmanager
def lock_beside(path: Path, wait_s: float) -> Iterator[None]:
    """Hold the lock of a file that is exchanged as a whole: `path.lock`, which stays.

    Only for those who ask for it. Blocks for `wait_s` at most. Raises `OSError`, also if the time is over.
    """
    lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        ends_s = time.monotonic() + wait_s
        while not _locked(lock):
            if time.monotonic() >= ends_s:
                raise OSError(errno.ETIMEDOUT, f"another process has held {path}.lock for {wait_s:g} s")
            time.sleep(LOCK_PAUSE_S)
        yield
    finally:
        os.close(lock)


def _locked(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def create_private(calls: FileCalls, path: str, flags: int = 0) -> int:
    """Create a file with mode 0600, open for writing. Raises `OSError`."""
    create = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = calls.open(path, create | flags, 0o600)
    try:
        calls.fchmod(fd, 0o600)  # regardless of the umask
    except OSError:
        calls.close(fd)
        raise
    return fd


def sync_dir(calls: FileCalls, path: str) -> None:
    """Sync a directory, so that its entries survive a power cut. Raises `OSError`."""
    fd = calls.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        calls.fsync(fd)
    finally:
        calls.close(fd)


def write_at(
    calls: FileCalls,
    fd: int,
    data: memoryview,
    at: int,
    *,
    align: int = 1,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Write all of `data` at offset `at`, repeating short writes.

    `align`: offsets, in the file and in `data`, are multiples of it. `check` is called before each write and
    may raise. Raises `OSError`.
    """
    done = 0
    while done < len(data):
        check()
        start = done // align * align
        try:
            written = calls.pwrite(fd, data[start:], at + start)
        except InterruptedError:
            continue
        if start + written <= done:
            raise OSError(errno.EIO, "a write made no progress")
        done = start + written
