"""Blocks over TLS of our own: who shows no certificate of the authority gets none; what fails goes by Ray."""

from __future__ import annotations

import shutil
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from ssl import SSLSocket

import numpy as np
import pytest

from samovar.cache_tiers.blocks.extent import Bytes
from samovar.cache_tiers.transport import tls_link
from samovar.cache_tiers.transport.link import Export, LinkDown, LinkLate, PeerGone
from samovar.cache_tiers.transport.peers import LazyLink
from samovar.cache_tiers.transport.tls_link import TlsLink
from samovar.configs.tls import NodeTls
from tests.support.inside import callers_of
from tests.support.nodes.node_harness import MIB, sample
from tests.support.nodes.peer_harness import Home, World, home, same
from tests.support.router.certificates import WRONG, Authority, node
from tests.support.services.service import until

HERE = "127.0.0.1"
WAIT_S = 20.0
pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def tea(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "tea")


@contextmanager
def opened(
    own: NodeTls, name: str = "a:1", *, bytes_max: int = 8 * MIB, lease_s: float = 60.0
) -> Iterator[TlsLink]:
    link = TlsLink(name, own, HERE, bytes_max=bytes_max, lease_s=lease_s)
    try:
        yield link
        link.check_integrity()
    finally:
        link.close()


def some(nbytes: int = 3 * MIB + 5) -> Bytes:
    return np.random.default_rng(7).integers(0, 256, nbytes, dtype=np.uint8)


def shared(link: TlsLink, data: Bytes) -> Export:
    export = link.share(data)
    assert export is not None
    return export


def test_what_one_node_shares_another_pulls_over_one_connection(tea: Authority) -> None:
    data = some()
    with opened(node(tea, "one")) as giver, opened(node(tea, "two"), "b:1") as taker:
        for part in (data, data[17:], data[:1]):
            export = shared(giver, part)
            came = taker.bring(export, WAIT_S)
            assert came is not None
            assert np.array_equal(came, part)
            giver.release(export.generation)
        assert len(callers_of(giver)) == 1


def test_many_at_once_come_whole(tea: Authority) -> None:
    data = some(MIB)
    came: dict[int, Bytes | None] = {}
    with (
        opened(node(tea, "one"), bytes_max=32 * MIB) as giver,
        opened(node(tea, "two"), "b:1", bytes_max=32 * MIB) as taker,
    ):
        exports = [shared(giver, data[n:]) for n in range(8)]

        def bring(n: int) -> None:
            came[n] = taker.bring(exports[n], WAIT_S)

        threads = [threading.Thread(target=bring, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
    assert sorted(came) == list(range(8))
    assert all(np.array_equal(came[n], data[n:]) for n in range(8))


def test_what_travels_is_not_read_on_the_way(tea: Authority) -> None:
    """A tap between both ends sees no part of the record."""
    seen = bytearray()
    data = np.frombuffer(b"a secret word " * 1000, np.uint8)

    def copy(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while piece := source.recv(65536):
                seen.extend(piece)
                sink.sendall(piece)
            sink.shutdown(socket.SHUT_WR)

    with opened(node(tea, "one")) as giver, opened(node(tea, "two"), "b:1") as taker:
        export = shared(giver, data)
        with socket.create_server((HERE, 0)) as between:
            port = between.getsockname()[1]

            def tap() -> None:
                caller, _ = between.accept()
                onward = socket.create_connection((HERE, int(export.metadata.split()[1])))
                back = threading.Thread(target=copy, args=(onward, caller))
                back.start()
                copy(caller, onward)
                back.join(WAIT_S)
                caller.close()
                onward.close()

            tapping = threading.Thread(target=tap)
            tapping.start()
            came = taker.bring(replace(export, metadata=f"{HERE} {port}".encode()), WAIT_S)
            assert came is not None
            assert np.array_equal(came, data)
            taker.close()
            tapping.join(WAIT_S)
    assert len(seen) > data.nbytes
    assert b"secret" not in seen


Wrong = Callable[[Authority, Authority], NodeTls]


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_caller_gets_nothing_though_it_knows_the_number(
    tea: Authority, tmp_path: Path, wrong: Wrong
) -> None:
    files = node(tea, "one")
    own = NodeTls(tea.folder / "one.ca", files.certificate, files.key)
    own.ca.write_bytes(tea.file.read_bytes())
    stranger = wrong(tea, Authority(tmp_path, "coffee"))
    with opened(own) as giver, opened(stranger, "c:1") as taker:
        export = shared(giver, some())
        with pytest.raises(PeerGone):
            taker.bring(export, WAIT_S)
        assert not callers_of(giver)
        with opened(node(tea, "two"), "b:1") as other:  # others are served on
            assert other.bring(export, WAIT_S) is not None


@pytest.mark.parametrize("wrong", WRONG[1:])
def test_a_wrong_listener_is_told_nothing(
    tea: Authority, tmp_path: Path, wrong: Wrong, monkeypatch: pytest.MonkeyPatch
) -> None:
    stranger = wrong(tea, Authority(tmp_path, "coffee"))
    files, ca = node(tea, "two"), tea.folder / "one.ca"
    own = NodeTls(ca if ca.exists() else tea.file, files.certificate, files.key)
    heard: list[int] = []
    monkeypatch.setattr(TlsLink, "_answer", lambda self, connection, *said: heard.extend(said))
    with opened(stranger) as giver, opened(own, "b:1") as taker, pytest.raises(PeerGone):
        taker.bring(shared(giver, some()), WAIT_S)
    assert not heard


def test_a_listener_of_another_address_is_not_believed(tea: Authority) -> None:
    with (
        opened(node(tea, "one", host="10.1.2.3")) as giver,
        opened(node(tea, "two"), "b:1") as taker,
        pytest.raises(PeerGone, match="IP address mismatch"),
    ):
        taker.bring(shared(giver, some()), WAIT_S)


def port_of(link: TlsLink) -> int:
    return int(shared(link, some(1)).metadata.split()[1])


def test_older_versions_are_refused(tea: Authority) -> None:
    files = node(tea, "old")
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname = False
    old.load_verify_locations(files.ca)
    old.load_cert_chain(files.certificate, files.key)
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with (
        opened(node(tea, "one")) as giver,
        socket.create_connection((HERE, port_of(giver))) as plain,
        pytest.raises(OSError, match=r"alert|version|^$|reset"),
    ):
        old.wrap_socket(plain)


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", tls_link.ASK.pack(1, 2, 3)])
def test_plain_text_is_answered_by_nothing_but_an_alert(tea: Authority, said: bytes) -> None:
    with opened(node(tea, "one")) as giver, socket.create_connection((HERE, port_of(giver))) as plain:
        plain.settimeout(WAIT_S)
        plain.sendall(said)
        with suppress(ConnectionResetError):
            assert plain.recv(100)[:1] in (b"", b"\x15"), "a TLS alert, at most"


def test_a_revocation_is_heard_at_the_next_connection_and_ends_those_that_are_kept(
    tea: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = node(tea, "one")
    own = NodeTls(tea.folder / "one.ca", files.certificate, files.key)
    own.ca.write_bytes(tea.file.read_bytes())
    monkeypatch.setattr(tls_link, "CALLER_SHARE", 1e9)  # a caller that would keep it for good
    with opened(own) as giver, opened(node(tea, "two"), "b:1") as taker:
        export = shared(giver, some())
        assert taker.bring(export, WAIT_S) is not None
        own.ca.write_bytes(tea.file.read_bytes() + tea.revoke("two"))
        assert taker.bring(export, WAIT_S) is not None, "the connection from before"
        monkeypatch.setattr(tls_link, "CONNECTION_S", -1.0)
        (kept,) = callers_of(giver)
        kept.settimeout(0.0)  # its thread looks at its age
        taker.close()
        until("it has left", lambda: not callers_of(giver))
        for _ in range(2):  # the first began before there was a list
            revoked = NodeTls(tea.file, tea.folder / "two.pem", tea.folder / "two.key")
            with opened(revoked, "b:2") as again, pytest.raises(PeerGone):
                again.bring(export, WAIT_S)


def test_a_connection_is_served_no_longer_than_its_time(
    tea: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_link, "CONNECTION_S", 0.2)
    monkeypatch.setattr(tls_link, "CALLER_SHARE", 1e9)
    with opened(node(tea, "one")) as giver, opened(node(tea, "two"), "b:1") as taker:
        export = shared(giver, some())
        assert taker.bring(export, WAIT_S) is not None
        until("its time is over", lambda: not callers_of(giver))
        assert taker.bring(export, WAIT_S) is not None, "by another connection"


def test_a_renewed_certificate_is_taken_up(tea: Authority) -> None:
    caller = node(tea, "two", days=-1)
    with opened(node(tea, "one")) as giver, opened(caller, "b:1") as taker:
        export = shared(giver, some())
        with pytest.raises(PeerGone):
            taker.bring(export, WAIT_S)
        new = node(tea, "new")
        shutil.copy(new.key, caller.key)
        shutil.copy(new.certificate, caller.certificate)
        assert taker.bring(export, WAIT_S) is not None


def test_a_thread_that_cannot_be_started_costs_one_connection(
    tea: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had ended the thread that takes them all."""
    start, failed = threading.Thread.start, list[str]()

    def fails_once(thread: threading.Thread) -> None:
        if thread.name == "samovar-blocks" and not failed:
            failed.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    with opened(node(tea, "one")) as giver, opened(node(tea, "two"), "b:1") as taker:
        export = shared(giver, some())
        monkeypatch.setattr(threading.Thread, "start", fails_once)
        with pytest.raises(PeerGone):
            taker.bring(export, WAIT_S)
        assert failed
        assert taker.bring(export, WAIT_S) is not None


def test_a_node_without_its_files_has_no_link_and_says_which(tmp_path: Path) -> None:
    with pytest.raises(LinkDown, match=str(tmp_path / "b")):
        TlsLink("a:1", NodeTls(tmp_path / "a", tmp_path / "b", tmp_path / "c"), HERE, bytes_max=1, lease_s=1)


# -- what is shared, and for how long ------------------------------------------------------


def test_what_is_over_or_another_s_is_not_given(tea: Authority) -> None:
    with opened(node(tea, "one")) as giver, opened(node(tea, "two"), "b:1") as taker:
        export = shared(giver, some())
        for wrong in (
            replace(export, address=export.address ^ 1),
            replace(export, nbytes=export.nbytes - 1),
            replace(export, generation=export.generation + 1),
        ):
            with pytest.raises(PeerGone, match="not share it any more"):
                taker.bring(wrong, WAIT_S)
        for wrong in (
            replace(export, metadata=b"\xff"),
            replace(export, metadata=b"nowhere"),
            replace(export, address=-1),
        ):
            with pytest.raises(PeerGone):
                taker.bring(wrong, WAIT_S)
        assert taker.bring(export, WAIT_S) is not None
        giver.release(export.generation)
        with pytest.raises(PeerGone, match="not share it any more"):
            taker.bring(export, WAIT_S)
    with (
        opened(node(tea, "three"), lease_s=0.0) as giver,
        opened(node(tea, "four"), "b:1") as taker,
        pytest.raises(PeerGone, match="not share it any more"),
    ):
        taker.bring(shared(giver, some()), WAIT_S)


def test_bytes_are_bounded_at_both_ends(tea: Authority) -> None:
    with (
        opened(node(tea, "one"), bytes_max=2 * MIB) as giver,
        opened(node(tea, "two"), "b:1", bytes_max=MIB) as taker,
    ):
        first = shared(giver, some(MIB + 1))
        assert giver.share(some(MIB)) is None
        assert taker.bring(first, WAIT_S) is None
        giver.release(first.generation)
        assert taker.bring(shared(giver, some(MIB)), WAIT_S) is not None


def test_strangers_make_room_for_each_other_and_take_none_of_the_nodes(
    tea: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_link, "STRANGERS_MAX", 2)
    with opened(node(tea, "one")) as giver, opened(node(tea, "two"), "b:1") as taker:
        export = shared(giver, some())
        place = (HERE, int(export.metadata.split()[1]))
        silent = [socket.create_connection(place) for _ in range(3)]
        silent[0].settimeout(WAIT_S)
        assert silent[0].recv(1) == b"", "the oldest was cut"
        assert taker.bring(export, WAIT_S) is not None
        for one in silent:
            one.close()


def test_who_only_connects_is_cut(tea: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls_link, "HANDSHAKE_S", 0.2)
    with opened(node(tea, "one")) as giver, socket.create_connection((HERE, port_of(giver))) as silent:
        silent.settimeout(WAIT_S)
        with suppress(ConnectionResetError):
            assert silent.recv(1) == b""


def test_more_callers_than_there_may_be_are_refused(tea: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls_link, "CONNECTIONS_MAX", 1)
    with opened(node(tea, "one")) as giver, opened(node(tea, "two"), "b:1") as taker:
        export = shared(giver, some())
        assert taker.bring(export, WAIT_S) is not None
        with opened(node(tea, "three"), "c:1") as other, pytest.raises(PeerGone):
            other.bring(export, WAIT_S)


# -- what fails ----------------------------------------------------------------------------


def dies_in_the_middle(connection: SSLSocket, data: memoryview, ends_s: float) -> None:
    """In place of `tls_link._send`: half of a record comes."""
    half = data if len(data) < 100 else data[: len(data) // 2]
    connection.settimeout(max(0.0, ends_s - time.monotonic()))
    connection.sendall(half)
    if half is not data:
        tls_link._end(connection)


def test_half_a_record_is_none(tea: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(node(tea, "one")) as giver, opened(node(tea, "two"), "b:1") as taker:
        export = shared(giver, some())
        with monkeypatch.context() as patched:
            patched.setattr(tls_link, "_send", dies_in_the_middle)
            with pytest.raises(PeerGone):
                taker.bring(export, WAIT_S)
        assert taker.bring(export, WAIT_S) is not None


def test_a_peer_that_says_nothing_ends_at_the_deadline_and_a_closed_link_at_once(
    tea: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard, go_on = threading.Event(), threading.Event()

    def silent(self: TlsLink, connection: SSLSocket, *said: int) -> None:
        heard.set()
        go_on.wait(WAIT_S)

    monkeypatch.setattr(TlsLink, "_answer", silent)
    try:
        with opened(node(tea, "one")) as giver, opened(node(tea, "two"), "b:1") as taker:
            export = shared(giver, some())
            with pytest.raises(LinkLate):
                taker.bring(export, 0.5)
            heard.clear()
            failed: list[Exception] = []

            def bring() -> None:
                try:
                    taker.bring(export, WAIT_S)
                except LinkDown as error:
                    failed.append(error)

            thread = threading.Thread(target=bring)
            thread.start()
            assert heard.wait(WAIT_S)
            taker.close()
            thread.join(WAIT_S)
            assert len(failed) == 1
            with pytest.raises(LinkDown):
                taker.bring(export, WAIT_S)
            with pytest.raises(LinkDown):
                taker.share(some(1))
    finally:
        go_on.set()


def test_a_peer_that_has_ended_is_gone_and_its_successor_is_found(tea: Authority) -> None:
    with opened(node(tea, "two"), "b:1") as taker:
        with opened(node(tea, "one")) as giver:
            export = shared(giver, some())
            assert taker.bring(export, WAIT_S) is not None
        with pytest.raises(PeerGone):
            taker.bring(export, WAIT_S)
        with opened(node(tea, "again"), "a:2") as giver:
            assert taker.bring(shared(giver, some()), WAIT_S) is not None


# -- nodes ---------------------------------------------------------------------------------


@pytest.fixture
def two(tea: Authority) -> Iterator[tuple[World, Home, Home]]:
    """Node `a` that has blocks, and node `b` that wants them: over TLS."""
    world, links = World(), []

    def link(name: str, own: NodeTls) -> LazyLink:
        links.append(
            LazyLink(lambda: TlsLink(f"{name}:first", own, HERE, bytes_max=MIB, lease_s=60), way="tls")
        )
        return links[-1]

    yield world, *(home(world, name, link=link(name, node(tea, name))) for name in "ab")
    for one in links:
        one.close()


def test_an_extent_comes_over_tls_and_stays(two: tuple[World, Home, Home]) -> None:
    world, a, b = two
    wanted = sample(1)
    a.store(wanted)
    assert same(b.bring(wanted, "a"), wanted)
    assert b.holds(wanted) == ("cpu",)
    stats = b.node.stats()
    assert stats.transport == "tls"
    assert stats.peers["a"].pulls == {"tls": 1}
    assert world.calls["release"] == 1


def test_a_peer_that_dies_in_mid_transfer_is_a_fetch_by_ray(
    two: tuple[World, Home, Home], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, a, b = two
    wanted = sample(1)
    a.store(wanted)
    monkeypatch.setattr(tls_link, "_send", dies_in_the_middle)
    assert same(b.bring(wanted, "a"), wanted)
    stats = b.node.stats().peers["a"]
    assert stats.pulls == {"ray": 1}
    assert stats.failures == {"tls:PeerGone": 1}


def test_other_bytes_than_were_sealed_are_not_kept(
    two: tuple[World, Home, Home], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted bug: TLS carries whole what the owner's memory has, which is not the record any more."""
    world, a, b = two
    wanted = sample(1)
    a.store(wanted)
    real = TlsLink.share

    def spoilt(self: TlsLink, data: Bytes) -> Export | None:
        wrong = data.copy()
        wrong[-1] ^= 1
        return real(self, wrong)

    monkeypatch.setattr(TlsLink, "share", spoilt)
    assert same(b.bring(wanted, "a"), wanted), "by Ray"
    assert b.node.stats().peers["a"].bad == {"checksum": 1}
    assert world.calls["check"] == 1


def test_a_link_that_is_closed_is_no_way_any_more(two: tuple[World, Home, Home]) -> None:
    _, a, b = two
    a.store(sample(1))
    a.store(sample(2))
    assert same(b.bring(sample(1), "a"), sample(1))
    b.node.peers._link.get().close()
    assert same(b.bring(sample(2), "a"), sample(2))
    assert b.node.stats().transport == "ray: b:first is closed"
