"""Faults for tests of the node."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from samovar.cache_tiers.blocks.extent import Address, Bytes, Clear
from samovar.cache_tiers.blocks.record import Record, TierError, decode_header
from samovar.cache_tiers.blocks.tiers import TierName
from samovar.cache_tiers.media.faults import FaultyTier
from samovar.cache_tiers.media.memory import HeapTier
from samovar.cache_tiers.media.tier import Deadline, Scanned, Tier
from samovar.configs.sections import FaultSettings

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

    def put(self, address: Address, record: Record, *, deadline: Deadline) -> None:
        self._pass()
        super().put(address, record, deadline=deadline)

    def read(self, address: Address, start: int, nbytes: int, *, deadline: Deadline) -> Bytes:
        self._pass()
        return super().read(address, start, nbytes, deadline=deadline)

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


class SharedBucket(MemoryTier):
    """One node's way to a bucket: records, when each was put there, and marks of clears with their times.

    `headers`: that looks through it read. `down`: it answers nothing. `other`: an ingress to the same bucket.
    """

    def __init__(self, bytes_max: int, other: SharedBucket | None = None) -> None:
        super().__init__("s3", bytes_max)
        self.headers = 0
        self.down = False
        self.is_shared = True
        self.heed: Callable[[Sequence[Clear]], None] = lambda clears: None
        self.state = other.state if other is not None else BucketState(self._records)
        self._records = self.state.records

    def bytes_held(self) -> int:
        return sum(data.nbytes for data in self._records.values())

    def put(self, address: Address, record: Record, *, deadline: Deadline) -> None:
        self._ask()
        is_new = address not in self._records
        super().put(address, record, deadline=deadline)
        if is_new:
            self.state.put_at[address] = self.state.next()

    def delete(self, address: Address, unused_s: float = 0.0) -> None:
        """As if no node had used it."""
        self._ask()
        super().delete(address)

    def probe(self) -> None:
        self._ask()

    def on_marks(self, heed: Callable[[Sequence[Clear]], None]) -> None:
        self.heed = heed

    def scan(self) -> Iterator[Scanned]:
        return self.rescan(lambda address: False)

    def rescan(self, is_known: Callable[[Address], bool]) -> Iterator[Scanned]:
        self._ask()
        there = list(self._records.items())
        self.heed(list(self.state.marks))
        for address, data in there:
            if not is_known(address):
                self.headers += 1
                header = decode_header(data)
                is_cleared = self._is_cleared(address, header.session)
                yield Scanned(header, data.nbytes, 1.0, is_cleared=is_cleared)

    def is_marked(self, address: Address, session: bytes, deadline: Deadline) -> bool:
        self._ask()
        return self._is_cleared(address, session)

    def _is_cleared(self, address: Address, session: bytes) -> bool:
        marks = self.state.marks
        times = (marks.get(Clear(address.tenant, one), 0) for one in (None, session))
        return self.state.put_at[address] <= max(times)

    def mark_cleared(self, clears: Sequence[Clear], deadline: Deadline) -> None:
        self._ask()
        for clear in clears:
            self.state.marks[clear] = self.state.next()

    def purge(self, tenant: bytes, is_known: Callable[[Address], bool], deadline: Deadline) -> bool:
        self._ask()
        at = self.state.marks.get(Clear(tenant), 0)
        for address in list(self._records):
            if address.tenant == tenant and self.state.put_at[address] <= at and not is_known(address):
                del self._records[address]
        return True

    def settle(self) -> None:
        """Marks stay for ever."""

    def _ask(self) -> None:
        if self.down:
            raise TierError("the bucket does not answer")


@dataclass
class BucketState:
    """What all ingresses of a bucket see."""

    records: dict[Address, Bytes]
    put_at: dict[Address, int] = field(default_factory=dict)
    marks: dict[Clear, int] = field(default_factory=dict)
    clock: int = 0

    def next(self) -> int:
        self.clock += 1
        return self.clock
