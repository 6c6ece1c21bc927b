"""What a tier of files takes up: its files, the quarantine, what is still to be removed, what is reserved.

Pure bookkeeping in bytes of room on the medium; it touches no file. Not thread-safe: the tier's
lock guards it.
"""

from __future__ import annotations

from cache_tiers.extent import Address
from cache_tiers.files import FileSize
from cache_tiers.tier import TierFull


class NvmeLedger:
    """`held` bytes of `bytes_max`; of those at most `quarantine_bytes_max` of bad records."""

    def __init__(self, bytes_max: int, quarantine_bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.quarantine_bytes_max = quarantine_bytes_max
        self.files: dict[Address, FileSize] = {}
        self.bad: dict[str, int] = {}  # path -> bytes, the oldest first
        self.litter: dict[str, int] = {}  # path -> bytes: to be removed, still counted
        self.held = 0
        self.reserved = 0

    def reserve(self, nbytes: int) -> None:
        """Set room aside for a file; quarantined records yield to it. Raises `TierFull`."""
        lacking = self.held + self.reserved + nbytes - self.bytes_max
        if lacking > sum(self.bad.values()):
            raise TierFull(
                f"{self.held + self.reserved} of {self.bytes_max} bytes are taken, {nbytes} wanted"
            )
        self.drop_bad(lacking)
        self.reserved += nbytes

    def release(self, nbytes: int) -> None:
        """The reservation ends; what was written is in `add` by now."""
        self.reserved -= nbytes

    def add(self, address: Address, size: FileSize) -> None:
        """A file is there; it took the place of any before it."""
        self.forget(address)
        self.files[address] = size
        self.held += size.nbytes

    def forget(self, address: Address) -> FileSize | None:
        """A file is gone."""
        size = self.files.pop(address, None)
        self.held -= size.nbytes if size else 0
        return size

    def add_bad(self, path: str, nbytes: int) -> None:
        """A bad record is kept, for which older ones may have to go, or itself if it is too large."""
        self.forget_path(path)
        self.bad[path] = nbytes
        self.held += nbytes
        self.drop_bad(sum(self.bad.values()) - self.quarantine_bytes_max)

    def drop_bad(self, nbytes: int) -> None:
        """The oldest bad records that take `nbytes` together become litter; all, if they take less."""
        for path in list(self.bad):
            if nbytes <= 0:
                break
            self.litter[path] = self.bad.pop(path)
            nbytes -= self.litter[path]

    def add_litter(self, path: str, nbytes: int) -> None:
        """A file that nobody wants is still there."""
        self.forget_path(path)
        self.litter[path] = nbytes
        self.held += nbytes

    def forget_path(self, path: str) -> int:
        """A bad record or litter is gone; the bytes it took."""
        nbytes = self.bad.pop(path, 0) + self.litter.pop(path, 0)
        self.held -= nbytes
        return nbytes

    def check_integrity(self) -> None:
        """Raises `AssertionError` naming what is wrong."""
        total = sum(size.nbytes for size in self.files.values())
        total += sum(self.bad.values()) + sum(self.litter.values())
        assert self.held == total, f"{self.held} bytes held, but the files take {total}"
        assert self.reserved >= 0, f"{self.reserved} bytes reserved"
        assert not self.bad.keys() & self.litter.keys(), "a path is both quarantined and litter"
        kept = sum(self.bad.values())
        assert kept <= self.quarantine_bytes_max, f"{kept} bytes quarantined of {self.quarantine_bytes_max}"
