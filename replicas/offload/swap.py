"""Keeps blocks of preempted sequences in this process until they run again.

Sealed and verified like every record: all bytes leave a page and come back the same way. Bounded: a sequence
that finds no room loses its blocks and computes them again.
"""

from __future__ import annotations

from collections.abc import Sequence as Listing
from dataclasses import dataclass
from typing import Any

from cache_tiers.blocks import ROOT, TAG_BYTES, BadRecord, BlockShape, Bytes, Placement, record_bytes
from replicas.kv import PageIo
from replicas.offload.block_runs import StoreRun
from replicas.offload.load import Expected, LoadedBlocks, unpack
from replicas.offload.store import Origin, sealed_record
from replicas.scheduling import Sequence

_NOWHERE = Placement(first="cpu", write_behind=(), lowest="cpu")


@dataclass(frozen=True, slots=True)
class SwappedBlocks:
    """Verified blocks from the requested one on; `tokens`: their end, from the sequence's beginning."""

    loaded: LoadedBlocks
    tokens: int


class SwapSpace:
    """Holds at most `bytes_max` bytes of records, one per sequence. For the engine's thread."""

    def __init__(self, bytes_max: int, shape: BlockShape, io: PageIo) -> None:
        self._bytes_max = bytes_max
        self._shape = shape
        self._io = io
        self._records: dict[Sequence, tuple[StoreRun, Bytes]] = {}
        self._nbytes = 0

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def holds(self, sequence: Sequence) -> bool:
        return sequence in self._records

    def room_for(self, blocks: int) -> bool:
        return self._nbytes + record_bytes(blocks, self._shape) <= self._bytes_max

    def put(self, sequence: Sequence, run: StoreRun, pages: Listing[int], mark: Any) -> bool:
        """Copy the blocks of `run` out of `pages` before returning. False if there is no room."""
        self.drop(sequence)
        if not self.room_for(len(run.keys)):
            return False
        origin = Origin(
            sequence.namespace, sequence.owner[:TAG_BYTES], sequence.owner[TAG_BYTES:], _NOWHERE, "", 0, 0.0
        )
        try:
            record, _ = sealed_record(run, ROOT, pages, origin, self._shape, self._io, mark)
        except MemoryError:  # memory can run out below our own limit
            return False
        self._records[sequence] = (run, record)
        self._nbytes += record.nbytes
        return True

    def take(self, sequence: Sequence, first_block: int) -> SwappedBlocks | None:
        """Remove and return the blocks from `first_block` on; None if there are none."""
        run, record = self._records[sequence]
        self.drop(sequence)
        keys, counts = run.keys[first_block:], run.token_counts[first_block:]
        if not keys:
            return None
        expected = Expected(sequence.namespace, self._shape, first_block, keys, counts)
        try:
            payload, good = unpack(record, 0, first_block, expected)
        except BadRecord as bad:
            return SwappedBlocks(LoadedBlocks(record[:0], 0, 0.0, bad.kind), run.tokens)
        return SwappedBlocks(
            LoadedBlocks(payload, good, 0.0, None if good == len(keys) else "checksum"), run.tokens
        )

    def drop(self, sequence: Sequence) -> None:
        """Forget a sequence's blocks, if there are any."""
        if sequence in self._records:
            self._nbytes -= self._records.pop(sequence)[1].nbytes

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is wrong."""
        held = sum(record.nbytes for _, record in self._records.values())
        assert held == self._nbytes, f"{self._nbytes} swapped bytes accounted, {held} held"
        assert self._nbytes <= self._bytes_max, "more is swapped out than there is room for"
