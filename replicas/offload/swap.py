"""Keeps blocks of preempted sequences in this process until they run again.

Sealed and verified like every record: all bytes leave a page and come back the same way. Bounded: a sequence
that finds no room loses its blocks and computes them again.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Listing
from dataclasses import dataclass

from samovar.cache_tiers.blocks import (
    ROOT,
    TAG_BYTES,
    TOP_TIER,
    BadRecord,
    BlockShape,
    Bytes,
    Placement,
    record_bytes,
)
from samovar.cache_tiers.pricing import TierMeter, TierPrice
from samovar.replicas.kv import CopyEvent, PageIo
from samovar.replicas.offload.load import Expected, LoadedBlocks, unpack
from samovar.replicas.offload.store import Origin, StoreRun, sealed_record
from samovar.replicas.scheduling import Sequence

_NOWHERE = Placement(first=TOP_TIER, write_behind=(), lowest=TOP_TIER)


def swap_record(
    sequence: Sequence,
    run: StoreRun,
    pages: Listing[int],
    shape: BlockShape,
    io: PageIo,
    written: CopyEvent,
    copied: Callable[[], None] = lambda: None,
) -> Bytes:
    """Return the sealed record of the blocks of `run`, copied out of `pages`. For a worker thread.

    `copied` is called when the pages are not needed any more.
    """
    tags = sequence.owner[:TAG_BYTES], sequence.owner[TAG_BYTES:]
    origin = Origin(sequence.namespace, tags[0], tags[1], _NOWHERE, "", 0, 0.0)
    return sealed_record(run, ROOT, pages, origin, shape, io, written, copied)[0]


def check_swapped(
    sequence: Sequence, run: StoreRun, record: Bytes, first_block: int, shape: BlockShape
) -> LoadedBlocks:
    """Return the verified blocks of a record from `first_block` on. For a worker thread."""
    keys, counts = run.keys[first_block:], run.token_counts[first_block:]
    expected = Expected(sequence.namespace, shape, first_block, keys, counts)
    try:
        payload, good = unpack(record, 0, first_block, expected)
    except BadRecord as bad:
        return LoadedBlocks(record[:0], 0, 0.0, bad.kind)
    return LoadedBlocks(payload, good, 0.0, None if good == len(keys) else "checksum")


@dataclass(slots=True, eq=False)
class SwappedBlocks:
    """The blocks of one sequence, `nbytes` as a record. `record`: None while they are being copied."""

    run: StoreRun
    nbytes: int
    record: Bytes | None = None


class SwapSpace:
    """Holds at most `bytes_max` bytes of records, one per sequence. For the engine's thread.

    `meter`: learns what one direction takes, checksums included.
    """

    def __init__(self, bytes_max: int, shape: BlockShape, meter: TierMeter) -> None:
        self.meter = meter
        self.bytes_max = bytes_max
        self._shape = shape
        self._swapped: dict[Sequence, SwappedBlocks] = {}
        self._nbytes = 0

    @property
    def nbytes(self) -> int:
        return self._nbytes

    @property
    def has_room(self) -> bool:
        """Whether it can hold anything."""
        return record_bytes(1, self._shape) <= self.bytes_max

    def price(self) -> TierPrice:
        """Return the price of one direction; it is not up where there is no room."""
        return self.meter.price(self.has_room)

    def get(self, sequence: Sequence) -> SwappedBlocks | None:
        return self._swapped.get(sequence)

    def reserve(self, sequence: Sequence, run: StoreRun) -> SwappedBlocks | None:
        """Make room for the blocks of `run`, in place of those that were held. None: there is not enough."""
        self.drop(sequence)
        nbytes = record_bytes(len(run.keys), self._shape)
        if self._nbytes + nbytes > self.bytes_max:
            return None
        swapped = self._swapped[sequence] = SwappedBlocks(run, nbytes)
        self._nbytes += nbytes
        return swapped

    def drop(self, sequence: Sequence) -> None:
        """Forget a sequence's blocks, if there are any."""
        if sequence in self._swapped:
            self._nbytes -= self._swapped.pop(sequence).nbytes

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is wrong."""
        held = sum(swapped.nbytes for swapped in self._swapped.values())
        assert held == self._nbytes, f"{self._nbytes} swapped bytes accounted, {held} held"
        assert self._nbytes <= self.bytes_max, "more is swapped out than there is room for"
        for swapped in self._swapped.values():
            assert swapped.record is None or swapped.record.nbytes == swapped.nbytes, (
                "a record of another size"
            )
