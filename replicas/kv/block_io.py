"""Copies blocks between the pool's pages and host memory.

On CPU both are host memory: plain copies. On CUDA a copy goes through pinned staging memory on its own
stream; an event of the compute stream orders the kernels that write a page before the copy that reads it (law
L6), and the compute stream waits for copies into pages before the next forward pass.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from cache_tiers.blocks import Bytes
from replicas.kv.kv_pool import KvGeometry, KvPool

STAGING_BLOCKS = 16


class PageIo(ABC):
    """Copies pages of `block_bytes` bytes.

    `mark` and `copy_in` are for the engine's thread, `copy_out` for any. `geometry`: of the pool.
    """

    geometry: KvGeometry

    @abstractmethod
    def mark(self) -> Any:
        """Return a marker after everything computed so far, for `copy_out`."""

    @abstractmethod
    def copy_out(self, pages: Sequence[int], out: Bytes, mark: Any) -> None:
        """Fill `out`, u8 `[pages * block_bytes]`. The pages must not change until this returns."""

    @abstractmethod
    def copy_in(self, payload: Bytes, pages: Sequence[int]) -> None:
        """Write `payload`, u8 `[pages * block_bytes]`, before any later computation."""


def page_io(pool: KvPool) -> PageIo:
    """Return the implementation for the pool's device."""
    return CudaPageIo(pool) if pool.data.is_cuda else HostPageIo(pool)


class HostPageIo(PageIo):
    def __init__(self, pool: KvPool) -> None:
        self.geometry = pool.geometry
        # As bytes: numpy has no bfloat16, and a copy needs none.
        self._pages: Bytes = pool.page_bytes.numpy()

    def mark(self) -> None:
        return None

    def copy_out(self, pages: Sequence[int], out: Bytes, mark: None) -> None:
        blocks = out.reshape(len(pages), -1)
        for block, page in zip(blocks, pages, strict=True):
            np.copyto(block, self._pages[page])

    def copy_in(self, payload: Bytes, pages: Sequence[int]) -> None:
        blocks = payload.reshape(len(pages), -1)
        for block, page in zip(blocks, pages, strict=True):
            np.copyto(self._pages[page], block)


class CudaPageIo(PageIo):
    def __init__(self, pool: KvPool) -> None:
        self.geometry = pool.geometry
        self._pages = pool.page_bytes
        self._device = pool.data.device
        shape = (STAGING_BLOCKS, self._pages.shape[1])
        self._out_staging = torch.empty(shape, dtype=torch.uint8, pin_memory=True)
        self._in_staging = torch.empty(shape, dtype=torch.uint8, pin_memory=True)
        self._out_stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._out_lock = threading.Lock()  # turns are stored and sequences swapped on different threads
        self._in_stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def copy_out(self, pages: Sequence[int], out: Bytes, mark: torch.cuda.Event) -> None:
        with self._out_lock:
            self._copy_out(pages, out.reshape(len(pages), -1), mark)

    def _copy_out(self, pages: Sequence[int], blocks: Bytes, mark: torch.cuda.Event) -> None:
        self._out_stream.wait_event(mark)
        for first in range(0, len(pages), STAGING_BLOCKS):
            some = pages[first : first + STAGING_BLOCKS]
            with torch.cuda.stream(self._out_stream):
                for row, page in enumerate(some):
                    self._out_staging[row].copy_(self._pages[page], non_blocking=True)
            self._out_stream.synchronize()
            np.copyto(blocks[first : first + len(some)], self._out_staging.numpy()[: len(some)])

    def copy_in(self, payload: Bytes, pages: Sequence[int]) -> None:
        blocks = payload.reshape(len(pages), -1)
        # Kernels in flight may still read the page's previous content.
        self._in_stream.wait_stream(torch.cuda.current_stream(self._device))
        for first in range(0, len(pages), STAGING_BLOCKS):
            some = pages[first : first + STAGING_BLOCKS]
            self._in_stream.synchronize()  # the staging memory is free again
            np.copyto(self._in_staging.numpy()[: len(some)], blocks[first : first + len(some)])
            with torch.cuda.stream(self._in_stream):
                for row, page in enumerate(some):
                    self._pages[page].copy_(self._in_staging[row], non_blocking=True)
        torch.cuda.current_stream(self._device).wait_stream(self._in_stream)
