"""The `nvme` tier: one file per extent in a private directory, counted to the block.

The directory has one owner at a time, by a lock. A scan checks headers, never payloads: the user of the
bytes verifies them. Bad records are kept beside the good ones for inspection, within bounds.

Below `root`: `<tenant>/<namespace>/<2 hex>/<extent id>.kv`, digests only. A record is written beside its
path, flushed (`sync`), renamed, and the directories flushed: after a kill or a power cut there is the whole
record or none (`RecordFiles`).
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import re
import secrets
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np

from samovar.cache_tiers.blocks import (
    KEY_BYTES,
    NVME,
    PREFIX_BYTES,
    TAG_BYTES,
    Address,
    BadRecord,
    Bytes,
    ExtentHeader,
    ForeignRecord,
    Record,
    TierError,
    TierFull,
    TierMiss,
)
from samovar.cache_tiers.media import files
from samovar.cache_tiers.media.files import (
    PAGE_BYTES,
    FileSize,
    Syscalls,
    TierBusy,
    supports_direct_io,
    tier_errors,
)
from samovar.cache_tiers.media.files import measure_direct_io as measure_direct_io
from samovar.cache_tiers.media.tier import BadFound, Deadline, RecordFormat, Scanned, Tier
from samovar.configs.atomic_file import DRAFT

logger = logging.getLogger(__name__)


class NvmeLedger:
    """Accounts the room of a file tier: `held` bytes of `bytes_max`, of which quarantine is bounded.

    Counts files, bad records (at most `quarantine_bytes_max` bytes), files still to be removed, and
    reservations, in bytes of room on the medium; touches no file. Not thread-safe: the tier's lock guards
    it.
    """

    def __init__(self, bytes_max: int, quarantine_bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.quarantine_bytes_max = quarantine_bytes_max
        self.files: dict[Address, FileSize] = {}
        self.bad: dict[str, int] = {}  # path -> bytes, oldest first
        self.litter: dict[str, int] = {}  # path -> bytes: to be removed, still counted
        self.held = 0
        self.reserved = 0

    def reserve(self, nbytes: int) -> None:
        """Reserve room for a file; quarantined records yield to it. Raises `TierFull`."""
        lacking = self.held + self.reserved + nbytes - self.bytes_max
        if lacking > sum(self.bad.values()):
            raise TierFull(
                f"{self.held + self.reserved} of {self.bytes_max} bytes are taken, {nbytes} wanted"
            )
        self.drop_bad(lacking)
        self.reserved += nbytes

    def release(self, nbytes: int) -> None:
        """End a reservation; what was written has been counted by `add`."""
        self.reserved -= nbytes

    def add(self, address: Address, size: FileSize) -> None:
        """Count a file that is there; it replaced any earlier one."""
        self.forget(address)
        self.files[address] = size
        self.held += size.nbytes

    def forget(self, address: Address) -> FileSize | None:
        """Stop counting a file that is gone; return its size."""
        size = self.files.pop(address, None)
        self.held -= size.nbytes if size else 0
        return size

    def add_bad(self, path: str, nbytes: int) -> None:
        """Count a kept bad record; older ones, or itself if too large, become litter to make room."""
        self.forget_path(path)
        self.bad[path] = nbytes
        self.held += nbytes
        self.drop_bad(sum(self.bad.values()) - self.quarantine_bytes_max)

    def drop_bad(self, nbytes: int) -> None:
        """Turn the oldest bad records that take `nbytes` together into litter; all, if they take less."""
        for path in list(self.bad):
            if nbytes <= 0:
                break
            self.litter[path] = self.bad.pop(path)
            nbytes -= self.litter[path]

    def add_litter(self, path: str, nbytes: int) -> None:
        """Count an unwanted file that is still there."""
        self.forget_path(path)
        self.litter[path] = nbytes
        self.held += nbytes

    def bad_below(self, folder: str) -> list[str]:
        """Return the bad records and the litter in a folder, which ends with a slash."""
        return [path for path in (*self.bad, *self.litter) if path.startswith(folder)]

    def forget_path(self, path: str) -> int:
        """Stop counting a bad record or litter that is gone; return the bytes it took."""
        nbytes = self.bad.pop(path, 0) + self.litter.pop(path, 0)
        self.held -= nbytes
        return nbytes

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is inconsistent."""
        total = sum(size.nbytes for size in self.files.values())
        total += sum(self.bad.values()) + sum(self.litter.values())
        assert self.held == total, f"{self.held} bytes held, but the files take {total}"
        assert self.reserved >= 0, f"{self.reserved} bytes reserved"
        assert not self.bad.keys() & self.litter.keys(), "a path is both quarantined and litter"
        kept = sum(self.bad.values())
        assert kept <= self.quarantine_bytes_max, f"{kept} bytes quarantined of {self.quarantine_bytes_max}"


PROBE_S_MAX = 5.0
UNREADABLE = "unreadable"
"""Kind of a bad record that the disk cannot read."""
BAD_SECTOR = (errno.EIO, errno.ENODATA)
"""What a disk answers that cannot read a place; the latter past the page cache."""
FAILING_MAX = 64
"""Files remembered that could not be read."""

SWEEP_MAX = 16
"""Maximum number of litter files that one call tries to remove on the side."""


class NvmeTier(Tier):
    """Stores records as files under `dir`, in at most `bytes_max` bytes of room.

    `waits`: a directory that another process holds is waited for (`take`), until then all calls fail.
    Raises `TierError` if the directory is unusable, or in use and not waited for.
    """

    name = NVME.name
    keeps_bad = takes_room = True

    def __init__(
        self,
        dir: Path,
        *,
        bytes_max: int,
        durability: Literal["crash", "none"],
        direct_io: bool,
        quarantine_bytes_max: int,
        wall_clock: Callable[[], float],
        calls: Syscalls | None = None,
        waits: bool = False,
    ) -> None:
        self.dir = dir
        self.ledger = NvmeLedger(bytes_max, quarantine_bytes_max)
        self._sync = durability == "crash"
        self._wall_clock = wall_clock
        self._calls = calls or Syscalls()
        self._root = str(dir / "v1")
        self._lock_fd = -1
        self._state = threading.Condition()  # guards the ledger and `_busy`; never held during I/O
        self._busy: set[Address] = set()
        self._bad_found = BadFound()
        self._waits_for = ""
        self._free_bytes: int | None = None  # of the file system, when it was last written to
        self._files = RecordFiles(self._root, self._calls, sync=self._sync, align=1)
        try:
            with tier_errors("opening"):
                self._open()
                self._files.align = PAGE_BYTES if direct_io and supports_direct_io(dir, self._calls) else 1
        except TierError as error:
            self.close()
            if not (waits and isinstance(error, TierBusy)):
                raise
            self._waits_for = str(error)

    def why_not_ours(self) -> str:
        return self._waits_for

    def take(self) -> bool:
        if not self._waits_for:
            return False
        with tier_errors("opening"):
            try:
                self._open()
            except TierBusy as error:
                self._waits_for = str(error)
                raise
        self._waits_for = ""
        return True

    def _open(self) -> None:
        """Own the directory, and remove what unfinished writes have left. Raises `OSError`, `TierError`."""
        self._own_dir()
        for name in self._calls.listdir(str(self.dir)):
            if name.endswith(TEMPORARY):
                self._remove(str(self.dir / name))
        self._see_room()

    def _see_room(self) -> None:
        with suppress(OSError):  # then what was seen before is all that is known
            self._free_bytes = shutil.disk_usage(self.dir).free

    def medium_free_bytes(self) -> int | None:
        return self._free_bytes

    @property
    def direct_io(self) -> bool:
        """Return whether the page cache is bypassed: as configured, if the file system can."""
        return self._files.align > 1

    def put(self, address: Address, record: Record, *, deadline: Deadline) -> None:
        path = self._path(address)
        room = -(-record.nbytes // PAGE_BYTES) * PAGE_BYTES
        with self._alone(address, deadline), tier_errors("writing"):
            size = self._files.find_same(path, record.data, deadline)
            if size:
                with self._state:
                    self.ledger.add(address, size)
                return
            with self._state:
                self.ledger.reserve(room)
            try:
                self._sweep_litter()
                size = self._files.publish(path, record.data, deadline, discard=self._remove)
                with self._state:
                    self.ledger.add(address, size)
            except BaseException as error:
                try:
                    self._recount(address, path)
                except OSError:  # sick disk: rather count too much, until it is read or deleted
                    with self._state:
                        self.ledger.add(address, FileSize(record.nbytes, room))
                if isinstance(error, OSError) and files.is_full(error):  # no room for bad records either
                    with self._state:
                        self.ledger.drop_bad(self.ledger.held)
                raise
            finally:
                with self._state:
                    self.ledger.release(room)
                self._see_room()

    def read(
        self, address: Address, start: int, nbytes: int, *, deadline: Deadline, room: Bytes | None = None
    ) -> Bytes:
        path = self._path(address)
        with self._state:
            known = self.ledger.files.get(address)
        try:
            with tier_errors("reading"):
                return self._files.read(path, start, nbytes, deadline, known.length if known else None, room)
        except TierError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            with tier_errors("the directory is gone"):
                self._calls.lstat(self._root)
            with self._alone(address, deadline), tier_errors("reading"):
                self._recount(address, path)
            raise TierMiss("no such file") from error

    def delete(self, address: Address) -> None:
        path = self._path(address)
        with self._alone(address), tier_errors("deleting"):
            with suppress(FileNotFoundError):
                self._calls.unlink(path)
            with self._state:
                self.ledger.forget(address)
            self._unlink(bad_path(path))  # flushes what was done to both
            self._files.dirs.prune(os.path.dirname(path))

    def quarantine(self, address: Address) -> None:
        path = self._path(address)
        with self._alone(address), tier_errors("quarantining"):
            self._quarantine(path)
            with self._state:
                self.ledger.forget(address)
        self._sweep_litter()

    def purge_quarantine(self, tenant: bytes) -> int:
        """Delete a tenant's bad records, which hold its blocks too; return how many. Raises `TierError`."""
        with self._state:
            paths = self.ledger.bad_below(os.path.join(self._root, tenant.hex(), ""))
        with tier_errors("purging"):
            self._files.remove(*paths)
        with self._state:  # known until it is gone for good: a try that failed before is repeated
            for path in paths:
                self.ledger.forget_path(path)
        return len(paths)

    def scan(self) -> Iterator[Scanned]:
        with self._state:
            unseen = set(self.ledger.files)
        bad: list[tuple[float, str, int]] = []
        for leaf in self._leaves():
            for name in self._names(leaf):
                path = os.path.join(leaf, name)
                if self._files.is_torn(name):
                    self._remove(path)
                elif name.endswith(BAD):
                    with tier_errors("scanning"), suppress(FileNotFoundError):
                        found = self._calls.lstat(path)
                        bad.append((found.st_ctime, path, files.size_of(found).nbytes))
                elif name.endswith(RECORD):
                    scanned = self._examine(path)
                    if scanned:
                        unseen.discard(scanned.header.address)
                        yield scanned
            self._files.dirs.prune(leaf)
        with self._state:
            for _, path, nbytes in sorted(bad):
                self.ledger.add_bad(path, nbytes)
        for address in unseen:
            with self._alone(address), tier_errors("scanning"):
                self._recount(address, self._path(address))
        self._sweep_litter()
        with tier_errors("flushing"):
            self._files.flush_all()

    def bad_found(self) -> BadFound:
        with self._state:
            return self._bad_found.copy()

    def touch(self, address: Address) -> None:
        try:
            self._calls.utime(self._path(address), min(max(self._wall_clock(), 0.0), 2.0**32))
        except (OSError, TierError) as error:  # it only loses its place in the order after a restart
            logger.debug("cannot touch %s: %s", address.extent_id[:6].hex(), error)

    def drop_cache(self, address: Address) -> None:
        try:
            descriptor = os.open(self._path(address), os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise TierError(f"cannot open it: {error.strerror}") from error
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)

    def bytes_held(self) -> int:
        with self._state:
            return self.ledger.held

    def measure(self) -> int:
        """Return what `bytes_held` should say, by walking the files. Raises `TierError`."""
        total = 0
        for leaf in self._leaves():
            for name in self._names(leaf):
                with tier_errors("measuring"), suppress(FileNotFoundError):
                    total += files.size_of(self._calls.lstat(os.path.join(leaf, name))).nbytes
        return total

    def probe(self) -> None:
        self._check_open()
        path = self._files.temporary(str(self.dir / "probe"))
        deadline = Deadline(PROBE_S_MAX, self._calls.monotonic)
        data = np.frombuffer(secrets.token_bytes(PAGE_BYTES), dtype=np.uint8)
        try:
            with tier_errors("probing"):
                if self._own_dir():
                    self._recount_all()
                try:
                    self._files.fill(files.open_new(self._calls, path, self._files.align), data, deadline)
                    back = self._files.read(path, 0, PAGE_BYTES, deadline)
                finally:
                    self._unlink(path)
        except BadRecord as error:
            raise TierError(f"probing: {error}") from error
        if not np.array_equal(back, data):
            raise TierError("probing: what was read is not what was written")
        self._sweep_litter()

    def close(self) -> None:
        with self._state:
            fd, self._lock_fd = self._lock_fd, -1
        if fd >= 0:
            os.close(fd)

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is inconsistent."""
        with self._state:
            self.ledger.check_integrity()
            assert self._busy or not self.ledger.reserved, "room is reserved without a holder"

    def _check_open(self) -> None:
        if self._lock_fd < 0:
            raise TierError("closed")

    def _path(self, address: Address) -> str:
        """Return the path of an extent's file. Raises `TierError` if the address is invalid, or closed."""
        self._check_open()
        lengths = [len(address.tenant), len(address.namespace), len(address.extent_id)]
        if lengths != [TAG_BYTES, KEY_BYTES, KEY_BYTES]:
            raise TierError(f"no address: parts of {lengths} bytes")
        return self._files.path(address)

    @contextmanager
    def _alone(self, address: Address, deadline: Deadline | None = None) -> Iterator[None]:
        """Hold exclusive access to this extent for writing, deleting and counting."""
        with self._state:
            left_s = deadline.left_s() if deadline else None
            if not self._state.wait_for(lambda: address not in self._busy, left_s):
                raise TierError("the deadline has passed while others were at this extent")
            self._busy.add(address)
        try:
            yield
        finally:
            with self._state:
                self._busy.discard(address)
                self._state.notify_all()

    def _own_dir(self) -> bool:
        """Create, lock and check the directory; return True if it was not ours already.

        Raises `OSError`, `TierError`.
        """
        lock = str(self.dir / "lock")
        fresh = self._lock_fd < 0 or not files.holds_lock(lock, self._lock_fd)
        if fresh:
            missing = [path for path in (self.dir, *self.dir.parents) if not path.exists()]
            self.dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            for path in missing if self._sync else ():
                files.sync_dir(self._calls, str(path.parent))
            old, self._lock_fd = self._lock_fd, files.take_lock(lock)
            if old >= 0:
                os.close(old)
        with suppress(FileExistsError):
            self._calls.mkdir(self._root)
            fresh = True
        found = self._calls.lstat(self._root)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise TierError(f"{self._root} is not a directory of this service")
        if fresh and self._sync:
            files.sync_dir(self._calls, str(self.dir))
        return fresh

    def _leaves(self) -> Iterator[str]:
        with tier_errors("looking into the directory"):
            yield from self._files.dirs.leaves()

    def _names(self, leaf: str) -> list[str]:
        with tier_errors("looking into the directory"):
            return self._files.dirs.names(leaf)

    def _examine(self, path: str) -> Scanned | None:
        """Return what a scanned file holds, and count it; None if bad (then quarantined) or gone."""
        try:
            with tier_errors("scanning"):
                header, found = self._files.examine(path, self.format)
        except BadRecord as error:
            problem, kind = str(error), error.kind
        except TierError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return None
            if not isinstance(error.__cause__, OSError) or error.__cause__.errno not in BAD_SECTOR:
                raise  # the state of the other files is unknown too
            problem, kind = str(error), UNREADABLE
        else:
            with self._alone(header.address), tier_errors("scanning"):
                self._recount(header.address, path)
            now_s = max(self._wall_clock(), 0.0)
            return Scanned(header, found.st_size, min(max(found.st_mtime, 0.0), now_s))
        logger.warning("extent %s is quarantined: %s", os.path.basename(path)[:12], problem)
        with self._state:
            self._bad_found.kinds[kind] += 1
        with tier_errors("quarantining"):
            self._quarantine(path)
        with self._state:
            self._bad_found.quarantined += 1
        return None

    def _quarantine(self, path: str) -> None:
        moved = self._files.quarantine(path)
        if moved:
            with self._state:
                self.ledger.add_bad(*moved)

    def _recount(self, address: Address, path: str) -> None:
        """Count what is at `path` now, if anything is. Raises `OSError`."""
        try:
            size = files.size_of(self._calls.lstat(path))
        except (FileNotFoundError, NotADirectoryError):
            with self._state:
                self.ledger.forget(address)
        else:
            with self._state:
                self.ledger.add(address, size)

    def _recount_all(self) -> None:
        with self._state:
            addresses, others = list(self.ledger.files), [*self.ledger.bad, *self.ledger.litter]
        for address in addresses:
            with self._alone(address):
                self._recount(address, self._path(address))
        for path in others:
            if not os.path.lexists(path):
                with self._state:
                    self.ledger.forget_path(path)

    def _sweep_litter(self) -> None:
        with self._state:
            paths = list(islice(self.ledger.litter, SWEEP_MAX))
        for path in paths:
            self._remove(path)

    def _remove(self, path: str) -> None:
        """Remove an unwanted file; if that fails, count it as litter until it works. Never raises."""
        try:
            self._unlink(path)
        except OSError as error:
            logger.warning("cannot remove %s: %s", os.path.basename(path)[:12], error.strerror)
            # A missing file is no litter, and a record stays in the count of records.
            if os.path.lexists(path) and not path.endswith(RECORD):
                nbytes = files.size_of(os.lstat(path)).nbytes
                with self._state:
                    self.ledger.add_litter(path, nbytes)

    def _unlink(self, path: str) -> None:
        self._files.remove(path)
        with self._state:  # not before: a removal that could not be flushed is tried again
            self.ledger.forget_path(path)


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

    def sync(self, leaf: str, *, may_be_gone: bool = False) -> None:
        """Make the entries of `leaf`, and the path to it, survive a power cut.

        `may_be_gone`: it may be empty, and then another thread removes it, and makes it again: that it was
        removed has to survive, too, or it comes back as it was. Raises `OSError`.
        """
        is_there = self._sync_dir(leaf, may_be_gone)
        for level in _above(leaf):
            entry = self._dirs.setdefault(level, _Dir()) if is_there else _Dir()
            is_there = entry.durable or self._sync_dir(os.path.dirname(level), may_be_gone)
            entry.durable = True

    def _sync_dir(self, path: str, may_be_gone: bool) -> bool:
        """Sync a directory; return whether it is there. Raises `OSError`."""
        try:
            files.sync_dir(self._calls, path)
        except (FileNotFoundError, NotADirectoryError):
            if not may_be_gone:
                raise
            return False
        return True

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
        self._lock = threading.Lock()
        self._failing: dict[str, bool] = {}  # that could not be read -> whether others were since

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
        with self._lock:
            self._failing.pop(path, None)  # it will be another file
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
        self,
        path: str,
        start: int,
        nbytes: int,
        deadline: Deadline,
        length: int | None = None,
        room: Bytes | None = None,
    ) -> Bytes:
        """Read bytes `[start, start + nbytes)` of a file that should be `length` long, if that is known.

        `room`: see `files.read_range`.
        Raises `BadRecord("truncated"|"oversized")`, `BadRecord("magic")` if it is not a file,
        `BadRecord(UNREADABLE)` if the disk fails there again and not elsewhere, `OSError`, `TierError`.
        """
        if min(start, nbytes) < 0:
            raise TierError(f"no bytes are at [{start}, {start + nbytes})")
        fd = -1
        try:
            fd = files.open_old(self._calls, path, self.align)
            found = self._calls.fstat(fd).st_size
            least = start + nbytes if length is None else length
            if found < least or (length is not None and found > length):
                kind = "truncated" if found < least else "oversized"
                raise BadRecord(kind, f"a file of {found} bytes, not of {least}")
            data = files.read_range(
                self._calls, fd, start, nbytes, align=self.align, deadline=deadline, room=room
            )
        except OSError as error:
            if error.errno in BAD_SECTOR and self._fails_alone(path):
                raise BadRecord(UNREADABLE, f"{error.strerror}, and not for the first time") from error
            raise
        finally:
            if fd >= 0:
                self._calls.close(fd)
        if self._failing:
            with self._lock:
                self._failing = {other: True for other in self._failing if other != path}
        return data

    def _fails_alone(self, path: str) -> bool:
        """Return whether a file that cannot be read could not be before, and others were since."""
        with self._lock:
            if self._failing.pop(path, False):
                return True
            self._failing[path] = False
            while len(self._failing) > FAILING_MAX:
                del self._failing[next(iter(self._failing))]
        return False

    def examine(self, path: str, format: RecordFormat) -> tuple[ExtentHeader, os.stat_result]:
        """Return a file's header, which must be whole and at its path. Raises `BadRecord`, `OSError`.

        A file of another setting is deleted, and said not to be there.
        """
        deadline = Deadline(float("inf"))
        fd = files.open_old(self._calls, path, align=1)
        try:
            found = self._calls.fstat(fd)
            length = format.read_header_bytes(self._beginning(fd, found, PREFIX_BYTES, deadline))
            header = format.decode_header(
                self._beginning(fd, found, length, deadline), record_bytes=found.st_size
            )
        except ForeignRecord as error:
            self._calls.unlink(path)
            raise FileNotFoundError(errno.ENOENT, str(error)) from error
        finally:
            self._calls.close(fd)
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
            self.remove(path)
            return None
        return bad, nbytes

    def remove(self, *paths: str) -> None:
        """Delete files so that no power cut brings them back; some may be gone. Raises `OSError`.

        Also of those that are gone the directory is flushed: an earlier try may have failed there. A draft
        may come back: who opens the directory then removes it.
        """
        for path in paths:
            with suppress(FileNotFoundError, NotADirectoryError):
                self._calls.unlink(path)
        leaves = {os.path.dirname(path) for path in paths if not path.endswith(TEMPORARY)}
        for leaf in sorted(leaves) if self._sync else ():
            self.dirs.sync(leaf, may_be_gone=True)

    def flush_all(self) -> None:
        """Make what is there survive a power cut, and what is not stay away. Raises `OSError`.

        For who finds the files of another process: that may have been killed before it has flushed what it
        deleted, and a clear takes what is not found for deleted.
        """
        if self._sync:
            files.sync_all(self._calls, self.root)

    def _beginning(self, fd: int, found: os.stat_result, nbytes: int, deadline: Deadline) -> Bytes:
        """Read up to `nbytes` from the start of the file; `codec` reports what is wrong with fewer."""
        nbytes = min(nbytes, found.st_size)
        return files.read_range(self._calls, fd, 0, nbytes, align=1, deadline=deadline)


def bad_path(path: str) -> str:
    """Return the name that a record's file gets in quarantine."""
    return path.removesuffix(RECORD) + BAD
