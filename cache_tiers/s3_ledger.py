"""What the S3 tier holds, by what it did and by the last listing: bytes, quarantine, deletes it owes.

Always at least what is there: bytes are entered before they are sent and struck out after the delete.
Pure, one user at a time.
"""

from __future__ import annotations

from collections.abc import Mapping

from cache_tiers.extent import Address
from cache_tiers.tier import TierError, TierFull

OWED_MAX = 1024
"""Deletes that are remembered for later; what is more, the next scan finds."""


class S3Ledger:
    """Accounts of one bucket prefix, up to `bytes_max`."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._sizes: dict[Address, int] = {}
        self._sizes_bytes = 0
        self._bad: dict[Address, int] = {}
        self._unindexed_bytes = 0
        self._is_listed = False
        self._changed: set[Address] | None = None  # since the listing began that is under way
        self._owed: dict[Address, None] = {}

    @property
    def bytes_held(self) -> int:
        """Records, quarantine, and what no scan has indexed. Raises `TierError` before the first listing."""
        if not self._is_listed:
            raise TierError("the bucket has not been listed yet")
        return self._bytes

    @property
    def owed(self) -> tuple[Address, ...]:
        """Records that may be there but must not, oldest first: their delete failed."""
        return tuple(self._owed)

    @property
    def bad_count(self) -> int:
        """Objects in quarantine."""
        return len(self._bad)

    def bad_of(self, tenant: bytes) -> list[Address]:
        """Whose bad records are kept for a look."""
        return [address for address in self._bad if address.tenant == tenant]

    def size_of(self, address: Address) -> int | None:
        """The record's size, where it is known."""
        return self._sizes.get(address)

    def reserve(self, address: Address, nbytes: int) -> int | None:
        """Enter a record before it is written; the size it had before. Raises `TierFull`."""
        before = self._sizes.get(address)
        if self._bytes - (before or 0) + nbytes > self._bytes_max:
            raise TierFull(f"{nbytes} bytes more than {self._bytes} of {self._bytes_max}")
        self.set(address, nbytes)
        return before

    def set(self, address: Address, nbytes: int | None) -> None:
        """The record has this size now; None: it is gone."""
        self._sizes_bytes -= self._sizes.pop(address, 0)
        if nbytes is not None:
            self._sizes[address] = nbytes
            self._sizes_bytes += nbytes
        if self._changed is not None:
            self._changed.add(address)

    def owe(self, address: Address) -> None:
        """Its delete failed: it counts, and is to be deleted when the tier works again."""
        self._owed[address] = None
        if len(self._owed) > OWED_MAX:
            del self._owed[next(iter(self._owed))]

    def settle(self, address: Address) -> None:
        """Nothing is owed of this one any more: it was deleted, or is wanted again."""
        self._owed.pop(address, None)

    def set_bad(self, address: Address, nbytes: int | None) -> None:
        """A copy of this size is kept for a look; None: it is not."""
        self._bad.pop(address, None)
        if nbytes is not None:
            self._bad[address] = nbytes

    def begin_listing(self) -> None:
        """What is entered from here on is newer than the listing."""
        self._changed = set()

    def end_listing(
        self, listed: Mapping[Address, int], unindexed_bytes: int, bad: Mapping[Address, int]
    ) -> None:
        """Everything that lay there, but for what changed meanwhile, which is known better."""
        changed = self._changed or set()
        self._changed = None
        known = {address: size for address, size in self._sizes.items() if address in changed}
        self._sizes = {address: size for address, size in listed.items() if address not in changed} | known
        self._sizes_bytes = sum(self._sizes.values())
        self._unindexed_bytes = unindexed_bytes
        self._bad = dict(bad)
        self._is_listed = True

    def check_integrity(self) -> None:
        """Raises `AssertionError` naming the account that is wrong."""
        assert self._sizes_bytes == sum(self._sizes.values()), f"{self._sizes_bytes} bytes accounted"
        assert all(size >= 0 for size in self._sizes.values()), "a record of less than no bytes"
        assert len(self._owed) <= OWED_MAX, f"{len(self._owed)} deletes owed"

    @property
    def _bytes(self) -> int:
        return self._sizes_bytes + self._unindexed_bytes + sum(self._bad.values())
