"""The link of nodes that speak TLS: pulls bytes from another node's memory into ours. One per process.

The owner keeps the bytes under a number drawn for them; the `Export` travels by a Ray call; the receiver
connects, says the number and reads. Python's own TLS on blocking sockets, a thread for each connection at the
owner's end: both read and write outside of the interpreter's lock.

Both ends show a certificate of the cluster's authority (`NodeTls`), on a port that speaks nothing else. A
connection serves many pulls, and no longer than `CONNECTION_S`: what was revoked meanwhile ends with it.

NOT done here: the bytes are not verified, as in `link.py`.
"""

from __future__ import annotations

import logging
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from ssl import SSLSocket

import numpy as np

from samovar.cache_tiers.blocks import Bytes
from samovar.cache_tiers.transport.link import Export, LinkDown, LinkLate, PeerGone
from samovar.configs.tls import CertificateRefused, NodeTls, RenewedContext

logger = logging.getLogger(__name__)

ASK = struct.Struct("<QQQ")
"""What a caller says: the export's generation, its number, its bytes."""
GIVEN, GONE = b"\x01", b"\x00"
"""What it is told: the bytes follow, or nothing does."""

HANDSHAKE_S = 5.0
CONNECTION_S, IDLE_S = 300.0, 60.0
"""How long a connection is used, and how long it waits for the next pull. A caller leaves a bit earlier."""
CALLER_SHARE = 0.8
CONNECTIONS_MAX, STRANGERS_MAX = 64, 16
"""Connections whose callers have proved themselves, and those in their handshake: each has a thread."""
KEPT_MAX = 4
"""Connections to one node that are kept for the next pull."""
LOOK_S = 0.05
"""How far beyond its deadline a transfer may go."""
REST_S = 0.1


@dataclass(slots=True)
class _Shared:
    data: Bytes
    number: int  # drawn; a caller proves by it that it was told
    ends_s: float


@dataclass(slots=True, eq=False)
class _IdleConnection:
    connection: SSLSocket
    began_s: float
    used_s: float

    def is_good(self, now_s: float) -> bool:
        """Return whether the other end still serves it, as far as is known."""
        is_young = now_s - self.began_s < CALLER_SHARE * CONNECTION_S
        if not is_young or now_s - self.used_s >= CALLER_SHARE * IDLE_S:
            return False
        ready = select.poll()
        ready.register(self.connection, select.POLLIN)
        return not ready.poll(0)  # nothing is said unasked: it has been closed


class TlsLink:
    """What is shared with other nodes, and pulls from them: at most `bytes_max` of both. Thread-safe."""

    def __init__(self, name: str, tls: NodeTls, host: str, *, bytes_max: int, lease_s: float) -> None:
        """Listen on `host`, this node's address. `name`: "node id:incarnation". Raises `LinkDown`."""
        self.name = name
        self._tls = tls
        self._bytes_max = bytes_max
        self._lease_s = lease_s
        self._lock = threading.Lock()  # guards all below
        self._shared: dict[int, _Shared] = {}  # by generation, the oldest first
        self._last = 0
        self._pulling_bytes = 0
        self._down: str | None = None
        self._strangers: dict[SSLSocket, None] = {}  # the oldest first
        self._callers: set[SSLSocket] = set()
        self._pulls: set[SSLSocket] = set()
        self._kept: dict[str, list[_IdleConnection]] = {}
        try:
            self._context = RenewedContext(tls).context
            self._listener = socket.create_server(
                (host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET
            )
        except (CertificateRefused, OSError) as error:
            raise LinkDown(f"no TLS between nodes: {error}") from error
        self._place = f"{host} {self._listener.getsockname()[1]}"
        threading.Thread(target=self._listen, name="samovar-blocks", daemon=True).start()

    def share(self, data: Bytes) -> Export | None:
        """Return what a peer needs to pull `data`, for `lease_s`; None: no room. Raises `LinkDown`.

        They are not copied: nothing may write to them any more.
        """
        with self._lock:
            self._check_up()
            now_s = time.monotonic()
            self._expire(now_s)
            if not self._has_room(data.nbytes):
                return None
            self._last += 1
            number = secrets.randbits(64)
            self._shared[self._last] = _Shared(np.ascontiguousarray(data), number, now_s + self._lease_s)
            return Export(self.name, self._place.encode(), number, data.nbytes, self._last)

    def release(self, generation: int) -> None:
        """End a share. Idempotent; no-op if the generation is unknown."""
        with self._lock:
            self._shared.pop(generation, None)

    def bring(self, export: Export, deadline_s: float) -> Bytes | None:
        """Pull the exported bytes, unverified; None: no room for them. Blocks. Raises `LinkError`."""
        ends_s = time.monotonic() + deadline_s
        with self._lock:
            self._check_up()
            if not self._has_room(export.nbytes):
                return None
            self._pulling_bytes += export.nbytes
        try:
            data = np.empty(export.nbytes, np.uint8)
            self._pull(export, data.data, ends_s)
        except TimeoutError:
            late = f"{export.nbytes} bytes of {export.agent} not within {deadline_s:.3f} s"
            raise LinkLate(late) from None
        except (CertificateRefused, OSError, ValueError, OverflowError, struct.error) as error:
            with self._lock:
                self._check_up()
            raise PeerGone(f"{export.agent}: {error}") from error
        finally:
            with self._lock:
                self._pulling_bytes -= export.nbytes
        return data

    def close(self) -> None:
        """Stop listening and end all connections; pulls in flight raise `LinkDown`. Idempotent."""
        with self._lock:
            self._down = self._down or f"{self.name} is closed"
            self._shared.clear()
            kept = [one.connection for held in self._kept.values() for one in held]
            self._kept.clear()
            for connection in (*self._strangers, *self._callers, *self._pulls):
                _end(connection)
        for connection in kept:
            connection.close()
        _end(self._listener)

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is wrong."""
        with self._lock:
            assert self._held_bytes() <= self._bytes_max, "more bytes are held than may be"
            assert len(self._strangers) <= STRANGERS_MAX, "too many are in their handshakes"
            assert len(self._callers) <= CONNECTIONS_MAX, "too many connections"
            for place, kept in self._kept.items():
                assert 0 < len(kept) <= KEPT_MAX, f"{len(kept)} connections are kept to {place}"

    def _check_up(self) -> None:
        if self._down is not None:
            raise LinkDown(self._down)

    def _held_bytes(self) -> int:
        return self._pulling_bytes + sum(shared.data.nbytes for shared in self._shared.values())

    def _has_room(self, nbytes: int) -> bool:
        return self._held_bytes() + nbytes <= self._bytes_max

    def _expire(self, now_s: float) -> None:
        for generation in [at for at, shared in self._shared.items() if shared.ends_s <= now_s]:
            del self._shared[generation]

    # -- of who pulls ------------------------------------------------------------------

    def _pull(self, export: Export, into: memoryview, ends_s: float) -> None:
        """Raises `LinkError`, `CertificateRefused`, `OSError`, `ValueError`."""
        place = export.metadata.decode("ascii")
        kept = self._take(place) or self._connect(place, ends_s)
        connection, is_over = kept.connection, False
        try:
            with self._lock:
                self._check_up()
                self._pulls.add(connection)
            said = memoryview(ASK.pack(export.generation, export.address, export.nbytes))
            _send(connection, said, ends_s)
            told = memoryview(bytearray(1))
            _receive(connection, told, ends_s)
            if told != GIVEN:
                raise PeerGone(f"{export.agent} does not share it any more")
            _receive(connection, into, ends_s)
            is_over = True
        finally:
            with self._lock:
                self._pulls.discard(connection)
            if is_over:
                self._keep(place, kept)
            else:
                connection.close()

    def _connect(self, place: str, ends_s: float) -> _IdleConnection:
        """Raises `CertificateRefused`, `OSError`, `ValueError`."""
        host, _, port = place.partition(" ")
        began_s = time.monotonic()
        within_s = min(HANDSHAKE_S, ends_s - began_s)
        if within_s <= 0:
            raise TimeoutError
        plain = socket.create_connection((host, int(port)), within_s)
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = self._tls.calling().wrap_socket(plain, server_hostname=host)
        finally:
            plain.close()  # of no effect where the other has taken it over
        return _IdleConnection(connection, began_s, began_s)

    def _take(self, place: str) -> _IdleConnection | None:
        """Return a connection that was kept, and close those that are no good any more."""
        now_s = time.monotonic()
        with self._lock:
            kept = self._kept.pop(place, [])
            good = [one for one in kept if one.is_good(now_s)]
            taken = good.pop() if good else None
            if good:
                self._kept[place] = good
        for one in kept:
            if one is not taken and one not in good:
                one.connection.close()
        return taken

    def _keep(self, place: str, kept: _IdleConnection) -> None:
        kept.used_s = time.monotonic()
        with self._lock:
            is_kept = self._down is None and len(self._kept.get(place, ())) < KEPT_MAX
            if is_kept:
                self._kept.setdefault(place, []).append(kept)
            left = [other for other, held in self._kept.items() if not held[-1].is_good(kept.used_s)]
            bad = [one for other in left for one in self._kept.pop(other)]
        for one in bad if is_kept else [*bad, kept]:
            one.connection.close()

    # -- of who shares -----------------------------------------------------------------

    def _listen(self) -> None:
        while self._down is None:
            try:
                plain, _ = self._listener.accept()
            except OSError as error:
                if self._down is None:
                    logger.warning("a connection for blocks was not taken: %s", error)
                    time.sleep(REST_S)
                continue
            try:
                plain.settimeout(HANDSHAKE_S)
                plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection = self._context.wrap_socket(plain, True, do_handshake_on_connect=False)
            except OSError as error:
                logger.info("a connection for blocks ended at once: %s", error)
                plain.close()
                continue
            self._meet(connection)
            serving = threading.Thread(
                target=self._serve, args=(connection,), name="samovar-blocks", daemon=True
            )
            try:
                serving.start()
            except RuntimeError as error:  # the process may be out of threads
                logger.warning("a connection for blocks was not served: %s", error)
                with self._lock:
                    self._strangers.pop(connection, None)
                connection.close()
        self._listener.close()

    def _meet(self, stranger: SSLSocket) -> None:
        """Note a connection whose caller has not proved itself; the oldest such makes room."""
        with self._lock:
            if len(self._strangers) >= STRANGERS_MAX:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                _end(oldest)
            self._strangers[stranger] = None

    def _admit(self, caller: SSLSocket) -> bool:
        with self._lock:
            self._strangers.pop(caller, None)
            if self._down is not None or len(self._callers) >= CONNECTIONS_MAX:
                return False
            self._callers.add(caller)
            return True

    def _serve(self, connection: SSLSocket) -> None:
        """Shake hands, then answer one pull after the other. In the connection's thread."""
        try:
            connection.do_handshake()
            ends_s = time.monotonic() + CONNECTION_S
            while self._down is None and (connection in self._callers or self._admit(connection)):
                said = memoryview(bytearray(ASK.size))
                _receive(connection, said, min(ends_s, time.monotonic() + IDLE_S))
                self._answer(connection, *ASK.unpack(said))
        except OSError as error:
            logger.info("a connection for blocks has ended: %s", error)
        finally:
            with self._lock:
                self._strangers.pop(connection, None)
                self._callers.discard(connection)
            connection.close()

    def _answer(self, connection: SSLSocket, generation: int, number: int, nbytes: int) -> None:
        now_s = time.monotonic()
        with self._lock:
            self._expire(now_s)
            shared = self._shared.get(generation)
        if shared is None or (shared.number, shared.data.nbytes) != (number, nbytes):
            _send(connection, memoryview(GONE), now_s + HANDSHAKE_S)
            return
        _send(connection, memoryview(GIVEN), shared.ends_s)
        _send(connection, shared.data.data, shared.ends_s)


def _send(connection: SSLSocket, data: memoryview, ends_s: float) -> None:
    _whole(connection, lambda at: connection.send(data[at:]), len(data), ends_s)


def _receive(connection: SSLSocket, into: memoryview, ends_s: float) -> None:
    _whole(connection, lambda at: connection.recv_into(into[at:]), len(into), ends_s)


def _whole(connection: SSLSocket, move: Callable[[int], int], nbytes: int, ends_s: float) -> None:
    """Repeat `move(at)`, a record of TLS each, until all bytes have been moved. Raises `OSError`."""
    at, looked_s = 0, 0.0
    while at < nbytes:
        now_s = time.monotonic()
        if now_s - looked_s > LOOK_S:
            if now_s >= ends_s:
                raise TimeoutError("not in time")
            connection.settimeout(ends_s - now_s)
            looked_s = now_s
        moved = move(at)
        if not moved:
            raise ConnectionResetError("the other end has closed it")
        at += moved


def _end(connection: socket.socket) -> None:
    """Wake the thread that waits on a connection, which then ends.

    Not by the method of TLS' sockets: these would go on without TLS afterwards.
    """
    try:
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
    except OSError as error:
        logger.debug("it had ended: %s", error)
