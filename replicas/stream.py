"""Events of one request on their way from the engine's thread to whoever reads its answer.

The first token goes out at once; later ones are sent together, because a message through a Serve handle
costs about 3 CPU-ms (FACTS.md part A, 1.6). A reader who hears nothing for a while hears that there is
nothing, so that silence means a dead replica. Knows asyncio; nothing of Ray or of engines.
"""

from __future__ import annotations

import asyncio
import contextlib

from replicas.messages import Delta, Event, Failed, Refused


class EventStream:
    """`choices`: answers of the request. `put` and `next` are for one event loop."""

    def __init__(self, choices: int, *, coalesce_s: float, heartbeat_s: float) -> None:
        self._events: list[Event] = []
        self._arrived = asyncio.Event()
        self._over = asyncio.Event()
        self._choices_open = choices
        self._coalesce_s = coalesce_s
        self._heartbeat_s = heartbeat_s
        self._has_spoken = False

    @property
    def is_over(self) -> bool:
        """The request's last event has come."""
        return self._over.is_set()

    @property
    def is_read(self) -> bool:
        """It is over, and `next` has given all of it."""
        return self.is_over and not self._events

    def put(self, event: Event) -> None:
        self._events.append(event)
        if isinstance(event, Delta) and event.finish_reason is not None:
            self._choices_open -= 1
        if self._choices_open == 0 or isinstance(event, Refused | Failed):
            self._over.set()
        self._arrived.set()

    async def next(self) -> list[Event]:
        """What has come; empty when nothing came for `heartbeat_s`. Not for a stream that is read."""
        if self._has_spoken:
            with contextlib.suppress(TimeoutError):  # the end does not wait for company
                await asyncio.wait_for(self._over.wait(), self._coalesce_s)
        try:
            async with asyncio.timeout(self._heartbeat_s):
                await self._arrived.wait()
        except TimeoutError:
            return []
        events, self._events = self._events, []
        self._arrived.clear()
        self._has_spoken = any(isinstance(event, Delta) for event in events)
        return merge_deltas(events)


def merge_deltas(events: list[Event]) -> list[Event]:
    """Join neighbouring `Delta`s of the same choice into one; order of choices stays."""
    merged: list[Event] = []
    last_of_choice: dict[int, int] = {}
    for event in events:
        if isinstance(event, Delta) and event.index in last_of_choice:
            place = last_of_choice[event.index]
            earlier = merged[place]
            assert isinstance(earlier, Delta)
            merged[place] = Delta(
                event.index,
                earlier.text + event.text,
                earlier.token_ids + event.token_ids,
                earlier.logprobs + event.logprobs,
                event.finish_reason,
            )
            continue
        if isinstance(event, Delta):
            last_of_choice[event.index] = len(merged)
        merged.append(event)
    return merged
