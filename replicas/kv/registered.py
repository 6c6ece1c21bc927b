"""Host memory that a GPU copies from and to by itself: registered with its driver, chunk by chunk.

What is registered stays in main memory and keeps its physical place. Calls of the driver and of the system
are in `HostCalls`; the arithmetic here is plain. Thread-safe.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import threading
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from samovar.cache_tiers.blocks import Bytes
from samovar.cache_tiers.transport import Arena
from samovar.configs.sections import MIB

logger = logging.getLogger(__name__)

CHUNK_BYTES = 64 * MIB
"""What is registered at a time; the first load from a part of the object store waits for that."""

PIECE_BYTES = 2 * MIB
"""What is brought into memory in one call: until it returns nothing else can be mapped in this process, and
who waits to map holds up every page fault behind it. In a virtual machine new memory takes .75 ms a MiB."""
THREADS = 4
"""That bring the object store into memory; more gain nothing (`docs/benchmarks/gpu.md`)."""

SHARED_MEMORY = "/dev/shm/"
OBJECT_STORE = "/dev/shm/plasma"
"""Of the files that Ray's object store maps."""
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

    @property
    def is_object_store(self) -> bool:
        return self.is_shared and OBJECT_STORE in self.file

    @property
    def path(self) -> str:
        return self.file.split(" ", 2)[-1]


def mappings(maps: str) -> Iterator[Mapping]:
    """Yield the mappings in the text of /proc/self/maps. Pure."""
    for line in maps.splitlines():
        bounds, _, rest = line.partition(" ")
        start, end = (int(bound, 16) for bound in bounds.split("-"))
        flags, _, *file = rest.split(maxsplit=4)
        yield Mapping(start, end, flags.endswith("s"), " ".join(file))


def mapping_of(address: int, maps: str) -> Mapping | None:
    """Return the mapping of an address in the text of /proc/self/maps. Pure."""
    return next((one for one in mappings(maps) if one.start <= address < one.end), None)


@dataclass(frozen=True, slots=True)
class HostCalls:
    """What is asked of the driver and of the system, by address and bytes.

    `register`: False if the driver refuses. `populate`: brings pages into memory; raises `OSError`. `maps`:
    the text of /proc/self/maps, some thousand lines in a process with a GPU. `is_mapped`: whether a mapping
    is still there; False as well where only `maps` can tell. `later`: does work on a thread of its own; False
    if none can be started.
    """

    register: Callable[[int, int], bool]
    unregister: Callable[[int], None]
    populate: Callable[[int, int], None]
    maps: Callable[[], str]
    is_mapped: Callable[[Mapping], bool]
    later: Callable[[Callable[[], None]], bool]


def populate_pages(start: int, nbytes: int) -> None:
    """Bring the pages of mapped memory into main memory: registering needs them. Raises `OSError`."""
    libc = ctypes.CDLL(None, use_errno=True)
    for at in range(start, start + nbytes, PIECE_BYTES):
        piece = min(PIECE_BYTES, start + nbytes - at)
        if libc.madvise(ctypes.c_void_p(at), ctypes.c_size_t(piece), POPULATE_READ):
            error = ctypes.get_errno()
            if error == errno.EINVAL:
                raise OSError(error, "MADV_POPULATE_READ needs Linux 5.14: without it nothing is registered")
            raise OSError(error, f"{piece} bytes could not be brought into memory")


def read_maps() -> str:
    return Path("/proc/self/maps").read_text()


def is_mapped(mapping: Mapping) -> bool:
    """Return whether a file of this name is still mapped at just these addresses.

    Without reading all mappings. False as well where the system does not tell: not all have `map_files`.
    """
    try:
        return os.readlink(f"/proc/self/map_files/{mapping.start:x}-{mapping.end:x}") == mapping.path
    except OSError:
        return False


@dataclass(slots=True, eq=False)
class _Known:
    """A mapping some of whose chunks are registered, and others about to be (`pending`).

    `is_refused`: the driver did not take one, or the mapping is gone: no more are tried.
    """

    mapping: Mapping
    chunks: set[int] = field(default_factory=set)
    pending: set[int] = field(default_factory=set)
    is_refused: bool = False

    @property
    def takes_more(self) -> bool:
        return not self.is_refused


class RegisteredMemory:
    """Registers memory in chunks of `chunk_bytes`, each once.

    Memory of this process (`add`) is registered at once. Shared memory that others map here, such as Ray's
    object store, is registered by `THREADS` of its own from its first use on (`begin`: from now on), and
    before that chunk by chunk where it is used. While its bytes are in use a mapping cannot go away, but
    between two uses it may have, and another one may be at its addresses: it is looked at each time.
    Registered memory that is no longer mapped would be copied from silently, so it is unregistered before
    anything else.

    No call of the driver is made under the lock that loads take.
    """

    def __init__(self, calls: HostCalls, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._calls = calls
        self._chunk_bytes = chunk_bytes
        self._changed = threading.Condition()
        self._own: list[Mapping] = []
        self._shared: dict[int, _Known] = {}  # by the mapping's start
        self._starts: list[int] = []  # of registered chunks, in order
        self._behind = 0  # threads that register ahead of any use
        self._is_closed = self._is_held = False

    def begin(self) -> None:
        """Register the object store in the background, if it is mapped already, its largest part first."""
        stores = [mapping for mapping in mappings(self._calls.maps()) if mapping.is_object_store]
        for mapping in sorted(stores, key=lambda one: one.start - one.end):
            with self._changed:
                known = self._shared.setdefault(mapping.start, _Known(mapping))
            self._register_behind(known)

    def settle(self, timeout_s: float) -> bool:
        """Wait until nothing is registered in the background any more; return whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._behind, timeout_s)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Register nothing in the background meanwhile.

        Each call that brings memory in holds the process' memory map, for which all that allocates waits. A
        compiler does little else: kernels took 38 s beside it that took 9 alone (an H200's machine).
        """
        with self._changed:
            self._is_held = True
        try:
            yield
        finally:
            with self._changed:
                self._is_held = False
                self._changed.notify_all()

    def add(self, start: int, nbytes: int, *, is_populated: bool = True) -> bool:
        """Register memory of this process, which stays mapped until `close`.

        `is_populated`: it has been written to. False: it was refused, and none of it is registered.
        """
        mapping = Mapping(start, start + nbytes, is_shared=False, file="")
        known = _Known(mapping)
        done = [
            chunk
            for chunk in self._chunks(mapping, start, start + nbytes)
            if self._ensure(known, chunk, is_populated=is_populated)
        ]
        with self._changed:
            if known.is_refused:
                for chunk in done:
                    self._unregister(chunk)
            elif done:
                self._own.append(mapping)
            return bool(done) and not known.is_refused

    def reaches(self, start: int, nbytes: int) -> bool:
        """Return whether all of these bytes are registered, after registering what may be."""
        if not nbytes:
            return False
        end = start + nbytes
        with self._changed:
            if any(own.start <= start and end <= own.end for own in self._own):
                return True
            known = next(
                (one for one in self._shared.values() if one.mapping.start <= start < one.mapping.end), None
            )
        is_new = False
        if known is None or not self._calls.is_mapped(known.mapping):
            known = self._look_up(start)
            is_new = known is not None and not known.chunks
        if known is None or end > known.mapping.end or not known.mapping.is_shared_memory:
            return False
        is_there = all(self._ensure(known, chunk) for chunk in self._chunks(known.mapping, start, end))
        if is_new and known.mapping.is_object_store:
            self._register_behind(known)
        return is_there

    def cuts(self, start: int, nbytes: int) -> Iterator[tuple[int, int]]:
        """Yield the parts `[from, to)` of these bytes, none across two chunks: the driver refuses those."""
        at, end = start, start + nbytes
        with self._changed:
            place = bisect_right(self._starts, start)
            borders = [border for border in self._starts[place:] if border < end]
        for border in (*borders, end):
            yield at - start, border - start
            at = border

    def close(self) -> None:
        """Unregister everything."""
        with self._changed:
            self._is_closed = True
            self._changed.wait_for(lambda: not any(known.pending for known in self._shared.values()))
            for start in list(self._starts):
                self._unregister(start)
            self._own, self._shared = [], {}

    def _look_up(self, address: int) -> _Known | None:
        """Return what is mapped at an address now, and unregister what was there before."""
        mapping = mapping_of(address, self._calls.maps())
        with self._changed:
            self._drop_unmapped(address, mapping)
            if mapping is None:
                return None
            return self._shared.setdefault(mapping.start, _Known(mapping))

    def _register_behind(self, known: _Known) -> None:
        chunks = self._chunks(known.mapping, known.mapping.start, known.mapping.end)
        left = iter(chunks)  # which the threads share, so that each takes another one

        def register() -> None:
            try:
                for chunk in left:
                    with self._changed:
                        self._changed.wait_for(lambda: not self._is_held)
                    if self._is_closed or not self._ensure(known, chunk):
                        return
            finally:
                self._count_behind(-1)

        for _ in range(min(THREADS, len(chunks))):
            self._count_behind(1)
            if not self._calls.later(register):
                self._count_behind(-1)

    def _count_behind(self, threads: int) -> None:
        with self._changed:
            self._behind += threads
            self._changed.notify_all()

    def _drop_unmapped(self, address: int, now: Mapping | None) -> None:
        """Unregister the chunks of mappings that were at this address and are not there any more."""
        for start, known in list(self._shared.items()):
            old = known.mapping
            meets = old.start <= address < old.end or (
                now is not None and old.start < now.end and now.start < old.end
            )
            if meets and old != now:
                known.is_refused = True  # who is registering one of its chunks unregisters it
                for chunk in known.chunks:
                    self._unregister(chunk)
                known.chunks.clear()
                del self._shared[start]

    def _chunks(self, mapping: Mapping, start: int, end: int) -> range:
        """Return the beginnings of the mapping's chunks that `[start, end)` touches."""
        first = start - (start - mapping.start) % self._chunk_bytes
        return range(first, end, self._chunk_bytes)

    def _ensure(self, known: _Known, chunk: int, *, is_populated: bool = False) -> bool:
        """Register a chunk, or wait for the thread that does; return whether it is registered."""
        with self._changed:
            self._changed.wait_for(lambda: chunk not in known.pending)
            if chunk in known.chunks or not known.takes_more:
                return chunk in known.chunks
            known.pending.add(chunk)
        try:
            is_registered = self._register(known.mapping, chunk, is_populated=is_populated)
        except BaseException:  # else all that wait for the chunk would wait for ever
            with self._changed:
                known.pending.remove(chunk)
                known.is_refused = True
                self._changed.notify_all()
            raise
        with self._changed:
            known.pending.remove(chunk)
            if is_registered and known.is_refused:  # the mapping went away meanwhile
                self._calls.unregister(chunk)
            elif is_registered:
                known.chunks.add(chunk)
                self._starts.insert(bisect_right(self._starts, chunk), chunk)
            elif not known.is_refused:
                known.is_refused = True
                logger.warning("memory cannot be registered: what uses it goes through staging memory")
            self._changed.notify_all()
            return chunk in known.chunks

    def _register(self, mapping: Mapping, chunk: int, *, is_populated: bool) -> bool:
        nbytes = min(self._chunk_bytes, mapping.end - chunk)
        try:
            if not is_populated:
                self._calls.populate(chunk, nbytes)
        except OSError as error:
            logger.warning("memory to register: %s", error)
            return False
        return self._calls.register(chunk, nbytes)

    def _unregister(self, chunk: int) -> None:
        self._starts.remove(chunk)
        self._calls.unregister(chunk)


def do_later(work: Callable[[], None]) -> bool:
    """Do work on a thread of its own. False: none can be started."""
    try:
        threading.Thread(target=work, name="samovar-register", daemon=True).start()
    except RuntimeError as error:  # each load registers what it uses, then
        logger.warning("the object store is not registered ahead: %s", error)
        return False
    return True


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
