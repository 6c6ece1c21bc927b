"""Moves blocks between the pool's pages and host memory, beside computing.

Each way has a stream of its own. A move out waits for the event behind the kernels that wrote its pages (G6
in docs/guarantees.md), a move in for the last step that could still read them; no thread and no other stream
waits for a move. Host memory that the device reaches is copied from and to directly, one copy for each run of
adjacent pages. Other memory goes through two halves of staging memory: while the device copies one, the
calling thread fills or empties the other.

The pages of a move belong to it until its ticket is done; `replicas/offload/load.py` sees to that.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from samovar.cache_tiers.blocks import Bytes
from samovar.configs.sections import MIB
from samovar.replicas.kv.copy_device import DONE, CopyDevice, CopyEvent, HostDevice, Told
from samovar.replicas.kv.cuda_device import CudaDevice
from samovar.replicas.kv.kv_pool import KvGeometry, KvPool
from samovar.replicas.kv.registered import RegisteredMemory

STAGING_BYTES = 16 * MIB
"""Size of each half of the staging memory, of which there are two each way; at least one block."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """A move under way. Keeps its host memory alive."""

    event: CopyEvent
    host: Bytes

    def done(self) -> bool:
        """Return whether the bytes are where they are to be. Raises what the device reports."""
        return self.event.is_done()

    def wait(self) -> None:
        """Block the calling thread until it is done. Raises what the device reports."""
        self.event.wait()

    def then(self, told: Told) -> None:
        """Call `told` once it is done, on any thread, perhaps before this returns."""

        def over(failure: BaseException | None, _alive: Ticket = self) -> None:
            told(failure)

        self.event.then(over)


@dataclass(frozen=True, slots=True)
class PageRun:
    """Adjacent pages `[page, page + count)`, of the blocks from `block` on."""

    block: int
    page: int
    count: int


def page_runs(pages: Sequence[int]) -> Iterator[PageRun]:
    """Yield the runs of adjacent pages, in their order."""
    first = 0
    for block in range(1, len(pages) + 1):
        if block == len(pages) or pages[block] != pages[block - 1] + 1:
            yield PageRun(first, pages[first], block - first)
            first = block


class PageIo:
    """Moves whole blocks into and out of the pages of `device`.

    `mark` is for the thread that computes; `begin_out` and `begin_in` are for worker threads: they may copy,
    and wait for staging memory. If one raises, nothing of its move is under way any more.
    """

    def __init__(self, device: CopyDevice, geometry: KvGeometry, staging_bytes: int = STAGING_BYTES) -> None:
        self.geometry = geometry
        self._device = device
        self._block_bytes = geometry.block_bytes
        self._out = device.stream()
        self._in = device.stream()
        half_blocks = max(1, staging_bytes // geometry.block_bytes)
        self._out_staging = _Staging(device, half_blocks, geometry.block_bytes)
        self._in_staging = _Staging(device, half_blocks, geometry.block_bytes)

    def mark(self) -> CopyEvent:
        """Return the event behind everything computed so far."""
        return self._device.mark()

    def adopt(self, host: Bytes) -> bool:
        """Let the device reach `host` itself, which stays where it is until `close`. False: it cannot."""
        return self._device.adopt(host)

    def empty(self, nbytes: int) -> Bytes:
        """Return memory for a record, if possible such as the device reaches."""
        return self._device.empty(nbytes)

    def begin_out(self, pages: Sequence[int], out: Bytes, written: CopyEvent) -> Ticket:
        """Fill `out`, u8 `[pages * block_bytes]`, with what the pages hold after `written`.

        The pages must not change until the ticket is done.
        """
        try:
            if self._device.reaches(out):
                return self._copy_out(pages, out, written)
            return self._stage_out(pages, out, written)
        except BaseException:
            self._out.mark().wait()
            raise

    def begin_in(self, payload: Bytes, pages: Sequence[int], read: CopyEvent) -> Ticket:
        """Write `payload`, u8 `[pages * block_bytes]`, into the pages, after `read`.

        Nothing that is computed after `read` may use the pages until the ticket is done, and `payload` must
        not change.
        """
        try:
            if self._device.reaches(payload):
                return self._copy_in(payload, pages, read)
            return self._stage_in(payload, pages, read)
        except BaseException:
            self._in.mark().wait()
            raise

    def close(self) -> None:
        """Wait for the moves under way, and give registered memory back."""
        self._out.mark().wait()
        self._in.mark().wait()
        self._device.close()

    def _copy_out(self, pages: Sequence[int], out: Bytes, written: CopyEvent) -> Ticket:
        self._out.wait_for(written)
        for run in page_runs(pages):
            self._out.copy_out(run.page, self._part(out, run.block, run.count))
        return Ticket(self._out.mark(), out)

    def _copy_in(self, payload: Bytes, pages: Sequence[int], read: CopyEvent) -> Ticket:
        self._in.wait_for(read)
        for run in page_runs(pages):
            self._in.copy_in(self._part(payload, run.block, run.count), run.page)
        return Ticket(self._in.mark(), payload)

    def _stage_out(self, pages: Sequence[int], out: Bytes, written: CopyEvent) -> Ticket:
        full: deque[tuple[int, int, _Half]] = deque()  # first block, blocks, where they are staged

        def empty_oldest() -> None:
            first, count, half = full.popleft()
            half.event.wait()
            np.copyto(self._part(out, first, count), self._part(half.memory, 0, count))

        with self._out_staging.lock:
            self._out.wait_for(written)
            for first, some in self._out_staging.portions(pages):
                if len(full) == HALVES:
                    empty_oldest()
                half = self._out_staging.next()
                for run in page_runs(some):
                    self._out.copy_out(run.page, self._part(half.memory, run.block, run.count))
                half.event = self._out.mark()
                full.append((first, len(some), half))
            while full:
                empty_oldest()
        return Ticket(DONE, out)

    def _stage_in(self, payload: Bytes, pages: Sequence[int], read: CopyEvent) -> Ticket:
        with self._in_staging.lock:
            self._in.wait_for(read)
            for first, some in self._in_staging.portions(pages):
                half = self._in_staging.next()
                half.event.wait()  # it may still be copied from, for the move before this
                np.copyto(self._part(half.memory, 0, len(some)), self._part(payload, first, len(some)))
                for run in page_runs(some):
                    self._in.copy_in(self._part(half.memory, run.block, run.count), run.page)
                half.event = self._in.mark()
        return Ticket(self._in.mark(), payload)

    def _part(self, memory: Bytes, block: int, count: int) -> Bytes:
        return memory[block * self._block_bytes : (block + count) * self._block_bytes]


HALVES = 2


@dataclass(slots=True)
class _Half:
    """Staging memory; `event`: behind the last copy from or to it."""

    memory: Bytes
    event: CopyEvent


class _Staging:
    """Halves of staging memory for one stream, in turn. Hold `lock` while using them."""

    def __init__(self, device: CopyDevice, half_blocks: int, block_bytes: int) -> None:
        self.lock = threading.Lock()
        self._device = device
        self._half_blocks = half_blocks
        self._half_bytes = half_blocks * block_bytes
        self._halves: deque[_Half] = deque()  # made when first needed: often the device reaches all memory

    def portions(self, pages: Sequence[int]) -> Iterator[tuple[int, Sequence[int]]]:
        """Split pages into parts that fit in a half; yields the number of the first with each."""
        for first in range(0, len(pages), self._half_blocks):
            yield first, pages[first : first + self._half_blocks]

    def next(self) -> _Half:
        """Return the half whose turn it is; copies may still use it."""
        while len(self._halves) < HALVES:
            self._halves.append(_Half(self._device.staging(self._half_bytes), DONE))
        self._halves.rotate(-1)
        return self._halves[-1]


def page_io(pool: KvPool, arena_bytes: int = 0, registered: RegisteredMemory | None = None) -> PageIo:
    """Return what moves blocks of the pool, on its device.

    Where there is a GPU, `arena_bytes`: of the registered memory for records; `registered`: what else is.
    """
    pages = pool.page_bytes
    if not pages.is_cuda:
        return PageIo(HostDevice(pages.numpy()), pool.geometry)
    return PageIo(CudaDevice(pages, arena_bytes, registered), pool.geometry)
