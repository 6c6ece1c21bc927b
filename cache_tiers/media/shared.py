"""The `cpu` tier of a node without Ray: records in sealed memory files, which other processes map."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os

import numpy as np

from cache_tiers.blocks import Address, BadRecord, Bytes, Record, TierError, TierFull
from cache_tiers.media.memory import RamTier
from cache_tiers.media.tier import Deadline

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
"""With these nobody can change a file any more: what was verified stays so, and no reader gets a SIGBUS."""


class SharedRecord:
    """A record in a sealed memory file. `fd`: open as long as this is; `data`: u8 `[nbytes]`, read-only."""

    def __init__(self, fd: int, nbytes: int) -> None:
        """Take over `fd`. Raises `TierError`, and closes it, if it is no sealed file of `nbytes` bytes."""
        self.fd = -1
        try:
            if nbytes < 1 or os.fstat(fd).st_size != nbytes:
                raise TierError(f"the memory file has not {nbytes} bytes")
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS:
                raise TierError("the memory file is not sealed")
            # Private: before Linux 6.7 a file that is sealed against writing cannot be mapped shared.
            self._memory = mmap.mmap(fd, nbytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
        except (OSError, ValueError) as error:
            os.close(fd)
            raise TierError(f"not a memory file: {error}") from error
        except TierError:
            os.close(fd)
            raise
        self.fd = fd
        self.data: Bytes = np.frombuffer(self._memory, dtype=np.uint8)

    @property
    def nbytes(self) -> int:
        return int(self.data.nbytes)

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


class MemoryFile:
    """A memory file that is being written: `data`, u8 `[nbytes]`, until it is sealed."""

    def __init__(self, nbytes: int) -> None:
        """Raises `TierFull` if there is no memory, or no file descriptor, for it."""
        try:
            self._fd = os.memfd_create("samovar-record", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise TierFull(f"no memory file: {error}") from error
        try:
            os.ftruncate(self._fd, nbytes)
            self._memory = mmap.mmap(self._fd, nbytes)
        except (OSError, ValueError) as error:
            os.close(self._fd)
            raise TierFull(f"no memory for a record of {nbytes} bytes: {error}") from error
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


class SharedTier(RamTier[SharedRecord]):
    """Holds records in sealed memory files. One that comes as such is taken over without a copy."""

    def put(self, address: Address, record: Record, *, deadline: Deadline) -> None:
        if not self._reserve(address, record.nbytes):
            return
        held = None
        try:
            held = record.owned if isinstance(record.owned, SharedRecord) else shared(record.data)
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
