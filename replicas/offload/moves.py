"""Moves of blocks into and out of the pool's pages, beside the steps: no other sequence waits for one.

A move's pages stay referenced until it is over, whatever becomes of the sequence that they are of: no other
work writes or reads a page under a move. What moves in has its sequence's own references, until that loses
its pages (`keep`); it begins whenever its bytes are verified, since no step reads a page that was given away
before the step was planned (`Scheduler`), and `Restore.claim` gives it no slot that a step computes.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Listing
from concurrent.futures import Executor
from typing import TypeVar

from samovar.cache_tiers.blocks import Bytes
from samovar.replicas.kv import CopyEvent, PageIo, PagePool, Ticket, Told
from samovar.replicas.offload.tier_client import CompletionQueue, begin
from samovar.replicas.scheduling import RestorePiece

logger = logging.getLogger(__name__)

T = TypeVar("T")


def _failure_of(ticket: Ticket) -> BaseException | None:
    """Wait for a move; return what the device reports of it, if anything."""
    try:
        ticket.wait()
    except Exception as error:  # noqa: BLE001 - it is the caller's to handle
        return error
    return None


class PageMoves:
    """Moves under way in one pool. For the engine's thread, but for `bring_in`; blocks leave in `lane`."""

    def __init__(self, io: PageIo, pool: PagePool, lane: Executor, arrivals: CompletionQueue) -> None:
        self.io = io
        self.pool = pool
        self.lane = lane
        self._arrivals = arrivals
        self._held: dict[int | RestorePiece, list[int]] = {}  # move -> its pages, referenced for it
        self._moves = 0

    def mark(self) -> CopyEvent:
        """Return the event behind everything computed so far. For the engine's thread."""
        return self.io.mark()

    def bring_in(self, payload: Bytes, pages: Listing[int], read: CopyEvent, landed: Told) -> bool:
        """Write verified `payload` into `pages`, behind `read`; then tell `landed`. For any thread.

        `landed` is told what the device reports of a copy under way, on whatever thread sees that. False: it
        could not be begun, and `landed` is not told.
        """
        try:
            ticket = self.io.begin_in(payload, pages, read)
        except Exception:
            logger.exception("blocks could not be copied into the pool")
            return False
        try:
            ticket.then(landed)
        except Exception:  # no thread can watch it
            logger.exception("a copy of blocks is waited for here")
            landed(_failure_of(ticket))
        return True

    def keep(self, piece: RestorePiece, pages: Listing[int]) -> None:
        """Reference the pages that a piece is being copied into: its sequence is about to release them."""
        for page in pages:
            self.pool.acquire(page)
        self._held[piece] = list(pages)

    def let_go(self, piece: RestorePiece) -> None:
        """Release the pages of a piece whose copy is over, if they were kept for it."""
        self._free(piece)

    def take_out(
        self,
        pages: Listing[int],
        take: Callable[[CopyEvent, Callable[[], None]], T],
        over: Callable[[T | None], None],
    ) -> None:
        """Call `take` in the lane to copy from `pages`, then `over` on the engine's thread with its result.

        `take` gets the event behind what is computed by now, and what to call when it needs the pages no
        more, at the latest by its return. `over` gets None if it has raised or could not be begun.
        """
        move = self._begin(pages)

        def copied() -> None:
            self._arrivals.post(lambda: self._free(move))

        def copy(written: CopyEvent) -> None:
            result: T | None = None
            try:
                result = take(written, copied)
            except Exception:
                logger.exception("blocks could not be copied out of the pool")
            self._arrivals.post(lambda: self._end(move, result, over))

        if not begin(self.lane, copy, self.io.mark()):
            self._end(move, None, over)

    def pages_held(self) -> list[list[int]]:
        """Return the pages of the moves under way, one list each; each page is referenced once."""
        return list(self._held.values())

    def pages_leaving(self) -> int:
        """Return how many pages nothing but moves holds: they become available soon."""
        if not self._held:
            return 0
        held = Counter(page for pages in self._held.values() for page in pages)
        return sum(self.pool.refs(page) == count for page, count in held.items())

    def _begin(self, pages: Listing[int]) -> int:
        for page in pages:
            self.pool.acquire(page)
        self._moves += 1
        self._held[self._moves] = list(pages)
        return self._moves

    def _end(self, move: int, result: T, over: Callable[[T], None]) -> None:
        self._free(move)
        over(result)

    def _free(self, move: int | RestorePiece) -> None:
        """Release a move's pages, unless that is done."""
        self.pool.release(self._held.pop(move, []))
