"""The sockets: a subscriber as vLLM's, which comes late, is slow, asks again, or sends what it likes."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import zmq

from samovar.cache_tiers.events import feed as of_feed
from samovar.cache_tiers.events import publisher as of_publisher
from samovar.cache_tiers.events.feed import POOL, BlocksRemoved, BlocksStored
from samovar.cache_tiers.events.publisher import (
    END,
    REPLAY_PORT,
    EventPublisher,
    own_address,
    publisher_at,
)
from tests.support.heard_cache import HeardCache
from tests.support.kv_subscriber import Subscriber, free_ports, until


def stored(one: int) -> BlocksStored:
    return BlocksStored((one,), None, tuple(range(one, one + 16)), 16, POOL)


@contextmanager
def publishing(ports: range | None = None) -> Iterator[EventPublisher]:
    publisher = EventPublisher("127.0.0.1", ports or free_ports(), model="tea")
    try:
        until(lambda: publisher.port is not None)
        yield publisher
    finally:
        publisher.close()


def test_a_subscriber_hears_all_in_order() -> None:
    with publishing() as publisher, Subscriber(publisher.port) as router:
        for one in range(500):
            publisher.feed.tell(stored(one))
        publisher.feed.tell(BlocksRemoved(range(100), POOL))
        until(lambda: router.heard.at("GPU", None) == set(range(100, 500)), router.read)
        assert router.topics == {f"kv@127.0.0.1:{publisher.port}@tea".encode()}


def test_what_was_missed_is_replayed_as_vllm_does() -> None:
    with publishing() as publisher:
        for one in range(3000):
            publisher.feed.tell(stored(one))
        with Subscriber(publisher.port) as router:
            until(lambda: len(router.heard.at("GPU", None)) == 3000, router.replay)
            publisher.feed.tell(stored(9000))
            until(lambda: 9000 in router.heard.at("GPU", None), router.read, router.replay)


def test_a_replay_that_is_longer_than_the_queue_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """ROUTER drops what a full queue does not take unless it is asked not to."""
    monkeypatch.setattr(of_publisher, "REPLAYED_AT_ONCE", 2)
    monkeypatch.setattr(of_feed, "BATCH_BLOCKS_MAX", 1)
    count = 300
    with publishing() as publisher, zmq.Context() as context, context.socket(zmq.DEALER) as asks:
        for one in range(count):
            publisher.feed.tell(BlocksStored((one,), None, tuple(range(4096)), 4096, POOL))
        asks.set(zmq.LINGER, 0)
        asks.set(zmq.RCVHWM, 2)
        asks.set(zmq.RCVBUF, 4096)
        asks.connect(f"tcp://127.0.0.1:{publisher.port + REPLAY_PORT}")  # type: ignore[operator]
        heard = HeardCache()
        while len(heard.at("GPU", None)) < count:
            asks.send_multipart([b"", heard.next_number.to_bytes(8, "big")])
            while True:
                assert asks.poll(30_000), "the replay has ended without its mark"
                _, _topic, number, payload = asks.recv_multipart()
                if number == END:
                    break
                heard.hear(int.from_bytes(number, "big"), payload)


@pytest.mark.parametrize("frames", [[b""], [b"", b"1234567"], [b"", b"x" * 10_000], [b"", b"", bytes(8)]])
def test_who_asks_otherwise_is_not_answered_and_harms_nothing(frames: list[bytes]) -> None:
    with (
        publishing() as publisher,
        Subscriber(publisher.port) as router,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as foreign,
    ):
        foreign.set(zmq.LINGER, 0)
        foreign.connect(f"tcp://127.0.0.1:{publisher.port + REPLAY_PORT}")  # type: ignore[operator]
        foreign.send_multipart(frames)
        with socket.create_connection(("127.0.0.1", publisher.port or 0)) as plain:
            plain.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
        publisher.feed.tell(stored(1))
        until(lambda: router.heard.at("GPU", None) == {1}, router.read, router.replay)
        assert not foreign.poll(0)


def test_a_subscriber_that_reads_nothing_costs_the_cache_nothing() -> None:
    """It misses messages, and sees that by their numbers; who tells is never kept waiting."""
    with publishing() as publisher, zmq.Context() as context, context.socket(zmq.SUB) as deaf:
        deaf.set(zmq.RCVHWM, 1)
        deaf.set(zmq.RCVBUF, 4096)
        deaf.connect(f"tcp://127.0.0.1:{publisher.port}")
        deaf.subscribe(b"")
        with Subscriber(publisher.port) as router:
            for one in range(30_000):
                publisher.feed.tell(stored(one))
            until(lambda: len(router.heard.at("GPU", None)) == 30_000, router.read, router.replay)


def test_a_port_that_is_taken_is_left_to_its_owner() -> None:
    ports = free_ports()
    with publishing(ports) as first, publishing(ports) as second:
        assert first.port == ports[0]
        assert second.port == ports[1]


def test_a_node_of_which_every_port_is_taken_serves_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_publisher, "BIND_AGAIN_S", 0.01)
    (port, *_) = free_ports()
    with socket.create_server(("127.0.0.1", port)) as taken:
        late = EventPublisher("127.0.0.1", (port,))
        late.feed.tell(stored(1))
        assert late.port is None
        taken.close()
        until(lambda: late.port == port)
    with Subscriber(port) as router:
        until(lambda: router.heard.at("GPU", None) == {1}, router.replay)
    late.close()
    late.feed.tell(stored(2))  # no one takes it


def test_where_a_node_and_its_replicas_publish() -> None:
    (port, *_) = free_ports()
    tiers, replica = (publisher_at(f"tcp://127.0.0.1:{port}", is_replica=is_one) for is_one in (False, True))
    until(lambda: tiers.port is not None and replica.port is not None)
    assert (tiers.port, replica.port) == (port, port + 1)
    tiers.close()
    replica.close()
    assert own_address().count(".") == 3
