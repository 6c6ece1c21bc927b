"""Is it possible, and is it faster, to read past the page cache (O_DIRECT) in this directory?"""

from __future__ import annotations

import logging
import os
import secrets
import statistics
from pathlib import Path

import numpy as np

from cache_tiers import files
from cache_tiers.extent import Bytes
from cache_tiers.files import PAGE_BYTES, Deadline, Syscalls
from cache_tiers.tier import BadRecord, TierError

logger = logging.getLogger(__name__)

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
    fd = files.open_new(calls, path, align)
    try:
        files.write_all(calls, fd, data, align=align, deadline=until)
        calls.fsync(fd)
    finally:
        calls.close(fd)


def _timed_read(calls: Syscalls, path: str, nbytes: int, align: int, until: Deadline) -> tuple[float, Bytes]:
    """Seconds that a read takes that finds nothing in the page cache, and what it read."""
    fd = files.open_old(calls, path, align)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        start_s = calls.monotonic()
        data = files.read_range(calls, fd, 0, nbytes, align=align, deadline=until)
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
