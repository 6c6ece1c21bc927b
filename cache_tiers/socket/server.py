"""The tiers' socket: engines of any kind use a node by it.

A connection makes one call at a time, on a thread of its own; a client opens a few, so that its lookups do
not wait behind its loads. All clients are processes of users that may come in, which the kernel tells; what
they say is checked all the same. Bytes go as sealed memory files: a load of what main memory holds is a map
of the record, what a file holds is read into room that the client has lent, a store brings its record along
and leaves nothing behind if its client dies.
"""

from __future__ import annotations

import logging
import os
import resource
import socket
import stat
import struct
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from samovar.cache_tiers.blocks import READABLE, BadRecord, Bytes, Record, TierError, decode_header
from samovar.cache_tiers.media import Room, SharedRecord, shared
from samovar.cache_tiers.messages import Fetch, Fetched, FetchFailed, Lookup, StoreRequest
from samovar.cache_tiers.node import LentRoom, TierNode
from samovar.cache_tiers.socket.checks import check
from samovar.cache_tiers.socket.messages import CALLS, FetchReply, Hello, Offer, Reports, Welcome
from samovar.cache_tiers.socket.wire import (
    FRAME_S,
    PROTOCOL,
    BadMessage,
    SocketError,
    close_all,
    decoded,
    receive,
    send,
)
from samovar.configs.sections import TierSettings

logger = logging.getLogger(__name__)

CONNECTIONS_MAX = 512
CONNECTIONS_PER_PROCESS_MAX = 16
CONNECTIONS_SHARE = 0.25
"""Part of this process' file descriptors that connections may take."""
WAITING_BYTES_MAX = 2 * 1024**3
"""Records that clients have brought and no tier has taken yet."""
ROOMS_MAX = 4
"""Rooms of one connection that stay mapped: of a client's threads each has its own, and any connection."""
PATH_BYTES_MAX = 107
"""Of a socket's path: the kernel's."""
PEER = struct.Struct("3i")  # pid, uid, gid
CLOSED = "closed"
USES = ("lookup", "fetch", "offer", "turn_over")
"""Calls that show that an engine uses these tiers."""


class BroughtRecords:
    """Records that came with one call, until the node has stored or dropped them."""

    def __init__(self, records: list[SharedRecord]) -> None:
        self.records = records


def call_brought(source: object, ticket: int) -> Record:
    """Return the record that an offer brought along. See `CallFor`. Raises `TierError`."""
    if not isinstance(source, BroughtRecords) or not 0 <= ticket < len(source.records):
        raise TierError("the offer brought no such record")
    record = source.records[ticket]
    return Record(record.data, owned=record)


@dataclass(frozen=True, slots=True)
class SocketStats:
    """`connections`: open now; `waiting_bytes`: brought and not stored yet; `refused`: by reason."""

    connections: int
    waiting_bytes: int
    refused: dict[str, int]


class SharedPlaces:
    """`most` places: bytes that wait, records that wait, fetches under way. A client is a process.

    Who holds some gets more only as long as it holds no more than what stays free then: alone a half, of n
    each a part of n + 1 in the end, and a client that comes finds a place. Who holds none gets any free one.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._held: Counter[int] = Counter()
        self._back: deque[tuple[int, int]] = deque()

    def take(self, pid: int, count: int) -> bool:
        """Take `count` places for a process, all or none; return whether they were there."""
        with self._lock:
            self._settle()
            held, free = self._held[pid], self._most - self._held.total() - count
            if free < 0 or not (held + count <= free or (not held and count <= max(1, self._most // 2))):
                return False
            self._held[pid] += count
            return True

    def give_back(self, pid: int, count: int) -> None:
        """Give places back. Takes no lock: finalizers call it, which may run within any line of a thread."""
        self._back.append((pid, count))

    @property
    def held(self) -> int:
        """How many are taken now, by all."""
        with self._lock:
            self._settle()
            return self._held.total()

    def _settle(self) -> None:
        while self._back:
            pid, count = self._back.popleft()
            self._held[pid] -= count
            if not self._held[pid]:
                del self._held[pid]


@dataclass(frozen=True, slots=True)
class SocketLimits:
    """`fetch_max`, `records_max`: fetches under way and records that wait, of all clients (`SharedPlaces`);
    `load_s_max`: the longest deadline; `frame_s`: how long a frame may take, see `wire.FRAME_S`.
    """

    fetch_max: int = 64
    records_max: int = 64
    load_s_max: float = 30.0
    frame_s: float = FRAME_S

    @staticmethod
    def of(settings: TierSettings) -> SocketLimits:
        """Return those of a node's settings."""
        return SocketLimits(settings.fetch_max, settings.store_queue_max, settings.load_s_max)


class _Rooms:
    """The room that a connection's client has lent, mapped as long as it is lent again and again."""

    def __init__(self) -> None:
        self._by_file: dict[tuple[int, int], Room] = {}

    def lent(self, fds: list[int]) -> LentRoom | None:
        """Return what came with a fetch, taken from `fds`; None if nothing did that can be used."""
        if len(fds) != 1:
            return None
        found = os.fstat(fds[0])
        room = self._by_file.pop((found.st_dev, found.st_ino), None)
        if room is None:
            try:
                room = Room(fds.pop())
            except TierError as error:  # blocks come another way
                logger.debug("room is not used: %s", error)
                return None
        while len(self._by_file) >= ROOMS_MAX:
            del self._by_file[next(iter(self._by_file))]
        self._by_file[found.st_dev, found.st_ino] = room
        return LentRoom(room.data)


class TierSocket:
    """Serves a node's tiers on a Unix socket.

    `path`: in a directory that only this user can enter, which is made if it is not there. `uids`: whose
    processes may come in, besides this user's and root's. `data_of`: bytes of what a tier hands out by
    reference, where that is no `SharedRecord`. `used`: called when a client uses the tiers.
    Thread-safe.
    """

    def __init__(
        self,
        node: TierNode,
        path: Path,
        *,
        uids: frozenset[int] = frozenset(),
        data_of: Callable[[object], Bytes] | None = None,
        used: Callable[[], None] = lambda: None,
        limits: SocketLimits = SocketLimits(),
    ) -> None:
        """Listen. Raises `OSError` if the socket cannot be made, or another process listens there."""
        self._node = node
        self.path = path
        self._uids = uids | {0, os.getuid()}
        self._data_of = data_of
        self._used = used
        self._limits = limits
        self._lock = threading.Lock()
        self._open: dict[socket.socket, int] = {}  # -> pid
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._connections_max = min(CONNECTIONS_MAX, int(soft * CONNECTIONS_SHARE))
        self._fetching = SharedPlaces(limits.fetch_max)
        self._waiting, self._waiting_bytes = SharedPlaces(limits.records_max), SharedPlaces(WAITING_BYTES_MAX)
        self._refused: Counter[str] = Counter()
        self._is_closed = False
        self._listener = _listen(path)
        threading.Thread(target=self._accept, name="tiers-socket", daemon=True).start()

    @property
    def stats(self) -> SocketStats:
        with self._lock:
            return SocketStats(len(self._open), self._waiting_bytes.held, dict(self._refused))

    def close(self) -> None:
        """End all connections and remove the socket. Idempotent."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            left = list(self._open)
        self.path.unlink(missing_ok=True)
        for sock in (self._listener, *left):
            _shut(sock)

    def _accept(self) -> None:
        is_short = False
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if self._is_closed:
                    self._listener.close()
                    return
                if not is_short:
                    logger.warning("no client can be let in for now: %s", error)  # out of file descriptors
                is_short = True
                threading.Event().wait(0.1)
                continue
            is_short = False
            try:
                why = self._let_in(sock)
            except Exception:  # of our own: it costs this client
                logger.exception("a client could not be let in")
                why = "error"
            if why:
                self._send_away(sock, why)

    def _send_away(self, sock: socket.socket, why: str) -> None:
        with self._lock:
            self._refused[why] += 1
            count = self._refused[why]
            self._open.pop(sock, None)
        sock.close()
        if why != CLOSED and str(count).strip("0") == "1":  # the 1st, 10th, 100th: they may come by thousands
            logger.warning("a client is sent away: %s (%d so far)", why, count)

    def _let_in(self, sock: socket.socket) -> str:
        """Serve a client on a thread of its own; return why not."""
        pid, uid, _ = PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size))
        if uid not in self._uids:
            return "foreign user"
        with self._lock:
            if self._is_closed:
                return CLOSED
            if len(self._open) >= self._connections_max:
                return "connections"
            if sum(one == pid for one in self._open.values()) >= CONNECTIONS_PER_PROCESS_MAX:
                return "connections of a process"
            self._open[sock] = pid
        try:
            threading.Thread(target=self._serve, args=(sock, pid), name="tiers-client", daemon=True).start()
        except RuntimeError:
            return "threads"
        return ""

    def _serve(self, sock: socket.socket, pid: int) -> None:
        rooms = _Rooms()
        try:
            self._greet(sock)
            while True:
                self._call(sock, pid, rooms)
        except SocketError as error:
            logger.debug("a client has left: %s", error)
        except Exception:  # of our own: it costs this connection
            logger.exception("a client's call failed")
        finally:
            with self._lock:
                self._open.pop(sock, None)
            sock.close()

    def _greet(self, sock: socket.socket) -> None:
        data, fds = receive(sock, self._limits.frame_s)
        close_all(fds)
        method, args = _call_of(data)
        hello = decoded(Hello, args) if method == "hello" else None
        if hello is None or hello.protocol != PROTOCOL:
            spoken = "no hello" if hello is None else f"protocol {hello.protocol}"
            send(sock, [False, f"this socket speaks protocol {PROTOCOL}, the client {spoken}"])
            raise SocketError(spoken)
        send(sock, [True, Welcome(PROTOCOL, self._node.incarnation, READABLE)])

    def _call(self, sock: socket.socket, pid: int, rooms: _Rooms) -> None:
        fds: list[int] = []
        try:
            data, fds = receive(sock, self._limits.frame_s, waits=True)
            method, args = _call_of(data)
            said, held = self._answered(method, args, fds, pid, rooms)
        except (BadMessage, ValueError, BadRecord) as error:
            said, held = [False, str(error)[:500]], None
        finally:
            close_all(fds)  # those that were taken over are gone from the list
        send(sock, said, () if held is None else (held.fd,), self._limits.frame_s)

    def _answered(
        self, method: str, args: Any, fds: list[int], pid: int, rooms: _Rooms
    ) -> tuple[list[Any], SharedRecord | None]:
        if method not in CALLS or method == "hello":
            raise BadMessage(f"there is no call {method!r}"[:100])
        given = decoded(CALLS[method][0], args)
        check(given)
        if method in USES:
            self._used()
        if method == "fetch":
            return self._fetch(given, pid, rooms.lent(fds))
        if method == "offer":
            return [True, self._offer(given, fds, pid)], None
        return [True, self._plain(method, given)], None

    def _plain(self, method: str, given: Any) -> Any:
        node = self._node
        match method:
            case "lookup":
                return node.lookup(self._bounded(given))
            case "report":
                reports: Reports = given
                return node.report(list(reports.bad), list(reports.loads))
            case "turn_over":
                node.turn_over(given)
                return None
            case "clear":
                return node.clear(given)
            case "stats":
                return node.stats()
            case _:
                return node.ping()

    def _bounded(self, lookup: Lookup) -> Lookup:
        return replace(lookup, wait_s=min(lookup.wait_s, self._limits.load_s_max))

    def _fetch(self, fetch: Fetch, pid: int, room: LentRoom | None) -> tuple[list[Any], SharedRecord | None]:
        if not self._fetching.take(pid, 1):
            failed = FetchFailed("refused", "this client's share of fetches is under way")
            return [True, FetchReply(0, None, 0, failed)], None
        try:
            reply = self._node.fetch(
                replace(fetch, deadline_s=min(fetch.deadline_s, self._limits.load_s_max)), room
            )
            if isinstance(reply, Fetched) and reply.is_placed:
                assert reply.data is not None
                return [True, FetchReply(reply.first, reply.tier, int(reply.data.nbytes))], None
            if isinstance(reply, Fetched):
                held = self._shared(reply)
                return [True, FetchReply(reply.first, reply.tier, held.nbytes)], held
            failed = reply
        except TierError as error:
            failed = FetchFailed("error", str(error))
        finally:
            self._fetching.give_back(pid, 1)
        return [True, FetchReply(0, None, 0, failed)], None

    def _shared(self, reply: Fetched) -> SharedRecord:
        """Return what was fetched as a memory file. Raises `TierError`."""
        if reply.data is not None:
            return shared(reply.data)
        (ref,) = reply.ref
        if isinstance(ref, SharedRecord):
            return ref
        if self._data_of is None:
            raise TierError("what this node holds cannot be handed out")
        return shared(self._data_of(ref))

    def _offer(self, offers: tuple[Offer, ...], fds: list[int], pid: int) -> tuple[str, ...]:
        if len(offers) != len(fds):
            raise BadMessage(f"{len(offers)} offers with {len(fds)} files")
        outcomes = ["refused:busy"] * len(offers)
        requests: dict[int, StoreRequest] = {}
        brought = BroughtRecords([])
        for number, offer in enumerate(offers):
            fd = fds.pop(0)
            if not self._reserve(brought, offer.nbytes, pid):
                close_all([fd])
                continue
            try:
                record = SharedRecord(fd, offer.nbytes)
            except TierError as error:
                raise BadMessage(str(error)) from error
            try:
                header = decode_header(record.data)
            except BadRecord as error:
                outcomes[number] = f"refused:{error.kind}"
            except TierError as error:  # no room for its map
                logger.warning("a record is refused: %s", error)
            else:
                ticket = len(brought.records)
                brought.records.append(record)
                requests[number] = StoreRequest(
                    ticket, header, offer.nbytes, offer.incarnation, offer.clear_seq, offer.recompute_s
                )
        replied = self._node.offer(list(requests.values()), brought).outcomes
        for number, outcome in zip(requests, replied, strict=True):
            outcomes[number] = outcome
        return tuple(outcomes)

    def _reserve(self, brought: BroughtRecords, nbytes: int, pid: int) -> bool:
        if not self._waiting.take(pid, 1):
            return False
        if not self._waiting_bytes.take(pid, nbytes):
            self._waiting.give_back(pid, 1)
            return False
        for places, count in ((self._waiting, 1), (self._waiting_bytes, nbytes)):
            weakref.finalize(brought, places.give_back, pid, count).atexit = False
        return True


class SocketOpener:
    """Opens a socket where another process may still listen: tried again and again, said once.

    `listen`: makes the socket, or raises `OSError`.
    """

    def __init__(self, listen: Callable[[], TierSocket]) -> None:
        self._listen = listen
        self._socket: TierSocket | None = None
        self._why = ""  # as said last

    def open(self) -> TierSocket | None:
        """Return the socket, opened now if it was not; None: not yet."""
        if self._socket is None:
            try:
                self._socket = self._listen()
            except OSError as error:
                if str(error) != self._why:
                    logger.warning("other engines cannot use these tiers; it is tried again: %s", error)
                self._why = str(error)
            else:
                if self._why:
                    logger.warning("other engines can use these tiers now: %s", self._socket.path)
        return self._socket


def _call_of(data: Any) -> tuple[str, Any]:
    if not (type(data) is list and len(data) == 2 and type(data[0]) is str):
        raise SocketError("no call")
    return data[0], data[1]


def _listen(path: Path) -> socket.socket:
    """Return the listening socket. Raises `OSError` whose text names the path, what is wrong, and the fix."""
    length = len(os.fsencode(path))
    if length > PATH_BYTES_MAX:
        raise OSError(f"{path} has {length} bytes, and a socket's path has {PATH_BYTES_MAX}: choose another")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.parent.stat()
    except OSError as error:
        raise OSError(f"the directory of {path} cannot be made: {error.strerror}; choose another") from error
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o022:
        raise PermissionError(
            f"others may put a socket into {path.parent}: give a directory of your own, of mode 0700"
        )
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket():
            _remove_dead(path)
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(64)
    except OSError as error:
        listener.close()
        if error.strerror is None:
            raise
        is_other = path.exists() and not path.is_socket()
        why = "is there and no socket: move it away" if is_other else f"cannot be made: {error.strerror}"
        raise OSError(f"{path} {why}, or choose another path") from error
    return listener


def _remove_dead(path: Path) -> None:
    """Remove a socket whose node was killed. Raises `FileExistsError` if a node listens there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
        pid, _, _ = PEER.unpack(probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size))
    raise FileExistsError(f"process {pid} listens at {path}: end it first, or choose another path")


def _shut(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)  # wakes its thread, which closes it
    except OSError:
        sock.close()  # not connected any more
