"""Other nodes that lie, hang, die or come back as others: never a wrong byte, never longer than asked."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from samovar.cache_tiers.blocks.extent import Bytes, Clear
from samovar.cache_tiers.media.memory import HeapTier
from samovar.cache_tiers.messages import BadReport, ExtentRequest, Fetched, FetchFailed
from samovar.cache_tiers.transport.link import LinkDown, LinkError, LinkLate, PeerGone
from samovar.cache_tiers.transport.peers import PeerError, PeerLate, PeerLost
from samovar.configs.sections import PeerSettings, TierSettings
from tests.support.inside import link_of, records_in
from tests.support.nodes.node_faults import FAILING, MemoryTier, faulty
from tests.support.nodes.node_harness import MIB, SESSION, TENANT, sample
from tests.support.nodes.peer_harness import Home, World, home, same


def pair(**more: object) -> tuple[World, Home, Home]:
    world = World()
    return world, home(world, "a"), home(world, "b", **more)  # type: ignore[arg-type]


def flipped(data: Bytes, bit: int) -> None:
    data[bit // 8 % data.nbytes] ^= 1 << bit % 8


def test_f18_a_flipped_bit_on_the_way_is_never_served_and_ray_is_tried() -> None:
    rng = random.Random(1)
    for number in range(60):
        world, a, b = pair()
        wanted = sample(number % 5)
        a.store(wanted)
        (one,) = b.look(wanted, "a").spans
        bit = rng.randrange(8 * wanted.record.nbytes)
        link_of(b.node.peers).get()
        b.link.spoil = lambda data, bit=bit: flipped(data, bit)  # type: ignore[misc]
        reply = b.fetch(wanted, one)
        # A bit in the header's padding is covered by its checksum, too: every one of them is noticed.
        assert same(reply, wanted)
        stats = b.node.stats().peers["a"]
        assert sum(stats.bad.values()) == 1
        assert stats.pulls == {"ray": 1}
        assert world.calls["check"] == 1
        assert a.holds(wanted) == ("cpu",)  # it looked, and its own copy is good


def test_f18_bad_by_every_way_is_a_miss_and_the_peer_is_shut_out() -> None:
    world, a, b = pair()
    wanted = sample(1)
    a.store(wanted)
    (one,) = b.look(wanted, "a").spans
    link_of(b.node.peers).get()
    b.link.spoil = lambda data: flipped(data, 8 * (data.nbytes - 1))

    def spoilt(data: Bytes) -> Bytes:
        copy = data.copy()
        flipped(copy, 8 * (data.nbytes - 1))
        return copy

    world.spoil_read = spoilt
    reply = b.fetch(wanted, one)
    assert isinstance(reply, FetchFailed)
    assert b.holds(wanted) == ()
    stats = b.node.stats()
    assert stats.peers["a"].bad == {"checksum": 2}
    assert stats.peers["a"].state == "open"
    assert stats.misses == {"error": 3}
    assert b.look(wanted, "a").spans == ()  # not even asked


@pytest.mark.parametrize("what", ["another extent", "another tenant's", "cut short", "stale memory", "empty"])
def test_f18_what_is_not_the_extent_asked_for_is_refused(what: str) -> None:
    world, a, b = pair()
    wanted, other = sample(1), sample(2, tenant=b"tenant-b" * 2 if "tenant" in what else TENANT)
    a.store(wanted)
    a.store(other)
    (one,) = b.look(wanted, "a").spans
    link_of(b.node.peers).get()
    if what.startswith("another"):
        world.swapped = lambda ask: ExtentRequest(other.header.address, ask.deadline_s)
    elif what == "cut short":
        world.spoil_read = lambda data: data[:-1]
        b.link.spoil = lambda data: data.fill(0)
    elif what == "empty":
        world.spoil_read = lambda data: data[:0]
        b.link.spoil = lambda data: data.fill(0)
    else:  # the lease expired and the arena was used again: another's record lies there now, of equal length

        def stale(data: Bytes) -> None:
            data[:] = other.record

        b.link.spoil = stale
        world.spoil_read = lambda data: other.record
    reply = b.fetch(wanted, one)
    assert isinstance(reply, FetchFailed)
    assert b.holds(wanted) == b.holds(other) == ()
    assert sum(b.node.stats().peers["a"].bad.values()) == 2


def test_the_check_of_the_record_is_what_keeps_bad_bytes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: without it the flipped bit is served, and the tests above would see it."""
    from samovar.cache_tiers.blocks.record import decode_header

    monkeypatch.setattr(
        "samovar.cache_tiers.node.peers.verified", lambda data, address, nbytes: decode_header(data)
    )
    _, a, b = pair()
    wanted = sample(1)
    a.store(wanted)
    (one,) = b.look(wanted, "a").spans
    link_of(b.node.peers).get()
    b.link.spoil = lambda data: flipped(data, 8 * (data.nbytes - 1))
    reply = b.fetch(wanted, one)
    assert isinstance(reply, Fetched)
    assert not same(reply, wanted)


def test_a_copy_that_rotted_at_the_peer_is_forgotten_there() -> None:
    _, a, b = pair()
    wanted = sample(1)
    a.store(wanted)
    (one,) = b.look(wanted, "a").spans
    heap = a.tiers["cpu"]
    assert isinstance(heap, HeapTier)
    rotten = records_in(heap)[wanted.header.address].copy()
    rotten[-1] ^= 1
    records_in(heap)[wanted.header.address] = rotten
    assert isinstance(b.fetch(wanted, one), FetchFailed)
    assert a.holds(wanted) == ()
    assert a.node.stats().tiers[0].verify_failures == {"checksum": 1}
    a.node.check_integrity()


def test_a_bad_report_of_what_came_from_a_peer_is_looked_into_here() -> None:
    _, a, b = pair()
    wanted = sample(1)
    a.store(wanted)
    assert same(b.bring(wanted, "a"), wanted)
    header = wanted.header
    report = BadReport(header.namespace, header.tenant, header.extent_id, "peer", "checksum")
    b.node.report([report])
    assert b.holds(wanted) == ("cpu",)
    heap = b.tiers["cpu"]
    assert isinstance(heap, HeapTier)
    records_in(heap)[header.address] = np.zeros_like(wanted.record)
    b.node.report([report])
    assert b.holds(wanted) == ()


@pytest.mark.parametrize("fault", [LinkLate("slow"), PeerGone("dead"), LinkDown("broken"), LinkError("what")])
def test_f10_any_fault_of_the_link_leaves_ray(fault: LinkError) -> None:
    _, a, b = pair()
    wanted = sample(1)
    a.store(wanted)
    (one,) = b.look(wanted, "a").spans
    link_of(b.node.peers).get()
    link = b.link
    link.fault = fault
    assert same(b.fetch(wanted, one), wanted)
    stats = b.node.stats()
    assert stats.peers["a"].pulls == {"ray": 1}
    assert stats.peers["a"].failures == {f"nixl:{type(fault).__name__}": 1}
    assert stats.peers["a"].state == "up"
    assert link.arena.free_bytes == MIB
    if isinstance(fault, LinkDown):
        assert stats.transport == "ray: broken"
        assert link.is_closed


def test_a_link_that_fails_again_and_again_is_not_waited_for() -> None:
    world, a, b = pair()
    chains = [sample(number) for number in range(6)]
    for wanted in chains:
        a.store(wanted)
    link_of(b.node.peers).get()
    b.link.fault = PeerGone("its port is closed")
    for wanted in chains:
        assert same(b.bring(wanted, "a"), wanted)
    assert b.link.pulls == PeerSettings().breaker_failures
    assert world.calls["read"] == 6
    b.link.fault = None
    b.clock.now_s += PeerSettings().breaker_open_s
    again = sample(9)
    a.store(again)
    assert same(b.bring(again, "a"), again)
    assert b.node.stats().peers["a"].pulls == {"ray": 6, "nixl": 1}


def test_a_trial_of_the_link_that_another_node_had_nothing_for_is_given_back() -> None:
    _, a, b = pair()
    failing = [sample(number) for number in range(PeerSettings().breaker_failures)]
    gone, there = sample(8, session=b"session2" * 2), sample(9)
    for wanted in (*failing, gone, there):
        a.store(wanted)
    link_of(b.node.peers).get()
    b.link.fault = PeerGone("its port is closed")
    for wanted in failing:
        assert same(b.bring(wanted, "a"), wanted)
    b.link.fault = None
    b.clock.now_s += PeerSettings().breaker_open_s
    (span,) = b.look(gone, "a").spans
    a.node.clear(Clear(TENANT, b"session2" * 2))
    assert isinstance(b.fetch(gone, span), FetchFailed)
    assert same(b.bring(there, "a"), there)
    assert b.node.stats().peers["a"].pulls == {"ray": len(failing), "nixl": 1}


@pytest.mark.parametrize("fault", [PeerLate("slow"), PeerLost("dead"), PeerError("odd")])
def test_f19_a_peer_that_does_not_answer_is_a_miss(fault: PeerError) -> None:
    world, a, b = pair()
    wanted = sample(1)
    a.store(wanted)
    (one,) = b.look(wanted, "a").spans
    world.faults["a", "export"] = world.faults["a", "read"] = fault
    reply = b.fetch(wanted, one)
    assert isinstance(reply, FetchFailed)
    assert reply.reason == ("timeout" if isinstance(fault, PeerLate) else "error")
    assert world.calls["read"] == 0  # who does not answer is not asked twice
    assert b.node.peers.lost.is_set() == isinstance(fault, PeerLost)
    world.faults.clear()
    assert same(b.bring(wanted, "a"), wanted)


def test_the_deadline_holds_over_all_ways() -> None:
    world, a, b = pair()
    wanted = sample(1)
    a.store(wanted)
    (one,) = b.look(wanted, "a").spans
    link_of(b.node.peers).get()
    b.link.fault = LinkLate("slow")

    def slow() -> None:
        b.clock.now_s += 5.0

    world.during_pull = slow
    reply = b.fetch(wanted, one, deadline_s=4.0)
    assert isinstance(reply, FetchFailed)
    assert reply.reason == "timeout"
    assert world.calls["read"] == 0
    assert b.holds(wanted) == ()
    again = b.fetch(wanted, one, deadline_s=6.0)  # time enough for the second way
    assert same(again, wanted)


def test_one_way_may_not_take_all_the_time() -> None:
    seen: list[float] = []
    world, a, b = pair(settings=TierSettings(peer=PeerSettings(pull_s_max=2.0)))
    wanted = sample(1)
    a.store(wanted)
    (one,) = b.look(wanted, "a").spans
    export = world.export

    def noted(node: str, ask: ExtentRequest, timeout_s: float):  # type: ignore[no-untyped-def]
        seen.append(timeout_s)
        return export(node, ask, timeout_s)

    world.export = noted  # type: ignore[method-assign]
    assert same(b.fetch(wanted, one, deadline_s=30.0), wanted)
    assert seen == [2.0]


def test_a_peers_broken_tier_is_that_peers_miss() -> None:
    world = World()
    broken = faulty(HeapTier(4 * MIB))
    a, b = home(world, "a", tiers=[broken]), home(world, "b")
    wanted = sample(1)
    a.store(wanted)
    (one,) = b.look(wanted, "a").spans
    broken.update(FAILING)
    reply = b.fetch(wanted, one)
    assert isinstance(reply, FetchFailed)
    assert reply.reason == "error"
    assert b.node.stats().peers["a"].state == "up"
    a.node.check_integrity()


def test_f06_a_bad_object_in_s3_is_not_served_either() -> None:
    world, bucket = World(), MemoryTier("s3", 4 * MIB)
    a = home(world, "a", tiers=[bucket])
    b = home(world, "b", tiers=[HeapTier(4 * MIB), bucket])
    wanted = sample(1)
    a.store(wanted)
    (one,) = b.look(wanted, "a").spans
    bucket.spoil(wanted.header.address)
    reply = b.fetch(wanted, one)
    assert isinstance(reply, FetchFailed)
    assert b.holds(wanted) == ()
    assert b.node.stats().tiers[2].verify_failures == {"checksum": 1}
    assert b.node.stats().peers["a"].bad == {}


def test_f21_a_release_for_an_earlier_incarnation_frees_nothing() -> None:
    world, a, b = pair()
    wanted = sample(1)
    a.store(wanted)
    export = a.node.peers.exports.export(ExtentRequest(wanted.header.address, 5.0))
    assert not isinstance(export, FetchFailed)
    again = home(world, "a", incarnation="second")
    again.store(wanted)
    mine = again.node.peers.exports.export(ExtentRequest(wanted.header.address, 5.0))
    assert not isinstance(mine, FetchFailed)
    assert mine.generation == export.generation
    free = again.link.arena.free_bytes
    world.release("a", export)
    assert again.link.arena.free_bytes == free
    world.release("a", mine)
    assert again.link.arena.free_bytes == MIB
    assert b.holds(wanted) == ()


def test_two_nodes_that_ask_each_other_do_not_wait_in_a_ring() -> None:
    """What a peer asks is answered from this node alone: no call leads to a third, nor back."""
    world, a, b = pair()
    mine, theirs = sample(1), sample(2)
    a.store(mine)
    b.store(theirs)
    depth, deepest = [0], [0]

    def counted(method: str) -> Callable[..., object]:
        real = getattr(world, method)

        def call(*args: object) -> object:
            depth[0] += 1
            deepest[0] = max(deepest[0], depth[0])
            try:
                return real(*args)
            finally:
                depth[0] -= 1

        return call

    for method in ("lookup", "export", "read"):
        setattr(world, method, counted(method))
    assert same(b.bring(mine, "a"), mine)
    assert same(a.bring(theirs, "b"), theirs)
    assert a.look(sample(3), "b").spans == ()
    assert deepest[0] == 1


def test_f36_clears_everywhere_leave_nothing_anywhere() -> None:
    """In every order of the two clears and the fetch between them."""
    for first, second in (("a", "b"), ("b", "a")):
        for fetch_at in range(3):
            world = World()
            nodes = {name: home(world, name) for name in "ab"}
            wanted = sample(1)
            nodes["a"].store(wanted)
            (one,) = nodes["b"].look(wanted, "a").spans
            for step, name in enumerate((first, second, "")):
                if step == fetch_at:
                    nodes["b"].fetch(wanted, one)
                if name:
                    nodes[name].node.clear(Clear(TENANT, SESSION))
            assert nodes["a"].holds(wanted) == (), (first, fetch_at)
            assert nodes["b"].holds(wanted) == (), (first, fetch_at)


def test_random_histories_of_three_nodes_keep_the_truth() -> None:
    for seed in range(12):
        rng = random.Random(seed)
        world = World()
        nodes = {name: home(world, name, bytes_max=60_000) for name in "abc"}
        chains = [sample(number, blocks=1 + number % 4) for number in range(8)]
        for _ in range(80):
            name, wanted = rng.choice("abc"), rng.choice(chains)
            here = nodes[name]
            if (name, "first") not in {tuple(link.split(":")) for link in world.links}:
                link_of(here.node.peers).get()
            bit = rng.randrange(8 * wanted.record.nbytes)
            here.link.spoil = (
                (lambda data, bit=bit: flipped(data, bit)) if rng.random() < 0.3 else (lambda data: None)  # type: ignore[misc]
            )
            here.link.fault = rng.choice([None, None, None, LinkLate("slow"), PeerGone("gone")])
            world.faults.clear()
            if rng.random() < 0.2:
                world.faults[rng.choice("abc"), rng.choice(["lookup", "export", "read"])] = PeerLate("slow")
            action = rng.random()
            if action < 0.1:
                here.node.clear(Clear(TENANT, SESSION))
            elif action < 0.15:
                here.clock.now_s += 100.0
            else:
                found = here.look(wanted, *rng.sample("abc", 3))
                if not found.spans:
                    here.store(wanted)
                for one in found.spans:
                    reply = here.fetch(wanted, one)
                    assert isinstance(reply, FetchFailed) or same(reply, wanted)
            here.node.check_integrity()
        assert all(link.arena.free_bytes == MIB for link in world.links.values())
