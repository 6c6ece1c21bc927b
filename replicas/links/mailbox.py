"""What has come for one stream or call and is not read yet. All methods run on one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


class Mailbox:
    """What has come for one stream and is not read yet.

    `watch`: called with whether the writer may go on, where payloads are bytes and `bytes_max` of them are
    unread. Other payloads are bounded by what an answer may hold.
    """

    def __init__(self, bytes_max: int = 1 << 62, watch: Callable[[bool], None] | None = None) -> None:
        self._items: list[Any] = []
        self._failure: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # its reader's, once that waits
        self._waiter: asyncio.Future[None] | None = None
        self._is_beaten = False
        self._bytes_max = bytes_max
        self._nbytes = 0
        self._watch = watch
        self._is_paused = False
        self.has_spoken = False

    def put(self, payload: Any) -> None:
        """Add what has come; the reader is not woken."""
        self._items.append(payload)
        if isinstance(payload, bytes):
            self._nbytes += _size(payload)
            if self._nbytes > self._bytes_max and not self._is_paused and self._watch is not None:
                self._is_paused = True
                self._watch(False)

    def beat(self) -> None:
        """Note a sign of life: the reader gets an empty list if there is nothing else."""
        self._is_beaten = True
        self.wake()

    def fail(self, failure: BaseException) -> None:
        """Make the reader raise `failure` after it has read what came before."""
        if self._failure is None:
            self._failure = failure
        self.wake()

    def wake(self) -> None:
        """Wake the reader, if one waits."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next(self, bytes_max: int | None = None) -> list[Any]:
        """Return what has come, at least one payload or a sign of life. Raises what `fail` was given.

        `bytes_max`: the rest is left for later, so that the writer soon goes on; one payload may be more.
        """
        while not self._items:
            if self._failure is not None:
                raise self._failure
            if self._is_beaten:
                self._is_beaten = False
                return []
            if self._loop is None:  # asking for it at each token costs more than a future
                self._loop = asyncio.get_running_loop()
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        items = self._take(bytes_max)
        self._is_beaten = False
        self.has_spoken = True
        if self._is_paused and self._nbytes <= self._bytes_max and self._watch is not None:
            self._is_paused = False
            self._watch(True)
        return items

    def _take(self, bytes_max: int | None) -> list[Any]:
        """Return what came first; the rest stays."""
        if bytes_max is None or self._nbytes <= bytes_max:
            items, self._items, self._nbytes = self._items, [], 0
            return items
        count, nbytes = 1, _size(self._items[0])
        for payload in self._items[1:]:
            if nbytes + _size(payload) > bytes_max:
                break
            nbytes += _size(payload)
            count += 1
        items, self._items = self._items[:count], self._items[count:]
        self._nbytes -= nbytes
        return items


def _size(payload: Any) -> int:
    return len(payload) if isinstance(payload, bytes) else 0
