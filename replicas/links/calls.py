"""Calls that come over links, as the process that takes them has them. All methods run on one event loop."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from samovar.replicas.links.mailbox import Mailbox

logger = logging.getLogger(__name__)

FULL, CLOSING, FAILED = "full", "closing", "failed"
"""Why a call is refused: too many are open, the process takes no more, or its handler has raised."""


class LinkCall:
    """One call: its first `payload`, and more of them as they come.

    The answer goes to where the payload says that it is awaited. `refuse`: tells the caller why it gets none.
    """

    def __init__(self, payload: Any, mailbox: Mailbox, refuse: Callable[[str], None]) -> None:
        self.payload = payload
        self.refuse = refuse
        self._mailbox = mailbox

    async def more(self, bytes_max: int | None = None) -> list[Any]:
        """Return the payloads that have come since, at least one, or none as a sign of life."""
        return await self._mailbox.next(bytes_max)


Handler = Callable[[LinkCall], Coroutine[Any, Any, None]]
"""Serves one call. Cancelled when the caller closes it, or is lost."""


class Calls:
    """The calls that a process serves now, at most `calls_max`."""

    def __init__(self, calls_max: int) -> None:
        self._calls_max = calls_max
        self._handler: Handler | None = None
        self._running: set[asyncio.Task[None]] = set()

    @property
    def open(self) -> int:
        """Return how many calls are served now."""
        return len(self._running)

    def take(self, handler: Handler) -> None:
        """Serve each call with `handler` from now on."""
        self._handler = handler

    def stop(self) -> None:
        """Refuse new calls; those that are open go on."""
        self._handler = None

    async def over(self, timeout_s: float) -> bool:
        """Wait until none is open; return whether that was so before `timeout_s` had passed."""
        if self._running:
            await asyncio.wait(set(self._running), timeout=timeout_s)
        return not self._running

    def cancel(self) -> None:
        """Cancel all that are open."""
        for task in self._running:
            task.cancel()

    def begin(self, call: LinkCall) -> asyncio.Task[None] | None:
        """Serve a call; None: it is refused, and its caller told so."""
        if self._handler is None:
            call.refuse(CLOSING)
            return None
        if len(self._running) >= self._calls_max:
            logger.warning("a call is refused: there are %d", len(self._running))
            call.refuse(FULL)
            return None
        # In a context of its own: where the process began to listen may have been within a request.
        task = asyncio.get_running_loop().create_task(
            _served(self._handler, call), context=contextvars.Context()
        )
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task


async def _served(handler: Handler, call: LinkCall) -> None:
    try:
        await handler(call)
    except Exception:  # its caller would wait for ever
        logger.exception("a call over a link has failed")
        call.refuse(FAILED)
