"""One call of a replica whose events come over a link, beside what the call itself returns."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from replicas.links import Inlet, events_of, said_events
from replicas.messages import Event

RUNNING: set[asyncio.Task[None]] = set()
"""Calls whose answers have been read: they end by themselves, and asyncio keeps no task alive."""

READ_BYTES = 1 << 14
"""Of a kept answer that is told again, so much is read at once: then others have their turn."""


class LinkedCall:
    """Iterates over the lists of events of one call; an empty one is a sign of life.

    `response`: the call's own stream. It has no events if they go over a link, and then may be over before
    they have arrived; else it has all of them. `joins`: deltas that come together become one. Iterating
    raises `LinkLost`, or what `response` raises. `close` at the end.
    """

    def __init__(
        self, response: AsyncIterator[list[Event]], inlet: Inlet, ticket: str, *, joins: bool = True
    ) -> None:
        self._joins = joins
        self._inlet = inlet
        self._ticket = ticket
        self._mailbox = inlet.expect(ticket)
        self._call = asyncio.create_task(self._follow(response))
        RUNNING.add(self._call)
        self._call.add_done_callback(RUNNING.discard)

    def __aiter__(self) -> LinkedCall:
        return self

    async def __anext__(self) -> list[Event]:
        try:
            if self._joins:
                return events_of(await self._mailbox.next())
            return said_events(await self._mailbox.next(READ_BYTES))
        except _CallOver:
            raise StopAsyncIteration from None

    def close(self, *, is_over: bool) -> None:
        """Drop what still comes. `is_over`: the answer is whole, so the call is left to end."""
        self._inlet.forget(self._ticket)
        if not is_over:
            self._call.cancel()

    async def _follow(self, response: AsyncIterator[list[Event]]) -> None:
        is_linked = True
        try:
            async for events in response:
                is_linked = False
                self._take(events)
        except asyncio.CancelledError:
            raise
        except Exception as failed:  # noqa: BLE001 - it is the reader's to handle
            self._mailbox.fail(failed)
            return
        if not is_linked:
            self._mailbox.fail(_CallOver())

    def _take(self, events: Any) -> None:
        if events:
            self._mailbox.put(tuple(events))
            self._mailbox.wake()
        else:
            self._mailbox.beat()


class _CallOver(Exception):
    """The call has returned, and its events were all that there are."""
