"""Room that a client lends: what a file holds comes straight into it, and it is never used while in doubt."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samovar.cache_tiers.blocks import Address, Bytes, Placement, TierError
from samovar.cache_tiers.media import Deadline, NvmeTier, Room, SharedTier, Tier
from samovar.cache_tiers.media.memory import ROOM_BYTES_MAX
from samovar.cache_tiers.messages import FetchFailed
from samovar.cache_tiers.node import LentRoom
from samovar.cache_tiers.socket.client import Loaded
from samovar.cache_tiers.socket.server import ROOMS_MAX
from samovar.cache_tiers.socket.wire import receive, send
from tests.support.nodes.node_harness import MIB, sample
from tests.support.nodes.socket_world import World, fetch_of, open_files, settles

ONE, OTHER = sample(1), sample(2)
NBYTES = int(ONE.record.nbytes)


class Slow(SharedTier):
    """Main memory that is called a file; a read into room waits for `may_end`, or fails with `error`."""

    takes_room = True

    def __init__(self, name: str) -> None:
        super().__init__(MIB)
        self.name = name
        self.may_end = threading.Event()
        self.may_end.set()
        self.error: Exception | None = None

    def ref(self, address: Address) -> Any:
        return None

    def read(
        self, address: Address, start: int, nbytes: int, *, deadline: Deadline, room: Bytes | None = None
    ) -> Bytes:
        data = super().read(address, start, nbytes, deadline=deadline)
        if room is None:
            return data
        self.may_end.wait(30)
        if self.error is not None:
            raise self.error
        room[:nbytes] = data
        return room[:nbytes]


def nvme(folder: Path) -> NvmeTier:
    return NvmeTier(
        folder / "kv",
        bytes_max=MIB,
        durability="none",
        direct_io=True,
        quarantine_bytes_max=0,
        wall_clock=time.time,
    )


@pytest.fixture
def worlds(tmp_path: Path) -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def make(**tiers: Tier) -> World:
        made.append(World(tmp_path / str(len(made)), tiers=tiers))
        return made[-1]

    yield make
    for world in made:
        world.close()


def came(found: Loaded | FetchFailed) -> Bytes:
    assert isinstance(found, Loaded), found
    return found.data


def test_what_a_file_holds_comes_into_the_room_again_and_again(
    worlds: Callable[..., World], tmp_path: Path
) -> None:
    world, room = worlds(nvme=nvme(tmp_path)), Room.made(NBYTES)
    for one in (ONE, OTHER):
        world.store(one)
    files = open_files()
    for one in (ONE, OTHER, ONE) * 5:
        data = came(world.link.fetch(fetch_of(one, tier="nvme"), room))
        assert np.array_equal(data, one.record)
        assert np.shares_memory(data, room.data)
    assert not room.is_lost
    assert open_files() <= files + 2, "the node has mapped it once"


def test_it_is_not_promoted_and_main_memory_is_handed_out_as_ever(worlds: Callable[..., World]) -> None:
    world, room = worlds(cpu=SharedTier(MIB), nvme=Slow("nvme")), Room.made(NBYTES)
    world.store(ONE)
    data = came(world.link.fetch(fetch_of(ONE), room))
    assert not np.shares_memory(data, room.data)
    assert not room.is_lost


def test_without_room_or_with_too_little_it_comes_as_a_file(
    worlds: Callable[..., World], tmp_path: Path
) -> None:
    world, small = worlds(nvme=nvme(tmp_path)), Room.made(1)
    assert small.data.nbytes < NBYTES
    world.store(ONE)
    for room in (None, small):
        data = came(world.link.fetch(fetch_of(ONE, tier="nvme"), room))
        assert np.array_equal(data, ONE.record)
    assert not small.is_lost


def test_room_of_a_read_that_was_late_is_lost(worlds: Callable[..., World]) -> None:
    slow = Slow("nvme")
    world, room = worlds(nvme=slow), Room.made(NBYTES)
    world.store(ONE)
    slow.may_end.clear()
    failed = world.link.fetch(fetch_of(ONE, tier="nvme", deadline_s=0.05), room)
    assert isinstance(failed, FetchFailed)
    assert room.is_lost
    slow.may_end.set()


def test_what_comes_from_elsewhere_does_not_come_into_the_room_of_a_read_that_failed(
    worlds: Callable[..., World],
) -> None:
    """It may be under way still, and would write over it. So may a read of the next request: it is lost."""
    first, second = Slow("nvme"), Slow("s3")
    world, room = worlds(nvme=first, s3=second), Room.made(NBYTES)
    one = sample(3, placement=Placement(write_behind=("s3",)))
    world.store(one)
    session = one.header.session  # its bytes are in the medium before the node knows of them
    settles(lambda: "s3" in world.node.sessions.session_bytes(one.header.tenant, [session])[session])
    first.error = TierError("it is sick")
    data = came(world.link.fetch(fetch_of(one, tier="nvme"), room))
    assert np.array_equal(data, one.record)
    assert not np.shares_memory(data, room.data)
    assert room.is_lost


def test_room_is_given_away_once() -> None:
    lent = LentRoom(np.zeros(4096, np.uint8))
    assert lent.taken(5000) is None
    assert lent.taken(4096) is not None
    assert lent.taken(1) is None


def memory_file(nbytes: int, seals: int) -> int:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def huge_pages() -> int:
    fd = os.memfd_create("test", os.MFD_HUGETLB | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 2 * MIB)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return fd


ODD_ROOMS: dict[str, Callable[[], int]] = {
    "it can shrink": lambda: memory_file(MIB, 0),
    "it cannot be written to": lambda: memory_file(MIB, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE),
    "empty": lambda: memory_file(0, fcntl.F_SEAL_SHRINK),
    "half a page": lambda: memory_file(MIB + 100, fcntl.F_SEAL_SHRINK),
    "too large": lambda: memory_file(ROOM_BYTES_MAX + mmap.PAGESIZE, fcntl.F_SEAL_SHRINK),
    "huge pages": huge_pages,
    "no memory": lambda: os.open("/dev/null", os.O_RDWR),
    "a pipe": lambda: os.pipe2(os.O_CLOEXEC)[0],
    "a folder": lambda: os.open("/tmp", os.O_RDONLY),
}


@pytest.mark.parametrize("name", ODD_ROOMS)
def test_odd_room_is_not_used(worlds: Callable[..., World], tmp_path: Path, name: str) -> None:
    """Of one that can shrink a write would end the node."""
    try:
        fd = ODD_ROOMS[name]()
    except OSError as error:
        pytest.skip(f"not to be had here: {errno.errorcode[error.errno or 0]}")
    world = worlds(nvme=nvme(tmp_path))
    world.store(ONE)
    sock = world.raw()
    send(sock, ["fetch", fetch_of(ONE, tier="nvme")], [fd])
    os.close(fd)
    said, fds = receive(sock)
    assert said[0] is True
    assert len(fds) == 1
    os.close(fds[0])
    sock.close()


def test_rooms_of_a_connection_are_bounded(worlds: Callable[..., World], tmp_path: Path) -> None:
    world = worlds(nvme=nvme(tmp_path))
    world.store(ONE)
    files, sock = open_files(), world.raw()
    for _ in range(5 * ROOMS_MAX):
        room = Room.made(NBYTES)
        send(sock, ["fetch", fetch_of(ONE, tier="nvme")], [room.fd])
        assert receive(sock) == ([True, [0, "nvme", NBYTES, None]], [])
        assert np.array_equal(room.data[:NBYTES], ONE.record)
        del room
    assert open_files() - files <= 2 * ROOMS_MAX + 2
    sock.close()
    settles(lambda: open_files() <= files)


def test_a_node_that_says_it_came_where_no_room_was_lent_is_not_believed(
    worlds: Callable[..., World], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = worlds(nvme=nvme(tmp_path))
    world.store(ONE)
    room, real = Room.made(NBYTES), world.node.fetch
    monkeypatch.setattr(world.node, "fetch", lambda fetch, _: real(fetch, LentRoom(room.data)))
    assert isinstance(world.link.fetch(fetch_of(ONE, tier="nvme")), FetchFailed)
