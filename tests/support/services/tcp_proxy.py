"""A TCP proxy on this machine that can be cut: one client's way to a server that others go on using.

It can also be a long way: with `delay_s` each answer comes that much later, however large it is.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Literal

Cut = Literal["refused", "silent", "deaf"]
"""`refused`: connections are reset. `silent`: nothing gets through, in neither direction, and nobody is told.
`deaf`: what is asked arrives and is done, the answers are lost."""

PART_BYTES = 65536
RESET = struct.pack("ii", 1, 0)


class TcpProxy:
    """Forwards to `port` of this machine until it is `cut`, and after it is healed (`cut(None)`).

    `accepted`: connections so far.
    """

    def __init__(self, port: int, delay_s: float = 0.0) -> None:
        self._to = ("127.0.0.1", port)
        self._delay_s = delay_s
        self._lock = threading.Lock()
        self._cut: Cut | None = None
        self._is_closed = False
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self.accepted = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._start(self._listen)

    def cut(self, how: Cut | None) -> None:
        """None: heal. Connections of before are reset, except that nobody is told of a silence."""
        with self._lock:
            self._cut = how
            if how in ("refused", None):
                for one in self._open:
                    _end(one)

    def close(self) -> None:
        """End all connections and threads."""
        with self._lock:  # what is accepted from now on is ended by `_listen`: nothing else would
            self._is_closed = True
        _end(self._listener)
        self._listener.close()
        self.cut(None)
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive(), "a connection did not end"

    def _start(self, run, *args: object) -> None:  # type: ignore[no-untyped-def]
        thread = threading.Thread(target=run, args=args, name="tcp-proxy", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _listen(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # closed
                return
            self.accepted += 1
            with self._lock:
                if self._is_closed or self._cut == "refused":
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                    client.close()
                    continue
                server = socket.create_connection(self._to)
                self._open |= {client, server}
            self._start(self._pump, client, server, ("silent",))
            self._start(self._pump, server, client, ("silent", "deaf"))

    def _pump(self, source: socket.socket, target: socket.socket, lost_when: tuple[Cut, ...]) -> None:
        """One direction of a connection, to its end."""
        on_way: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
        is_slow = self._delay_s > 0 and "deaf" in lost_when
        if is_slow:
            delivery = threading.Thread(target=self._deliver, args=(on_way, target), daemon=True)
            delivery.start()
        with contextlib.suppress(OSError):  # reset by either side: what this is about
            while data := source.recv(PART_BYTES):
                if self._cut in lost_when:
                    continue
                if is_slow:
                    on_way.put((time.monotonic() + self._delay_s, data))
                else:
                    target.sendall(data)
        if is_slow:
            on_way.put((0.0, b""))
            delivery.join()  # what is on its way still arrives
        with self._lock:
            _end(source)
            _end(target)
            self._open -= {source, target}

    @staticmethod
    def _deliver(on_way: queue.SimpleQueue[tuple[float, bytes]], target: socket.socket) -> None:
        """Hand on what is on its way when its time has come, to the end."""
        while data := (part := on_way.get())[1]:
            time.sleep(max(0.0, part[0] - time.monotonic()))
            with contextlib.suppress(OSError):
                target.sendall(data)


def _end(one: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has ended already
        one.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def tcp_proxy(port: int, delay_s: float = 0.0) -> Iterator[TcpProxy]:
    proxy = TcpProxy(port, delay_s)
    try:
        yield proxy
    finally:
        proxy.close()
