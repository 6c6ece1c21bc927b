"""One model replica as a Ray Serve deployment: the engine behind an async stream.

A thin shell: it builds the engine in its constructor, hands requests to the engine's thread and
gives each request's events to whoever iterates `generate`. The first token goes out at once;
later ones are sent together for `coalesce_ms`, because a message through a Serve handle costs
about 3 CPU-ms (FACTS.md part A, 1.6). When the caller goes away, however it goes, the
request is aborted and its pages are free before the next step.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

from ray import serve

from configs.settings import Settings
from replicas.build import build_engine
from replicas.engine_thread import EngineThread
from replicas.messages import Delta, EngineStats, Event, Failed, GenerateRequest, Refused, ReplicaInfo

logger = logging.getLogger("samovar.replica")


class _Stream:
    """Events of one request on their way from the engine's thread to its reader."""

    def __init__(self, choices: int) -> None:
        self.events: list[Event] = []
        self.arrived = asyncio.Event()
        self.over = asyncio.Event()
        self._choices_open = choices

    def put(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, Delta) and event.finish_reason is not None:
            self._choices_open -= 1
        if self._choices_open == 0 or isinstance(event, Refused | Failed):
            self.over.set()
        self.arrived.set()

    def take(self) -> list[Event]:
        events, self.events = self.events, []
        self.arrived.clear()
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


class Replica:
    """`model_dir`: a directory that `replicas.model_spec.inspect_model` accepts.

    Raises `ModelRefused` or `PoolTooSmall` when it cannot serve.
    """

    def __init__(self, settings: Settings, model_dir: str) -> None:
        replica_id = serve.get_replica_context().replica_id.unique_id
        built = build_engine(settings, Path(model_dir), replica_id)
        self._settings = settings
        self._info: ReplicaInfo = built.info
        self._thread = EngineThread(built.engine, self._deliver, settings.engine.idle_check_s)
        self._streams: dict[int, _Stream] = {}
        self._keys = itertools.count()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread.start()

    async def generate(self, request: GenerateRequest) -> AsyncIterator[list[Event]]:
        """The request's events (see `messages.py`), a list at a time, never empty."""
        self._loop = asyncio.get_running_loop()
        key, stream = next(self._keys), _Stream(request.n)
        self._streams[key] = stream
        self._thread.submit(key, request)
        coalesce_s = self._settings.engine.coalesce_ms / 1000
        try:
            while stream.events or not stream.over.is_set():
                await stream.arrived.wait()
                events = stream.take()
                yield events
                if any(isinstance(event, Delta) for event in events):
                    with contextlib.suppress(TimeoutError):  # the end does not wait for company
                        await asyncio.wait_for(stream.over.wait(), coalesce_s)
        finally:
            del self._streams[key]
            if not stream.over.is_set():
                self._thread.abort(key)

    async def describe(self) -> ReplicaInfo:
        return self._info

    async def stats(self) -> EngineStats:
        stats = await asyncio.wrap_future(self._thread.call(lambda engine: engine.stats()))
        return replace(stats, integrity_failures=self._thread.integrity_failures)

    async def check_integrity(self) -> None:
        """Raises `AssertionError` when the engine's books are wrong. For tests and operators."""
        await asyncio.wrap_future(self._thread.call(lambda engine: engine.check_integrity()))

    def check_health(self) -> None:
        """Ray Serve's health hook: raises when this replica should be replaced."""
        self._thread.check_health(self._settings.engine.stuck_step_s)

    async def __del__(self) -> None:
        """Ray Serve's shutdown hook, after the running requests have finished."""
        await asyncio.to_thread(self._thread.stop, self._settings.engine.stuck_step_s)

    def _deliver(self, events: list[tuple[int, Event]]) -> None:
        assert self._loop is not None, "events without a request"
        self._loop.call_soon_threadsafe(self._distribute, events)

    def _distribute(self, events: list[tuple[int, Event]]) -> None:
        for key, event in events:
            stream = self._streams.get(key)
            if stream is not None:  # else its reader has just gone away
                stream.put(event)
