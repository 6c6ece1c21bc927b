"""The `cpu` tier: records in Ray's object store; without Ray in sealed memory files, or on the heap."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from samovar.cache_tiers.blocks import (
    CPU,
    KEY_BYTES,
    TAG_BYTES,
    Address,
    BadRecord,
    Bytes,
    Record,
    TierError,
    TierFull,
    TierMiss,
    TierName,
)
from samovar.cache_tiers.media.tier import Deadline, Scanned, Tier

PROBE_ADDRESS = Address(bytes(TAG_BYTES), b"\xff" * KEY_BYTES, bytes(KEY_BYTES))
PROBE_S_MAX = 5.0


class _Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


Held = TypeVar("Held", bound=_Sized)
"""How a record is held: where its bytes are, and how many."""


class RamTier(Tier, Generic[Held]):
    """Records in main memory, at most `bytes_max` bytes. Nothing survives the process. Thread-safe."""

    name: TierName = CPU.name

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._lock = threading.Lock()
        self._records: dict[Address, Held] = {}
        self._nbytes = 0

    def delete(self, address: Address) -> None:
        with self._lock:
            held = self._records.pop(address, None)
            self._nbytes -= held.nbytes if held is not None else 0

    def quarantine(self, address: Address) -> None:
        """Delete the record: it could not be inspected later."""
        self.delete(address)

    def scan(self) -> Iterator[Scanned]:
        """Yield nothing: the contents were lost with the previous process."""
        return iter(())

    def touch(self, address: Address) -> None:
        pass

    def bytes_held(self) -> int:
        return self._nbytes

    def close(self) -> None:
        with self._lock:
            self._records.clear()
            self._nbytes = 0

    def _find(self, address: Address) -> Held:
        """Return how a record is held. Raises `TierMiss`."""
        with self._lock:
            held = self._records.get(address)
        if held is None:
            raise TierMiss("not there")
        return held

    def _reserve(self, address: Address, nbytes: int) -> bool:
        """Count a record before `_hold`; False if it is held already. Raises `TierFull`."""
        with self._lock:
            if address in self._records:
                return False
            if self._nbytes + nbytes > self._bytes_max:
                raise TierFull(f"{self._nbytes} of {self._bytes_max} bytes are taken")
            self._nbytes += nbytes
            return True

    def _hold(self, address: Address, held: Held | None, nbytes: int) -> None:
        """End a reservation by holding the record; None: it could not be stored."""
        with self._lock:
            if held is None or address in self._records:
                self._nbytes -= nbytes
            else:
                self._records[address] = held


class HeapTier(RamTier[Bytes]):
    """Holds records as arrays of this process, for tests and simulations.

    Takes a record over without a copy: a sealed record is never written to again.
    """

    def put(self, address: Address, record: Record, *, deadline: Deadline) -> None:
        data = record.data.view()
        data.flags.writeable = False
        if self._reserve(address, record.nbytes):
            self._hold(address, data, record.nbytes)

    def read(self, address: Address, start: int, nbytes: int, *, deadline: Deadline) -> Bytes:
        data = self._find(address)
        if data.nbytes < start + nbytes:
            raise BadRecord("truncated", f"{data.nbytes} bytes, {start + nbytes} were wanted")
        return data[start : start + nbytes]

    def probe(self) -> None:
        pass


SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
"""With these no process can change a file any more: what was verified stays so, no reader gets a SIGBUS."""


@contextmanager
def _taking_over(fd: int, seals: int) -> Iterator[None]:
    """Check that `fd` is a memory file with these seals; close it if it is none, or what follows fails.

    Raises `TierError`.
    """
    try:
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & seals != seals:
            raise TierError("the memory file is not sealed")
        if os.fstatvfs(fd).f_bsize != mmap.PAGESIZE:  # where huge pages are used up, a read ends the process
            raise TierError("a memory file of huge pages")
        yield
    except (OSError, ValueError, OverflowError) as error:
        os.close(fd)
        raise TierError(f"not a memory file: {error}") from error
    except TierError:
        os.close(fd)
        raise


def _new_file(nbytes: int) -> int:
    """Return a memory file that can be sealed. Raises `TierFull` if there is no room or descriptor for it."""
    try:
        fd = os.memfd_create("samovar", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise TierFull(f"no memory file: {error}") from error
    try:
        os.ftruncate(fd, nbytes)
    except (OSError, ValueError) as error:
        os.close(fd)
        raise TierFull(f"no memory for {nbytes} bytes: {error}") from error
    return fd


class SharedRecord:
    """A record in a sealed memory file. `fd`: open as long as this is; `data`: u8 `[nbytes]`, read-only."""

    def __init__(self, fd: int, nbytes: int) -> None:
        """Take over `fd`. Raises `TierError`, and closes it, if it is no sealed file of `nbytes` bytes."""
        self.fd, self.nbytes = -1, nbytes
        self._data: Bytes | None = None
        self._keeps_map = True
        with _taking_over(fd, SEALS):
            if nbytes < 1 or os.fstat(fd).st_size != nbytes:
                raise TierError(f"the memory file has not {nbytes} bytes")
        self.fd = fd

    @property
    def data(self) -> Bytes:
        """Raises `TierError` if there is no room for it among this process' maps."""
        data = self._data
        if data is None:
            try:
                # Private: before Linux 6.7 a file that is sealed against writing cannot be mapped shared.
                memory = mmap.mmap(self.fd, self.nbytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
            except (OSError, ValueError) as error:
                raise TierError(f"the memory file cannot be read: {error}") from error
            data = np.frombuffer(memory, dtype=np.uint8)
            self._data = data if self._keeps_map else None
        return data

    def unmap(self) -> None:
        """Map the file only while `data` is in use from now on: a map takes a file descriptor of its own."""
        self._keeps_map = False
        self._data = None

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


class MemoryFile:
    """A memory file that is being written: `data`, u8 `[nbytes]`, until it is sealed."""

    def __init__(self, nbytes: int) -> None:
        """Raises `TierFull` if there is no memory, or no file descriptor, for it."""
        fd = _new_file(nbytes)
        try:
            self._memory = mmap.mmap(fd, nbytes)
        except (OSError, ValueError) as error:
            os.close(fd)
            raise TierFull(f"no memory for a record of {nbytes} bytes: {error}") from error
        self._fd = fd  # only now: else `__del__` would close it once more
        self.data: Bytes = np.frombuffer(self._memory, dtype=np.uint8)

    def seal(self) -> SharedRecord:
        """End writing; `data` is gone. Raises `TierError` if another view of it is still in use."""
        nbytes = int(self.data.nbytes)
        del self.data
        try:
            self._memory.close()
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, SEALS)
        except (BufferError, OSError) as error:
            raise TierError(f"a memory file cannot be sealed: {error}") from error
        fd, self._fd = self._fd, -1
        return SharedRecord(fd, nbytes)

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            os.close(self._fd)


def shared(data: Bytes) -> SharedRecord:
    """Copy bytes into a sealed memory file. Raises `TierError`, `TierFull`."""
    made = MemoryFile(data.nbytes)
    made.data[:] = data
    return made.seal()


ROOM_BYTES_MAX = 1 << 30
ROOM_SEALS = fcntl.F_SEAL_SHRINK  # else what the node writes there could end it


class Room:
    """Memory that a client lends a node for records that it reads, again and again. `data`: u8, whole pages.

    A memory file of the client's that both map: its pages are made once, not for each record. `is_lost`: a
    call has failed that it was lent for; a node may still write there.
    """

    is_lost = False

    def __init__(self, fd: int) -> None:
        """Take over `fd`. Raises `TierError`, and closes it, if it is no memory file that cannot shrink."""
        with _taking_over(fd, ROOM_SEALS):
            nbytes = os.fstat(fd).st_size
            if not 0 < nbytes <= ROOM_BYTES_MAX or nbytes % mmap.PAGESIZE:
                raise TierError(f"room of {nbytes} bytes")
            self._memory = mmap.mmap(fd, nbytes)
        self.fd = fd
        self.data: Bytes = np.frombuffer(self._memory, dtype=np.uint8)

    @staticmethod
    def made(nbytes: int) -> Room:
        """Return new room for `nbytes` bytes. Raises `TierError`."""
        fd = _new_file(-(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, ROOM_SEALS | fcntl.F_SEAL_GROW)
        return Room(fd)

    def __del__(self) -> None:
        if getattr(self, "fd", -1) >= 0:
            os.close(self.fd)


FILES_SHARE = 0.5
"""Part of this process' file descriptors that records may take: connections and disks need some, too."""


class SharedTier(RamTier[SharedRecord]):
    """Holds records in sealed memory files. One that comes as such is taken over without a copy.

    `files_max`: of records, each of which is a file; None: what this process may open leaves as many.
    """

    def __init__(self, bytes_max: int, files_max: int | None = None) -> None:
        super().__init__(bytes_max)
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._files_max = int(soft * FILES_SHARE) if files_max is None else files_max

    def put(self, address: Address, record: Record, *, deadline: Deadline) -> None:
        if len(self._records) >= self._files_max and address not in self._records:
            raise TierFull(f"{self._files_max} files are open")
        if not self._reserve(address, record.nbytes):
            return
        held = None
        try:
            held = record.owned if isinstance(record.owned, SharedRecord) else shared(record.data)
            held.unmap()
        finally:
            self._hold(address, held, record.nbytes)

    def read(self, address: Address, start: int, nbytes: int, *, deadline: Deadline) -> Bytes:
        data = self._find(address).data
        if data.nbytes < start + nbytes:
            raise BadRecord("truncated", f"{data.nbytes} bytes, {start + nbytes} were wanted")
        return data[start : start + nbytes]

    def ref(self, address: Address) -> object:
        """Return the `SharedRecord`, to hand out. Raises `TierMiss`."""
        return self._find(address)

    def probe(self) -> None:
        try:
            shared(np.zeros(1, dtype=np.uint8))
        except TierFull as error:
            if isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EMFILE:
                return  # full, not broken
            raise


@dataclass(frozen=True, slots=True)
class RayObject:
    """An object of Ray's store: `ref` of a u8 array."""

    ref: Any
    nbytes: int


class ObjectStoreTier(RamTier[RayObject]):
    """Holds records in Ray's object store, within `bytes_max` bytes, so that Ray never has to spill.

    Each record is one object owned by the tier actor, because a Ray object dies with the process that put it
    or called for it: these die with the tier actor, which is a miss for all, and not with a replica. Any
    process of the node reads them without a copy. Objects are shared with nothing else, so the tier's bytes
    are what it takes up of the store.
    """

    def put(self, address: Address, record: Record, *, deadline: Deadline) -> None:
        if not self._reserve(address, record.nbytes):
            return
        import ray  # here, as `HeapTier` is for where there is none
        from ray.exceptions import ObjectStoreFullError, OutOfDiskError, RayError

        # What a client of the socket has brought is no object of Ray's.
        ref = None if isinstance(record.owned, SharedRecord) else record.owned
        try:
            if ref is None:
                ref = ray.put(record.data)
        except (ObjectStoreFullError, OutOfDiskError) as error:
            raise TierFull(f"the object store is full ({type(error).__name__})") from None
        except RayError as error:
            raise TierError(f"{type(error).__name__} at a put") from error
        finally:
            self._hold(address, None if ref is None else RayObject(ref, record.nbytes), record.nbytes)

    def read(self, address: Address, start: int, nbytes: int, *, deadline: Deadline) -> Bytes:
        """Return a view into the object store, without a copy; it keeps the object alive."""
        held = self._find(address)
        data = _get(held.ref, deadline)
        if data is None:
            self.delete(address)
            raise TierMiss("lost with its owner")
        if data.nbytes != held.nbytes or data.nbytes < start + nbytes:
            kind = "oversized" if data.nbytes > held.nbytes else "truncated"
            raise BadRecord(kind, f"{data.nbytes} bytes of a record of {held.nbytes}, up to {start + nbytes}")
        return data[start : start + nbytes]

    def ref(self, address: Address) -> object:
        """Return the whole record as an object to hand out. Raises `TierMiss`."""
        return self._find(address).ref

    def probe(self) -> None:
        sample = np.zeros(1, dtype=np.uint8)
        self.put(PROBE_ADDRESS, Record(sample), deadline=Deadline(PROBE_S_MAX))
        try:
            self.read(PROBE_ADDRESS, 0, 1, deadline=Deadline(PROBE_S_MAX))
        except BadRecord as error:
            raise TierError(f"read back something else: {error}") from error
        finally:
            self.delete(PROBE_ADDRESS)


def _get(ref: Any, deadline: Deadline) -> Bytes | None:
    """Return the object's array, or None if it is lost for good. Raises `TierError`."""
    import ray
    from ray.exceptions import GetTimeoutError, ObjectLostError, RayError

    try:
        data: Bytes = ray.get(ref, timeout=deadline.left_s())
    except ObjectLostError:  # its owner died, or the node lost it
        return None
    except GetTimeoutError:
        raise TierError(f"not read within {deadline.seconds:.3f} s") from None
    except RayError as error:
        raise TierError(f"{type(error).__name__} at a read") from error
    return data
