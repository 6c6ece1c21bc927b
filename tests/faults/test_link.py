"""Links of two processes: the bytes come, or an error does, in time; nobody else's memory is touched."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from samovar.cache_tiers.blocks import record as codec
from samovar.cache_tiers.blocks.extent import ROOT, BlockShape, Bytes, Placement
from samovar.cache_tiers.blocks.record import BadRecord
from samovar.cache_tiers.transport import nixl_agent
from samovar.cache_tiers.transport.link import (
    CHUNK_BYTES,
    ArenaLease,
    Export,
    LinkDown,
    LinkLate,
    NixlLink,
    PeerGone,
)
from tests.faults.link_peer import Peer, pattern
from tests.support.inside import arena_of, peers_of

MIB = 1024 * 1024
HERE = Path(__file__).resolve().parents[2]
TCP = {"UCX_TLS": "tcp"}  # as between two hosts: the peer has to take part in a read
SHAPE = BlockShape(layers=2, layer_bytes=4096, block_tokens=16)
IN_TIME_S = 8.0
"""What a call may take on a busy machine whose deadline, or whose peer's death, ends it."""


@pytest.fixture
def link() -> Iterator[NixlLink]:
    link = NixlLink("here:1", arena_bytes=32 * MIB, lease_s=600.0, clock=time.monotonic)
    yield link
    link.check_integrity()
    link.close()


@pytest.fixture
def tcp_link(monkeypatch: pytest.MonkeyPatch) -> Iterator[NixlLink]:
    monkeypatch.setenv("UCX_TLS", "tcp")
    link = NixlLink("here:1", arena_bytes=32 * MIB, lease_s=600.0, clock=time.monotonic)
    yield link
    link.check_integrity()
    link.close()


@pytest.fixture
def peers() -> Iterator[Callable[..., Peer]]:
    made: list[Peer] = []

    def make(name: str = "there:1", env: dict[str, str] | None = None) -> Peer:
        made.append(Peer(name, arena_bytes=64 * MIB, env=env))
        return made[-1]

    yield make
    for peer in made:
        peer.close()


@pytest.fixture(scope="module")
def steady() -> Iterator[Peer]:
    """A peer that nothing happens to: the tests share it."""
    peer = Peer("steady:1", arena_bytes=64 * MIB)
    yield peer
    assert peer.close() == 0


def room(link: NixlLink, nbytes: int) -> ArenaLease:
    lease = link.lease(nbytes, expires=False)
    assert lease is not None
    return lease


def until(condition: Callable[[], bool], deadline_s: float = 10.0) -> None:
    ends_s = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < ends_s, "it does not come about"
        threading.Event().wait(0.005)


def pulled(link: NixlLink, export: Export, deadline_s: float = 10.0) -> Bytes:
    into = room(link, export.nbytes)
    try:
        link.pull(export, into, deadline_s)
        return into.view.copy()
    finally:
        link.release(into.generation)
        link.check_integrity()


def free_bytes(link: NixlLink) -> int:
    return arena_of(link).free_bytes


@pytest.mark.parametrize("env", [{}, TCP], ids=["one host", "tcp"])
def test_the_bytes_come(
    env: dict[str, str], peers: Callable[..., Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    link = NixlLink("here:1", arena_bytes=32 * MIB, lease_s=600.0, clock=time.monotonic)
    peer = peers(env=env)
    for seed, nbytes in enumerate([1, 4096, CHUNK_BYTES, CHUNK_BYTES + 1, 9 * MIB + 5]):
        assert np.array_equal(pulled(link, peer.export(seed, nbytes)), pattern(seed, nbytes))
    assert free_bytes(link) == 32 * MIB
    link.close()


def test_a_larger_lease_keeps_its_rest(link: NixlLink, steady: Peer) -> None:
    into = room(link, 3 * MIB)
    into.view[:] = 9
    link.pull(steady.export(1, MIB), into, 10.0)
    assert np.array_equal(into.view[:MIB], pattern(1, MIB))
    assert (into.view[MIB:] == 9).all()


def test_many_pulls_at_once_from_two_peers(link: NixlLink, peers: Callable[..., Peer]) -> None:
    exports = [peer.export(seed, 200_000) for peer in (peers("a:1"), peers("b:1")) for seed in range(4)]

    def work(number: int) -> None:
        for turn in range(20):
            seed = (number + turn) % len(exports)
            assert np.array_equal(pulled(link, exports[seed]), pattern(seed % 4, 200_000))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert free_bytes(link) == 32 * MIB


def test_a_full_arena_has_no_room(link: NixlLink) -> None:
    held = room(link, 32 * MIB)
    assert link.lease(1, expires=True) is None
    link.release(held.generation)
    link.release(held.generation)
    assert link.lease(1, expires=True) is not None


@pytest.mark.parametrize("is_known", [False, True], ids=["never met", "met"])
def test_a_peer_killed_before_is_gone_at_once(
    link: NixlLink, peers: Callable[..., Peer], is_known: bool
) -> None:
    peer = peers()
    export = peer.export(1, MIB)
    if is_known:
        pulled(link, export)
    peer.kill()
    for _ in range(2):
        began_s = time.monotonic()
        with pytest.raises(PeerGone):
            pulled(link, export)
        assert time.monotonic() - began_s < IN_TIME_S
    assert free_bytes(link) == 32 * MIB


@pytest.mark.parametrize("env", [{}, TCP], ids=["one host", "tcp"])
def test_a_peer_killed_meanwhile_is_gone(
    env: dict[str, str], peers: Callable[..., Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    link = NixlLink("here:1", arena_bytes=128 * MIB, lease_s=600.0, clock=time.monotonic)
    peer = peers(env=env)
    export = peer.export(1, 16 * MIB)
    gone: list[float] = []
    under_way = threading.Semaphore(0)

    def pull_on() -> None:
        while True:
            under_way.release()
            try:
                pulled(link, export)
            except PeerGone:
                gone.append(time.monotonic())
                return

    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(pull_on) for _ in range(4)]
        for _ in range(12):
            assert under_way.acquire(timeout=10.0)
        peer.kill()
        killed_s = time.monotonic()
        for call in calls:
            call.result(timeout=10.0)
    assert max(gone) - killed_s < IN_TIME_S
    until(lambda: free_bytes(link) == 128 * MIB)
    link.check_integrity()
    link.close()


def test_a_sleeping_peer_is_late_and_its_late_bytes_meet_nobody(
    tcp_link: NixlLink, peers: Callable[..., Peer]
) -> None:
    """The trap: with UCX over TCP, a released transfer of a removed peer still writes when the peer wakes."""
    link, peer = tcp_link, peers(env=TCP)
    export = peer.export(1, 4 * MIB)
    pulled(link, export)
    peer.stop()
    into, queued = room(link, 4 * MIB), room(link, 4 * MIB)
    into.view[:] = 0
    for lease in (into, queued):
        began_s = time.monotonic()
        with pytest.raises(LinkLate):
            link.pull(export, lease, 0.3)
        assert 0.3 <= time.monotonic() - began_s < IN_TIME_S
        link.release(lease.generation)
        link.check_integrity()
    until(lambda: free_bytes(link) == 28 * MIB)  # the one that had not begun is free
    others = []
    while (other := link.lease(4 * MIB, expires=False)) is not None:
        other.view[:] = 7
        others.append(other)
    assert len(others) == 7, "the destination is parked"
    peer.go_on()
    until(lambda: free_bytes(link) == 4 * MIB)
    assert np.array_equal(into.view[:4096], pattern(1, 4096)), "the late bytes did come"
    assert not into.view[CHUNK_BYTES:].any(), "and no more than those that had been asked for"
    assert all((other.view == 7).all() for other in others)
    link.release(others[0].generation)
    assert np.array_equal(pulled(link, export), pattern(1, 4 * MIB)), "the peer is as good as before"


def test_a_sleeping_peer_that_dies_frees_what_was_parked(
    tcp_link: NixlLink, peers: Callable[..., Peer]
) -> None:
    peer = peers(env=TCP)
    export = peer.export(1, MIB)
    peer.stop()
    with pytest.raises(LinkLate):
        pulled(tcp_link, export, 0.2)
    assert free_bytes(tcp_link) == 31 * MIB
    peer.kill()
    until(lambda: free_bytes(tcp_link) == 32 * MIB)


def test_a_forgotten_peer_that_dies_in_its_sleep(tcp_link: NixlLink, peers: Callable[..., Peer]) -> None:
    peer = peers(env=TCP)
    export = peer.export(1, MIB)
    peer.stop()
    with pytest.raises(LinkLate):
        pulled(tcp_link, export, 0.2)
    until(lambda: tcp_link._peers["there:1"].handle is not None)
    tcp_link.forget("there:1")
    peer.kill()
    until(lambda: free_bytes(tcp_link) == 32 * MIB)
    again = peers("there:2", env=TCP).export(2, MIB)
    assert np.array_equal(pulled(tcp_link, again), pattern(2, MIB)), "the link's thread lives"


def test_a_forgotten_peer_keeps_nobody_waiting(tcp_link: NixlLink, peers: Callable[..., Peer]) -> None:
    link, peer = tcp_link, peers(env=TCP)
    export = peer.export(1, MIB)
    link.forget("nobody:1")
    pulled(link, export)
    peer.stop()
    with ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(pulled, link, export, 60.0) for _ in range(3)]
        until(lambda: arena_of(link).writes == 3 and peers_of(link)["there:1"].handle is not None)
        link.forget("there:1")
        for call in calls:
            with pytest.raises(PeerGone, match="forgotten"):
                call.result(timeout=5.0)
    with pytest.raises(PeerGone):
        pulled(link, export, 1.0)
    peer.go_on()
    until(lambda: free_bytes(link) == 32 * MIB)
    until(lambda: "there:1" not in peers_of(link))
    assert np.array_equal(pulled(link, export), pattern(1, MIB))


def test_close_while_a_pull_hangs(tcp_link: NixlLink, peers: Callable[..., Peer]) -> None:
    link, peer = tcp_link, peers(env=TCP)
    export = peer.export(1, MIB)
    peer.stop()
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(pulled, link, export, 60.0) for _ in range(2)]
        until(lambda: arena_of(link).writes == 2)
        began_s = time.monotonic()
        link.close()
        assert time.monotonic() - began_s < IN_TIME_S
        for call in calls:
            with pytest.raises(LinkDown, match="closed"):
                call.result(timeout=1.0)
    with pytest.raises(LinkDown):
        link.lease(1, expires=True)
    with pytest.raises(LinkDown):
        link.pull(export, ArenaLease(np.zeros(MIB, np.uint8), MIB, 1, 0), 1.0)
    link.close()
    peer.go_on()
    assert peer.close() == 0


def test_a_peer_survives_the_death_of_one_who_pulls(peers: Callable[..., Peer]) -> None:
    """UCX aborts a process that answers requests of the dead; it must not be asked for much at once."""
    peer = peers(env=TCP)
    export = peer.export(1, 16 * MIB)
    script = (
        "import sys, time\n"
        "from samovar.cache_tiers.transport.link import Export, NixlLink\n"
        "link = NixlLink('q:' + sys.argv[1], arena_bytes=16 << 20, lease_s=9, clock=time.monotonic)\n"
        "into = link.lease(16 << 20, expires=False)\n"
        "address, metadata = int(sys.stdin.readline()), bytes.fromhex(sys.stdin.readline())\n"
        "while True:\n"
        "    link.pull(Export('there:1', metadata, address, 16 << 20, 1), into, 60.0)\n"
        "    print('x', flush=True)\n"
    )
    for number in range(2):
        child = subprocess.Popen(
            [sys.executable, "-c", script, str(number)],
            cwd=HERE, env=os.environ | TCP, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(f"{export.address}\n{export.metadata.hex()}\n")
        child.stdin.flush()
        assert child.stdout.readline() == "x\n"
        child.kill()
        child.wait(10.0)
        child.stdin.close()
        child.stdout.close()
        assert peer.export(number, 4096).nbytes == 4096
    assert peer.close() == 0


def test_a_restarted_peer_is_met_anew(link: NixlLink, peers: Callable[..., Peer]) -> None:
    first = peers("there:1")
    old = first.export(1, MIB)
    pulled(link, old)
    first.kill()
    again = peers("there:2").export(2, MIB)
    assert np.array_equal(pulled(link, again), pattern(2, MIB))
    assert set(peers_of(link)) == {"there:2"}
    with pytest.raises(PeerGone):
        pulled(link, old)
    liar = Export("there:1", again.metadata, again.address, again.nbytes, again.generation)
    with pytest.raises(PeerGone, match="there:2 that answers"):
        pulled(link, liar)
    assert np.array_equal(pulled(link, again), pattern(2, MIB))


def test_another_process_under_the_same_name(link: NixlLink, peers: Callable[..., Peer]) -> None:
    first = peers("there:1")
    pulled(link, first.export(1, MIB))
    second = peers("there:1")
    assert np.array_equal(pulled(link, second.export(2, MIB)), pattern(2, MIB))


@pytest.mark.parametrize("metadata", [b"", b"garbage", bytes(500)])
def test_metadata_that_is_none(link: NixlLink, metadata: bytes) -> None:
    with pytest.raises(PeerGone):
        pulled(link, Export("there:1", metadata, 4096, 4096, 1))


def test_an_export_of_memory_that_is_not_registered(link: NixlLink, steady: Peer) -> None:
    good = steady.export(1, 4096)
    with pytest.raises(PeerGone):
        pulled(link, Export(good.agent, good.metadata, good.address + (1 << 40), 4096, good.generation))
    assert np.array_equal(pulled(link, good), pattern(1, 4096))


def test_what_the_caller_gets_wrong_is_said(link: NixlLink, steady: Peer) -> None:
    export = steady.export(1, 8192)
    small, over = room(link, 4096), room(link, 8192)
    link.release(over.generation)
    exported = link.lease(8192, expires=True)
    assert exported is not None
    for lease in (small, over, exported):
        with pytest.raises(ValueError, match=r"lease of|not free"):
            link.pull(export, lease, 1.0)
    with pytest.raises(ValueError, match="not held"):
        link.export(over)
    with pytest.raises(ValueError, match="not held"):
        link.export(small)


def test_an_exported_lease_is_taken_back_in_time() -> None:
    now_s = [100.0]
    link = NixlLink("here:1", arena_bytes=MIB, lease_s=5.0, clock=lambda: now_s[0])
    lease = link.lease(MIB, expires=True)
    assert lease is not None
    now_s[0] += 60.0  # filling it took its time: that does not count
    export = link.export(lease)
    assert (export.agent, export.address, export.nbytes) == ("here:1", lease.address, MIB)
    now_s[0] += 4.9
    assert link.lease(1, expires=False) is None
    now_s[0] += 0.1
    again = link.lease(MIB, expires=True)
    assert again is not None
    assert again.generation > lease.generation
    link.release(lease.generation)
    link.check_integrity()
    with pytest.raises(ValueError, match="not held"):
        link.export(lease)
    assert link.export(again).generation == again.generation
    link.close()


def record(byte: int) -> Bytes:
    keys = [bytes([byte, number]) * 16 for number in range(4)]
    head = codec.header_bytes(4, SHAPE.layers)
    data = np.full(head + 4 * SHAPE.block_bytes, byte, np.uint8)
    codec.seal(
        data, namespace=b"n" * 32, tenant=b"t" * 16, session=b"s" * 16, shape=SHAPE, parent=ROOT,
        first_block=0, keys=keys, token_counts=[16] * 4, placement=Placement(), created_unix_s=1.0,
    )  # fmt: skip
    return data


def test_memory_that_was_leased_again_is_caught_by_the_record(link: NixlLink, steady: Peer) -> None:
    """A planted bug: the exporter uses the memory of an export that a peer still pulls. NIXL says DONE."""
    export = steady.export_bytes(record(3))
    head = codec.header_bytes(4, SHAPE.layers)
    good = pulled(link, export)
    assert codec.good_blocks(codec.decode_header(good, record_bytes=len(good)), good[head:], 0) == 4
    steady.overwrite(export.generation, 5)
    stale = pulled(link, export)
    with pytest.raises(BadRecord):
        codec.decode_header(stale, record_bytes=len(stale))
    torn = np.concatenate([good[: head + 100], stale[head + 100 :]])
    assert codec.good_blocks(codec.decode_header(torn, record_bytes=len(torn)), torn[head:], 0) == 0


def run(script: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script],
        cwd=HERE, env=os.environ | env, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


MAKE = (
    "import time; from samovar.cache_tiers.transport.link import NixlLink, LinkDown\n"
    "link = NixlLink('here:1', arena_bytes=1 << 20, lease_s=1, clock=time.monotonic)\n"
)


@pytest.mark.parametrize("end", ["link.close()", "", "del link", "raise SystemExit(0)"])
def test_a_script_with_a_link_exits_0_and_says_nothing(end: str) -> None:
    done = run(MAKE + end)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_an_idle_link_burns_less_than_three_percent_of_a_core() -> None:
    measure = (
        "import threading\n"
        "wall_s, cpu_s = time.monotonic(), time.process_time()\n"
        "threading.Event().wait(2.0)\n"
        "print((time.process_time() - cpu_s) / (time.monotonic() - wall_s))\n"
    )
    assert float(run(MAKE + measure).stdout) < 0.03


def test_logging_is_left_as_it_was() -> None:
    check = "import logging; print(logging.raiseExceptions, logging.getLogger('nixl').handlers)"
    assert run(MAKE + check).stdout == "True []\n"


def test_what_the_operator_has_set_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NIXL_LOG_LEVEL", "ERROR")
    monkeypatch.setenv("UCX_TCP_TX_SEG_SIZE", "1m")
    monkeypatch.delenv("UCX_TCP_RX_SEG_SIZE", raising=False)
    monkeypatch.delenv("UCX_MODULES", raising=False)
    monkeypatch.setattr(nixl_agent, "INFINIBAND", tmp_path)
    nixl_agent.prepare_environment()
    names = ["NIXL_LOG_LEVEL", "UCX_TCP_TX_SEG_SIZE", "UCX_TCP_RX_SEG_SIZE", "UCX_MODULES"]
    assert [os.environ.get(name) for name in names] == ["ERROR", "1m", nixl_agent.SEGMENT, None]
    monkeypatch.setattr(nixl_agent, "INFINIBAND", tmp_path / "none")
    nixl_agent.prepare_environment()
    assert os.environ["UCX_MODULES"] == "^ib"
    monkeypatch.setenv("UCX_MODULES", "all")
    nixl_agent.prepare_environment()
    assert os.environ["UCX_MODULES"] == "all"


def test_without_nixl_the_link_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl_meta_utils", None)
    with pytest.raises(LinkDown, match=r'peer transport needs nixl, .*pip install "samovar\[nixl\]"'):
        NixlLink("here:1", arena_bytes=MIB, lease_s=1.0, clock=time.monotonic)


def test_a_backend_that_does_not_start_is_a_link_that_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_agent, "BACKEND", "NONE")
    with pytest.raises(LinkDown, match="no NIXL agent"):
        NixlLink("here:1", arena_bytes=MIB, lease_s=1.0, clock=time.monotonic)


def test_an_arena_larger_than_the_machine_is_refused() -> None:
    with pytest.raises(LinkDown, match="in a machine of"):
        NixlLink("here:1", arena_bytes=1 << 50, lease_s=1.0, clock=time.monotonic)


def test_a_thread_that_fails_takes_the_link_down(
    link: NixlLink, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(agent: object, pull: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(link, "_start", broken)
    with pytest.raises(LinkDown, match="a bug"):
        pulled(link, Export("there:1", b"", 4096, 4096, 1))
    with pytest.raises(LinkDown, match="a bug"):
        link.lease(1, expires=False)
    assert "the link's thread has failed" in caplog.text
