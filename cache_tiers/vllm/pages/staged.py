"""Copies between a device's pages and records, by way of host memory that the device reaches. No torch.

A device's stream runs its work in the order in which it was submitted, some time later; only events say that
it is over. That is all that this counts on: tests have a device that runs the work in any legal order. Two
halves of staging memory a direction: one is filled by the device while the other is copied by this thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from samovar.cache_tiers.blocks import Bytes
from samovar.cache_tiers.vllm.messages import PageLayout

STAGING_BYTES = 32 * 1024 * 1024
"""Of a direction. Two extents of the usual size: what is more goes in several parts."""


class PageEvent(Protocol):
    """A point in a stream: what was submitted to it before."""

    def wait(self) -> None:
        """Block until it is over. Raises what the device reports."""
        ...


class PageStream(Protocol):
    """Copies in order; no method waits for the device.

    `host`, u8 `[blocks, layers, layer_bytes]` of `PageDevice.staging`, and the pages stay as they are until
    an event behind the copy is over.
    """

    def read(self, pages: Sequence[int], host: Bytes) -> None:
        """Fill `host` from pages."""
        ...

    def write(self, host: Bytes, pages: Sequence[int]) -> None:
        """Fill pages from `host`."""
        ...

    def mark(self) -> PageEvent:
        """Return the event behind everything submitted so far."""
        ...


class PageDevice(Protocol):
    """The memory that holds the pages."""

    def mark(self) -> PageEvent:
        """Return the event behind all computing submitted so far. For the thread that submits it."""
        ...

    def stream(self) -> PageStream: ...

    def staging(self, nbytes: int) -> Bytes:
        """Return host memory that the device reaches. Raises `MemoryError`."""
        ...


class _Direction:
    """A stream with its two halves of staging memory, for one thread at a time."""

    def __init__(self, device: PageDevice, layout: PageLayout, staging_bytes: int) -> None:
        layers, layer_bytes = len(layout.layers), layout.layer_bytes
        self.blocks = max(1, staging_bytes // (2 * layers * layer_bytes))
        memory = device.staging(2 * self.blocks * layers * layer_bytes)
        self.halves = memory.reshape(2, self.blocks, layers, layer_bytes)
        self.stream = device.stream()
        self.lock = threading.Lock()

    def parts(self, count: int) -> list[tuple[int, int]]:
        return [(first, min(first + self.blocks, count)) for first in range(0, count, self.blocks)]


class StagedPages:
    """Pages of a device. Thread-safe; what is to be copied has one owner meanwhile."""

    def __init__(self, layout: PageLayout, device: PageDevice, staging_bytes: int = STAGING_BYTES) -> None:
        self.layout = layout
        self._device = device
        self._out = _Direction(device, layout, staging_bytes)
        self._in = _Direction(device, layout, staging_bytes)

    def gather(self, pages: Sequence[int], out: Bytes) -> None:
        """Copy pages to u8 `[blocks, layers, layer_bytes]`. Raises what the device reports."""
        with self._out.lock:
            under_way: tuple[int, int, Bytes, PageEvent] | None = None
            for number, (first, end) in enumerate(self._out.parts(len(pages))):
                half = self._out.halves[number % 2][: end - first]
                self._out.stream.read(pages[first:end], half)
                begun = (first, end, half, self._out.stream.mark())
                if under_way is not None:
                    _take(under_way, out)
                under_way = begun
            if under_way is not None:
                _take(under_way, out)

    def scatter(self, pages: Sequence[int], blocks: Bytes) -> None:
        """Copy u8 `[blocks, layers, layer_bytes]` to pages, and wait. Raises what the device reports."""
        with self._in.lock:
            events: list[PageEvent] = []
            try:
                for number, (first, end) in enumerate(self._in.parts(len(pages))):
                    half = self._in.halves[number % 2][: end - first]
                    if number >= 2:
                        events[number - 2].wait()  # the half is free again
                    half[:] = blocks[first:end]
                    self._in.stream.write(half, pages[first:end])
                    events.append(self._in.stream.mark())
            finally:
                for event in events[-2:]:
                    event.wait()

    def mark(self) -> Callable[[], None]:
        """Return what waits until the KV that was computed up to now is there."""
        return self._device.mark().wait


def _take(part: tuple[int, int, Bytes, PageEvent], out: Bytes) -> None:
    first, end, half, event = part
    event.wait()
    out[first:end] = half
