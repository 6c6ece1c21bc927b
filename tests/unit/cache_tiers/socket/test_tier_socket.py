"""The socket: what a client stores and loads there, and that no client hurts the node or another client."""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgpack
import numpy as np
import pytest

from samovar.cache_tiers.blocks import Clear, decode_header, good_blocks, header_bytes, marks_of
from samovar.cache_tiers.media import MemoryFile, shared
from samovar.cache_tiers.messages import BadReport, FetchFailed, LoadReport, Lookup, TurnEnded
from samovar.cache_tiers.socket.client import Loaded
from samovar.cache_tiers.socket.messages import Hello, Offer
from samovar.cache_tiers.socket.server import CONNECTIONS_PER_PROCESS_MAX, TierSocket
from samovar.cache_tiers.socket.wire import FRAME_BYTES_MAX, LENGTH, PROTOCOL, SocketError, receive, send
from tests.support.nodes.node_harness import sample
from tests.support.nodes.socket_world import World, fetch_of


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()


def inode_at(address: int) -> int:
    """Return the file that is mapped at an address of this process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, _, _, _, inode, *_ = line.split()
        first, end = (int(one, 16) for one in place.split("-"))
        if first <= address < end:
            return int(inode)
    raise AssertionError("nothing is mapped there")


def test_what_was_stored_is_loaded_as_it_was(world: World) -> None:
    one = sample(1)
    world.store(one)
    loaded = world.link.fetch(fetch_of(one))
    assert isinstance(loaded, Loaded)
    assert np.array_equal(loaded.data, one.record)
    header = decode_header(loaded.data)
    payload = loaded.data[header_bytes(header.blocks, header.shape.layers) :]
    assert good_blocks(header, payload, 0) == header.blocks
    assert not loaded.data.flags.writeable


def test_a_load_from_main_memory_is_the_record_itself(world: World) -> None:
    """Not a copy: one file for the node and both clients."""
    one = sample(1)
    world.store(one)
    files = []
    for _ in range(2):
        loaded = world.link.fetch(fetch_of(one))
        assert isinstance(loaded, Loaded)
        files.append(inode_at(loaded.data.ctypes.data))
        del loaded
    assert files[0] == files[1] != 0


def test_other_calls_go_through(world: World) -> None:
    one = sample(1)
    world.store(one)
    header = one.header
    assert world.link.ping() == "life-1" == world.link.incarnation
    stats = world.link.stats()
    assert stats is not None
    assert stats.tiers[0].blocks == header.blocks
    world.link.report([], [LoadReport("cpu", 100, 0.1)])
    world.link.report([BadReport(header.namespace, header.tenant, header.extent_id, "cpu", "checksum")], [])
    assert world.look(one).spans == ()
    world.store(one)
    assert world.link.clear(Clear(header.tenant), 5.0).extents == 1
    assert world.look(one).spans == ()


def test_a_miss_and_a_bad_record_are_said(world: World) -> None:
    missed = world.link.fetch(fetch_of(sample(1)))
    assert isinstance(missed, FetchFailed)
    assert missed.reason == "gone"
    one = sample(2)
    found = world.look(one)
    broken = one.record.copy()
    broken[:64] = 0
    offer = Offer(broken.nbytes, found.incarnation, found.clear_seq)
    assert world.link.offer([(offer, shared(broken))]) == ("refused:magic",)
    assert world.link.offer([(replace(offer, incarnation="x"), shared(one.record))]) == (
        "refused:incarnation",
    )
    assert world.socket.stats.waiting_bytes == 0


def test_a_file_that_can_still_be_written_is_refused(world: World) -> None:
    """Its bytes could be changed after they were verified."""
    one = sample(1)
    made = MemoryFile(one.record.nbytes)
    made.data[:] = one.record
    sock = world.raw()
    offer = Offer(one.record.nbytes, "life-1", 0)
    send(sock, ["offer", [offer]], [made._fd])
    said, _ = receive(sock)
    assert said == [False, "the memory file is not sealed"]


def test_a_client_that_dies_leaves_nothing(world: World) -> None:
    one = sample(1)
    world.store(one)
    for method, given, fds in (
        ("fetch", fetch_of(one), []),
        ("offer", [Offer(one.record.nbytes, "life-1", 0)], [shared(one.record)]),
    ):
        sock = world.raw()
        send(sock, [method, given], [record.fd for record in fds])
        sock.close()
    half = world.raw()
    half.send(LENGTH.pack(100) + b"half")
    half.close()
    ends_s = time.monotonic() + 30
    while world.socket.stats.connections > 1 or world.socket.stats.waiting_bytes:
        assert time.monotonic() < ends_s
        time.sleep(0.005)
    assert isinstance(world.link.fetch(fetch_of(one)), Loaded)


def test_a_node_that_is_gone_costs_nothing_and_comes_back(tmp_path: Path) -> None:
    world = World(tmp_path)
    assert world.link.ping() == "life-1"
    world.close()
    link = world.client()
    for _ in range(1000):  # most of them without a try to connect: this ends
        assert link.lookup(Lookup(bytes(32), b"", bytes(16), bytes(16))) is None
        assert isinstance(link.fetch(fetch_of(sample(1))), FetchFailed)
        assert link.ping() is None
        with pytest.raises(TimeoutError):
            link.clear(Clear(bytes(16)), 1.0)
    again = World(tmp_path)
    ends_s = time.monotonic() + 30
    while link.ping() is None:
        assert time.monotonic() < ends_s
        time.sleep(0.01)
    again.close()


def test_only_so_many_connections_of_a_process(world: World) -> None:
    socks = [world.raw() for _ in range(CONNECTIONS_PER_PROCESS_MAX - 1)]
    assert world.link.ping()
    for _ in range(2):
        with pytest.raises((SocketError, OSError)):
            world.raw()
    assert world.socket.stats.refused["connections of a process"] == 2
    for sock in socks:
        sock.close()


def test_another_protocol_is_told_so(world: World) -> None:
    sock = world.raw(greets=False)
    send(sock, ["hello", Hello(PROTOCOL + 1, "new")])
    said, _ = receive(sock)
    assert said[0] is False
    assert "speaks protocol" in said[1]


def test_a_second_node_does_not_take_the_socket(world: World) -> None:
    with pytest.raises(FileExistsError):
        TierSocket(world.node, world.socket.path)
    world.socket.path.parent.chmod(0o777)
    with pytest.raises(PermissionError):
        TierSocket(world.node, world.socket.path.with_name("other"))


def test_frames_of_noise_hurt_nobody(world: World) -> None:
    one = sample(1)
    world.store(one)
    rng = random.Random(7)
    good = msgpack.packb(["lookup", [bytes(32), one.chain, bytes(16), bytes(16), [], False, False, 0.1, ""]])
    values = [
        None,
        -1,
        2**63,
        1.5,
        float("nan"),
        float("inf"),
        "x" * 100,
        b"y" * 33,
        [],
        [[]] * 5,
        {},
        {"a": 1},
        True,
    ]
    for number in range(2000):
        sock = world.raw()
        try:
            match number % 4:
                case 0:
                    sock.send(rng.randbytes(rng.randrange(1, 64)))
                case 1:
                    data = bytearray(good)
                    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
                    sock.send(LENGTH.pack(len(data)) + data)
                case 2:
                    sock.send(LENGTH.pack(rng.choice([FRAME_BYTES_MAX + 1, 2**32 - 1, 3])) + b"\x93")
                case _:
                    method = rng.choice(
                        ["lookup", "fetch", "offer", "report", "turn_over", "clear", "stats", "hello", "x"]
                    )
                    given = rng.choice([rng.choices(values, k=rng.randrange(14)), rng.choice(values)])
                    data = msgpack.packb([method, given])
                    fds = [os.open("/dev/null", os.O_RDONLY) for _ in range(rng.randrange(3))]
                    socket.send_fds(sock, [LENGTH.pack(len(data)) + data], fds)
                    for fd in fds:
                        os.close(fd)
                    receive(sock)
        except (SocketError, OSError):
            pass
        sock.close()
    assert isinstance(world.link.fetch(fetch_of(one)), Loaded)
    world.node.check_integrity()
    assert world.socket.stats.waiting_bytes == 0


def test_a_turns_end_reaches_the_predictor(world: World) -> None:
    one = sample(1)
    world.store(one)
    header = one.header
    world.link.lookup(Lookup(header.namespace, one.chain, header.tenant, header.session, starts_turn=True))
    world.link.turn_over(TurnEnded(header.tenant, header.session, 1.0, 12, 3, marks_of(header.keys), 4))
    stats = world.link.stats()
    assert stats is not None
    assert stats.returns.sessions == 1
