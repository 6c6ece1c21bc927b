"""Fetches records, verifies them before use and copies them into their pages: the right blocks, unchanged.

Runs on worker threads, from a piece's beginning to its end: the engine's thread has steps to compute. No part
of a fetched record is trusted: header, namespace, every block key and every block's checksum are compared
with what was requested (G1-G5 and G7 in docs/guarantees.md).
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable
from collections.abc import Sequence as Listing
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TypeVar

from samovar.cache_tiers.blocks import (
    BadRecord,
    BlockShape,
    Bytes,
    LoadSource,
    bad_layers,
    check_belongs,
    decode_header,
    good_blocks,
    header_bytes,
)
from samovar.cache_tiers.messages import Fetch, Fetched, FetchFailed
from samovar.replicas.kv import CopyEvent, PageIo, PagePool, Ticket, Told
from samovar.replicas.offload.tier_client import CompletionQueue, begin
from samovar.replicas.scheduling import Restore, RestorePiece

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Suspect:
    """Slots `[start, end)` of a prompt that came from a tier; call `condemn` if they are wrong."""

    start: int
    end: int
    condemn: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Expected:
    """What a fetch must return: blocks with these keys and token counts, from `first_block` on."""

    namespace: bytes
    shape: BlockShape
    first_block: int
    keys: tuple[bytes, ...]
    token_counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoadedBlocks:
    """The verified result of a fetch.

    `payload`: u8 `[good * block_bytes]`, may be read-only. `bad`: why there are no more good blocks. `tier`:
    its source, if not the requested tier. `is_kept`: see `Fetched`.
    """

    payload: Bytes
    good: int
    arrived_s: float
    bad: str | None = None
    tier: LoadSource | None = None
    is_kept: bool = False


def unpack(data: Bytes, first: int, offset: int, expected: Expected) -> tuple[Bytes, int]:
    """Return (payload of the good leading blocks, their number) of a fetched record. Raises `BadRecord`.

    `data`: header, then the payload of the extent's blocks from `first` on; `offset`: the first requested
    block of the extent.
    """
    header = decode_header(data)
    shape, blocks = expected.shape, len(expected.keys)
    check_belongs(header, expected.namespace, shape, offset, expected.first_block, expected.keys)
    if header.token_counts[offset : offset + blocks] != expected.token_counts:
        raise BadRecord("key", "blocks of other token counts than were asked for")
    start = header_bytes(header.blocks, shape.layers) + (offset - first) * shape.block_bytes
    end = start + blocks * shape.block_bytes
    if first > offset or data.nbytes < end:
        raise BadRecord("truncated", f"{data.nbytes} bytes where {end} were to come")
    payload = data[start:end]
    good = good_blocks(header, payload, offset)
    if good < blocks:
        layers = ", ".join(map(str, bad_layers(header, payload, offset + good, offset)))
        logger.error("block %d of an extent of %d is not what was sealed: layers %s", good, blocks, layers)
    return payload[: good * shape.block_bytes], good


def load(
    fetch_now: Callable[[Fetch], Fetched | FetchFailed],
    fetch: Fetch,
    expected: Expected,
    clock: Callable[[], float],
) -> LoadedBlocks | FetchFailed:
    """Fetch and verify. `LoadedBlocks.arrived_s` is the clock's time after both."""
    reply = fetch_now(fetch)
    if isinstance(reply, FetchFailed):
        return reply
    assert reply.data is not None, "a link hands out bytes, not references"
    try:
        payload, good = unpack(reply.data, reply.first, fetch.offset, expected)
    except BadRecord as bad:
        return LoadedBlocks(reply.data[:0], 0, clock(), bad.kind, reply.tier)
    bad_kind = "checksum" if good < len(expected.keys) else None
    return LoadedBlocks(payload, good, clock(), bad_kind, reply.tier, reply.is_kept)


@dataclass(frozen=True, slots=True, eq=False)
class PieceLoad:
    """One piece on its way into `pages`, which are those of its blocks. `read`: see `PageIo.begin_in`.

    `over` is called once, on the engine's thread, with what came of it and what the device reports, if that
    fails. Of a piece that was copied the state is then "moving".
    """

    restore: Restore
    piece: RestorePiece
    pages: tuple[int, ...]
    read: CopyEvent
    over: Callable[[LoadedBlocks | FetchFailed, BaseException | None], None]


class PieceLoads:
    """Loads under way; at most `fetch_max` fetches, others wait in the order in which they were begun.

    Thread-safe.
    """

    def __init__(
        self,
        fetch_now: Callable[[Fetch], Fetched | FetchFailed],
        moves: PageMoves,
        lane: Executor,
        arrivals: CompletionQueue,
        shape: BlockShape,
        fetch_max: int,
        clock: Callable[[], float],
    ) -> None:
        self.fetch_now = fetch_now
        self._moves = moves
        self._lane = lane
        self._arrivals = arrivals
        self._shape = shape
        self._fetch_max = fetch_max
        self._clock = clock
        self._lock = threading.Lock()
        self._under_way = 0
        # All of these have their pages, so the pool bounds them.
        self._backlog: deque[tuple[PieceLoad, Fetch, Expected]] = deque()
        self._is_starting = False

    def fetch(self, load: PieceLoad, fetch: Fetch, expected: Expected) -> None:
        """Fetch a piece, verify it and copy it, as soon as there is a thread for it."""
        self._start(0, (load, fetch, expected))

    def place(self, load: PieceLoad, loaded: LoadedBlocks) -> None:
        """Begin to copy the good blocks that no step computes."""
        self._place(load, loaded, lambda: None)

    def _start(self, ended: int, *more: tuple[PieceLoad, Fetch, Expected]) -> None:
        """Begin what there is room for, now that loads have `ended` and `more` wait.

        One thread does, or calls would nest where all is done at once. Whenever the lock is free, nothing
        waits for room that there is, unless a thread is about to begin it.
        """
        with self._lock:
            self._under_way -= ended
            self._backlog += more
            if self._is_starting:
                return
            self._is_starting = True
        while (coming := self._next()) is not None:
            load, fetch, expected = coming
            if not begin(self._lane, self._run, load, fetch, expected):
                self._over(load, FetchFailed("error"), self._fetched)

    def _next(self) -> tuple[PieceLoad, Fetch, Expected] | None:
        with self._lock:
            if not self._backlog or self._under_way >= self._fetch_max:
                self._is_starting = False
                return None
            self._under_way += 1
            return self._backlog.popleft()

    def _fetched(self) -> None:
        self._start(1)

    def _run(self, of: PieceLoad, fetch: Fetch, expected: Expected) -> None:
        result = self._load(of, fetch, expected)
        if isinstance(result, FetchFailed):
            self._over(of, result, self._fetched)
        else:
            self._place(of, result, self._fetched)

    def _load(self, of: PieceLoad, fetch: Fetch, expected: Expected) -> LoadedBlocks | FetchFailed:
        if not of.restore.is_wanted(of.piece):
            return FetchFailed("unwanted" if of.restore.is_stopped else "late")
        of.piece.begun_s = self._clock()

        def fetch_now(fetch: Fetch) -> Fetched | FetchFailed:
            reply = self.fetch_now(fetch)
            of.piece.fetched_s = self._clock()
            return reply

        try:
            result = load(fetch_now, fetch, expected, self._clock)
        except Exception:  # a fault of the tiers must not leave the request waiting
            logger.exception("a load failed")
            return FetchFailed("error")
        if isinstance(result, LoadedBlocks):
            of.piece.arrived_s = result.arrived_s
        return result

    def _place(self, load: PieceLoad, loaded: LoadedBlocks, then: Callable[[], None]) -> None:
        restore, piece = load.restore, load.piece
        bt, block_bytes = self._shape.block_tokens, self._shape.block_bytes
        first = piece.start // bt
        end = min(piece.end, (first + loaded.good) * bt)
        start = restore.claim(piece, end) if loaded.good else None
        if start is None:
            self._over(load, loaded, then)
            return
        skip = start // bt - first
        pages = load.pages[skip : -(-end // bt) - first]
        payload = loaded.payload[skip * block_bytes : (skip + len(pages)) * block_bytes]

        def landed(failure: BaseException | None) -> None:
            piece.landed_s = self._clock()
            self._over(load, loaded, then, failure)

        if not self._moves.bring_in(payload, pages, load.read, landed):
            self._over(load, FetchFailed("error"), then)

    def _over(
        self,
        load: PieceLoad,
        result: LoadedBlocks | FetchFailed,
        then: Callable[[], None],
        failure: BaseException | None = None,
    ) -> None:
        self._arrivals.post(lambda: load.over(result, failure))
        then()

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is wrong."""
        with self._lock:
            assert self._under_way >= 0, "more loads have ended than were begun"
            is_full = self._under_way >= self._fetch_max
            assert is_full or self._is_starting or not self._backlog, (
                "a load waits for none that is under way"
            )


T = TypeVar("T")


def _failure_of(ticket: Ticket) -> BaseException | None:
    """Wait for a move; return what the device reports of it, if anything."""
    try:
        ticket.wait()
    except Exception as error:  # noqa: BLE001 - it is the caller's to handle
        return error
    return None


class PageMoves:
    """Moves blocks into and out of the pool's pages, beside the steps: no other sequence waits for one.

    A move's pages stay referenced until it is over, whatever becomes of the sequence that they are of: no
    other work writes or reads a page under a move. What moves in has its sequence's own references, until
    that loses its pages (`keep`); it begins whenever its bytes are verified, since no step reads a page that
    was given away before the step was planned (`Scheduler`), and `Restore.claim` gives it no slot that a step
    computes.

    Of one pool, for the engine's thread, but for `bring_in`; blocks leave in `lane`.
    """

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
        self.pool.acquire(*pages)
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
        self.pool.acquire(*pages)
        self._moves += 1
        self._held[self._moves] = list(pages)
        return self._moves

    def _end(self, move: int, result: T, over: Callable[[T], None]) -> None:
        self._free(move)
        over(result)

    def _free(self, move: int | RestorePiece) -> None:
        """Release a move's pages, unless that is done."""
        self.pool.release(self._held.pop(move, []))
