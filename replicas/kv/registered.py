"""Host memory that a GPU copies from and to by itself: registered with its driver, chunk by chunk.

What is registered stays in main memory and keeps its physical place. Calls of the driver and of the system
are in `HostCalls`; the arithmetic here is plain. Thread-safe.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cache_tiers.blocks import Bytes
from cache_tiers.transport import Arena
from configs.sections import MIB

logger = logging.getLogger(__name__)

CHUNK_BYTES = 64 * MIB
"""What is registered at a time; the first load from a part of the object store waits for that."""

SHARED_MEMORY = "/dev/shm/"
POPULATE_READ = 22
"""`MADV_POPULATE_READ` (Linux 5.14)."""


@dataclass(frozen=True, slots=True)
class Mapping:
    """A line of /proc/self/maps: addresses `[start, end)`; `file`: device, inode and path."""

    start: int
    end: int
    is_shared: bool
    file: str

    @property
    def is_shared_memory(self) -> bool:
        return self.is_shared and SHARED_MEMORY in self.file


def mapping_of(address: int, maps: str) -> Mapping | None:
    """Return the mapping of an address in the text of /proc/self/maps. Pure."""
    for line in maps.splitlines():
        bounds, _, rest = line.partition(" ")
        start, end = (int(bound, 16) for bound in bounds.split("-"))
        if start <= address < end:
            flags, _, *file = rest.split(maxsplit=4)
            return Mapping(start, end, flags.endswith("s"), " ".join(file))
    return None


@dataclass(frozen=True, slots=True)
class HostCalls:
    """What is asked of the driver and of the system, by address and bytes.

    `register`: False if the driver refuses. `populate`: brings pages into memory; raises `OSError`. `maps`:
    the text of /proc/self/maps.
    """

    register: Callable[[int, int], bool]
    unregister: Callable[[int], None]
    populate: Callable[[int, int], None]
    maps: Callable[[], str]


def populate_pages(start: int, nbytes: int) -> None:
    """Bring the pages of mapped memory into main memory: registering needs them. Raises `OSError`."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(nbytes), POPULATE_READ):
        error = ctypes.get_errno()
        raise OSError(error, f"{nbytes} bytes could not be brought into memory")


def read_maps() -> str:
    return Path("/proc/self/maps").read_text()


@dataclass(slots=True)
class _Known:
    """A mapping some of whose chunks are registered; `is_refused`: the driver did not take one."""

    mapping: Mapping
    chunks: set[int]
    is_refused: bool = False


class RegisteredMemory:
    """Registers memory in chunks of `chunk_bytes`, each once.

    Memory of this process (`add`) is registered at once. Shared memory that others map here, such as Ray's
    object store, is registered chunk by chunk when it is first used. A mapping is looked up each time: while
    its bytes are in use it cannot go away, but between two uses it may have, and another one may be at its
    addresses. Registered memory that is no longer mapped would be copied from silently, so it is unregistered
    before anything else.
    """

    def __init__(self, calls: HostCalls, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._calls = calls
        self._chunk_bytes = chunk_bytes
        self._lock = threading.Lock()
        self._own: list[Mapping] = []
        self._shared: dict[int, _Known] = {}  # by the mapping's start
        self._starts: list[int] = []  # of registered chunks, in order

    def add(self, start: int, nbytes: int) -> bool:
        """Register memory of this process, which has been written to and stays mapped until `close`.

        False: it was refused, and none of it is registered.
        """
        mapping = Mapping(start, start + nbytes, is_shared=False, file="")
        with self._lock:
            done: list[int] = []
            for chunk in self._chunks(mapping, start, start + nbytes):
                if not self._register(mapping, chunk, is_populated=True):
                    for registered in done:
                        self._unregister(registered)
                    return False
                done.append(chunk)
            if done:
                self._own.append(mapping)
            return bool(done)

    def reaches(self, start: int, nbytes: int) -> bool:
        """Return whether all of these bytes are registered, after registering what may be."""
        end = start + nbytes
        with self._lock:
            if any(own.start <= start and end <= own.end for own in self._own):
                return True
            mapping = mapping_of(start, self._calls.maps()) if nbytes else None
            self._drop_unmapped(start, mapping)
            if mapping is None or end > mapping.end or not mapping.is_shared_memory:
                return False
            known = self._shared.setdefault(mapping.start, _Known(mapping, set()))
            return not known.is_refused and self._register_part(known, start, end)

    def cuts(self, start: int, nbytes: int) -> Iterator[tuple[int, int]]:
        """Yield the parts `[from, to)` of these bytes, none across two chunks: the driver refuses those."""
        at, end = start, start + nbytes
        with self._lock:
            place = bisect_right(self._starts, start)
            borders = [border for border in self._starts[place:] if border < end]
        for border in (*borders, end):
            yield at - start, border - start
            at = border

    def close(self) -> None:
        """Unregister everything."""
        with self._lock:
            for start in list(self._starts):
                self._unregister(start)
            self._own, self._shared = [], {}

    def _register_part(self, known: _Known, start: int, end: int) -> bool:
        for chunk in self._chunks(known.mapping, start, end):
            if chunk in known.chunks:
                continue
            if not self._register(known.mapping, chunk):
                known.is_refused = True
                logger.warning("shared memory cannot be registered: loads go through staging memory")
                return False
            known.chunks.add(chunk)
        return True

    def _drop_unmapped(self, address: int, now: Mapping | None) -> None:
        """Unregister the chunks of mappings that were at this address and are not there any more."""
        for start, known in list(self._shared.items()):
            old = known.mapping
            meets = old.start <= address < old.end or (
                now is not None and old.start < now.end and now.start < old.end
            )
            if meets and old != now:
                for chunk in known.chunks:
                    self._unregister(chunk)
                del self._shared[start]

    def _chunks(self, mapping: Mapping, start: int, end: int) -> range:
        """Return the beginnings of the mapping's chunks that `[start, end)` touches."""
        first = start - (start - mapping.start) % self._chunk_bytes
        return range(first, end, self._chunk_bytes)

    def _register(self, mapping: Mapping, chunk: int, *, is_populated: bool = False) -> bool:
        nbytes = min(self._chunk_bytes, mapping.end - chunk)
        try:
            if not is_populated:
                self._calls.populate(chunk, nbytes)
        except OSError as error:
            logger.warning("memory to register: %s", error)
            return False
        if not self._calls.register(chunk, nbytes):
            return False
        self._starts.insert(bisect_right(self._starts, chunk), chunk)
        return True

    def _unregister(self, chunk: int) -> None:
        self._starts.remove(chunk)
        self._calls.unregister(chunk)


class RecordArena:
    """Memory for records in one piece, `memory`. A record's part is free again when no array of it exists."""

    def __init__(self, memory: Bytes) -> None:
        self._memory = memory
        self._arena = Arena(memory.nbytes)
        self._lock = threading.Lock()
        self._over: deque[int] = deque()  # what to release: arrays end on any thread, even inside of `empty`

    @property
    def free_bytes(self) -> int:
        with self._lock:
            self._release()
            return self._arena.free_bytes

    def empty(self, nbytes: int) -> Bytes | None:
        """Return uninitialised bytes; None: there is no room for them in one piece."""
        with self._lock:
            self._release()
            piece = self._arena.take(nbytes, expires=False)
        if piece is None:
            return None
        # numpy's views keep the first object alive that is no array: this one.
        part = (ctypes.c_uint8 * nbytes).from_buffer(self._memory.data, piece.offset)
        weakref.finalize(part, self._over.append, piece.generation).atexit = False
        return np.frombuffer(memoryview(part), dtype=np.uint8)

    def _release(self) -> None:
        while self._over:
            self._arena.release(self._over.popleft())
