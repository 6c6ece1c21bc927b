"""The engine's own thread: commands in, events out, one step after the other.

Everything that touches the engine runs here, so the engine needs no locks. Commands are taken between steps:
an abort frees its pages before the next step. After a while without work the engine checks its own
bookkeeping once and sleeps until the next command.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from samovar.replicas.engine.engine import Engine
from samovar.replicas.messages import Event, Failed, GenerateRequest

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
