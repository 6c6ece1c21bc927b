"""What moves between pages and host memory need of a device: streams, events, copies.

A stream runs its work in the order in which it was submitted, streams among each other run in any order, and
only events tie them together: that is all that `block_io.py` may count on. On CPU (`HostDevice`) every copy
is over when it returns; a GPU is in `cuda_device.py`; tests have a device that runs the work in any legal
order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from samovar.cache_tiers.blocks import Bytes

Told = Callable[[BaseException | None], None]
"""Is called once with what went wrong, or None."""


class CopyEvent(Protocol):
    """A point in a stream: what was submitted to it before."""

    def is_done(self) -> bool:
        """Return whether all of it is over. Raises what the device reports."""
        ...

    def wait(self) -> None:
        """Block the calling thread until it is over. Raises what the device reports."""
        ...

    def then(self, told: Told) -> None:
        """Call `told` once it is over, on any thread, perhaps before this returns."""
        ...


class CopyStream(Protocol):
    """Copies in order. Thread-safe; no method waits for the device.

    Host memory and pages of a copy must stay as they are until an event behind it is done.
    """

    def wait_for(self, event: CopyEvent) -> None:
        """Start nothing that is submitted later before `event` is done."""
        ...

    def copy_in(self, host: Bytes, page: int) -> None:
        """Copy `host`, whole blocks, into `page` and those behind it."""
        ...

    def copy_out(self, page: int, host: Bytes) -> None:
        """Fill `host`, whole blocks, from `page` and those behind it."""
        ...

    def mark(self) -> CopyEvent:
        """Return the event behind everything submitted so far."""
        ...


class CopyDevice(Protocol):
    """The memory that holds a pool's pages, and what copies from and to it."""

    def mark(self) -> CopyEvent:
        """Return the event behind all computing submitted so far. For the thread that submits it."""
        ...

    def stream(self) -> CopyStream: ...

    def reaches(self, host: Bytes) -> bool:
        """Return whether streams can copy from and to `host` itself, not only by way of `staging`.

        May take long the first time that memory is seen.
        """
        ...

    def adopt(self, host: Bytes) -> bool:
        """Let streams reach `host`, which stays where it is until `close`. False: that is not possible."""
        ...

    def empty(self, nbytes: int) -> Bytes:
        """Return host memory for a record, if possible such as the device reaches."""
        ...

    def staging(self, nbytes: int) -> Bytes:
        """Return host memory that the device reaches, to be kept and used again. Raises `MemoryError`."""
        ...

    def close(self) -> None:
        """Give registered memory back. No copy may be under way."""
        ...


class Done:
    """The event of what is over already."""

    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        return

    def then(self, told: Told) -> None:
        told(None)


DONE = Done()


class HostDevice:
    """Pages in main memory, u8 `[pages, block_bytes]`: a copy is over when it returns.

    Computing is over as well whenever it is asked for: it runs on the thread that asks.
    """

    def __init__(self, pages: Bytes) -> None:
        self._pages = pages

    def mark(self) -> CopyEvent:
        return DONE

    def stream(self) -> CopyStream:
        return _HostStream(self._pages)

    def reaches(self, host: Bytes) -> bool:
        return True

    def adopt(self, host: Bytes) -> bool:
        return True

    def empty(self, nbytes: int) -> Bytes:
        return np.empty(nbytes, dtype=np.uint8)

    def staging(self, nbytes: int) -> Bytes:
        return np.empty(nbytes, dtype=np.uint8)

    def close(self) -> None:
        pass


class _HostStream:
    def __init__(self, pages: Bytes) -> None:
        self._pages = pages

    def wait_for(self, event: CopyEvent) -> None:
        event.wait()

    def copy_in(self, host: Bytes, page: int) -> None:
        blocks = host.reshape(-1, self._pages.shape[1])
        np.copyto(self._pages[page : page + len(blocks)], blocks)

    def copy_out(self, page: int, host: Bytes) -> None:
        blocks = host.reshape(-1, self._pages.shape[1])
        np.copyto(blocks, self._pages[page : page + len(blocks)])

    def mark(self) -> CopyEvent:
        return DONE
