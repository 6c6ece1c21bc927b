"""The client's end of the tiers' socket: calls of a node's tiers from an engine's process.

No failure of the node leaves it as an error: tiers that do not answer have no blocks and accept none.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samovar.cache_tiers.blocks import Clear
from samovar.cache_tiers.media import SharedRecord
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
from samovar.cache_tiers.socket.messages import CALLS, FetchReply, Hello, Offer, Reports, Welcome
from samovar.cache_tiers.socket.server import CONNECTIONS_PER_PROCESS_MAX, PEER
from samovar.cache_tiers.socket.wire import PROTOCOL, SocketError, close_all, decoded, receive, send

logger = logging.getLogger(__name__)

CONNECT_S = 1.0
RETRY_S = 1.0
"""So long after a connection failed no call tries again: a call costs nothing then."""
MARGIN_S = 1.0
"""An answer may come so much later than the node's own deadline."""


class SaidNo(SocketError):
    """The node has answered that it will not do that."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """Blocks that were fetched: `record.data` is the extent's header, then the blocks from `first` on.

    Nothing is verified: see `record.good_blocks`. The node's memory is taken up until this object goes.
    """

    first: int
    found: FetchReply
    record: SharedRecord


class SocketLink:
    """Calls a node by its socket; connections are opened as they are needed, and opened again. Thread-safe.

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
        self._lock = threading.Lock()
        self._free: list[socket.socket] = []
        self._slots = threading.BoundedSemaphore(CONNECTIONS_PER_PROCESS_MAX)
        self._retry_s = float("-inf")
        self._is_down = False
        self._is_closed = False
        self.incarnation = ""

    def lookup(self, lookup: Lookup) -> LookupResult | None:
        """Look up a prompt's blocks; None: no answer in time."""
        found: LookupResult | None = self._ask("lookup", lookup, self._call_s)
        return found

    def fetch(self, fetch: Fetch) -> Loaded | FetchFailed:
        """Fetch blocks within the fetch's deadline."""
        try:
            found, fds = self._call("fetch", fetch, fetch.deadline_s + MARGIN_S)
        except SaidNo as error:
            return FetchFailed("refused", str(error))
        except SocketError as error:
            return FetchFailed("gone", str(error))
        if found.failed is not None:
            close_all(fds)
            failed: FetchFailed = found.failed
            return failed
        try:
            (fd,) = fds
            return Loaded(found.first, found, SharedRecord(fd, found.nbytes))
        except Exception as error:  # noqa: BLE001 - a node that sends something else has nothing
            return FetchFailed("error", str(error))

    def offer(self, offers: Sequence[tuple[Offer, SharedRecord]]) -> tuple[str, ...]:
        """Bring records; return one outcome for each, see `StoreReply`."""
        said, fds = tuple(offer for offer, _ in offers), [record.fd for _, record in offers]
        outcomes: tuple[str, ...] | None = self._ask("offer", said, self._call_s, fds)
        return outcomes if outcomes and len(outcomes) == len(offers) else ("refused:no answer",) * len(offers)

    def report(self, bad: Sequence[BadReport], loads: Sequence[LoadReport]) -> None:
        """Tell of bad records, and how long loads took."""
        self._ask("report", Reports(tuple(bad), tuple(loads)), self._call_s)

    def turn_over(self, over: TurnEnded) -> None:
        """Report a turn's end."""
        self._ask("turn_over", over, self._call_s)

    def clear(self, clear: Clear, timeout_s: float) -> Cleared:
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
        if not self._slots.acquire(timeout=max(0.0, timeout_s)):
            raise SocketError("all connections are busy")
        try:
            sock, is_new = self._taken(ends_s)
            try:
                return self._exchanged(sock, method, given, ends_s, fds)
            except SaidNo:
                raise
            except SocketError:
                # A connection that lay idle may have been closed by a node that was started again.
                if is_new or self._clock() >= ends_s:
                    self._failed()
                    raise
            sock, _ = self._taken(ends_s, is_new=True)
            try:
                return self._exchanged(sock, method, given, ends_s, fds)
            except SaidNo:
                raise
            except SocketError:
                self._failed()
                raise
        finally:
            self._slots.release()

    def _exchanged(
        self, sock: socket.socket, method: str, given: Any, ends_s: float, fds: Sequence[int]
    ) -> tuple[Any, list[int]]:
        """Make one call on a connection, which is free again then, or closed. Raises `SocketError`."""
        came: list[int] = []
        try:
            sock.settimeout(max(ends_s - self._clock(), 1e-3))
            send(sock, [method, given], fds)
            said, came = receive(sock)
            if not (type(said) is list and len(said) == 2 and type(said[0]) is bool):
                raise SocketError("no answer")
            result = decoded(CALLS[method][1], said[1], is_finite=False) if said[0] else said[1]
        except BaseException as error:
            close_all(came)
            sock.close()
            if isinstance(error, OSError):
                raise SocketError(str(error)) from error
            raise
        with self._lock:
            if self._is_closed:
                sock.close()
            else:
                self._free.append(sock)
        if not said[0]:
            close_all(came)
            raise SaidNo(str(result))
        return result, came

    def _taken(self, ends_s: float, *, is_new: bool = False) -> tuple[socket.socket, bool]:
        """Return a connection, and whether it is a new one. Raises `SocketError`."""
        with self._lock:
            if self._is_closed:
                raise SocketError("closed")
            if is_new:  # the others are as old
                left, self._free = self._free, []
                for old in left:
                    old.close()
            elif self._free:
                return self._free.pop(), False
            if self._clock() < self._retry_s:
                raise SocketError("it did not answer just now")
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(min(CONNECT_S, max(ends_s - self._clock(), 1e-3)))
            sock.connect(str(self._path))
            _, uid, _ = PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size))
            if uid not in self._uids:
                raise SocketError(f"user {uid} serves {self._path}")
            send(sock, ["hello", Hello(PROTOCOL, self._client)])
            said, came = receive(sock)
            close_all(came)
            if type(said) is not list or len(said) != 2 or said[0] is not True:
                raise SocketError(str(said[1]) if type(said) is list and len(said) == 2 else "no welcome")
            welcome: Welcome = decoded(Welcome, said[1], is_finite=False)
        except (OSError, SocketError) as error:
            sock.close()
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
