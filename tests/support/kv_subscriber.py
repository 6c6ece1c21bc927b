"""A subscriber of KV events as vLLM documents one: messages of the PUB socket, missed ones by a replay."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable
from types import TracebackType

import zmq

from samovar.cache_tiers.events.publisher import END, REPLAY_PORT
from tests.support.heard_cache import HeardCache

WAIT_S = 30.0


def until(is_done: Callable[[], bool], *work: Callable[[], object]) -> None:
    """Do the work until `is_done`."""
    ends_s = time.monotonic() + WAIT_S
    while not is_done():
        assert time.monotonic() < ends_s, "it does not come"
        for one in work:
            one()
        time.sleep(0.001)


def free_ports(count: int = 4) -> range:
    """Ports in a row that are free, and those of their replays."""
    while True:
        first = random.randrange(20_000, 30_000)
        try:
            for port in range(first, first + count):
                socket.create_server(("127.0.0.1", port)).close()
                socket.create_server(("127.0.0.1", port + REPLAY_PORT)).close()
        except OSError:
            continue
        return range(first, first + count)


class Subscriber:
    """Keeps a `HeardCache` up to date. Single-threaded: `read` and `replay` take what there is."""

    def __init__(self, port: int | None, *, is_late: bool = False) -> None:
        self.heard = HeardCache(is_late=is_late)
        self.topics: set[bytes] = set()
        self._port = port
        self._context = zmq.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.subscribe(b"kv@")
        self._sub.connect(f"tcp://127.0.0.1:{port}")
        self._waiting: dict[int, bytes] = {}
        until(lambda: self._sub.poll(0) > 0 or self.replay() >= 0)

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._context.destroy(linger=0)

    def read(self) -> None:
        """Take what has come, as far as nothing is missing before it."""
        while self._sub.poll(5):
            topic, number, payload = self._sub.recv_multipart()
            self.topics.add(topic)
            self._waiting[int.from_bytes(number, "big")] = payload
        self._hear()

    def replay(self) -> int:
        """Ask for what is missing, and return how many messages came."""
        asks = self._context.socket(zmq.DEALER)
        asks.connect(f"tcp://127.0.0.1:{(self._port or 0) + REPLAY_PORT}")
        asks.send_multipart([b"", self.heard.next_number.to_bytes(8, "big")])
        count = 0
        while asks.poll(10_000):
            _, topic, number, payload = asks.recv_multipart()
            if number == END:
                break
            count += 1
            self.topics.add(topic)
            self._waiting[int.from_bytes(number, "big")] = payload
        asks.close(linger=0)
        self._hear()
        return count

    def _hear(self) -> None:
        for number in sorted(self._waiting):
            payload = self._waiting[number]
            if number <= self.heard.next_number:
                del self._waiting[number]
            if number == self.heard.next_number:
                self.heard.hear(number, payload)
