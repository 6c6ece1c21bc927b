"""The `cpu` tier where there is no Ray: records as arrays of this process, for tests and simulations.

Takes a record over as it is, without a copy: nobody writes to a sealed record again. Nothing survives
the process. Thread-safe.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

from cache_tiers.extent import Address, Bytes, TierName
from cache_tiers.tier import BadRecord, Record, Scanned, Tier, TierFull, TierMiss


class HeapTier(Tier):
    """At most `bytes_max` bytes of records."""

    name: TierName = "cpu"

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._lock = threading.Lock()
        self._records: dict[Address, Bytes] = {}
        self._nbytes = 0

    def put(self, address: Address, record: Record, *, deadline_s: float) -> None:
        data = record.data.view()
        data.flags.writeable = False
        with self._lock:
            if address in self._records:
                return
            if self._nbytes + record.nbytes > self._bytes_max:
                raise TierFull(f"{self._nbytes} of {self._bytes_max} bytes are taken")
            self._records[address] = data
            self._nbytes += record.nbytes

    def read(self, address: Address, start: int, nbytes: int, *, deadline_s: float) -> Bytes:
        with self._lock:
            data = self._records.get(address)
        if data is None:
            raise TierMiss("not there")
        if data.nbytes < start + nbytes:
            raise BadRecord("truncated", f"{data.nbytes} bytes, {start + nbytes} were wanted")
        return data[start : start + nbytes]

    def delete(self, address: Address) -> None:
        with self._lock:
            data = self._records.pop(address, None)
            self._nbytes -= data.nbytes if data is not None else 0

    def quarantine(self, address: Address) -> None:
        """The same as `delete`: nobody could look at it later."""
        self.delete(address)

    def scan(self) -> Iterator[Scanned]:
        """Nothing: whatever was here went with the process before."""
        return iter(())

    def touch(self, address: Address) -> None:
        pass

    def bytes_held(self) -> int:
        return self._nbytes

    def probe(self) -> None:
        pass

    def close(self) -> None:
        with self._lock:
            self._records.clear()
            self._nbytes = 0
