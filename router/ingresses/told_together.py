"""What turns have left is told to the session directory in one call for all that ended meanwhile.

A call costs about a CPU-millisecond at both ends, whatever it carries. An idle ingress tells each turn at
once; a busy one, whose call is still under way, tells those that end until then with the next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from cache_tiers.sessions import Item, SessionRow
from router.routing import DirectoryLost

BYTES_MAX = 1 << 20
"""A call that carries more takes up no further turn."""


class KeepLink(Protocol):
    """The part of the directory's link that keeps items. Raises `DirectoryLost`."""

    async def keep(self, items: tuple[Item, ...], rows: tuple[SessionRow, ...]) -> int: ...


@dataclass(slots=True)
class _Bundle:
    """What a call carries that has not begun. `over`: what it failed by, or None."""

    over: asyncio.Future[DirectoryLost | None]
    items: list[Item] = field(default_factory=list)
    rows: list[SessionRow] = field(default_factory=list)
    nbytes: int = 0


class ToldTogether:
    """Calls of `keep`, one at a time. Use it from one event loop."""

    def __init__(self) -> None:
        self.calls = 0
        """Calls that were made."""
        self._is_calling = asyncio.Lock()
        self._next: _Bundle | None = None
        self._running: set[asyncio.Task[None]] = set()

    async def keep(self, link: KeepLink, items: Sequence[Item], rows: Sequence[SessionRow]) -> None:
        """Tell of a turn; return when the directory knows it. Raises `DirectoryLost`."""
        call = self._next
        if call is None or call.nbytes > BYTES_MAX:
            loop = asyncio.get_running_loop()
            call = self._next = _Bundle(loop.create_future())
            task = loop.create_task(self._make(link, call))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
        call.items += items
        call.rows += rows
        call.nbytes += sum(item.nbytes for item in items)
        lost = await asyncio.shield(call.over)  # one that waits no longer ends it for no other
        if lost is not None:
            raise lost

    async def _make(self, link: KeepLink, call: _Bundle) -> None:
        lost: DirectoryLost | None = DirectoryLost("the call has failed")
        try:
            async with self._is_calling:
                if self._next is call:
                    self._next = None  # what ends from now on goes with another
                self.calls += 1
                await link.keep(tuple(call.items), tuple(call.rows))
                lost = None
        except DirectoryLost as failed:
            lost = failed
        finally:
            call.over.set_result(lost)
