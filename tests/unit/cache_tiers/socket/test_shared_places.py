"""What clients share is shared fairly; what counts twice is said once; what cannot be opened is said once."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import random
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from samovar.cache_tiers.blocks import marks_of
from samovar.cache_tiers.media import shared
from samovar.cache_tiers.messages import BadReport, Fetch, FetchFailed, TurnEnded
from samovar.cache_tiers.socket.client import Loaded, SocketLink
from samovar.cache_tiers.socket.messages import Offer, Welcome
from samovar.cache_tiers.socket.process import serve_tiers
from samovar.cache_tiers.socket.server import SharedPlaces, SocketLimits, SocketOpener, TierSocket
from samovar.cache_tiers.socket.wire import PROTOCOL, SocketError, receive, send
from samovar.configs.settings import Settings
from tests.support.nodes.node_harness import sample
from tests.support.nodes.socket_world import World, fetch_of, settles

ONE = sample(1)
HEADER = ONE.header
OVER = TurnEnded(HEADER.tenant, HEADER.session, 1.0, 12, 3, marks_of(HEADER.keys), 4)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("most", [1, 2, 3, 7, 64])
def test_whoever_comes_finds_a_place_where_one_has_tried_to_take_all(most: int) -> None:
    places = SharedPlaces(most)
    taken = sum(places.take(1, 1) for _ in range(2 * most))
    assert taken == max(1, most // 2)
    assert most == 1 or places.take(2, 1)


def test_many_who_take_all_they_get_end_up_alike() -> None:
    """Whoever was first gives way as its places come back."""
    rng, places, held = random.Random(5), SharedPlaces(60), Counter[int]()
    for pid in (1, 2, 3, 4):
        while places.take(pid, 1):
            held[pid] += 1
    assert held[1] == 30
    assert held[4] >= 1
    for _ in range(4000):
        pid = rng.choice([one for one in held if held[one]])
        places.give_back(pid, 1)
        held[pid] -= 1
        for one in rng.sample((1, 2, 3, 4), 4):
            held[one] += places.take(one, 1)
    assert places.held == held.total() <= 60
    assert min(held.values()) >= 60 // 5 - 1
    assert max(held.values()) <= 60 // 5 + 1


def test_what_comes_back_is_free_again() -> None:
    places = SharedPlaces(10)
    assert places.take(1, 5)
    assert not places.take(1, 1)
    places.give_back(1, 5)
    assert places.held == 0
    assert places.take(1, 5)


def fetch_there(path: Path) -> None:
    """Fetch from a process of its own, or fail."""
    assert isinstance(SocketLink(path, "other").fetch(fetch_of(ONE)), Loaded)


def test_fetches_of_one_client_leave_places_to_others(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process takes half of them where nobody else loads; here others are told by another pid."""
    world.store(ONE)
    path = world.socket.path.with_name("few.sock")
    few = TierSocket(world.node, path, limits=SocketLimits(fetch_max=4))
    go, under_way = threading.Event(), threading.Semaphore(0)
    real = world.node.fetch

    def slow(fetch: Fetch, _room: object) -> object:
        under_way.release()
        go.wait(30)
        return real(fetch)

    monkeypatch.setattr(world.node, "fetch", slow)
    link = SocketLink(path, "greedy")
    replies: list[object] = []
    threads = [threading.Thread(target=lambda: replies.append(link.fetch(fetch_of(ONE)))) for _ in range(6)]
    for thread in threads:
        thread.start()
    settles(lambda: len(replies) == 4)
    assert all(isinstance(one, FetchFailed) and one.reason == "refused" for one in replies)
    other = multiprocessing.get_context("fork").Process(target=fetch_there, args=(path,))
    other.start()
    for _ in range(3):
        assert under_way.acquire(timeout=30)
    go.set()
    other.join(30)
    assert other.exitcode == 0
    for thread in threads:
        thread.join(30)
    assert sum(isinstance(one, Loaded) for one in replies) == 2
    assert isinstance(link.fetch(fetch_of(ONE)), Loaded)
    link.close()
    few.close()


def test_records_of_one_client_leave_places_to_others(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    path = world.socket.path.with_name("few.sock")
    few = TierSocket(world.node, path, limits=SocketLimits(records_max=4))
    link = SocketLink(path, "greedy")
    some = [(Offer(one.record.nbytes, "life-1", 0), shared(one.record)) for one in map(sample, range(50, 55))]
    assert link.offer(some) == ("taken", "taken", *["refused:busy"] * 3)
    gc.collect()
    settles(lambda: not few.stats.waiting_bytes)
    assert link.offer(some[2:4]) == ("taken", "taken")
    link.close()
    few.close()


class Deaf:
    """A node that takes one call on each connection, and closes it without an answer."""

    def __init__(self, path: Path) -> None:
        self.calls: list[str] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            with client:
                try:
                    receive(client)
                    send(client, [True, Welcome(PROTOCOL, "life-1", (3,))])
                    for _ in range(2):
                        said, _ = receive(client, waits=True)
                        self.calls.append(said[0])
                        if said[0] == "ping":
                            send(client, [True, "life-1"])
                        else:
                            break
                except SocketError:
                    pass

    def close(self) -> None:
        self._listener.close()


def test_a_turns_end_whose_answer_is_lost_is_not_said_again(tmp_path: Path) -> None:
    """The node may have learned it: twice would be two turns. Other calls are made again."""
    deaf = Deaf(tmp_path / "t.sock")
    link = SocketLink(tmp_path / "t.sock", "test", call_s=5.0)
    assert link.ping() == "life-1"  # a connection that lies idle
    link.turn_over(OVER)
    assert deaf.calls == ["ping", "turn_over"]
    link = SocketLink(tmp_path / "t.sock", "test", call_s=5.0)
    assert link.ping() == "life-1"
    link.report([BadReport(HEADER.namespace, HEADER.tenant, HEADER.extent_id, "cpu", "checksum")], [])
    assert deaf.calls[2:] == ["ping", "report"]
    link = SocketLink(tmp_path / "t.sock", "test", call_s=5.0)
    assert link.ping() == "life-1"
    assert link.stats() is None
    assert deaf.calls[4:] == ["ping", "stats", "stats"]
    deaf.close()


def test_a_turns_end_after_a_restart_of_the_node_is_not_lost(tmp_path: Path) -> None:
    """The idle connection is seen to be closed before anything is said over it."""
    world = World(tmp_path)
    link = world.client()
    assert link.ping()
    world.close()
    again = World(tmp_path)
    link.turn_over(OVER)
    stats = again.link.stats()
    assert stats is not None
    assert stats.returns.sessions == 1
    link.close()
    again.close()


def test_a_socket_that_cannot_be_opened_is_said_once(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    opener = SocketOpener(lambda: TierSocket(world.node, world.socket.path))
    for _ in range(5):
        assert opener.open() is None
    assert [record.message for record in caplog.records] == [
        f"other engines cannot use these tiers; it is tried again: process {os.getpid()} listens at "
        f"{world.socket.path}: end it first, or choose another path"
    ]
    world.socket.close()
    opened = opener.open()
    assert opened is not None
    assert opener.open() is opened
    assert len(caplog.records) == 2
    opened.close()


def said(tmp_path: Path, path: Path, port: int | None = None) -> str:
    lines: list[str] = []
    settings = Settings.model_validate({"tiers": {"nvme": {"dir": str(tmp_path / "kv")}}})
    assert serve_tiers(settings, path, port=port, say=lines.append) == 1
    (line,) = lines
    return line


def test_why_it_does_not_start_is_one_line_that_names_the_fix(world: World, tmp_path: Path) -> None:
    assert f"process {os.getpid()} listens at {world.socket.path}" in said(tmp_path, world.socket.path)
    file = tmp_path / "mine" / "file"
    file.parent.mkdir(mode=0o700)
    file.write_text("")
    assert f"{file} is there and no socket: move it away" in said(tmp_path, file)
    assert "the directory of" in said(tmp_path, file / "t.sock")
    long = tmp_path / ("x" * 120) / "t.sock"
    assert f"has {len(str(long))} bytes, and a socket's path has 107" in said(tmp_path, long)
    free = tmp_path / "open"
    free.mkdir()
    free.chmod(0o777)
    assert "of mode 0700" in said(tmp_path, free / "t.sock")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"--metrics-port {port}: Address already in use" in said(
            tmp_path, tmp_path / "s" / "t.sock", port
        )
    for port in (70_000, -1):
        assert f"--metrics-port {port}: no port has this number; choose another, 0 = any free one" in said(
            tmp_path, tmp_path / "s" / "t.sock", port
        )
    assert not (tmp_path / "s" / "t.sock").exists()
