"""A machine on a virtual clock: worker threads, and a device whose copies take as long as their bytes.

One byte of a test stands for many of the machine that is played. Nothing happens but in `pass_to`; what is
begun takes its time from then on, and its effect is there at the end of it.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

from samovar.cache_tiers.blocks.extent import Bytes
from samovar.replicas.kv.copy_device import CopyEvent, HostDevice, Told
from tests.support.clock import Clock


class VirtualTime(Clock):
    """A clock, and what is to happen on it."""

    def __init__(self) -> None:
        super().__init__()
        self._coming: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    @property
    def next_s(self) -> float | None:
        return self._coming[0][0] if self._coming else None

    def at(self, at_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._coming, (at_s, next(self._order), act))

    def pass_to(self, end_s: float) -> None:
        """Let everything happen until then."""
        while self._coming and self._coming[0][0] <= end_s:
            at_s, _, act = heapq.heappop(self._coming)
            self.now_s = max(self.now_s, at_s)
            act()
        self.now_s = max(self.now_s, end_s)


class VirtualWorkers(Executor):
    """`threads` that take `seconds` for each piece of work, whose effect is there at the end of it."""

    def __init__(self, time: VirtualTime, threads: int, seconds: float) -> None:
        self.seconds = seconds
        self._time = time
        self._free = threads
        self._waiting: deque[Callable[[], None]] = deque()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self._waiting.append(lambda: fn(*args, **kwargs))
        self._begin()
        return Future()

    def _begin(self) -> None:
        while self._free and self._waiting:
            self._free -= 1
            work = self._waiting.popleft()
            self._time.at(self._time.now_s + self.seconds, lambda work=work: self._end(work))  # type: ignore[misc]

    def _end(self, work: Callable[[], None]) -> None:
        work()
        self._free += 1
        self._begin()


class VirtualEvent:
    def __init__(self, time: VirtualTime, over_s: float) -> None:
        self.over_s = over_s
        self._time = time

    def is_done(self) -> bool:
        return self._time.now_s >= self.over_s

    def wait(self) -> None:
        assert self.is_done(), "a thread waits for a copy"

    def then(self, told: Told) -> None:
        self._time.at(self.over_s, lambda: told(None))


class VirtualStream:
    """Copies one after the other. A copy in shows at its end."""

    def __init__(self, device: VirtualDevice) -> None:
        self._device = device
        self._host = HostDevice(device.pages).stream()
        self.free_s = 0.0
        self.busy_s = 0.0

    def wait_for(self, event: CopyEvent) -> None:
        assert isinstance(event, VirtualEvent)
        self.free_s = max(self.free_s, event.over_s)

    def copy_in(self, host: Bytes, page: int) -> None:
        self._take(host.nbytes, lambda: self._host.copy_in(host, page))

    def copy_out(self, page: int, host: Bytes) -> None:
        self._take(host.nbytes, lambda: self._host.copy_out(page, host))

    def mark(self) -> CopyEvent:
        return VirtualEvent(self._device.time, max(self.free_s, self._device.time.now_s))

    def _take(self, nbytes: int, copy: Callable[[], None]) -> None:
        time, took_s = self._device.time, nbytes / self._device.bytes_per_s
        self.free_s = max(self.free_s, time.now_s) + took_s
        self.busy_s += took_s
        if took_s:
            time.at(self.free_s, copy)
        else:
            copy()


class VirtualDevice:
    """`bytes_per_s` in each direction; `computes_until_s`: when the step that was begun last is over."""

    def __init__(self, pages: Bytes, time: VirtualTime, bytes_per_s: float) -> None:
        self.pages = pages
        self.time = time
        self.bytes_per_s = bytes_per_s
        self.computes_until_s = 0.0
        self._host = HostDevice(pages)

    def mark(self) -> CopyEvent:
        return VirtualEvent(self.time, max(self.computes_until_s, self.time.now_s))

    def stream(self) -> VirtualStream:
        return VirtualStream(self)

    def reaches(self, host: Bytes) -> bool:
        return True

    def adopt(self, host: Bytes) -> bool:
        return True

    def empty(self, nbytes: int) -> Bytes:
        return self._host.empty(nbytes)

    def staging(self, nbytes: int) -> Bytes:
        return self._host.staging(nbytes)

    def close(self) -> None:
        pass
