"""Publishes a feed over ZeroMQ as vLLM does: a PUB socket, and a ROUTER for what a subscriber has missed.

A message is topic, number (8 bytes, big-endian, from 0 on) and payload. Who sends a number to the ROUTER is
sent what is kept from there on, and an end mark. A thread of its own does it all; sockets drop what a slow
subscriber does not take, which sees that by the numbers.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from samovar.cache_tiers.events.feed import Batches, EventFeed

if TYPE_CHECKING:
    import zmq

    Sockets: TypeAlias = tuple[zmq.Socket[bytes], zmq.Socket[bytes]]

logger = logging.getLogger(__name__)

REPLAY_PORT = 1000
"""The ROUTER's port is so much above the PUB socket's, where Dynamo and Ray look for it."""
REPLICAS_MAX = 63
"""Replicas of a node that have a port: those behind the port of its tiers."""
END = (-1).to_bytes(8, "big", signed=True)
GATHER_S = 0.01
"""What happens within it is one message."""
BIND_AGAIN_S = 5.0
QUEUED_MAX = 10_000
"""Messages that wait for one subscriber; further ones it misses."""
REPLAYS_MAX = 16
REPLAYED_AT_ONCE = 1000
REPLAY_POLL_MS = 20
ASKED_BYTES_MAX = 256
HEARTBEAT_MS = 10_000


class EventPublisher:
    """Publishes `feed` until it is closed, at the first of `ports` that is free, in a thread of its own.

    `host`: of the endpoint, `*` for all addresses. `own`, `model`: in the topic: how others reach this
    machine, and what it serves. Ports that are taken are tried again later. `wall_clock`: Unix seconds.
    """

    def __init__(
        self,
        host: str,
        ports: Sequence[int],
        own: str = "127.0.0.1",
        model: str = "",
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.feed = EventFeed()
        self.port: int | None = None
        """Where it listens; None: nowhere yet."""
        self._host, self._ports = host, ports
        self._own, self._model = own, model
        self._batches = Batches(wall_clock)
        self._topic = b""
        self._replays: dict[bytes, int] = {}  # subscriber -> the number that it is sent next
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stopped = threading.Event()
        self.feed.wake = partial(os.eventfd_write, self._wake_fd, 1)
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread and its sockets."""
        self._stopped.set()
        os.eventfd_write(self._wake_fd, 1)
        self._thread.join()

    def _run(self) -> None:
        try:
            import zmq  # an extra: a node of a cluster that lacks it serves all the same
        except ImportError:
            logger.exception("no KV events: pyzmq is not installed")
            self.feed.close()
            return
        context = zmq.Context()
        try:
            sockets = self._bound(context)
            if sockets is not None:
                self._serve(*sockets)
        except Exception:
            logger.exception("KV events end: routers hear nothing more of this cache")
        finally:
            self.feed.close()
            context.destroy(linger=0)

    def _bound(self, context: zmq.Context[zmq.Socket[bytes]]) -> Sockets | None:
        """Return the PUB and the ROUTER socket; None: closed before there was a port."""
        import zmq

        why = ""
        while not self._stopped.is_set():
            for port in self._ports:
                pub, replay = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
                for one, queued in ((pub, QUEUED_MAX), (replay, REPLAYED_AT_ONCE)):
                    one.set(zmq.SNDHWM, queued)
                    one.set(zmq.MAXMSGSIZE, ASKED_BYTES_MAX)
                    one.set(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)  # else what is sent to a dead one is kept
                    one.set(zmq.IPV6, int(self._host.startswith("[")))
                replay.set(zmq.ROUTER_MANDATORY, 1)  # a full queue says so, instead of dropping the rest
                try:
                    pub.bind(f"tcp://{self._host}:{port}")
                    replay.bind(f"tcp://{self._host}:{port + REPLAY_PORT}")
                except zmq.ZMQError as error:
                    pub.close(linger=0)
                    replay.close(linger=0)
                    if not why:
                        logger.warning("no KV events at port %d: %s", port, error)
                    why = str(error)
                    continue
                self._topic = f"kv@{self._own}:{port}@{self._model}".encode()
                self.port = port
                logger.info("KV events at %s:%d", self._host, port)
                return pub, replay
            self._stopped.wait(BIND_AGAIN_S)
        return None

    def _serve(self, pub: zmq.Socket[bytes], replay: zmq.Socket[bytes]) -> None:
        import zmq

        poller = zmq.Poller()
        poller.register(self._wake_fd, zmq.POLLIN)
        poller.register(replay, zmq.POLLIN)
        while not self._stopped.is_set():
            self._publish(pub)
            self._replays = {
                peer: number
                for peer, begun in self._replays.items()
                if (number := self._replayed(replay, peer, begun)) is not None
            }
            ready = dict(poller.poll(REPLAY_POLL_MS if self._replays else None))
            if self._wake_fd in ready:
                os.eventfd_read(self._wake_fd)
                self._stopped.wait(GATHER_S)
            if replay in ready:
                frames = replay.recv_multipart()
                if len(frames) == 3 and len(frames[2]) == 8 and len(self._replays) < REPLAYS_MAX:
                    self._replays[frames[0]] = int.from_bytes(frames[2], "big")

    def _publish(self, pub: zmq.Socket[bytes]) -> None:
        while events := self.feed.take():
            first = self._batches.next_number
            self._batches.add(events)
            for number, payload in self._batches.since(first):
                pub.send_multipart((self._topic, number.to_bytes(8, "big"), payload))

    def _replayed(self, replay: zmq.Socket[bytes], peer: bytes, number: int) -> int | None:
        """Replay from `number` on, as far as a subscriber takes it; return what is next, None: no more."""
        import zmq

        try:
            for kept, payload in self._batches.since(number):
                frames = (peer, b"", self._topic, kept.to_bytes(8, "big"), payload)
                replay.send_multipart(frames, zmq.DONTWAIT)
                number = kept + 1
            replay.send_multipart((peer, b"", b"", END, b""), zmq.DONTWAIT)
        except zmq.Again:
            return number
        except zmq.ZMQError as error:  # it has gone
            logger.info("a replay of KV events ends: %s", error)
        return None


def publisher_at(endpoint: str, *, is_replica: bool, model: str = "") -> EventPublisher:
    """Return a publisher at `telemetry.kv_events`, a node's tiers at this port and its replicas behind it."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    base = int(port)
    ports = range(base + 1, base + 1 + REPLICAS_MAX) if is_replica else (base,)
    return EventPublisher(host, ports, own_address() if host == "*" else host, model)


def own_address() -> str:
    """Return the address that this machine has on its way to others; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        address: str = probe.getsockname()[0]
        return address
