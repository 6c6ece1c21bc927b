"""Several replica streams read as one, with a clock beside them.

`next` gives the next events of any stream, or None after a silence, and loses nothing when it gave
None. Closing it closes every stream, and that cancels them on their replicas. Knows asyncio;
nothing of HTTP or of what events mean.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from types import TracebackType

from replicas.messages import Event

Stream = AsyncGenerator[list[Event], None]


class EventPump:
    """An async context manager over `streams`; leave it and they are closed."""

    def __init__(self, streams: Sequence[Stream]) -> None:
        self._streams = list(streams)
        self._waiting: dict[asyncio.Task[list[Event]], int] = {}

    async def __aenter__(self) -> EventPump:
        for index in range(len(self._streams)):
            self._read_on(index)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._waiting:
            task.cancel()
        await asyncio.gather(*self._waiting, return_exceptions=True)
        self._waiting.clear()
        await asyncio.gather(*(stream.aclose() for stream in self._streams), return_exceptions=True)

    async def next(self, silence_s: float | None = None) -> tuple[int, list[Event]] | None:
        """(index of the stream, its next events); None when all were silent for `silence_s`, if given.

        Raises StopAsyncIteration when all streams have ended, and whatever a stream raises.
        """
        while self._waiting:
            done, _ = await asyncio.wait(
                self._waiting, timeout=silence_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                return None
            task = done.pop()  # the others stay in `_waiting`, done: the next call finds them
            index = self._waiting.pop(task)
            try:
                events = task.result()
            except StopAsyncIteration:
                continue
            self._read_on(index)
            return index, events
        raise StopAsyncIteration

    def _read_on(self, index: int) -> None:
        self._waiting[asyncio.create_task(_next_of(self._streams[index]))] = index


async def _next_of(stream: Stream) -> list[Event]:
    return await anext(stream)
