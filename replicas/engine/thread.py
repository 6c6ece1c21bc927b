"""The engine's own thread: commands in, events out, one step after the other.

Everything that touches the engine runs here, so the engine needs no locks. Commands are taken between steps:
an abort frees its pages before the next step. After a while without work the engine checks its own
bookkeeping once and sleeps until the next command.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from samovar.replicas.engine.engine import Engine
from samovar.replicas.links import said_events
from samovar.replicas.messages import Delta, Event, Failed, GenerateRequest, Refused

logger = logging.getLogger(__name__)

T = TypeVar("T")
Deliver = Callable[[list[tuple[int, Event]]], None]

STOPPED = Failed("the replica's engine has stopped", replica_lost=True)


class EngineThread:
    """Runs the engine on its own thread.

    `deliver` is called on that thread with (request key, event) pairs; it must not block.
    """

    def __init__(self, engine: Engine, deliver: Deliver, idle_check_s: float) -> None:
        self._engine = engine
        self._deliver = deliver
        self._idle_check_s = idle_check_s
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._ended = False  # no further step will run
        self._failure: str | None = None
        self._state_checked = True
        self._step_started_s: float | None = None
        self._thread = threading.Thread(target=self._run, name="samovar-engine", daemon=True)
        self.integrity_failures = 0
        engine.on_wake(self._notify)

    def _notify(self) -> None:
        with self._wake:
            self._wake.notify()

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """End the thread after the current step; requests still open get `Failed`."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(timeout_s)

    def submit(self, key: int, request: GenerateRequest) -> None:
        """Queue a request; events for `key` will be delivered, including a refusal or a failure."""
        self._post(lambda: self._add(key, request))

    def abort(self, key: int) -> None:
        """Free the request's pages before the next step. Nothing more is delivered for it."""
        self._post(lambda: self._abort(key))

    def call(self, function: Callable[[Engine], T]) -> Future[T]:
        """Run `function` between two steps."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return  # the caller has cancelled
            try:
                future.set_result(function(self._engine))
            except Exception as error:  # noqa: BLE001 - it is the caller's to handle
                future.set_exception(error)

        self._post(run)
        return future

    def check_health(self, stuck_step_s: float) -> None:
        """Raise `RuntimeError` if the engine has failed or hangs in a step."""
        if self._failure is not None:
            raise RuntimeError(f"the engine stopped: {self._failure}")
        if not self._thread.is_alive():
            raise RuntimeError("the engine's thread has ended")
        self._engine.runner.check()
        started_s = self._step_started_s
        if started_s is not None and time.monotonic() - started_s > stuck_step_s:
            raise RuntimeError(f"one step has been running for more than {stuck_step_s} s")

    def _post(self, command: Callable[[], None]) -> None:
        with self._wake:
            if self._thread.is_alive():
                self._commands.append(command)
                self._wake.notify()
                return
        command()  # the thread has ended: run it here; it sees that the engine has ended

    # -- on the engine's thread ------------------------------------------------------------

    def _add(self, key: int, request: GenerateRequest) -> None:
        if self._ended:
            self._deliver([(key, STOPPED)])
            return
        refused = self._engine.requests.add(key, request)
        if refused is not None:
            self._deliver([(key, refused)])

    def _abort(self, key: int) -> None:
        if not self._ended:
            self._engine.requests.abort(key)

    def _run(self) -> None:
        try:
            while self._take_commands():
                self._step_started_s = time.monotonic()
                events = self._engine.step()
                self._step_started_s = None
                self._state_checked = False
                if events:
                    self._deliver(events)
        except Exception as error:
            # The bookkeeping may be wrong: serve no further request, so that the health check gets this
            # replica replaced.
            logger.exception("the engine stopped")
            self._failure = f"{type(error).__name__}: {error}"
        self._step_started_s = None
        self._ended = True
        open_keys = self._engine.requests.open_keys()
        if open_keys:
            self._deliver([(key, STOPPED) for key in open_keys])
        while not self._stopping:
            self._run_commands()
            self._wait_for_commands()
        self._run_commands()

    def _take_commands(self) -> bool:
        """Run posted commands; wait while there is no work. False when it is time to stop."""
        while not self._stopping:
            self._run_commands()
            if self._engine.has_work:
                self._await_lookups()
                return True
            if self._is_silent():
                self._check_state()
            else:
                self._wait_for_commands(self._engine.wake_in_s)
        return False

    def _await_lookups(self) -> None:
        """Wait for lookups that have just begun, before a step that would be long without them."""
        hold_s = self._engine.hold_s
        if hold_s > 0:
            with self._wake:
                self._wake.wait_for(lambda: self._stopping or self._engine.has_arrivals, hold_s)
            self._run_commands()

    def _is_silent(self) -> bool:
        """Return whether no command came for `idle_check_s` and the bookkeeping is still unchecked."""
        if self._state_checked or self._engine.wake_in_s is not None:
            return False
        with self._wake:
            return not self._wake.wait_for(self._is_called, self._idle_check_s)

    def _wait_for_commands(self, timeout_s: float | None = None) -> None:
        with self._wake:
            self._wake.wait_for(self._is_called, timeout_s)

    def _is_called(self) -> bool:
        return bool(self._commands or self._stopping or self._engine.has_arrivals)

    def _run_commands(self) -> None:
        with self._wake:
            commands, self._commands = self._commands, deque()
        for command in commands:
            command()

    def _check_state(self) -> None:
        self._state_checked = True
        try:
            self._engine.check_integrity()
        except AssertionError:
            self.integrity_failures += 1
            raise


class EventStream:
    """Carries events of one request from the engine's thread to the reader of its answer, through Serve.

    The way where there is no link (`replicas/links`). The first token is sent at once; later ones are
    batched, because a message through a Serve handle costs about 3 CPU-ms. After
    `heartbeat_s` without events the reader gets an empty list, so that silence means a dead replica.

    `choices`: answers of the request. `joins`: events that wait become one. `put` and `next` must run on one
    event loop.
    """

    def __init__(self, choices: int, *, coalesce_s: float, heartbeat_s: float, joins: bool = True) -> None:
        self._events: list[Event] = []
        self._arrived = asyncio.Event()
        self._over = asyncio.Event()
        self._read = asyncio.Event()
        self._choices_open = choices
        self._coalesce_s = coalesce_s
        self._heartbeat_s = heartbeat_s
        self._has_spoken = False
        self._joins = joins

    @property
    def is_over(self) -> bool:
        """Whether the request's last event has come."""
        return self._over.is_set()

    @property
    def is_read(self) -> bool:
        """Whether the request is over and `next` has returned all of its events."""
        return self.is_over and not self._events

    def put(self, event: Event) -> None:
        self._events.append(event)
        if isinstance(event, Delta) and event.finish_reason is not None:
            self._choices_open -= 1
        if self._choices_open == 0 or isinstance(event, Refused | Failed):
            self._over.set()
        self._arrived.set()

    def put_packed(self, piece: bytes) -> None:
        """Take several events, packed one behind the other."""
        for event in said_events([piece]):
            self.put(event)

    def caught_up(self, choices_open: int) -> None:
        """Do nothing: each event was counted."""

    async def drained(self) -> None:
        """Wait until what was put is read."""
        while self._events:
            self._read.clear()
            await self._read.wait()

    async def next(self) -> list[Event]:
        """Return the new events; empty if none came for `heartbeat_s`. Not for a stream that is read."""
        if self._has_spoken:
            with contextlib.suppress(TimeoutError):  # the end is sent without waiting for a batch
                await asyncio.wait_for(self._over.wait(), self._coalesce_s)
        try:
            async with asyncio.timeout(self._heartbeat_s):
                await self._arrived.wait()
        except TimeoutError:
            return []
        events, self._events = self._events, []
        self._arrived.clear()
        self._read.set()
        self._has_spoken = any(isinstance(event, Delta) for event in events)
        return merge_deltas(events) if self._joins else events


def merge_deltas(events: list[Event]) -> list[Event]:
    """Join consecutive `Delta`s of the same choice into one; the order of choices stays."""
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
