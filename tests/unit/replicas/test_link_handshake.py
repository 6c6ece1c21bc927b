"""Both ends of a link prove that they know its secret, which never travels."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samovar.configs.cluster import LinkSettings
from samovar.replicas.links import Inlet, Link, LinkLost, Links
from samovar.replicas.links.handshake import NUMBER_BYTES, PROOF_BYTES, Handshake, proof_of
from samovar.replicas.links.wire import packed
from samovar.replicas.messages import ReplyTo
from tests.support.inside import connecting_by, links_of, unreached_by
from tests.support.link_ends import admit
from tests.support.router.router_harness import until

SECRET, OTHER = "5" * 64, "6" * 64
SETTINGS = LinkSettings()

pytestmark = pytest.mark.guarantee("F33")


def said_by(caller: Handshake, listener: Handshake) -> tuple[bytes, bytes, bytes]:
    """What the listener, the caller and the listener again say to each other. Raises `LinkLost`."""
    number = listener.begin()
    hello, _ = caller.take(number)
    proof, _ = listener.take(hello)
    caller.take(proof)
    return number, hello, proof


def test_two_ends_that_know_the_secret_prove_it_and_never_say_it() -> None:
    caller, listener = Handshake("caller", SECRET), Handshake("listener", SECRET)
    assert caller.begin() == b""
    words = said_by(caller, listener)
    assert caller.is_proven
    assert listener.is_proven
    assert [len(word) for word in words] == [NUMBER_BYTES, NUMBER_BYTES + PROOF_BYTES, PROOF_BYTES]
    assert SECRET.encode() not in b"".join(words)
    assert bytes.fromhex(SECRET) not in b"".join(words)


@given(st.binary(max_size=8), st.lists(st.integers(1, 40), max_size=9))
def test_words_may_come_in_any_pieces_and_what_is_behind_them_is_kept(behind: bytes, cuts: list[int]) -> None:
    caller, listener = Handshake("caller", SECRET), Handshake("listener", SECRET)

    def told(end: Handshake, data: bytes) -> tuple[bytes, bytes]:
        said = rest = b""
        for cut in [*cuts, len(data)]:
            piece, data = data[:cut], data[cut:]
            more, left = end.take(piece)
            said, rest = said + more, rest + left
        return said, rest

    hello, _ = told(caller, listener.begin())
    proof, rest = told(listener, hello)
    assert rest == b""
    assert told(caller, proof + behind) == (b"", behind)
    assert caller.is_proven
    assert listener.is_proven


def test_a_wrong_secret_proves_nothing_at_either_end() -> None:
    caller, listener = Handshake("caller", OTHER), Handshake("listener", SECRET)
    hello, _ = caller.take(listener.begin())
    with pytest.raises(LinkLost, match="not proved"):
        listener.take(hello)
    with pytest.raises(LinkLost, match="not proved"):
        caller.take(proof_of("listener", SECRET, listener._own, caller._own))
    assert not caller.is_proven
    assert not listener.is_proven


def reflected(number: bytes, hello: bytes) -> bytes:
    return hello[NUMBER_BYTES:]


def replayed(number: bytes, hello: bytes) -> bytes:
    """What the true listener has proved to another connection, of which the squatter has read all."""
    return said_by(Handshake("caller", SECRET), Handshake("listener", SECRET))[2]


def turned(number: bytes, hello: bytes) -> bytes:
    """The caller's own proof, were the roles not in it: with the numbers the other way."""
    return proof_of("caller", SECRET, hello[:NUMBER_BYTES], number)


def unkeyed(number: bytes, hello: bytes) -> bytes:
    return proof_of("listener", "", number, hello[:NUMBER_BYTES])


def zeros(number: bytes, hello: bytes) -> bytes:
    return bytes(PROOF_BYTES)


def welcome(number: bytes, hello: bytes) -> bytes:
    """What listeners of earlier versions said, as often as needed."""
    return packed([]) * PROOF_BYTES


FORGED = [reflected, replayed, turned, unkeyed, zeros, welcome]


@pytest.mark.parametrize("forged", FORGED)
def test_a_listener_that_forges_its_proof_is_not_believed(forged: Callable[[bytes, bytes], bytes]) -> None:
    caller, number = Handshake("caller", SECRET), bytes(NUMBER_BYTES)
    hello, _ = caller.take(number)
    with pytest.raises(LinkLost, match="not proved"):
        caller.take(forged(number, hello))
    assert not caller.is_proven


def test_a_caller_that_says_again_what_another_said_is_not_believed() -> None:
    first = Handshake("listener", SECRET)
    hello, _ = Handshake("caller", SECRET).take(first.begin())
    again = Handshake("listener", SECRET)
    with pytest.raises(LinkLost, match="not proved"):
        again.take(hello)


def test_a_caller_that_says_the_listeners_own_words_back_is_not_believed() -> None:
    """Two connections to one listener: what it says on one is no answer on the other."""
    one, other = Handshake("listener", SECRET), Handshake("listener", SECRET)
    with pytest.raises(LinkLost, match="not proved"):
        one.take(other.begin() + other.begin())
    with pytest.raises(LinkLost, match="not proved"):
        other.take(one._own + proof_of("listener", SECRET, other._own, one._own))


@given(st.lists(st.binary(max_size=80), max_size=8), st.sampled_from(["caller", "listener"]))
def test_garbage_never_proves_anything_and_little_of_it_is_kept(pieces: list[bytes], role: str) -> None:
    end = Handshake("caller" if role == "caller" else "listener", SECRET)
    try:
        for piece in pieces:
            end.take(piece)
            assert len(end._heard) < NUMBER_BYTES
    except LinkLost:
        pass
    assert not end.is_proven


# -- over sockets ----------------------------------------------------------------------------------------


class Squatter:
    """Listens, keeps all it is told, and does `act` with each connection."""

    def __init__(self, act: Callable[[asyncio.StreamReader, asyncio.StreamWriter], object]) -> None:
        self.heard = bytearray()
        self.is_ended = asyncio.Event()
        self._act = act

    async def listen(self) -> ReplyTo:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return ReplyTo("127.0.0.1", self.server.sockets[0].getsockname()[1], SECRET)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._act(reader, writer)
        try:
            while data := await reader.read(1 << 16):
                self.heard += data
        except ConnectionError:
            pass
        writer.close()
        self.is_ended.set()


@pytest.mark.parametrize(
    "first", [packed([]), bytes(NUMBER_BYTES + PROOF_BYTES), b"HTTP/1.1 400 Bad\r\n" * 9]
)
async def test_who_listens_and_has_not_proved_itself_is_told_nothing_of_a_request(first: bytes) -> None:
    squatter = Squatter(lambda _, writer: writer.write(first))
    to, links = await squatter.listen(), Links(SETTINGS.model_copy(update={"connect_s": 0.05}), 60.0)
    link = await links.reach(to)
    assert link is None
    assert SECRET.encode() not in squatter.heard
    assert len(squatter.heard) <= NUMBER_BYTES + PROOF_BYTES
    squatter.server.close()
    for task, _ in connecting_by(links).values():
        task.cancel()


async def test_a_link_that_is_not_proven_sends_nothing_whoever_has_it() -> None:
    squatter = Squatter(lambda _, writer: writer.write(packed([])))
    to = await squatter.listen()
    loop = asyncio.get_running_loop()
    _, link = await loop.create_connection(lambda: Link(SETTINGS, SECRET, 60.0), to.host, to.port)
    with pytest.raises(LinkLost):
        link.call("t", b"prompt", lambda: None, lambda _: None)
    with pytest.raises(LinkLost):
        link.open("t", lambda: None)
    link._queue(["t", b"prompt"])
    link._flush()
    link.cut()
    await asyncio.wait_for(squatter.is_ended.wait(), 10)
    assert not squatter.heard
    squatter.server.close()


async def test_a_listener_that_proves_nothing_in_time_is_cut_and_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("samovar.replicas.links.link.PROOF_WAIT_S", 0.05)
    squatter = Squatter(lambda *_: None)
    to, links = await squatter.listen(), Links(SETTINGS, 60.0)
    assert await links.reach(to) is None
    await asyncio.wait_for(squatter.is_ended.wait(), 10)
    assert to in unreached_by(links)
    squatter.server.close()


async def test_a_busy_listener_is_not_waited_for_longer_than_a_connection_and_reached_later() -> None:
    """Requests meanwhile go through Serve, without waiting; none opens another connection."""
    go, served = asyncio.Event(), 0

    async def late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal served
        served += 1
        await go.wait()
        await admit(reader, writer, SECRET)
        await reader.read()
        writer.close()

    server = await asyncio.start_server(late, "127.0.0.1", 0)
    to = ReplyTo("127.0.0.1", server.sockets[0].getsockname()[1], SECRET)
    links = Links(SETTINGS.model_copy(update={"connect_s": 0.05}), 60.0)
    assert await links.reach(to) is None
    assert await links.reach(to) is None
    go.set()
    await until(lambda: to in links_of(links))
    link = await links.reach(to)
    assert link is not None
    assert link.is_open
    assert served == 1
    link.cut()
    server.close()


@pytest.mark.parametrize("said", [b"", b"x", bytes(NUMBER_BYTES + PROOF_BYTES - 1)])
async def test_a_connection_that_does_not_prove_itself_in_time_is_closed(
    said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("samovar.replicas.links.inlet.PROOF_WAIT_S", 0.05)
    inlet = Inlet("127.0.0.1", SETTINGS, 0.0)
    to = await inlet.address()
    reader, writer = await asyncio.open_connection(to.host, to.port)
    writer.write(said)
    await reader.readexactly(NUMBER_BYTES)
    with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
        await asyncio.wait_for(reader.readexactly(1), 10)
    await until(lambda: not inlet._strangers)
    writer.close()
    inlet.close()


async def test_a_connection_that_has_proved_itself_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samovar.replicas.links.inlet.PROOF_WAIT_S", 0.05)
    inlet = Inlet("127.0.0.1", SETTINGS, 0.0)
    link = await Links(SETTINGS, 60.0).reach(await inlet.address())
    assert link is not None
    looked = asyncio.Event()
    asyncio.get_running_loop().call_later(
        0.1, looked.set
    )  # after the inlet's own look, which was planned before
    await asyncio.wait_for(looked.wait(), 10)
    assert link.is_open
    inlet.close()
