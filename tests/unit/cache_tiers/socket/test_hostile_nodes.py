"""A node that breaks the rules: its client's calls end in time, have nothing, and leave no file behind."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from samovar.cache_tiers.blocks import Clear, marks_of
from samovar.cache_tiers.media import shared
from samovar.cache_tiers.messages import (
    AbsentRun,
    BlockRange,
    FetchFailed,
    Lookup,
    LookupResult,
    PartialBlock,
    TurnEnded,
)
from samovar.cache_tiers.pricing import TierPrice
from samovar.cache_tiers.socket.client import SocketLink
from samovar.cache_tiers.socket.messages import FetchReply, Offer, Welcome
from samovar.cache_tiers.socket.wire import (
    FDS_MAX,
    FRAME_BYTES_MAX,
    LENGTH,
    PROTOCOL,
    SocketError,
    receive,
    send,
)
from tests.support.nodes.node_harness import sample
from tests.support.nodes.socket_world import World, fetch_of, open_files, settles, steady_count

ONE = sample(1)
HEADER = ONE.header
NBYTES = ONE.record.nbytes
RECORD = shared(ONE.record)
LOOKUP = Lookup(HEADER.namespace, ONE.chain, HEADER.tenant, HEADER.session)
SPAN = BlockRange(HEADER.extent_id, HEADER.tenant, 0, 0, HEADER.blocks, "cpu", NBYTES)
TAIL = PartialBlock(bytes(32), 1, replace(SPAN, first=3, blocks=1))
FOUND = LookupResult("life", 0, (SPAN,), (TAIL,), {"cpu": TierPrice(0.0, 1e9)})
CALL_S = 0.3


class Impostor:
    """Listens where a node should, and answers what it was told to."""

    def __init__(self, path: Path, answer: Callable[[socket.socket], None]) -> None:
        self._answer = answer
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(8)
        self.welcome: Any = [True, Welcome(PROTOCOL, "life", (1, 2, 3))]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            receive(sock)
            send(sock, self.welcome)
            while True:
                _, fds = receive(sock, 1.0)
                for fd in fds:
                    os.close(fd)
                self._answer(sock)
        except (SocketError, OSError):
            pass
        finally:
            sock.close()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@pytest.fixture
def meet(tmp_path: Path) -> Iterator[Callable[[Callable[[socket.socket], None]], SocketLink]]:
    """Meet a node that answers so."""
    before, met = steady_count(open_files), []

    def make(answer: Callable[[socket.socket], None]) -> SocketLink:
        impostor = Impostor(tmp_path / "t.sock", answer)
        link = SocketLink(tmp_path / "t.sock", "test", call_s=CALL_S)
        met.append((impostor, link))
        return link

    yield make
    for impostor, link in met:
        link.close()
        impostor.close()
    settles(lambda: open_files() <= before)


Meet = Callable[[Callable[[socket.socket], None]], SocketLink]


def says(message: Any, files: int = 0) -> Callable[[socket.socket], None]:
    return lambda sock: send(sock, message, [RECORD.fd] * files)


def test_what_a_good_node_says_is_believed(meet: Meet) -> None:
    assert meet(says([True, FOUND])).lookup(LOOKUP) == FOUND


SENSELESS: dict[str, LookupResult] = {
    "another tenant's": replace(FOUND, spans=(replace(SPAN, tenant=bytes(16)),)),
    "beyond the chain": replace(FOUND, spans=(replace(SPAN, blocks=HEADER.blocks + 1),)),
    "far beyond": replace(FOUND, spans=(replace(SPAN, first=2**63),)),
    "before it": replace(FOUND, spans=(replace(SPAN, first=-1),)),
    "no block": replace(FOUND, spans=(replace(SPAN, blocks=0),)),
    "less than none": replace(FOUND, spans=(replace(SPAN, blocks=-(2**63)),)),
    "twice": replace(FOUND, spans=(SPAN, SPAN)),
    "offset": replace(FOUND, spans=(replace(SPAN, offset=-1),)),
    "bytes": replace(FOUND, spans=(replace(SPAN, nbytes=-1),)),
    "a name": replace(FOUND, spans=(replace(SPAN, extent_id=b"x"),)),
    "a tail of two": replace(FOUND, tails=(replace(TAIL, span=replace(SPAN, blocks=2)),)),
    "a tail beyond": replace(FOUND, tails=(replace(TAIL, span=replace(SPAN, first=9, blocks=1)),)),
    "a tail of no token": replace(FOUND, tails=(replace(TAIL, tokens=0),)),
    "a tail's key": replace(FOUND, tails=(replace(TAIL, key=b""),)),
    "no bandwidth": replace(FOUND, prices={"cpu": TierPrice(0.0, 0.0)}),
    "backwards": replace(FOUND, prices={"cpu": TierPrice(0.0, -1.0)}),
    "before it began": replace(FOUND, prices={"cpu": TierPrice(-1.0, 1.0)}),
    "never": replace(FOUND, prices={"cpu": TierPrice(float("inf"), 1.0)}),
    "no number": replace(FOUND, prices={"cpu": TierPrice(float("nan"), 1.0)}),
    "clears": replace(FOUND, clear_seq=-1),
    "absent": replace(FOUND, absent=(AbsentRun(0, 2**40, "evicted"),)),
}


@pytest.mark.parametrize("name", SENSELESS)
def test_a_lookups_answer_that_makes_no_sense_is_none(meet: Meet, name: str) -> None:
    assert meet(says([True, SENSELESS[name]])).lookup(LOOKUP) is None


@pytest.mark.parametrize(
    ("reply", "files"),
    [
        (FetchReply(0, "cpu", NBYTES), 0),
        (FetchReply(0, "cpu", NBYTES), 2),
        (FetchReply(0, "cpu", NBYTES), FDS_MAX),
        (FetchReply(0, "cpu", NBYTES + 1), 1),
        (FetchReply(0, "cpu", 0), 1),
        (FetchReply(0, "cpu", -1), 1),
        (FetchReply(0, "cpu", 2**63), 1),
        (FetchReply(-1, "cpu", NBYTES), 1),
        (FetchReply(1, "cpu", NBYTES), 1),
        (FetchReply(0, "cpu", NBYTES, FetchFailed("gone")), 3),
        ([], 1),
        (None, 1),
    ],
)
def test_a_fetch_that_brings_something_else_has_failed(meet: Meet, reply: Any, files: int) -> None:
    assert isinstance(meet(says([True, reply], files)).fetch(fetch_of(ONE)), FetchFailed)


def test_a_file_that_can_still_be_written_is_not_taken(meet: Meet) -> None:
    fd = os.memfd_create("open", os.MFD_ALLOW_SEALING)
    os.write(fd, ONE.record.tobytes())
    link = meet(lambda sock: send(sock, [True, FetchReply(0, "cpu", NBYTES)], [fd]))
    assert isinstance(link.fetch(fetch_of(ONE)), FetchFailed)
    os.close(fd)


ODD: dict[str, Callable[[socket.socket], None]] = {
    "nothing": lambda sock: None,
    "the end": lambda sock: sock.close(),
    "noise": lambda sock: sock.sendall(os.urandom(64)),
    "half a frame": lambda sock: sock.sendall(LENGTH.pack(100) + b"half"),
    "too much": lambda sock: sock.sendall(LENGTH.pack(FRAME_BYTES_MAX + 1)),
    "no list": lambda sock: send(sock, 5),
    "no bool": lambda sock: send(sock, [1, FOUND]),
    "three": lambda sock: send(sock, [True, FOUND, FOUND]),
    "another type": lambda sock: send(sock, [True, {"a": 1}]),
    "no": lambda sock: send(sock, [False, "no"]),
    "no, in no words": lambda sock: send(sock, [False, [1]]),
    "files": says([False, "no"], FDS_MAX),
}


@pytest.mark.parametrize("name", ODD)
def test_no_answer_is_an_error_to_the_caller(meet: Meet, name: str) -> None:
    link = meet(ODD[name])
    assert link.lookup(LOOKUP) is None
    assert isinstance(link.fetch(replace(fetch_of(ONE), deadline_s=0.1)), FetchFailed)
    assert link.offer([(Offer(NBYTES, "life", 0), RECORD)]) == ("refused:no answer",)
    assert (link.ping(), link.stats()) == (None, None)
    link.report([], [])
    link.turn_over(TurnEnded(HEADER.tenant, HEADER.session, 1.0, 1, 1, marks_of(HEADER.keys), 4))
    with pytest.raises(TimeoutError):
        link.clear(Clear(HEADER.tenant), CALL_S)


def test_an_answer_that_drips_ends_with_the_call(meet: Meet) -> None:
    """The limit is the whole call's: one byte in time after the other would hold the engine's thread."""
    over = threading.Event()

    def drip(sock: socket.socket) -> None:
        sock.sendall(LENGTH.pack(FRAME_BYTES_MAX))
        while not over.wait(0.02):
            sock.sendall(b"\x91")

    link = meet(drip)
    assert link.lookup(LOOKUP) is None
    over.set()


@pytest.mark.parametrize(
    "welcome",
    [
        [True, Welcome(PROTOCOL, "life", (99,))],
        [True, []],
        [False, "no"],
        "hello",
        [True, [PROTOCOL, "life", [2**63] * 100]],
    ],
    ids=["other records", "empty", "no", "a word", "numbers"],
)
def test_a_welcome_that_is_none_is_no_connection(tmp_path: Path, welcome: Any) -> None:
    impostor = Impostor(tmp_path / "t.sock", says([True, "life"]))
    impostor.welcome = welcome
    link = SocketLink(tmp_path / "t.sock", "test", call_s=CALL_S)
    assert link.ping() is None
    link.close()
    impostor.close()


def test_what_cannot_be_said_is_not_the_nodes_fault(tmp_path: Path) -> None:
    """A node that counted as away for it would cost every request its blocks."""
    world = World(tmp_path)
    long = Lookup(bytes(32), bytes(2 * FRAME_BYTES_MAX), bytes(16), bytes(16))
    assert world.link.lookup(long) is None
    assert world.link.lookup(replace(LOOKUP, keys=b"x")) is None
    assert world.link.lookup(LOOKUP) is not None
    many = [(Offer(NBYTES, "another life", 0), shared(ONE.record)) for _ in range(2 * FDS_MAX + 1)]
    assert world.link.offer(many) == ("refused:incarnation",) * len(many)
    assert world.link.ping()
    world.close()
