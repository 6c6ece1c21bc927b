"""Ten thousand broken frames of 64 clients, which are killed: a node goes on, and so do its other clients.

Long, and its figures are of wall time: `make test-slow ARGS=tests/unit/cache_tiers/socket`.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import quantiles
from typing import Any

import msgpack
import pytest

from samovar.cache_tiers.blocks import Clear, marks_of
from samovar.cache_tiers.media import shared
from samovar.cache_tiers.messages import TurnEnded
from samovar.cache_tiers.socket.client import Loaded, SocketLink
from samovar.cache_tiers.socket.messages import Hello, Offer
from samovar.cache_tiers.socket.wire import (
    FRAME_BYTES_MAX,
    LENGTH,
    PROTOCOL,
    SocketError,
    encoded,
    receive,
    send,
)
from tests.laws.tier_link import assert_loads, fetch_of, lookup_of, made, store
from tests.support.nodes.socket_world import BySocket, settles

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CLIENTS = 64
FRAMES_MIN = 10_000
PAUSE_S = 0.04
"""Between two frames of a client: the node is busy, but not the machine."""
LOOKUPS = 3000
KILL_EVERY_S = 0.1
MIB = 1024 * 1024
FORK = multiprocessing.get_context("fork")
VALUES: list[Any] = [
    None, True, -1, 0, 2**31, 2**63, 2**64 - 1, 1.5, 1e308, float("nan"), float("inf"), "x" * 100, "",
    b"y" * 33, bytes(16), bytes(32), [], [[]] * 5, [0] * 2000, {}, {"a": 1},
]  # fmt: skip


def calls_of(number: int) -> list[tuple[str, Any]]:
    one = made(number)
    header = one.header
    over = TurnEnded(header.tenant, header.session, 1.0, 12, 3, marks_of(header.keys), 4)
    return [
        ("lookup", lookup_of(one)),
        ("fetch", fetch_of(one)),
        ("offer", (Offer(one.record.nbytes, "x", 0, 1.0),)),
        ("turn_over", over),
        ("clear", Clear(header.tenant)),
        ("stats", None),
    ]


def mutated(rng: random.Random, data: Any) -> Any:
    if isinstance(data, list) and data and rng.random() < 0.9:
        at = rng.randrange(len(data))
        return [*data[:at], mutated(rng, data[at]), *data[at + 1 :]]
    return rng.choice(VALUES)


def rage(path: str, seed: int, counts: Any) -> None:
    """What one hostile client does until it is killed."""
    rng = random.Random(seed)
    calls = [(method, encoded(given)) for method, given in calls_of(1000 + seed % CLIENTS)]
    record = shared(made(1000 + seed % CLIENTS).record)
    kept: list[socket.socket] = []
    while True:
        with suppress(SocketError, OSError):
            sock = socket.socket(socket.AF_UNIX)
            sock.settimeout(2.0)
            sock.connect(path)
            send(sock, ["hello", Hello(PROTOCOL, "x")])
            receive(sock)
            for _ in range(rng.randrange(1, 8)):
                time.sleep(rng.uniform(0, 2 * PAUSE_S))
                counts[seed % CLIENTS] += 1
                one_frame(rng, sock, calls, record.fd)
        if rng.random() < 0.1 and len(kept) < 8:
            kept.append(sock)  # and says nothing more
        else:
            sock.close()


def one_frame(rng: random.Random, sock: socket.socket, calls: list[tuple[str, Any]], fd: int) -> None:
    method, given = rng.choice(calls)
    kind = rng.randrange(8)
    fds = [fd] * (1 if method == "offer" else rng.choice([0, 0, 0, 2]))
    data = msgpack.packb([method, given if kind < 3 else mutated(rng, given)], unicode_errors="replace")
    if kind == 6:
        broken = bytearray(data)
        broken[rng.randrange(len(broken))] ^= 1 << rng.randrange(8)
        data = bytes(broken)
    frame = LENGTH.pack(len(data)) + data
    if kind == 7:
        cut = frame[: rng.randrange(1, len(frame))]
        frame = rng.choice([rng.randbytes(40), cut, LENGTH.pack(FRAME_BYTES_MAX + 1)])
    socket.send_fds(sock, [frame], fds)
    if kind in (2, 7):
        raise OSError("leaves without the answer")
    for came in receive(sock)[1]:
        os.close(came)


@contextmanager
def node(folder: Path) -> Iterator[tuple[int, Path]]:
    """A node's process, and its socket."""
    path = folder / "own" / "tiers.sock"
    words = ["-m", "samovar.cache_tiers.socket", "--socket", str(path), f"--tiers.cpu.bytes_max={4 * MIB}"]
    words += ["--tiers.nvme.bytes_max=0", "--telemetry.log_level=error"]
    process = subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert "ready" in process.stdout.readline()
    yield process.pid, path
    assert process.poll() is None
    process.terminate()
    assert process.wait(60) == 0


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def files_of(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def meet(paths: list[Path], seconds: Any) -> None:
    """What a good client of each does, in a process of its own: `seconds` of lookups, in turn; some loads."""
    one, links = made(1), [SocketLink(path, "good") for path in paths]
    for number in range(len(seconds)):
        link = links[number % len(links)]
        began_s = time.perf_counter()
        assert link.lookup(lookup_of(one)) is not None
        seconds[number] = time.perf_counter() - began_s
        if not number % 10:
            assert isinstance(link.fetch(fetch_of(one)), Loaded)
        time.sleep(0.002)


class Meter:
    """A good client's process. `p99_ms`: under which 99 of 100 lookups were answered, of each node."""

    def __init__(self, *paths: Path) -> None:
        self._nodes = len(paths)
        self._seconds = FORK.Array("d", LOOKUPS * len(paths))
        self.process = FORK.Process(target=meet, args=(list(paths), self._seconds), daemon=True)
        self.process.start()

    def p99_ms(self) -> list[float]:
        self.process.join()
        assert self.process.exitcode == 0
        return [quantiles(self._seconds[at :: self._nodes], n=100)[-1] * 1e3 for at in range(self._nodes)]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[tuple[int, Path]]]:
    """One for the storm, one for the calm: what the machine's cores cost a lookup, both pay."""
    with node(tmp_path / "a") as stormy, node(tmp_path / "b") as calm:
        yield [stormy, calm]


def test_a_storm_of_hostile_clients(nodes: list[tuple[int, Path]]) -> None:
    (pid, path), (_, calm) = nodes
    one = made(1)
    for each in (path, calm):
        link = SocketLink(each, "good")
        store(BySocket(link), one)
        link.close()
    link = SocketLink(path, "good")
    (alone_ms,) = Meter(path).p99_ms()

    def held() -> int:
        """Files beside those of records."""
        stats = link.stats()
        assert stats is not None
        return files_of(pid) - stats.tiers[0].extents

    before = held()
    counts = FORK.Array("l", CLIENTS)
    rng = random.Random(5)

    def begin(seed: int) -> Any:
        client = FORK.Process(target=rage, args=(str(path), seed, counts), daemon=True)
        client.start()
        return client

    clients = [begin(seed) for seed in range(CLIENTS)]
    kills, began_s, used_s = 0, time.monotonic(), cpu_s(pid)
    try:
        meter = Meter(path, calm)
        while sum(counts) < FRAMES_MIN or meter.process.is_alive():
            at = rng.randrange(CLIENTS)
            clients[at].kill()
            clients[at].join()
            kills += 1
            clients[at] = begin(at + kills * CLIENTS)
            time.sleep(KILL_EVERY_S)
    finally:
        for client in clients:
            client.kill()
            client.join()
    storm_ms, calm_ms = meter.p99_ms()
    print(f"{sum(counts)} frames and {kills} kills in {time.monotonic() - began_s:.1f} s, of CPU", end=" ")
    print(
        f"{cpu_s(pid) - used_s:.1f}; p99 of a lookup {alone_ms:.2f} ms before, then {storm_ms:.2f} ms,",
        end=" ",
    )
    print(f"and, at the other node, {calm_ms:.2f} ms")
    settles(lambda: held() == before)
    assert_loads(BySocket(link), one)
    stats = link.stats()
    assert stats is not None
    assert (stats.tiers[0].state, stats.returns.predictor[:3] != "off") == ("up", True)
    assert storm_ms <= 2 * max(alone_ms, calm_ms)
    link.close()
