"""Clients that break the rules: each costs its own connection at most, and leaves no file, byte or lease."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import os
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samovar.cache_tiers.blocks import Clear, marks_of
from samovar.cache_tiers.media import shared
from samovar.cache_tiers.media.memory import SEALS
from samovar.cache_tiers.messages import BadReport, FetchFailed, LoadReport, Lookup, TurnEnded
from samovar.cache_tiers.socket import server
from samovar.cache_tiers.socket.client import Loaded
from samovar.cache_tiers.socket.messages import Offer, Reports
from samovar.cache_tiers.socket.wire import (
    FDS_MAX,
    FRAME_BYTES_MAX,
    LENGTH,
    SocketError,
    encoded,
    receive,
    send,
)
from tests.support.inside import state_of
from tests.support.nodes.node_harness import sample
from tests.support.nodes.socket_world import World, fetch_of, open_files, settles, steady_count

ONE = sample(1)
NBYTES = ONE.record.nbytes


def files_beside_records(world: World) -> int:
    return open_files() - world.node.stats().tiers[0].extents


@pytest.fixture
def _without_collections() -> Iterator[None]:
    """What only a collection of cycles would free counts as left."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def world(tmp_path: Path, _without_collections: None) -> Iterator[World]:
    """What a test's clients have left open is seen when they are gone."""
    made = World(tmp_path)
    made.store(ONE)
    before = steady_count(lambda: files_beside_records(made))
    yield made
    settles(lambda: made.socket.stats.connections == 1)
    settles(lambda: files_beside_records(made) <= before)
    settles(lambda: not made.socket.stats.waiting_bytes)
    assert isinstance(made.link.fetch(fetch_of(ONE)), Loaded)
    made.node.check_integrity()
    assert made.node.stats().returns.predictor != "off"
    made.close()


def memory_file(nbytes: int, seals: int, flags: int = 0) -> int:
    fd = os.memfd_create("odd", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    except OSError:
        os.close(fd)
        raise
    return fd


def pipe_end() -> int:
    end, other = os.pipe()
    os.close(other)
    return end


def shm_file() -> int:
    fd = os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR)
    os.ftruncate(fd, NBYTES)
    return fd


ODD_FILES: dict[str, tuple[Callable[[], int], int]] = {
    "a pipe": (pipe_end, NBYTES),
    "a socket": (lambda: socket.socket(socket.AF_UNIX).detach(), NBYTES),
    "a directory": (lambda: os.open("/", os.O_RDONLY), os.stat("/").st_size or 4096),
    "a device": (lambda: os.open("/dev/zero", os.O_RDWR), NBYTES),
    "a file": (lambda: os.open(__file__, os.O_RDONLY), os.stat(__file__).st_size),
    "a file of /dev/shm": (shm_file, NBYTES),
    "without a seal": (lambda: memory_file(NBYTES, 0), NBYTES),
    "that may shrink": (lambda: memory_file(NBYTES, SEALS & ~fcntl.F_SEAL_SHRINK), NBYTES),
    "that may grow": (lambda: memory_file(NBYTES, SEALS & ~fcntl.F_SEAL_GROW), NBYTES),
    "that may be written": (lambda: memory_file(NBYTES, SEALS & ~fcntl.F_SEAL_WRITE), NBYTES),
    "longer than said": (lambda: memory_file(NBYTES + 1, SEALS), NBYTES),
    "shorter than said": (lambda: memory_file(NBYTES - 1, SEALS), NBYTES),
    "empty": (lambda: memory_file(0, SEALS), 0),
    "of huge pages": (lambda: memory_file(2 << 20, SEALS, os.MFD_HUGETLB), 2 << 20),
    "huge and sparse": (lambda: memory_file(1 << 40, SEALS), 1 << 40),
    "large and sparse": (lambda: memory_file(1 << 29, SEALS), 1 << 29),
}


@pytest.mark.parametrize("name", ODD_FILES)
def test_a_file_that_is_no_sealed_record_is_refused(world: World, name: str) -> None:
    make, nbytes = ODD_FILES[name]
    try:
        fd = make()
    except OSError as error:
        pytest.skip(f"not to be had here: {errno.errorcode[error.errno or 0]}")
    sock = world.raw()
    send(sock, ["offer", [Offer(nbytes, "life-1", 0)]], [fd])
    os.close(fd)
    said, _ = receive(sock)
    assert said[0] is False or said[1][0].startswith("refused:")
    send(sock, ["ping", None])
    assert receive(sock) == ([True, "life-1"], [])
    sock.close()


@pytest.mark.parametrize(("offers", "files"), [(0, 1), (1, 0), (1, 2), (3, 1), (FDS_MAX, FDS_MAX - 1)])
def test_as_many_files_as_offers(world: World, offers: int, files: int) -> None:
    sock = world.raw()
    record = shared(ONE.record)
    send(sock, ["offer", [Offer(NBYTES, "life-1", 0)] * offers], [record.fd] * files)
    assert receive(sock)[0][0] is False
    sock.close()


def test_files_beside_calls_that_take_none(world: World) -> None:
    sock = world.raw()
    record = shared(ONE.record)
    for method, given in (("ping", None), ("lookup", _lookup()), ("nothing", None), ("clear", [1])):
        send(sock, [method, given], [record.fd] * FDS_MAX)
        receive(sock)
    sock.close()


def test_too_many_files_cost_the_call_only(world: World) -> None:
    sock = world.raw()
    record = shared(ONE.record)
    frame = b"\x92\xa4ping\xc0"
    socket.send_fds(sock, [LENGTH.pack(len(frame)) + frame], [record.fd] * (FDS_MAX + 40))
    said, _ = receive(sock)
    assert said[0] is False
    assert "files" in said[1]
    send(sock, ["ping", None])
    assert receive(sock)[0][0]
    sock.close()


def test_where_no_file_can_be_opened_records_are_refused_and_lookups_answered(world: World) -> None:
    """A connection that broke then would cost the client every other call, too."""
    other = sample(2)
    offered = [(Offer(other.record.nbytes, "life-1", 0), shared(other.record))]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_files() + 8, hard))
    hogs = []
    try:
        with contextlib.suppress(OSError):
            while True:
                hogs.append(os.open("/dev/null", os.O_RDONLY))
        assert world.link.offer(offered) == ("refused:no answer",)
        assert world.link.lookup(_lookup()) is not None
    finally:
        for fd in hogs:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert world.link.offer(offered) == ("taken",)


@pytest.mark.usefixtures("_without_collections")
def test_main_memory_takes_a_part_of_the_files_only(tmp_path: Path) -> None:
    """Else nothing could be let in or read from a disk any more, and only bytes would make room."""
    world = World(tmp_path, files_max=4)
    for number in range(20):
        world.store(sample(number))
    before = steady_count(lambda: files_beside_records(world))
    for number in range(20, 40):
        world.store(sample(number))
    row = world.node.stats().tiers[0]
    assert (row.state, row.extents <= 4) == ("up", True)
    settles(lambda: files_beside_records(world) <= before)
    world.close()


def test_a_record_in_main_memory_is_one_file(world: World) -> None:
    """A map holds a second one (`mmap.mmap` duplicates what it is given)."""
    before = steady_count(open_files)
    for number in range(10, 20):
        world.store(sample(number))
    settles(lambda: open_files() <= before + 10)


def test_what_a_client_keeps_stays_whole_and_is_none_of_the_tiers_bytes(world: World) -> None:
    kept = world.link.fetch(fetch_of(ONE))
    assert isinstance(kept, Loaded)
    world.link.clear(Clear(ONE.header.tenant), 5.0)
    assert world.node.stats().tiers[0].bytes_held == 0
    assert np.array_equal(kept.data, ONE.record)
    del kept
    world.store(ONE)


def test_one_process_cannot_bring_all_that_may_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "WAITING_BYTES_MAX", 3 * NBYTES)
    world = World(tmp_path)
    sock = world.raw()
    some = [sample(number) for number in range(30, 32)]
    records = [shared(one.record) for one in some]
    send(sock, ["offer", [Offer(NBYTES, "life-1", 0)] * 2], [record.fd for record in records])
    assert receive(sock)[0] == [True, ["taken", "refused:busy"]]
    sock.close()
    world.close()


def _lookup(**changed: Any) -> Lookup:
    header = ONE.header
    return Lookup(header.namespace, ONE.chain, header.tenant, header.session, **changed)


def _calls() -> dict[str, Any]:
    header = ONE.header
    over = TurnEnded(header.tenant, header.session, 1.0, 12, 3, marks_of(header.keys), 4)
    bad = BadReport(header.namespace, header.tenant, header.extent_id, "nvme", "checksum")
    return {
        "lookup": _lookup(peers=("node",), starts_turn=True, is_queued=True),
        "fetch": fetch_of(ONE),
        "report": Reports((bad,), (LoadReport("cpu", 100, 0.1),)),
        "turn_over": over,
        "clear": Clear(b"another-tenant-1", bytes(16), (bytes(16),)),
        "stats": None,
        "ping": None,
    }


ODD_VALUES = (
    None, True, -1, 0, 1, 2**31, 2**53, 2**63, 2**64 - 1, -(2**63), 0.0, -1.0, -0.0, 1e-320, 1e30, 1e308,
    float("inf"), float("-inf"), float("nan"), "", "x", "\ud800", "y" * 100_000, b"", b"z" * 15, b"z" * 16,
    b"z" * 31, b"z" * 32, b"z" * 64, b"z" * 1_000_000, [], [[]], [0] * 5000, {}, {"a": 1},
)  # fmt: skip


def _changed(data: Any) -> Iterator[Any]:
    """Every message that differs in one value."""
    if isinstance(data, list):
        for at, one in enumerate(data):
            for other in _changed(one):
                yield [*data[:at], other, *data[at + 1 :]]
        yield data[:-1]
        yield [*data, None]
    yield from ODD_VALUES


@pytest.mark.parametrize("method", _calls())
def test_every_field_at_every_bound_is_answered(world: World, method: str) -> None:
    """Taken or refused, by this connection, which goes on; nothing of it is left in a number or a name."""
    sock = world.raw()
    good = encoded(_calls()[method])
    asked = 0
    for given in [good, *_changed(good)]:
        send(sock, [method, given])
        said, fds = receive(sock)
        for fd in fds:
            os.close(fd)
        assert type(said[0]) is bool
        assert said[0] or type(said[1]) is str
        asked += given is not good
    sock.close()


@pytest.mark.parametrize(
    "given",
    [
        Clear(b"short"),
        Clear(bytes(16), None, tuple(bytes(16) for _ in range(5000))),
        _lookup(trace="x" * 1000),
        _lookup(wait_s=1e12),
        Lookup(bytes(32), bytes(33), bytes(16), bytes(16)),
        Lookup(bytes(32), b"", bytes(15), bytes(16)),
        fetch_of(ONE, offset=-1),
        fetch_of(ONE, blocks=2**40),
        Reports((BadReport(bytes(32), bytes(16), bytes(32), "cpu", "a kind of mine"),)),
        Reports((), (LoadReport("cpu", 2**60, 1.0),)),
        TurnEnded(bytes(16), bytes(16), 1.0, 12, 3, marks_of([bytes(32)]), 0),
    ],
    ids=range(11),
)
def test_what_makes_no_sense_is_refused(world: World, given: Any) -> None:
    """A clear of a strange size would make the file of clears unreadable, a kind of its own a label."""
    method = {Clear: "clear", Lookup: "lookup", Reports: "report", TurnEnded: "turn_over"}.get(
        type(given), "fetch"
    )
    sock = world.raw()
    send(sock, [method, given])
    assert receive(sock)[0][0] is False
    sock.close()


def test_blocks_that_an_extent_has_not_are_a_miss(world: World) -> None:
    blocks = ONE.header.blocks
    for offset, count in ((0, blocks + 1), (blocks, 1), (1, blocks), (0, 0)):
        assert isinstance(world.link.fetch(fetch_of(ONE, offset=offset, blocks=count)), FetchFailed)


def test_a_frame_that_stops_anywhere(world: World) -> None:
    record = shared(ONE.record)
    pair = socket.socketpair()
    send(pair[0], ["offer", [Offer(NBYTES, "life-1", 0)]])
    frame = pair[1].recv(1000)
    for at in range(1, len(frame)):
        sock = world.raw()
        socket.send_fds(sock, [frame[:at]], [record.fd])
        sock.close()
    for sock in pair:
        sock.close()


def test_a_frame_that_drips_is_cut_off(tmp_path: Path) -> None:
    """The limit is the whole frame's: one byte in time after the other would hold a thread for months."""
    world = World(tmp_path, frame_s=0.2)
    sock = world.raw()
    sock.send(LENGTH.pack(FRAME_BYTES_MAX))
    for _ in range(600):
        try:
            sock.send(b"\x91")
        except OSError:
            break
        time.sleep(0.05)
    else:
        pytest.fail("it waits on")
    sock.close()
    assert world.link.ping()
    world.close()


def test_answers_that_nobody_takes_are_cut_off(tmp_path: Path) -> None:
    world = World(tmp_path, frame_s=0.2)
    sock = world.raw()
    sock.settimeout(0.05)
    with contextlib.suppress(SocketError):
        for _ in range(100_000):
            send(sock, ["stats", None], (), 30.0)
    settles(lambda: world.socket.stats.connections == 0)
    sock.close()
    assert world.link.ping()
    world.close()


@pytest.mark.parametrize(
    "payload",
    [
        b"\xdd" + struct.pack(">I", 8_000_000) + b"\x90" * 8_000_000,
        b"\xdc\x40\x00" * 1000,
        b"\xdc\x3f\xff" + b"\xdc\x3f\xff" * 16000,
        b"\x91" * 1_000_000,
        b"\x81\xa1a" * 100_000,
        b"\xdc\x00\x14" + (b"\xdc\x27\x10" + b"\x90" * 10_000) * 20,
        b"\xc7\xff\x01" + bytes(255),
        b"\xc1",
        b"",
    ],
    ids=[
        "long",
        "deep and wide",
        "wide",
        "deep",
        "maps",
        "many lists",
        "extension",
        "reserved",
        "empty",
    ],
)
def test_a_frame_that_would_be_large_here_is_no_frame(payload: bytes) -> None:
    one, other = socket.socketpair()
    one.settimeout(5)
    threading.Thread(target=lambda: one.sendall(LENGTH.pack(len(payload)) + payload), daemon=True).start()
    with pytest.raises(SocketError):
        receive(other)
    one.close()
    other.close()


def test_frames_up_to_the_limit(world: World) -> None:
    keys = bytes(FRAME_BYTES_MAX - 32 * 4)
    found = world.link.lookup(Lookup(bytes(32), keys, bytes(16), bytes(16)))
    assert found is not None
    assert found.spans == ()
    assert world.link.lookup(Lookup(bytes(32), bytes(FRAME_BYTES_MAX), bytes(16), bytes(16))) is None
    assert world.link.ping() == "life-1"


def test_a_forked_process_has_connections_of_its_own(world: World) -> None:
    """On its parent's it would read its parent's answers."""
    assert world.link.ping()
    asked, seen = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(seen[1])  # the end of the parent's test is the end of this
        os.write(asked[1], b"y" if world.link.ping() == "life-1" else b"n")
        os.read(seen[0], 1)
        os._exit(0)
    try:
        assert os.read(asked[0], 1) == b"y"
        assert world.socket.stats.connections == 2
        assert world.link.lookup(_lookup()) is not None
    finally:
        for fd in (*asked, *seen):
            os.close(fd)
        os.waitpid(child, 0)


def test_no_lease_is_left_by_those_who_leave_while_they_are_answered(world: World) -> None:
    for _ in range(50):
        sock = world.raw()
        send(sock, ["fetch", fetch_of(ONE)])
        sock.close()
    settles(lambda: world.socket.stats.connections == 1)
    state = state_of(world.node)
    assert state.fetches == 0
    world.link.clear(Clear(ONE.header.tenant), 5.0)
    assert world.node.stats().tiers[0].bytes_held == 0
    world.store(ONE)
