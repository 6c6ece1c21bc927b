"""A device whose streams run in any legal order, every copy a part at a time.

Nothing happens by itself: `happen` runs some of what may happen next, chosen by the given random numbers, and
so does everybody who asks for an event. What waits for nothing may happen at once or last. Host memory that a
copy fills is garbage until then.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from samovar.cache_tiers.blocks.extent import Bytes
from samovar.replicas.kv.copy_device import CopyEvent, Told

GARBAGE = 0xA5
STEPS = 4
"""At most so much happens while somebody looks."""


@dataclass(eq=False)
class SimulatedEvent:
    device: SimulatedDevice
    is_over: bool = False
    waiting: list[Told] = field(default_factory=list)

    def is_done(self) -> bool:
        self.device.happen()
        return self.is_over

    def wait(self) -> None:
        while not self.is_over:
            assert self.device.run_one(), "a wait for what never happens"

    def then(self, told: Told) -> None:
        if self.is_over:
            told(None)
        else:
            self.waiting.append(told)

    def fire(self) -> None:
        self.is_over = True
        for told in self.waiting:
            told(None)


@dataclass
class _Work:
    parts: deque[Callable[[], None]]
    may_begin: Callable[[], bool] = lambda: True


class SimulatedStream:
    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device
        self.work: deque[_Work] = deque()

    def submit(self, *parts: Callable[[], None]) -> None:
        self.work.append(_Work(deque(parts)))

    def wait_for(self, event: CopyEvent) -> None:
        def may_begin() -> bool:  # asking a simulated event would let things happen
            return event.is_over if isinstance(event, SimulatedEvent) else event.is_done()

        self.work.append(_Work(deque([lambda: None]), may_begin))

    def copy_in(self, host: Bytes, page: int) -> None:
        pages = self._device.pages
        blocks = host.reshape(-1, pages.shape[1])
        self.submit(*_parts(blocks, pages[page : page + len(blocks)]))

    def copy_out(self, page: int, host: Bytes) -> None:
        pages = self._device.pages
        blocks = host.reshape(-1, pages.shape[1])
        host[:] = GARBAGE
        self.submit(*_parts(pages[page : page + len(blocks)], blocks))

    def mark(self) -> SimulatedEvent:
        event = SimulatedEvent(self._device)
        self.submit(event.fire)
        return event


def _parts(source: Bytes, target: Bytes) -> list[Callable[[], None]]:
    """A copy in two halves: in between, one is new and the other garbage."""
    half = source.shape[1] // 2

    def first() -> None:
        target[:] = GARBAGE
        target[:, half:] = source[:, half:]

    def rest() -> None:
        target[:, :half] = source[:, :half]

    return [first, rest]


class SimulatedDevice:
    """`pages`: u8 `[pages, block_bytes]`; `direct_share`: of the host memory that streams reach directly."""

    def __init__(self, pages: Bytes, rng: random.Random, direct_share: float = 0.5) -> None:
        self.pages = pages
        self.computing = SimulatedStream(self)
        self._rng = rng
        self._direct_share = direct_share
        self._streams = [self.computing]

    @property
    def is_busy(self) -> bool:
        return any(stream.work for stream in self._streams)

    def mark(self) -> CopyEvent:
        return self.computing.mark()

    def stream(self) -> SimulatedStream:
        stream = SimulatedStream(self)
        self._streams.append(stream)
        return stream

    def reaches(self, host: Bytes) -> bool:
        return self._rng.random() < self._direct_share

    def adopt(self, host: Bytes) -> bool:
        return True

    def empty(self, nbytes: int) -> Bytes:
        return np.full(nbytes, GARBAGE, dtype=np.uint8)

    def staging(self, nbytes: int) -> Bytes:
        return np.full(nbytes, GARBAGE, dtype=np.uint8)

    def close(self) -> None:
        assert not self.is_busy, "closed with copies under way"

    def happen(self) -> None:
        """Let some of what may happen next happen."""
        for _ in range(self._rng.randint(0, STEPS)):
            self.run_one()

    def run_one(self) -> bool:
        """Run one part of the work that may be next in some stream; False: there is none."""
        ready = [stream for stream in self._streams if stream.work and stream.work[0].may_begin()]
        if not ready:
            return False
        work = self._rng.choice(ready).work
        parts = work[0].parts
        part = parts.popleft()
        if not parts:
            work.popleft()
        part()
        return True
