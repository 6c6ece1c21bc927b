"""Bounds waits that come in thousands, one for each token of an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


class BoundedWaits:
    """Cancels a wait that takes too long, as `asyncio.timeout` does, for one wait at a time.

    One timer serves many waits: it looks when the latest one ends, and goes on. Timers and contexts for
    each cost a third of what a token does in an ingress whose caches a model on the same CPU has emptied.
    Call `close` at the end.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._looks_s = 0.0  # when the timer does, by the loop's clock
        self._ends_s: float | None = None  # of the running wait
        self._task: asyncio.Task[object] | None = None
        self._is_late = False

    async def wait(self, awaitable: Awaitable[T], wait_s: float) -> T:
        """Return what `awaitable` gives. Raises `TimeoutError` if it takes longer than `wait_s`."""
        task = asyncio.current_task()
        assert task is not None, "outside of a task"
        assert self._ends_s is None, "another wait is running"
        self._task, cancels = task, task.cancelling()
        self._ends_s = ends_s = self._loop.time() + wait_s
        if self._timer is None or ends_s < self._looks_s:
            self._look_at(ends_s)
        try:
            return await awaitable
        except asyncio.CancelledError:
            if self._is_late and task.cancelling() - 1 <= cancels:
                raise TimeoutError from None
            raise
        finally:
            if self._is_late:
                task.uncancel()
            self._ends_s = self._task = None
            self._is_late = False

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_at(self, when_s: float) -> None:
        self.close()
        self._looks_s = when_s
        self._timer = self._loop.call_at(when_s, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._ends_s is None or self._task is None or self._is_late:
            return  # the next wait sets a timer
        if self._loop.time() < self._ends_s:
            self._look_at(self._ends_s)
            return
        self._is_late = True
        self._task.cancel()
