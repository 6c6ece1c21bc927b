"""Links over TLS: who shows no certificate of the cluster's authority is told nothing, and not believed."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from samovar.configs.tls import NodeTls, node_tls
from samovar.replicas.links import Inlet, Link, Links
from samovar.replicas.messages import ReplyTo
from tests.support.inside import links_of, unreached_by
from tests.support.router.certificates import WRONG, Authority, node
from tests.support.router.linked_replicas import LINKS
from tests.support.router.router_harness import until

HERE = "127.0.0.1"


@pytest.fixture
def tea(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "tea")


@asynccontextmanager
async def listening(own: NodeTls) -> AsyncIterator[tuple[Inlet, ReplyTo]]:
    inlet = Inlet(HERE, LINKS, 0.0, tls=own)
    try:
        yield inlet, await inlet.address()
    finally:
        inlet.close()


async def reached(to: ReplyTo, own: NodeTls | None) -> Link | None:
    return await Links(LINKS.model_copy(update={"connect_s": 10.0}), 60.0, own).reach(to)


async def test_nodes_of_one_authority_talk_both_ways(tea: Authority) -> None:
    async with listening(node(tea, "one")) as (inlet, to):
        link = await reached(to, node(tea, "two"))
        assert link is not None
        box, large = inlet.expect("t"), b"x" * (1 << 20)
        link.open("t", lambda: None)
        for _ in range(3):
            link.send("t", large)
        found: list[object] = []
        async with asyncio.timeout(10):
            while len(found) < 3:
                found += await box.next(1 << 20)
        assert found == [large] * 3
        await asyncio.wait_for(link.drained("t"), 10)  # what was said backwards has come


async def test_what_travels_is_not_read_on_the_way(tea: Authority) -> None:
    """A tap between both ends sees neither tickets nor text."""
    seen = bytearray()

    async def tap(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        onward = await asyncio.open_connection(HERE, port)

        async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            with suppress(OSError):
                while piece := await source.read(65536):
                    seen.extend(piece)
                    sink.write(piece)
            sink.close()

        await asyncio.gather(copy(reader, onward[1]), copy(onward[0], writer))

    async with listening(node(tea, "one")) as (inlet, to):
        port = to.port
        server = await asyncio.start_server(tap, HERE, 0)
        between = ReplyTo(HERE, server.sockets[0].getsockname()[1], to.secret)
        link = await reached(between, node(tea, "two"))
        assert link is not None
        box = inlet.expect("a-ticket")
        link.open("a-ticket", lambda: None)
        link.send("a-ticket", "a secret word")
        assert "a secret word" in await asyncio.wait_for(box.next(), 10)
        assert seen
        assert b"a secret word" not in seen
        assert b"a-ticket" not in seen
        link.cut()
        server.close()


def _plain(tea: Authority, other: Authority) -> NodeTls | None:
    return None


Wrong = Callable[[Authority, Authority], NodeTls | None]


@pytest.mark.parametrize("wrong", [_plain, *WRONG])
async def test_a_wrong_caller_is_refused_though_it_knows_the_secret(
    tea: Authority, tmp_path: Path, wrong: Wrong
) -> None:
    files = node(tea, "one")
    own = NodeTls(tea.folder / "one.ca", files.certificate, files.key)
    own.ca.write_bytes(tea.file.read_bytes())
    caller = wrong(tea, Authority(tmp_path, "coffee"))
    async with listening(own) as (inlet, to):
        assert await reached(to, caller) is None
        assert not links_of(inlet)
        assert await reached(to, node(tea, "two")) is not None  # others are served on


@pytest.mark.parametrize("wrong", WRONG[1:])
async def test_a_wrong_listener_is_told_nothing(tea: Authority, tmp_path: Path, wrong: Wrong) -> None:
    listener = wrong(tea, Authority(tmp_path, "coffee"))
    assert listener is not None
    files, ca = node(tea, "two"), tea.folder / "one.ca"
    own = NodeTls(ca if ca.exists() else tea.file, files.certificate, files.key)
    async with listening(listener) as (inlet, to):
        assert await reached(to, own) is None
        assert not links_of(inlet)


async def test_a_listener_of_another_address_is_not_believed(tea: Authority) -> None:
    async with listening(node(tea, "one", host="10.1.2.3")) as (_, to):
        assert await reached(to, node(tea, "two")) is None


async def test_a_listener_without_tls_is_told_nothing(tea: Authority) -> None:
    inlet = Inlet(HERE, LINKS, 0.0)
    try:
        links = Links(LINKS.model_copy(update={"connect_s": 10.0}), 60.0, node(tea, "two"))
        to = await inlet.address()
        assert await links.reach(to) is None
        assert to in unreached_by(links)
    finally:
        inlet.close()


async def test_older_versions_are_refused(tea: Authority) -> None:
    files = node(tea, "old")
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname = False
    old.load_verify_locations(files.ca)
    old.load_cert_chain(files.certificate, files.key)
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    async with listening(node(tea, "one")) as (_, to):
        with pytest.raises(OSError, match=r"alert|version|^$"):  # an alert, or a reset before it is read
            await asyncio.open_connection(HERE, to.port, ssl=old)


async def test_plain_text_is_answered_by_nothing_but_an_alert(tea: Authority) -> None:
    async with listening(node(tea, "one")) as (_, to):
        reader, writer = await asyncio.open_connection(HERE, to.port)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        with suppress(ConnectionResetError):
            said = await asyncio.wait_for(reader.read(), 10)
            assert said[:1] in (b"", b"\x15"), "a TLS alert, at most"
        writer.close()


async def test_a_renewed_certificate_is_taken_up_and_a_later_revocation_heard(tea: Authority) -> None:
    files = node(tea, "one")
    own = NodeTls(tea.folder / "one.ca", files.certificate, files.key)
    own.ca.write_bytes(tea.file.read_bytes())
    late, caller = node(tea, "late", days=-1), node(tea, "two")
    async with listening(own) as (_, to):
        assert await reached(to, caller) is not None
        for new, old in ((late.key, own.key), (late.certificate, own.certificate)):
            shutil.copy(new, old)
        assert await reached(to, caller) is None, "the listener has what has expired by now"
        again = node(tea, "again")
        for new, old in ((again.key, own.key), (again.certificate, own.certificate)):
            shutil.copy(new, old)
        assert await reached(to, caller) is not None
        own.ca.write_bytes(tea.file.read_bytes() + tea.revoke("two"))
        for _ in range(2):  # the first began before there was a list
            assert await reached(to, caller) is None
        assert await reached(to, node(tea, "three")) is not None


async def test_a_caller_reads_its_files_at_each_connection(tea: Authority) -> None:
    caller = node(tea, "two", days=-1)
    async with listening(node(tea, "one")) as (_, to):
        assert await reached(to, caller) is None
        new = node(tea, "new")
        shutil.copy(new.key, caller.key)
        assert await reached(to, caller) is None, "they do not fit together"
        shutil.copy(new.certificate, caller.certificate)
        assert await reached(to, caller) is not None


async def test_who_only_connects_is_cut(tea: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samovar.replicas.links.inlet.PROOF_WAIT_S", 0.2)
    async with listening(node(tea, "one")) as (_, to):
        with socket.create_connection((HERE, to.port)) as silent:
            silent.setblocking(False)
            loop = asyncio.get_running_loop()
            with suppress(ConnectionResetError):
                assert await asyncio.wait_for(loop.sock_recv(silent, 1), 10) == b""


async def test_a_listener_without_its_files_says_so(tmp_path: Path) -> None:
    nowhere = NodeTls(tmp_path / "a", tmp_path / "b", tmp_path / "c")
    with pytest.raises(OSError, match=str(tmp_path / "b")):
        await Inlet(HERE, LINKS, 0.0, tls=nowhere).address()


async def test_a_link_that_ends_is_known_at_once(tea: Authority) -> None:
    async with listening(node(tea, "one")) as (inlet, to):
        link = await reached(to, node(tea, "two"))
        assert link is not None
        lost: list[str] = []
        inlet.expect("t")
        link.open("t", lambda: lost.append("t"))
        inlet.close()
        await until(lambda: lost == ["t"])


def test_ray_s_own_variables_say_what_is_spoken(tea: Authority) -> None:
    own = node(tea, "one")
    assert node_tls({}) is None
    assert node_tls({"RAY_USE_TLS": "0"}) is None
    assert node_tls(own.environment()) == own
