"""What is sent to a client, work that ends when the client goes away, and bounds of waits that come in
thousands."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

from starlette.types import Message, Receive, Send

from samovar.router.openai import ClientClosedRequest

logger = logging.getLogger(__name__)

PIECE_BYTES = 1 << 14


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
        task = asyncio.current_task(self._loop)
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


class ResponseSender:
    """ASGI `send` that records whether the whole response has been sent. Call `close` at the end.

    Waits at most `write_idle_s` for a client that does not read; then raises `ClientClosedRequest`. One that
    takes `PIECE_BYTES` in that time reads: a body is sent in such pieces.
    """

    def __init__(self, send: Send, write_idle_s: float) -> None:
        self._send = send
        self._waits = BoundedWaits()
        self._write_idle_s = write_idle_s
        self.is_complete = False

    def close(self) -> None:
        self._waits.close()

    async def __call__(self, message: Message) -> None:
        body, piece = message.get("body", b""), message
        last = max(0, len(body) - 1) // PIECE_BYTES * PIECE_BYTES
        for start in range(0, last + 1, PIECE_BYTES):
            if last:
                more = start < last or message.get("more_body", False)
                piece = {**message, "body": body[start : start + PIECE_BYTES], "more_body": more}
            if piece["type"] == "http.response.body" and not piece.get("more_body", False):
                self.is_complete = True  # set before sending: servers report a disconnect right after it
            try:
                await self._waits.wait(self._send(piece), self._write_idle_s)
            except TimeoutError:
                logger.info("a client reads nothing: its connection is closed")
                raise ClientClosedRequest from None


async def cancel_on_disconnect(
    receive: Receive, work: Coroutine[Any, Any, None], sender: ResponseSender
) -> None:
    """Run `work` to its end, or cancel it as soon as the client disconnects.

    The body must have been read, and `work` must write to `sender`. Raises what `work` raises, or
    `ClientClosedRequest`.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            leaving.result()  # a server error is not a client disconnect
            if not sender.is_complete:
                raise ClientClosedRequest
        await working
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
