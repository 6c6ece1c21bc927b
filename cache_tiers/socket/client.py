"""The client's end of the tiers' socket: calls of a node's tiers from an engine's process.

No failure of the node leaves it as an error: tiers that do not answer have no blocks and accept none.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samovar.cache_tiers.blocks import (
    VERSION,
    BlockShape,
    Bytes,
    Clear,
    TierError,
    check_belongs,
    decode_header,
    good_blocks,
    header_bytes,
)
from samovar.cache_tiers.media import Room, SharedRecord
from samovar.cache_tiers.messages import (
    BadReport,
    Cleared,
    Fetch,
    FetchFailed,
    LoadReport,
    Lookup,
    LookupResult,
    NodeStats,
    TurnEnded,
)
from samovar.cache_tiers.socket.checks import is_answer
from samovar.cache_tiers.socket.messages import CALLS, FetchReply, Hello, Offer, Reports, Welcome
from samovar.cache_tiers.socket.server import CONNECTIONS_PER_PROCESS_MAX, PEER
from samovar.cache_tiers.socket.wire import (
    FDS_MAX,
    PROTOCOL,
    BadMessage,
    SocketError,
    close_all,
    decoded,
    packed,
    receive,
    send,
    send_frame,
)

logger = logging.getLogger(__name__)

CONNECT_S = 1.0
RETRY_S = 1.0
"""So long after a connection failed no call tries again: a call costs nothing then."""
CLEAR_S = 30.0
COUNTED = ("turn_over", "report")
"""Calls that a node learns from: at most once, though an answer that did not come may mean that it has."""
MARGIN_S = 1.0
"""An answer may come so much later than the node's own deadline."""


class SaidNo(SocketError):
    """The node has answered that it will not do that."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """Blocks that were fetched: `data` is the extent's header, then the blocks from `first` on.

    Nothing is verified: see `checked`. The node's memory, or the room that it came in, is taken up until this
    object goes.
    """

    first: int
    found: FetchReply
    data: Bytes

    def checked(
        self, namespace: bytes, shape: BlockShape, offset: int, first_block: int, keys: Sequence[bytes]
    ) -> tuple[Bytes, int]:
        """Return the extent's blocks from `offset` on, in one run, and how many leading ones are good.

        `first_block`: where they stand in their chain. Raises `BadRecord` if they are not those of `keys`.
        """
        header = decode_header(self.data)
        check_belongs(header, namespace, shape, offset, first_block, keys)
        start = header_bytes(header.blocks, shape.layers) + (offset - self.first) * shape.block_bytes
        payload = self.data[start : start + len(keys) * shape.block_bytes]
        return payload, good_blocks(header, payload, offset)


class SocketLink:
    """Calls a node by its socket; connections are opened as they are needed, and opened again. Thread-safe.

    As `replicas.offload.TierLink`, which replicas use over Ray, but: an offer brings its record along, and
    is not called for; a fetch gives a memory file (`Loaded`); `turn_over` gives no forecast; nothing
    measures a start (`sample`, `measured`).

    `path`: the socket. `client`: a name for people. `call_s`: how long an answer is waited for, where the
    call has no deadline of its own. `uids`: whose process may serve it, besides this user's and root's.
    """

    def __init__(
        self,
        path: Path,
        client: str,
        *,
        call_s: float = 5.0,
        uids: frozenset[int] = frozenset(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path
        self._client = client
        self._call_s = call_s
        self._uids = uids | {0, os.getuid()}
        self._clock = clock
        self._open: set[socket.socket] = set()
        self._retry_s = float("-inf")
        self._is_down = False
        self._is_closed = False
        self.incarnation = ""
        self._begin()
        _LINKS.add(self)

    def _begin(self) -> None:
        """Begin without a connection; a forked process, too, which would read its parent's answers."""
        for sock in self._open:
            sock.close()
        self._open = set()
        self._free: list[socket.socket] = []
        self._lock = threading.Lock()
        self._slots = threading.BoundedSemaphore(CONNECTIONS_PER_PROCESS_MAX)

    def lookup(self, lookup: Lookup) -> LookupResult | None:
        """Look up a prompt's blocks; None: no answer in time."""
        found: LookupResult | None = self._ask("lookup", lookup, self._call_s)
        if found is None or is_answer(lookup, found):
            return found
        logger.warning("the tiers at %s have answered a lookup with what makes no sense", self._path)
        return None

    def fetch(self, fetch: Fetch, room: Room | None = None) -> Loaded | FetchFailed:
        """Fetch blocks within the fetch's deadline.

        `room`: where they may come if they are to be read from a file. It may be used again when what came is
        not needed any more, unless it `is_lost`.
        """
        came = self._fetched(fetch, room)
        # Else a read that was late may be under way, beside what came from elsewhere.
        if room is not None and (isinstance(came, FetchFailed) or came.found.tier != fetch.tier):
            room.is_lost = True
        return came

    def _fetched(self, fetch: Fetch, room: Room | None) -> Loaded | FetchFailed:
        lent = [] if room is None else [room.fd]
        try:
            found, fds = self._call("fetch", fetch, fetch.deadline_s + MARGIN_S, lent)
        except SaidNo as error:
            return FetchFailed("refused", str(error))
        except SocketError as error:
            return FetchFailed("gone", str(error))
        if found.failed is not None:
            close_all(fds)
            failed: FetchFailed = found.failed
            return failed
        is_placed = room is not None and not fds and 0 < found.nbytes <= room.data.nbytes
        if len(fds) != (0 if is_placed else 1) or not 0 <= found.first <= fetch.offset:
            close_all(fds)
            return FetchFailed("error", f"{len(fds)} files with blocks from {found.first} on")
        if room is not None and is_placed:
            return Loaded(found.first, found, room.data[: found.nbytes])
        try:
            return Loaded(found.first, found, SharedRecord(fds[0], found.nbytes).data)
        except TierError as error:
            return FetchFailed("error", str(error))

    def offer(self, offers: Sequence[tuple[Offer, SharedRecord]]) -> tuple[str, ...]:
        """Bring records; return one outcome for each, see `StoreReply`."""
        outcomes: list[str] = []
        for at in range(0, len(offers), FDS_MAX):
            some = offers[at : at + FDS_MAX]
            said, fds = tuple(offer for offer, _ in some), [record.fd for _, record in some]
            told: tuple[str, ...] | None = self._ask("offer", said, self._call_s, fds)
            outcomes += told if told and len(told) == len(some) else ["refused:no answer"] * len(some)
        return tuple(outcomes)

    def report(self, bad: Sequence[BadReport], loads: Sequence[LoadReport]) -> None:
        """Tell of bad records, and how long loads took."""
        self._ask("report", Reports(tuple(bad), tuple(loads)), self._call_s)

    def turn_over(self, over: TurnEnded) -> None:
        """Report a turn's end. Waits until the node has learned it, as `TierLink.turn_over`."""
        self._ask("turn_over", over, self._call_s)

    def clear(self, clear: Clear, timeout_s: float = CLEAR_S) -> Cleared:
        """Clear records. Raises `TimeoutError` without an answer: they may not have been cleared."""
        cleared: Cleared | None = self._ask("clear", clear, timeout_s)
        if cleared is None:
            raise TimeoutError("the cache tiers do not answer: the clear may not have reached them")
        return cleared

    def stats(self) -> NodeStats | None:
        """Return the node's counters; None: no answer."""
        stats: NodeStats | None = self._ask("stats", None, self._call_s)
        return stats

    def ping(self) -> str | None:
        """Return the node's incarnation; None: no answer."""
        incarnation: str | None = self._ask("ping", None, self._call_s)
        return incarnation

    def close(self) -> None:
        """Close the connections; calls under way end by themselves."""
        with self._lock:
            self._is_closed = True
            left, self._free = self._free, []
            self._open.difference_update(left)
        for sock in left:
            sock.close()

    def _ask(self, method: str, given: Any, timeout_s: float, fds: Sequence[int] = ()) -> Any:
        """Return the answer; None: there was none."""
        try:
            result, came = self._call(method, given, timeout_s, fds)
        except SocketError as error:
            logger.info("the tiers at %s did not answer %s: %s", self._path, method, error)
            return None
        close_all(came)
        return result

    def _call(
        self, method: str, given: Any, timeout_s: float, fds: Sequence[int] = ()
    ) -> tuple[Any, list[int]]:
        ends_s = self._clock() + timeout_s
        try:
            frame = packed([method, given])
        except BadMessage as error:  # the node is not to blame
            raise SaidNo(str(error)) from error
        if not self._slots.acquire(timeout=max(0.0, timeout_s)):
            raise SocketError("all connections are busy")
        try:
            is_new = False
            while True:
                sock, is_new = self._taken(ends_s, is_new=is_new)
                try:
                    return self._exchanged(sock, method, frame, ends_s, fds)
                except SaidNo:
                    raise
                except SocketError:
                    # The node was started again in this moment. What counts twice is not said twice.
                    if is_new or method in COUNTED or self._clock() >= ends_s:
                        self._failed()
                        raise
                is_new = True
        finally:
            self._slots.release()

    def _exchanged(
        self, sock: socket.socket, method: str, frame: bytes, ends_s: float, fds: Sequence[int]
    ) -> tuple[Any, list[int]]:
        """Make one call on a connection, which is free again then, or closed. Raises `SocketError`."""
        came: list[int] = []
        try:
            send_frame(sock, frame, fds, ends_s - self._clock())
            said, came = receive(sock, ends_s - self._clock())
            if not (type(said) is list and len(said) == 2 and type(said[0]) is bool):
                raise SocketError("no answer")
            result = decoded(CALLS[method][1], said[1], is_finite=False) if said[0] else said[1]
        except BaseException as error:
            close_all(came)
            self._close(sock)
            if isinstance(error, OSError):
                raise SocketError(str(error)) from error
            raise
        with self._lock:
            is_kept = not self._is_closed
            if is_kept:
                self._free.append(sock)
        if not is_kept:
            self._close(sock)
        if not said[0]:
            close_all(came)
            raise SaidNo(str(result))
        return result, came

    def _close(self, sock: socket.socket) -> None:
        with self._lock:
            self._open.discard(sock)
        sock.close()

    def _taken(self, ends_s: float, *, is_new: bool = False) -> tuple[socket.socket, bool]:
        """Return a connection, and whether it is a new one. Raises `SocketError`."""
        with self._lock:
            if self._is_closed:
                raise SocketError("closed")
            if is_new:  # the others are as old
                left, self._free = self._free, []
                self._open.difference_update(left)
                for old in left:
                    old.close()
            while self._free:
                sock = self._free.pop()
                if _is_open(sock):
                    return sock, False
                self._open.discard(sock)
                sock.close()
            if self._clock() < self._retry_s:
                raise SocketError("it did not answer just now")
            try:
                sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            except OSError as error:
                raise SocketError(f"no connection: {error}") from error
            self._open.add(sock)
        try:
            connect_s = min(CONNECT_S, max(ends_s - self._clock(), 1e-3))
            welcome = greeted(sock, self._path, self._client, self._uids, connect_s)
        except (OSError, SocketError) as error:
            self._close(sock)
            self._failed()
            raise SocketError(f"no connection: {error}") from error
        if self._is_down:
            logger.warning("the tiers at %s answer again", self._path)
        self._is_down, self.incarnation = False, welcome.incarnation
        return sock, True

    def _failed(self) -> None:
        self._retry_s = self._clock() + RETRY_S
        if not self._is_down:
            self._is_down = True
            logger.warning("the tiers at %s do not answer; requests are computed meanwhile", self._path)


def _is_open(sock: socket.socket) -> bool:
    """Return whether an idle connection is one still: a node that was started again has closed it."""
    sock.settimeout(0.0)
    try:
        sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False  # closed, or something came that was not asked for


def greeted(
    sock: socket.socket, path: Path, client: str, uids: frozenset[int], within_s: float = CONNECT_S
) -> Welcome:
    """Connect to a node and return its welcome. `uids`: whose process may serve there.

    Raises `OSError` where no process listens, `SocketError` if it is another's, or speaks otherwise.
    """
    sock.settimeout(within_s)
    sock.connect(str(path))
    _, uid, _ = PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size))
    if uid not in uids:
        raise SocketError(f"user {uid} serves {path}")
    send(sock, ["hello", Hello(PROTOCOL, client)], (), within_s)
    said, came = receive(sock, within_s)
    close_all(came)
    if type(said) is not list or len(said) != 2 or said[0] is not True:
        raise SocketError(str(said[1]) if type(said) is list and len(said) == 2 else "no welcome")
    welcome: Welcome = decoded(Welcome, said[1], is_finite=False)
    if VERSION not in welcome.records:
        raise SocketError(f"it does not read records of version {VERSION}")
    return welcome


_LINKS: weakref.WeakSet[SocketLink] = weakref.WeakSet()


def _begin_again() -> None:
    for link in _LINKS:
        link._begin()


os.register_at_fork(after_in_child=_begin_again)
