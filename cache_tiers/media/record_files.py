"""One file per record: its path, atomic publishing, and examining what is found later.

Below `root`: `<tenant>/<namespace>/<2 hex>/<extent id>.kv`, digests only. A record is written beside its
path, flushed (`sync`), renamed, and the directories flushed: after a kill or a power cut there is the whole
record or none. `examine` checks headers; payloads are not looked at. Accounting and locks are in `nvme.py`.
"""

from __future__ import annotations

import itertools
import os
import re
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import numpy as np

from samovar.cache_tiers.blocks import (
    KEY_BYTES,
    PREFIX_BYTES,
    TAG_BYTES,
    Address,
    BadRecord,
    Bytes,
    ExtentHeader,
    TierError,
    decode_header,
    read_header_bytes,
)
from samovar.cache_tiers.media import files
from samovar.cache_tiers.media.files import PAGE_BYTES, FileSize, Syscalls
from samovar.cache_tiers.media.tier import Deadline
from samovar.configs.atomic_file import DRAFT

_LEVELS = tuple(re.compile(f"[0-9a-f]{{{2 * nbytes}}}") for nbytes in (TAG_BYTES, KEY_BYTES, 1))


class _Dir:
    """A directory we created or found. `durable`: its own entry survives a power cut."""

    durable = False


class NvmeDirs:
    """Leaf directories below `root`, which must exist.

    Directories are created when a file needs one, removed when empty, flushed in order. Three levels:
    tenant, namespace, two hex digits; the last ("leaf") holds files. Other names are ignored. Thread-safe.
    """

    def __init__(self, root: str, calls: Syscalls) -> None:
        self.root = root
        self._calls = calls
        self._tree = threading.Lock()  # keeps a directory between its creation and its first file
        self._dirs: dict[str, _Dir] = {}

    def create(self, path: str, align: int, deadline: Deadline) -> int:
        """Create a file, and its leaf if needed; return its fd. Raises `OSError`, `TierError`."""
        if not self._tree.acquire(timeout=deadline.left_s()):
            raise TierError("the deadline has passed")
        try:
            for level in reversed(_above(os.path.dirname(path))):
                try:
                    self._calls.mkdir(level)
                    self._dirs[level] = _Dir()
                except FileExistsError:
                    self._dirs.setdefault(level, _Dir())
            return files.open_new(self._calls, path, align)
        finally:
            self._tree.release()

    def sync(self, leaf: str) -> None:
        """Make the entries of `leaf`, and the path to it, survive a power cut. `leaf` must not be empty."""
        files.sync_dir(self._calls, leaf)
        for level in _above(leaf):
            entry = self._dirs.setdefault(level, _Dir())
            if not entry.durable:
                files.sync_dir(self._calls, os.path.dirname(level))
                entry.durable = True

    def prune(self, leaf: str) -> None:
        """Remove `leaf` and its parents if empty; skipped while another thread is at work there."""
        if not self._tree.acquire(blocking=False):
            return
        try:
            for level in _above(leaf):
                self._calls.rmdir(level)
                self._dirs.pop(level, None)
        except OSError:  # not empty: the usual case
            return
        finally:
            self._tree.release()

    def leaves(self) -> Iterator[str]:
        """Yield the existing leaf directories. Raises `OSError`."""
        self._calls.listdir(self.root)  # raises if it is missing
        yield from self._below(self.root, _LEVELS)

    def names(self, path: str) -> list[str]:
        """Return the names in a directory; empty if it is missing. Raises `OSError`."""
        try:
            return sorted(self._calls.listdir(path))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def _below(self, path: str, levels: tuple[re.Pattern[str], ...]) -> Iterator[str]:
        if not levels:
            yield path
            return
        for name in self.names(path):
            if levels[0].fullmatch(name):
                yield from self._below(os.path.join(path, name), levels[1:])


def _above(leaf: str) -> tuple[str, str, str]:
    """Return the leaf and the two levels above it, bottom first."""
    namespace = os.path.dirname(leaf)
    return leaf, namespace, os.path.dirname(namespace)


RECORD, BAD, TEMPORARY = ".kv", ".bad", DRAFT


class RecordFiles:
    """Files of whole records below `root`. `align > 1`: bypass the page cache."""

    def __init__(self, root: str, calls: Syscalls, *, sync: bool, align: int) -> None:
        self.root = root
        self.dirs = NvmeDirs(root, calls)
        self.align = align
        self._calls = calls
        self._sync = sync
        self._token = secrets.token_hex(4)  # in our temporary names, so that a write in flight is not swept
        self._numbers = itertools.count()

    def path(self, address: Address) -> str:
        extent_id = address.extent_id.hex()
        folder = os.path.join(self.root, address.tenant.hex(), address.namespace.hex(), extent_id[:2])
        return os.path.join(folder, extent_id + RECORD)

    def temporary(self, stem: str) -> str:
        """Return a unique name beside `stem`."""
        return f"{stem}.{self._token}-{next(self._numbers)}{TEMPORARY}"

    def is_torn(self, name: str) -> bool:
        """Return whether the name was left by a write that never ended."""
        return name.endswith(TEMPORARY) and self._token not in name

    def publish(
        self, path: str, data: Bytes, deadline: Deadline, *, discard: Callable[[str], None]
    ) -> FileSize:
        """Write `data` to `path`, whole or not at all; on failure `discard` gets the path of what is left.

        Raises `OSError`, `TierError`.
        """
        temporary = self.temporary(path.removesuffix(RECORD))
        leaf = os.path.dirname(path)
        left = temporary
        try:
            size = self.fill(self.dirs.create(temporary, self.align, deadline), data, deadline)
            deadline.check()
            self._calls.rename(temporary, path)
            left = path  # a file that cannot be flushed must not be relied on
            if self._sync:
                self.dirs.sync(leaf)
        except BaseException:
            discard(left)
            self.dirs.prune(leaf)
            raise
        return size

    def find_same(self, path: str, data: Bytes, deadline: Deadline) -> FileSize | None:
        """Return the file's size if it is this same record, which is then flushed; else None.

        The first page is enough: its checksum covers the header and with it the payload's checksums. Raises
        `OSError`, `TierError`.
        """
        beginning = min(PAGE_BYTES, len(data))
        try:
            size = files.size_of(self._calls.lstat(path))
            if size.length != len(data):
                return None
            if not np.array_equal(self.read(path, 0, beginning, deadline), data[:beginning]):
                return None
            if self._sync:  # its writer may have been killed before the flush
                fd = files.open_old(self._calls, path, align=1)
                try:
                    self._calls.fsync(fd)
                finally:
                    self._calls.close(fd)
                self.dirs.sync(os.path.dirname(path))
        except (FileNotFoundError, BadRecord):
            return None
        return size

    def fill(self, fd: int, data: Bytes, deadline: Deadline) -> FileSize:
        """Write and flush a new file; its `fd` is closed in any case."""
        try:
            files.write_all(self._calls, fd, data, align=self.align, deadline=deadline)
            if self._sync:
                self._calls.fsync(fd)
            return files.size_of(self._calls.fstat(fd))
        finally:
            self._calls.close(fd)

    def read(
        self, path: str, start: int, nbytes: int, deadline: Deadline, *, length: int | None = None
    ) -> Bytes:
        """Read bytes `[start, start + nbytes)` of a file that should be `length` long, if that is known.

        Raises `BadRecord("truncated"|"oversized")`, `BadRecord("magic")` if it is not a file, `OSError`,
        `TierError`.
        """
        fd = files.open_old(self._calls, path, self.align)
        try:
            found = self._calls.fstat(fd).st_size
            least = start + nbytes if length is None else length
            if found < least or (length is not None and found > length):
                kind = "truncated" if found < least else "oversized"
                raise BadRecord(kind, f"a file of {found} bytes, not of {least}")
            return files.read_range(self._calls, fd, start, nbytes, align=self.align, deadline=deadline)
        finally:
            self._calls.close(fd)

    def examine(self, path: str) -> tuple[ExtentHeader, os.stat_result]:
        """Return a file's header, which must be whole and at its path. Raises `BadRecord`, `OSError`."""
        deadline = Deadline(float("inf"))
        fd = files.open_old(self._calls, path, align=1)
        try:
            found = self._calls.fstat(fd)
            length = read_header_bytes(self._beginning(fd, found, PREFIX_BYTES, deadline))
            data = self._beginning(fd, found, length, deadline)
        finally:
            self._calls.close(fd)
        header = decode_header(data, record_bytes=found.st_size)
        place = self.path(header.address)
        if place != path:
            same_id = os.path.basename(place) == os.path.basename(path)
            raise BadRecord("namespace" if same_id else "key", "not in its place")
        return header, found

    def quarantine(self, path: str) -> tuple[str, int] | None:
        """Rename to `.bad` and return the new path and size; None if the file is gone.

        A file that cannot be renamed is deleted instead.
        """
        bad = bad_path(path)
        try:
            nbytes = files.size_of(self._calls.lstat(path)).nbytes
            self._calls.rename(path, bad)
        except FileNotFoundError:
            return None
        except OSError:
            with suppress(FileNotFoundError):
                self._calls.unlink(path)
            return None
        return bad, nbytes

    def _beginning(self, fd: int, found: os.stat_result, nbytes: int, deadline: Deadline) -> Bytes:
        """Read up to `nbytes` from the start of the file; `codec` reports what is wrong with fewer."""
        nbytes = min(nbytes, found.st_size)
        return files.read_range(self._calls, fd, 0, nbytes, align=1, deadline=deadline)


def bad_path(path: str) -> str:
    """Return the name that a record's file gets in quarantine."""
    return path.removesuffix(RECORD) + BAD
