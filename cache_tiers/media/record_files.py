"""One record, one file: where it lies, how it is published whole, what is found in it later.

Below `root`: `<tenant>/<namespace>/<2 hex>/<extent id>.kv`, digests only. Written beside its place, flushed
(`sync`), renamed, the directories flushed: after a kill or a power cut there is the whole record or
none. Headers are checked by `examine`; nothing here looks at a payload. No accounts, no locks: see
`nvme.py`.
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

from cache_tiers.blocks import (
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
from cache_tiers.media import files
from cache_tiers.media.files import PAGE_BYTES, Deadline, FileSize, Syscalls

# The directories below a tier of files: made when a file needs one, removed when empty, flushed in order.
#
# Three levels below `root`: tenant, namespace, two hex digits; the last ("leaf") holds files. Other names
# are passed over. Thread-safe. This module knows nothing of records or of room.

_LEVELS = tuple(re.compile(f"[0-9a-f]{{{2 * nbytes}}}") for nbytes in (TAG_BYTES, KEY_BYTES, 1))


class _Dir:
    """One directory as we made or met it: does its own entry survive a power cut?"""

    durable = False


class NvmeDirs:
    """Leaf directories below `root`, which must be there."""

    def __init__(self, root: str, calls: Syscalls) -> None:
        self.root = root
        self._calls = calls
        self._tree = threading.Lock()  # a directory is not removed between its making and its first file
        self._dirs: dict[str, _Dir] = {}

    def create(self, path: str, align: int, deadline: Deadline) -> int:
        """A new file in a leaf that is made if need be; its fd. Raises `OSError`, `TierError`."""
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
        """The entries of `leaf`, and the way to it, survive a power cut. `leaf` must not be empty."""
        files.sync_dir(self._calls, leaf)
        for level in _above(leaf):
            entry = self._dirs.setdefault(level, _Dir())
            if not entry.durable:
                files.sync_dir(self._calls, os.path.dirname(level))
                entry.durable = True

    def prune(self, leaf: str) -> None:
        """Remove `leaf` and what is above it where that is empty; not now if others are at work there."""
        if not self._tree.acquire(blocking=False):
            return
        try:
            for level in _above(leaf):
                self._calls.rmdir(level)
                self._dirs.pop(level, None)
        except OSError:  # not empty: the usual end of it
            return
        finally:
            self._tree.release()

    def leaves(self) -> Iterator[str]:
        """The leaf directories there are. Raises `OSError`."""
        self._calls.listdir(self.root)  # raises where there is none
        yield from self._below(self.root, _LEVELS)

    def names(self, path: str) -> list[str]:
        """What is in a directory; nothing where there is none (any more). Raises `OSError`."""
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
    """The leaf and the two levels above it, from below."""
    namespace = os.path.dirname(leaf)
    return leaf, namespace, os.path.dirname(namespace)


RECORD, BAD, TEMPORARY = ".kv", ".bad", ".tmp"


class RecordFiles:
    """Files of whole records below `root`. `align > 1`: past the page cache."""

    def __init__(self, root: str, calls: Syscalls, *, sync: bool, align: int) -> None:
        self.root = root
        self.dirs = NvmeDirs(root, calls)
        self.align = align
        self._calls = calls
        self._sync = sync
        self._token = secrets.token_hex(4)  # in our temporary names: what is in flight is not swept
        self._numbers = itertools.count()

    def path(self, address: Address) -> str:
        extent_id = address.extent_id.hex()
        folder = os.path.join(self.root, address.tenant.hex(), address.namespace.hex(), extent_id[:2])
        return os.path.join(folder, extent_id + RECORD)

    def temporary(self, stem: str) -> str:
        """A name beside `stem` that nobody else uses."""
        return f"{stem}.{self._token}-{next(self._numbers)}{TEMPORARY}"

    def is_torn(self, name: str) -> bool:
        """Was it left by a write that never ended?"""
        return name.endswith(TEMPORARY) and self._token not in name

    def publish(
        self, path: str, data: Bytes, deadline: Deadline, *, discard: Callable[[str], None]
    ) -> FileSize:
        """Write `data` to `path`, whole or not at all; `discard` is called with what is left when it fails.

        Raises `OSError`, `TierError`.
        """
        temporary = self.temporary(path.removesuffix(RECORD))
        leaf = os.path.dirname(path)
        left = temporary
        try:
            size = self.fill(self.dirs.create(temporary, self.align, deadline), data, deadline)
            deadline.check()
            self._calls.rename(temporary, path)
            left = path  # if it cannot be flushed, nobody may rely on it
            if self._sync:
                self.dirs.sync(leaf)
        except BaseException:
            discard(left)
            self.dirs.prune(leaf)
            raise
        return size

    def find_same(self, path: str, data: Bytes, deadline: Deadline) -> FileSize | None:
        """The size of the file if it is this very record; then it is flushed. Raises `OSError`, `TierError`.

        Its beginning tells: the checksum in there covers the header and with it the payload's checksums.
        """
        beginning = min(PAGE_BYTES, len(data))
        try:
            size = files.size_of(self._calls.lstat(path))
            if size.length != len(data):
                return None
            if not np.array_equal(self.read(path, 0, beginning, deadline), data[:beginning]):
                return None
            if self._sync:  # whoever published it may have been killed before its flush
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
        """Bytes `[start, start + nbytes)` of a file that should be `length` long, where that is known.

        Raises `BadRecord("truncated"|"oversized")`, `BadRecord("magic")` for what is no file, `OSError`,
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
        """The header of a file, which must be whole and in its place. Raises `BadRecord`, `OSError`."""
        deadline = Deadline(self._calls, float("inf"))
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
        """Rename to `.bad`: where to, and how large. None when it is gone, if only as a way out."""
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
        """As much of the first `nbytes` as the file has: `codec` says what is wrong with fewer."""
        nbytes = min(nbytes, found.st_size)
        return files.read_range(self._calls, fd, 0, nbytes, align=1, deadline=deadline)


def bad_path(path: str) -> str:
    """The name that a record's file gets in quarantine."""
    return path.removesuffix(RECORD) + BAD
