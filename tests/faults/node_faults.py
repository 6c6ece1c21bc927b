"""Faults for tests of the node."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from cache_tiers.codec import decode_header
from cache_tiers.extent import Address, Bytes, TierName
from cache_tiers.faults import FaultyTier
from cache_tiers.heap_tier import HeapTier
from cache_tiers.tier import Record, Scanned, Tier
from configs.tier_settings import FaultSettings

FAILING = FaultSettings(error_rate=1.0)
FULL = FaultSettings(full_rate=1.0)
HANGING = FaultSettings(hang_rate=1.0, hang_s=600.0)


def faulty(tier: Tier, settings: FaultSettings | None = None) -> FaultyTier:
    return FaultyTier(tier, settings or FaultSettings())


class MemoryTier(HeapTier):
    """A lower tier in memory that outlives its node, as a bucket or a disk does: `scan` finds what it has.

    `gate`: reads and writes wait until it is set, to make them late on purpose.
    """

    def __init__(self, name: TierName, bytes_max: int) -> None:
        super().__init__(bytes_max)
        self.name = name
        self.gate = threading.Event()
        self.gate.set()
        self.waiting = threading.Semaphore(0)

    def put(self, address: Address, record: Record, *, deadline_s: float) -> None:
        self._pass()
        super().put(address, record, deadline_s=deadline_s)

    def read(self, address: Address, start: int, nbytes: int, *, deadline_s: float) -> Bytes:
        self._pass()
        return super().read(address, start, nbytes, deadline_s=deadline_s)

    def scan(self) -> Iterator[Scanned]:
        for data in list(self._records.values()):
            yield Scanned(decode_header(data), data.nbytes, 1.0)

    def spoil(self, address: Address) -> None:
        """One bit of the payload rots."""
        data = self._records[address].copy()
        data[-1] ^= 1
        self._records[address] = data

    def close(self) -> None:
        """Keeps what it has."""

    def _pass(self) -> None:
        if not self.gate.is_set():
            self.waiting.release()
            self.gate.wait()
