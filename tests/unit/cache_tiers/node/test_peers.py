"""Blocks from other nodes, nothing broken: asking, joining, the three ways, clears, drain, sessions."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samovar.cache_tiers.blocks import ChainMarks
from samovar.cache_tiers.blocks.extent import KEY_BYTES, Address, Clear, Placement
from samovar.cache_tiers.blocks.record import Record, TierFull
from samovar.cache_tiers.catalog.gone import Clears
from samovar.cache_tiers.forecast.features import SessionHistory
from samovar.cache_tiers.media.memory import HeapTier
from samovar.cache_tiers.media.tier import Deadline
from samovar.cache_tiers.messages import (
    BlockRange,
    Fetched,
    FetchFailed,
    LoadReport,
    Lookup,
    LookupResult,
    PartialBlock,
    StoreRequest,
    TurnEnded,
)
from samovar.cache_tiers.node.drain import DrainNotice, takers
from samovar.cache_tiers.node.peers import covers, merged
from samovar.cache_tiers.transport.link import LinkDown
from samovar.cache_tiers.transport.peers import LazyLink, PeerLate, PeerLost
from samovar.configs.sections import PeerSettings, S3TierSettings, TierSettings
from tests.support.clock import Clock
from tests.support.inside import guards_of, join_scans, learner_of, state_of
from tests.support.nodes.node_faults import MemoryTier, SharedBucket
from tests.support.nodes.node_harness import MIB, OTHER_TENANT, SESSION, TENANT, Sample, nvme, sample
from tests.support.nodes.peer_harness import Home, World, home, same

S3_TOO = Placement(first="cpu", write_behind=("s3",))


def two(**second: object) -> tuple[World, Home, Home]:
    """Node `a` that has blocks, and node `b` that wants them."""
    world = World()
    return world, home(world, "a"), home(world, "b", **second)  # type: ignore[arg-type]


# -- joining -------------------------------------------------------------------------------


def span(first: int, blocks: int, tier: str = "cpu", name: int = 0) -> BlockRange:
    return BlockRange(bytes([name]) * KEY_BYTES, TENANT, first, 0, blocks, tier, 1000)  # type: ignore[arg-type]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 6)), max_size=4), st.data())
def test_own_spans_win_and_the_peers_fill_every_gap_they_can(
    theirs: list[tuple[int, int]], data: st.DataObject
) -> None:
    blocks = 16
    own, end = [], 0
    while end < blocks:  # a row of own spans with gaps
        first = end + data.draw(st.integers(0, 5))
        length = data.draw(st.integers(1, 4))
        if first + length > blocks:
            break
        own.append(span(first, length))
        end = first + length
    # Without overlap, as every answer to a lookup is.
    peer, end = [], 0
    for number, (first, length) in enumerate(sorted(theirs)):
        if first >= end and first + length <= blocks:
            peer.append(span(first, length, "nvme", number + 1))
            end = first + length
    found = merged(
        LookupResult("x", 1, tuple(own)),
        LookupResult("y", 9, tuple(peer)),
        node="a",
        tenant=TENANT,
        blocks=blocks,
    )
    assert [one for one in found.spans if one.tier != "peer"] == own
    taken = [False] * blocks
    for one in found.spans:
        for block in range(one.first, one.first + one.blocks):
            assert not taken[block], "spans overlap"
            taken[block] = True
        if one.tier == "peer":
            (origin,) = [p for p in peer if p.extent_id == one.extent_id]
            assert one.node == "a"
            assert one.offset - origin.offset == one.first - origin.first
            assert origin.first <= one.first < one.first + one.blocks <= origin.first + origin.blocks
    theirs_too = [any(p.first <= block < p.first + p.blocks for p in own + peer) for block in range(blocks)]
    assert taken == theirs_too
    assert [one.first for one in found.spans] == sorted(one.first for one in found.spans)
    assert (found.incarnation, found.clear_seq) == ("x", 1)
    assert covers(found.spans, blocks) == all(taken)


def test_what_a_peer_says_is_not_believed() -> None:
    foreign = replace(span(0, 2), tenant=OTHER_TENANT)
    nonsense = [span(-1, 2), span(0, 0), span(15, 2), span(0, 2, "peer"), span(0, 2, "tape")]
    tail = PartialBlock(b"k" * KEY_BYTES, 3, foreign)
    theirs = LookupResult("y", 0, (foreign, *nonsense), (tail,))
    found = merged(LookupResult("x", 0), theirs, node="a", tenant=TENANT, blocks=16)
    assert found.spans == found.tails == ()


def test_tails_of_both_deepest_first() -> None:
    own = LookupResult("x", 0, (), (PartialBlock(b"1" * 32, 3, span(2, 1)),))
    theirs = LookupResult(
        "y", 0, (), (PartialBlock(b"2" * 32, 2, span(5, 1)), PartialBlock(b"1" * 32, 3, span(2, 1)))
    )
    tails = merged(own, theirs, node="a", tenant=TENANT, blocks=8).tails
    assert [(tail.key[:1], tail.span.tier, tail.span.node) for tail in tails] == [
        (b"2", "peer", "a"),
        (b"1", "cpu", ""),
    ]


# -- a lookup ------------------------------------------------------------------------------


def test_a_peer_is_asked_only_for_what_is_missing() -> None:
    world, a, b = two()
    here, there = sample(1), sample(2)
    b.store(here)
    a.store(there)
    assert {one.tier for one in b.look(here, "a").spans} == {"cpu"}
    assert world.calls["lookup"] == 0
    found = b.look(there, "a")
    (one,) = found.spans
    assert (one.tier, one.node, one.first, one.blocks) == ("peer", "a", 0, 3)
    assert found.prices["peer"].is_up
    assert "peer" not in b.look(sample(3), "a").prices


def test_neither_itself_nor_more_than_two_are_asked() -> None:
    world, _, b = two()
    for name in "cdef":
        home(world, name)
    b.look(sample(1), "b", "b", "c", "d", "e", "f")
    assert world.calls["lookup"] == 2
    off = home(world, "g", settings=TierSettings(peer=PeerSettings(enabled=False)))
    off.look(sample(1), "c")
    assert world.calls["lookup"] == 2
    assert off.node.stats().transport == "off"


def test_a_peer_that_fails_is_shut_out_for_a_while() -> None:
    world, a, b = two()
    wanted = sample(1)
    a.store(wanted)
    world.faults["a", "lookup"] = PeerLost("gone")
    for _ in range(5):
        assert b.look(wanted, "a").spans == ()
    assert world.calls["lookup"] == PeerSettings().breaker_failures
    stats = b.node.stats().peers["a"]
    assert stats.state == "open"
    assert stats.failures == {"lookup:PeerLost": 2}
    world.faults.clear()
    b.clock.now_s += PeerSettings().breaker_open_s
    assert b.look(wanted, "a").spans[0].tier == "peer"
    assert b.node.stats().peers["a"].state == "up"


# -- a fetch -------------------------------------------------------------------------------


def test_an_extent_comes_over_nixl_and_stays() -> None:
    world, a, b = two()
    wanted = sample(1)
    a.store(wanted)
    fetched = b.bring(wanted, "a")
    assert same(fetched, wanted)
    assert isinstance(fetched, Fetched)
    assert (fetched.tier, fetched.is_kept) == ("peer", True)
    assert b.holds(wanted) == a.holds(wanted) == ("cpu",)
    stats = b.node.stats()
    assert stats.moves["peer>cpu:committed"] == 1
    assert stats.transport == "nixl"
    assert stats.peers["a"].pulls == {"nixl": 1}
    assert stats.peers["a"].nbytes == {"nixl": wanted.record.nbytes}
    assert world.calls["release"] == 1
    for one in (a, b):  # nothing of either arena is leased any more
        assert one.link.arena.free_bytes == MIB
    assert {one.tier for one in b.look(wanted, "a").spans} == {"cpu"}


def test_without_a_link_it_comes_by_ray() -> None:
    def none() -> None:
        raise LinkDown("no nixl here")

    world, a, b = two(link=LazyLink(none))  # type: ignore[arg-type]
    first, second = sample(1), sample(2)
    a.store(first)
    a.store(second)
    assert same(b.bring(first, "a"), first)
    assert same(b.bring(second, "a"), second)
    stats = b.node.stats()
    assert stats.peers["a"].pulls == {"ray": 2}
    assert stats.transport == "ray: no nixl here"
    assert world.calls["export"] == 0


def test_a_full_arena_is_no_fault_and_ray_carries_it() -> None:
    world, a, b = two(arena_bytes=4096)
    wanted = sample(1)
    a.store(wanted)
    assert same(b.bring(wanted, "a"), wanted)
    assert b.node.stats().peers["a"].pulls == {"ray": 1}
    assert a.link.arena.free_bytes == MIB  # released all the same
    world, a, b = World(), None, None
    a, b = home(world, "a", arena_bytes=4096), home(world, "b")
    a.store(wanted)
    assert same(b.bring(wanted, "a"), wanted)
    assert b.node.stats().peers["a"].failures == {"nixl:no room": 1}
    assert b.node.stats().peers["a"].state == "up"


def test_a_dead_peers_blocks_come_from_s3() -> None:
    world = World()
    bucket = MemoryTier("s3", 4 * MIB)
    a = home(world, "a", tiers=[HeapTier(4 * MIB), bucket])
    b = home(world, "b", tiers=[HeapTier(4 * MIB), bucket])
    wanted = sample(1, placement=S3_TOO)
    a.store(wanted)
    (span_there,) = b.look(wanted, "a").spans
    world.faults["a", "export"] = PeerLost("killed")
    assert same(b.fetch(wanted, span_there), wanted)
    assert b.node.peers.lost.is_set()
    stats = b.node.stats()
    assert stats.peers["a"].pulls == {"s3": 1}
    assert stats.moves["s3>cpu:committed"] == 1


@pytest.mark.guarantee("G12")
def test_what_was_erased_is_not_read_from_s3_by_its_address() -> None:
    """Found by the world, seed 10000000: no listing of this node had shown the record."""
    world, bucket = World(), SharedBucket(4 * MIB)
    a = home(world, "a", tiers=[HeapTier(4 * MIB), bucket])
    b = home(world, "b", tiers=[HeapTier(4 * MIB), SharedBucket(4 * MIB, bucket)])
    for number, is_erased in ((1, False), (2, True)):
        a.store(wanted := sample(number, placement=S3_TOO))
        (span_there,) = b.look(wanted, "a").spans
        world.faults["a", "export"] = PeerLost("killed")
        if is_erased:
            bucket.mark_cleared([Clear(TENANT, SESSION)], Deadline(20.0))
        fetched = b.fetch(wanted, span_there)
        assert isinstance(fetched, FetchFailed) == is_erased
        del world.faults["a", "export"]


def test_what_a_peer_has_in_s3_alone_is_read_there() -> None:
    world = World()
    bucket = MemoryTier("s3", 4 * MIB)
    a = home(world, "a", tiers=[bucket])
    b = home(world, "b", tiers=[HeapTier(4 * MIB), bucket])
    wanted = sample(1, placement=Placement(first="s3", write_behind=()))
    a.store(wanted)
    assert same(b.bring(wanted, "a"), wanted)
    assert b.node.stats().peers["a"].pulls == {"s3": 1}
    assert world.calls["read"] == 0
    assert b.node.stats().peers["a"].state == "up"


def test_a_node_that_is_gone_takes_no_other_ones_place_among_those_asked() -> None:
    """Found by the world, seed 9000012: the node that had left was asked, and so not who had its blocks."""
    world = World()
    _gone, _empty, taker, asker = (home(world, name) for name in ("gone", "empty", "taker", "asker"))
    taker.store(wanted := sample(1))
    world.faults["gone", "lookup"] = PeerLost("it has left")
    (span,) = asker.look(wanted, "gone", "empty", "taker").spans
    assert (span.tier, span.node) == ("peer", "taker")
    assert asker.look(sample(2), "gone", "empty", "taker").has_silent_peer


def test_of_those_that_do_not_answer_two_are_waited_for() -> None:
    world = World()
    for name in ("late", "later", "taker"):
        home(world, name).store(sample(1))
    asker = home(world, "asker")
    world.faults |= dict.fromkeys((("late", "lookup"), ("later", "lookup")), PeerLate("no answer"))
    assert asker.look(sample(1), "late", "later", "taker").spans == ()
    assert world.calls["lookup"] == 2


def test_many_who_want_the_same_are_one_pull() -> None:
    world, a, b = two()
    wanted = sample(1)
    a.store(wanted)
    (one,) = b.look(wanted, "a").spans
    began, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        began.set()
        assert go_on.wait(20)

    world.during_pull = wait
    replies: list[Fetched | FetchFailed] = []
    threads = [threading.Thread(target=lambda: replies.append(b.fetch(wanted, one))) for _ in range(8)]
    for thread in threads:
        thread.start()
    assert began.wait(20)
    go_on.set()
    for thread in threads:
        thread.join(20)
    assert len(replies) == 8
    assert all(same(reply, wanted) for reply in replies)
    assert world.calls["export"] == 1
    assert b.node.stats().moves["peer>cpu:committed"] == 1


def test_where_nothing_has_room_it_is_handed_out_and_not_kept() -> None:
    _, a, b = two(bytes_max=4096)
    wanted = sample(1)
    a.store(wanted)
    fetched = b.bring(wanted, "a")
    assert same(fetched, wanted)
    assert isinstance(fetched, Fetched)
    assert not fetched.is_kept
    assert b.holds(wanted) == ()


def test_it_goes_to_disk_where_that_is_all_there_is(tmp_path: Path) -> None:
    _, a, b = two(tiers=[nvme(tmp_path)])
    wanted = sample(1)
    a.store(wanted)
    assert same(b.bring(wanted, "a"), wanted)
    assert b.holds(wanted) == ("nvme",)
    assert b.node.stats().moves["peer>nvme:committed"] == 1


def test_what_may_not_leave_main_memory_does_not(tmp_path: Path) -> None:
    _, a, b = two(tiers=[nvme(tmp_path)])
    wanted = sample(1, placement=Placement(write_behind=(), lowest="cpu"))
    a.store(wanted)
    assert same(b.bring(wanted, "a"), wanted)
    assert b.holds(wanted) == ()


def test_the_price_follows_what_loads_took() -> None:
    _, a, b = two()
    a.store(sample(1))
    before = b.look(sample(1), "a").prices["peer"].seconds(MIB)
    for _ in range(20):
        b.node.report(loads=[LoadReport("peer", MIB, 5.0)])
    assert b.look(sample(1), "a").prices["peer"].seconds(MIB) > 10 * before


# -- clears --------------------------------------------------------------------------------


def test_what_was_cleared_here_is_not_taken_from_a_peer() -> None:
    """The clear reached this node first: the blocks are still at the other one."""
    world, a, b = two()
    wanted = sample(1)
    a.store(wanted)
    (one,) = b.look(wanted, "a").spans
    b.node.clear(Clear(TENANT, SESSION))
    assert isinstance(b.fetch(wanted, one), FetchFailed)
    assert b.look(wanted, "a").spans == ()
    other = sample(2, session=b"session2" * 2)
    a.store(other)
    assert same(b.bring(other, "a"), other)
    # A session of which only another's extent is found: its maker's clear counts.
    shared = b.look(wanted, "a", session=b"session2" * 2).spans[0]
    assert isinstance(b.fetch(wanted, shared), FetchFailed)
    assert b.holds(wanted) == ()
    # Long after that, what is still there was made anew.
    b.clock.now_s += TierSettings().store_s_max + 1
    assert same(b.bring(wanted, "a"), wanted)
    assert world.calls["check"] == 0


@pytest.mark.parametrize("clear", [Clear(TENANT), Clear(TENANT, SESSION)])
def test_a_clear_during_a_pull_wins(clear: Clear) -> None:
    world, a, b = two()
    wanted = sample(1)
    a.store(wanted)
    (one,) = b.look(wanted, "a").spans

    def cleared() -> None:
        b.node.clear(clear)

    world.during_pull = cleared
    assert isinstance(b.fetch(wanted, one), FetchFailed)
    assert b.holds(wanted) == ()


def test_a_clear_at_the_peer_ends_it_there() -> None:
    _, a, b = two()
    wanted = sample(1)
    a.store(wanted)
    (one,) = b.look(wanted, "a").spans
    a.node.clear(Clear(TENANT, SESSION))
    failed = b.fetch(wanted, one)
    assert isinstance(failed, FetchFailed)
    assert failed.reason == "gone"
    assert b.node.stats().peers["a"].state == "up"


def test_g12_a_clear_of_a_tenant_forbids_all_its_sessions_for_a_while() -> None:
    """In a table with room for more: no overflow forbids it by accident."""
    clock = Clock()
    clears = Clears(100, 10.0, clock)
    clears.add(Clear(TENANT), is_held=True)
    assert clears.forbids_pull(TENANT, SESSION)
    assert clears.forbids_pull(TENANT, bytes(16))
    assert not clears.forbids_pull(OTHER_TENANT, SESSION)
    clock.now_s += 10.0
    assert not clears.forbids_pull(TENANT, SESSION)


def test_g12_after_the_clear_of_a_tenant_nothing_of_it_comes_from_a_node_that_has_not_cleared_yet() -> None:
    _, a, b = two()
    wanted = sample(1)
    a.store(wanted)
    (span,) = b.look(wanted, "a").spans
    b.node.clear(Clear(TENANT))
    reply = b.fetch(wanted, span)
    assert isinstance(reply, FetchFailed)
    assert b.look(wanted, "a").spans == ()
    assert b.holds(wanted) == ()


def test_g12_a_clear_in_the_middle_of_a_pull_of_a_session_that_never_asked_here() -> None:
    """Another session of the tenant pulls what it made: there is no tombstone to stop that."""
    world, a, b = two()
    wanted = sample(1)
    a.store(wanted)
    (span,) = b.look(wanted, "a", session=b"session2" * 2).spans
    world.during_pull = lambda: void(b.node.clear(Clear(TENANT, SESSION)))
    assert isinstance(b.fetch(wanted, span), FetchFailed)
    b.clock.now_s += 1e6
    assert b.holds(wanted) == ()


def test_g12_a_clear_between_the_last_look_and_the_booking_of_what_was_pulled() -> None:
    _, a, b = two()
    wanted = sample(1)
    a.store(wanted)
    (span,) = b.look(wanted, "a", session=b"session2" * 2).spans
    state_of(b.node).reach = lambda state: void(
        b.node.clear(Clear(TENANT, SESSION)) if state == "planned" else None
    )
    assert isinstance(b.fetch(wanted, span), FetchFailed)
    b.clock.now_s += 1e6
    assert b.holds(wanted) == ()


def void(_result: object) -> None:
    """For callables that return nothing."""


def test_recent_clears_are_bounded_and_end() -> None:
    clock = Clock()
    clears = Clears(2, 10.0, clock)
    clears.add(Clear(OTHER_TENANT, SESSION), is_held=False)
    for number in range(3):
        clears.add(Clear(TENANT, bytes([number]) * 16), is_held=False)
        clears.check_integrity()
    assert clears.forbids_pull(
        TENANT, SESSION
    )  # one was forgotten: all of its tenant is forbidden for as long
    assert clears.forbids_pull(OTHER_TENANT, SESSION)
    assert not clears.forbids_pull(OTHER_TENANT, bytes(16)), "and nobody else's"
    clock.now_s += 10.0
    assert not clears.forbids_pull(TENANT, SESSION)
    assert not clears.forbids_pull(OTHER_TENANT, SESSION)
    assert not clears.forbids_pull(TENANT, bytes([2]) * 16)
    clears.add(Clear(TENANT), is_held=True)
    clock.now_s -= 1e6  # the clock jumps back: the grace begins anew, and ends
    assert clears.forbids_pull(TENANT, SESSION)
    clock.now_s += 10.0
    assert not clears.forbids_pull(TENANT, SESSION)


# -- drain ---------------------------------------------------------------------------------


def test_a_drained_node_gives_its_blocks_to_the_others() -> None:
    world, a, b = two()
    c = home(world, "c")
    chains = [sample(number, session=bytes([number]) * 16) for number in range(6)]
    for wanted in chains:
        a.store(wanted)
    done = a.node.drain(20.0, ("b", "c"))
    assert done == {"peer": 6, "left": 0}
    assert all(b.holds(wanted) or c.holds(wanted) for wanted in chains)
    assert b.node.stats().tiers[0].extents == c.node.stats().tiers[0].extents == 3
    stats = a.node.stats()
    assert (stats.draining, stats.drained) == (True, done)
    assert a.node.drain(20.0, ("b", "c")) == done  # once
    for one in (a, b, c):
        one.node.check_integrity()


def test_f27_what_is_stored_after_a_drain_follows_until_its_deadline() -> None:
    """A replica hands over the end of a turn when the rest of the node is saved already."""
    _, a, b = two()
    early, late, too_late = (sample(number, session=bytes([number]) * 16) for number in range(3))
    a.store(early)
    assert a.node.drain(20.0, ("b",)) == {"peer": 1, "left": 0}
    a.store(late)
    assert not b.holds(late)
    assert a.node.drain(0.0, ()) == {"peer": 2, "left": 0}
    assert b.holds(late)
    a.clock.now_s += 21.0
    a.store(too_late)
    assert a.node.drain(0.0, ()) == {"peer": 2, "left": 0}
    assert not b.holds(too_late)


def test_a_drain_goes_to_s3_where_there_is_one_and_the_placement_allows() -> None:
    world = World()
    bucket = MemoryTier("s3", 4 * MIB)
    a = home(world, "a", tiers=[HeapTier(4 * MIB), bucket])
    b = home(world, "b")
    shared, private = sample(1), sample(2, placement=Placement(write_behind=(), lowest="cpu"))
    a.store(shared)
    a.store(private)
    assert a.node.drain(20.0, ("b",)) == {"s3": 1, "peer": 1, "left": 0}
    assert a.holds(shared) == ("cpu", "s3")
    assert b.holds(private) == ("cpu",)


def test_a_drain_saves_the_hottest_first_and_ends_by_its_deadline() -> None:
    world = World()
    a, b = home(world, "a", settings=TierSettings(io_threads=1)), home(world, "b")
    chains = [sample(number, placement=Placement(write_behind=(), min_ttl_s=0.0)) for number in range(4)]
    for wanted in chains:
        a.store(wanted)
        a.clock.now_s += 10
    a.look(chains[0])  # used last
    taken: list[int] = []
    take = world.take

    def slow(node: str, ask: object, timeout_s: float) -> str:
        a.clock.now_s += 3.0
        taken.append([chain.header.address for chain in chains].index(ask.address))  # type: ignore[attr-defined]
        return take(node, ask, timeout_s)  # type: ignore[arg-type]

    world.take = slow  # type: ignore[method-assign]
    done = a.node.drain(5.0, ("b",))
    assert taken == [0, 3]
    assert done == {"peer": 2, "left": 2}
    assert b.node.stats().tiers[0].extents == 2


def test_a_peer_that_does_not_take_is_left_out() -> None:
    world, a, b = two()
    home(world, "c")
    world.faults["c", "take"] = PeerLost("no such node")
    for number in range(3):
        a.store(sample(number))
    assert a.node.drain(20.0, ("c", "b")) == {"peer": 3, "left": 0}
    assert b.node.stats().tiers[0].extents == 3


@pytest.mark.parametrize("fault", [PeerLost("it starts again"), PeerLate("it hangs")])
def test_f27_what_had_no_place_is_tried_again_while_there_is_time(fault: PeerLost | PeerLate) -> None:
    """A taker that starts again takes it at a later look; one that hung is not asked any more."""
    world, a, b = two()
    wanted = sample(1)
    a.store(wanted)
    world.faults["b", "take"] = fault
    assert a.node.drain(120.0, ("b",)) == {"failed": 1, "left": 0}
    del world.faults["b", "take"]
    assert a.node.drain(0.0, ("b",)) == {"failed": 1, "left": 0}, "too soon"
    assert a.node.stats().unsaved == 1
    a.clock.now_s += 1.0
    is_saved = isinstance(fault, PeerLost)
    done = a.node.drain(0.0, ("b",))
    assert (done["failed"], done.get("peer", 0)) == ((0, 1) if is_saved else (1, 0))
    assert a.node.stats().unsaved == 1 - is_saved
    assert bool(b.holds(wanted)) == is_saved


def test_f27_a_node_that_comes_during_a_drain_takes_at_once() -> None:
    world, a, b = two()
    wanted = sample(1)
    a.store(wanted)
    world.faults["b", "take"] = PeerLost("no such node")
    assert a.node.drain(120.0, ("b",))["failed"] == 1
    c = home(world, "c")
    assert a.node.drain(0.0, ("b", "c"))["peer"] == 1
    assert c.holds(wanted)
    assert a.node.stats().drained == {"peer": 1, "failed": 0, "left": 0}
    assert not b.holds(wanted)


def test_f27_a_bucket_that_hiccups_gets_it_when_it_is_back() -> None:
    world = World()
    a = home(world, "a", tiers=[HeapTier(4 * MIB), MemoryTier("s3", 4 * MIB)])
    wanted = sample(1, placement=Placement(write_behind=()))
    a.store(wanted)
    guards_of(a.node)["s3"].ready = False
    assert a.node.drain(120.0, ())["failed"] == 1
    guards_of(a.node)["s3"].ready = True
    a.clock.now_s += 1.0
    assert a.node.drain(0.0, ()) == {"s3": 1, "failed": 0, "left": 0}


def test_f27_what_nobody_takes_is_given_up_after_some_tries() -> None:
    """A pod does not wait all its time for what has no place."""
    world, a, _ = two()
    a.store(sample(1))
    world.faults["b", "take"] = PeerLost("no such node")
    a.node.drain(1000.0, ("b",))
    for _ in range(80):
        a.clock.now_s += 1.0
        a.node.drain(0.0, ("b",))
    assert world.calls["take"] == 6
    assert a.node.stats().unsaved == 0
    assert a.node.stats().drained == {"failed": 1, "left": 0}


def test_f27_a_node_says_what_it_has_still_to_save() -> None:
    """A pod that is stopped waits for that: a replica stores as the last thing that it does."""
    _, a, _ = two()
    early, late = (sample(number, session=bytes([number]) * 16) for number in range(2))
    a.store(early)
    assert a.node.stats().unsaved == 0, "it stays"
    a.node.drain(20.0, ("b",))
    assert a.node.stats().unsaved == 0
    a.store(late)
    assert a.node.stats().unsaved == 1
    a.node.drain(0.0, ("b",))
    assert a.node.stats().unsaved == 0
    a.store(sample(3))
    a.clock.now_s += 21.0
    assert a.node.stats().unsaved == 0, "its time is over"


def test_f27_an_offer_that_is_on_its_way_is_not_saved_yet() -> None:
    _, a, _ = two()
    a.node.drain(20.0, ("b",))
    wanted = sample(1)
    found, ticket = a.look(wanted), a.outbox.put(wanted.record)
    assert ticket is not None
    offer = StoreRequest(ticket, wanted.header, wanted.record.nbytes, found.incarnation, found.clear_seq)
    assert a.node.offer([offer], a.outbox).outcomes == ("taken",)
    assert a.node.stats().unsaved > 0


def test_all_strangers_together_take_no_more_time_than_one() -> None:
    world, a, _ = two()
    names = [home(world, name).name for name in "cdef"]
    lookup, began_s = world.lookup, a.clock.now_s

    def slow(node: str, ask: Lookup, timeout_s: float) -> LookupResult:
        a.clock.now_s += timeout_s
        raise PeerLate("it starts")

    world.lookup = slow  # type: ignore[method-assign]
    assert a.node.peers.meet(["b", *names]) == set()
    assert a.clock.now_s - began_s == 5.0
    world.lookup = lookup  # type: ignore[method-assign]
    assert a.node.peers.meet(["b", *names]) == {"b", *names}


def test_a_drain_notice_begins_one_drain() -> None:
    notice = DrainNotice("a", drain_s=20.0)
    assert notice.heard({}, 1000.0) is None
    assert notice.heard({"b": 0}, 1000.0) is None
    assert notice.heard({"a": 1_100_000}, 1000.0) == pytest.approx(90.0)
    assert notice.heard({"a": 1_100_000}, 1001.0) is None
    assert notice.is_draining
    assert notice.heard({}, 1002.0) is None
    assert not notice.is_draining
    assert notice.heard({"a": 0}, 1003.0) == 20.0
    late = DrainNotice("a", drain_s=20.0)
    assert late.heard({"a": 1}, 1000.0) == 0.0


def test_blocks_are_not_given_to_nodes_that_go_as_well() -> None:
    assert takers("aa00aa00", ["aa00aa00", "b", "c"], ["c"]) == ("b",)
    assert takers("aa00aa00", ["aa00aa00"], []) == ()
    assert sorted(takers("aa00aa01", ["b", "c", "d"], [])) == ["b", "c", "d"]
    assert takers("not hex!", ["b", "c"], []) == ("b", "c")


# -- sessions ------------------------------------------------------------------------------


def test_sessions_are_known_by_their_last_use(tmp_path: Path) -> None:
    one = home(World(), "a", tiers=[HeapTier(4 * MIB), nvme(tmp_path)])
    behind = Placement(write_behind=("nvme",))
    chains = [sample(n, session=bytes([n]) * 16, placement=behind) for n in range(3)]
    for wanted in chains:
        one.store(wanted)
        one.clock.now_s += 5
    rows = one.node.sessions.sessions(2)
    assert [row.session for row in rows] == [bytes([2]) * 16, bytes([1]) * 16]
    nbytes = chains[0].record.nbytes
    assert rows[0].nbytes == {"cpu": nbytes, "nvme": nbytes}
    assert (rows[0].tokens, rows[0].blocks, rows[0].idle_s) == (12, 3, 5.0)
    held = one.node.sessions.session_bytes(TENANT, (bytes(16), b"unknown!" * 2))
    assert held == {bytes(16): {"cpu": nbytes, "nvme": nbytes}, b"unknown!" * 2: {}}
    assert one.node.sessions.session_bytes(OTHER_TENANT, (bytes(16),)) == {bytes(16): {}}


def test_a_session_goes_down_and_comes_up_at_a_hint(tmp_path: Path) -> None:
    one = home(World(), "a", tiers=[HeapTier(4 * MIB), nvme(tmp_path)])
    wanted, other = sample(1), sample(2, session=b"session2" * 2)
    one.store(wanted)
    one.store(other)
    assert one.node.sessions.demote(TENANT, SESSION) == 1
    one.work()
    assert one.holds(wanted) == ("nvme",)
    assert one.holds(other) == ("cpu",)
    assert one.node.resumption.prefetch.promote(TENANT, SESSION, "hint") == 1
    one.work()
    assert one.holds(wanted) == ("cpu", "nvme")
    assert one.node.sessions.demote(TENANT, SESSION) == 1  # a copy is below: at once
    assert one.holds(wanted) == ("nvme",)
    assert one.node.sessions.demote(OTHER_TENANT, SESSION) == 0


def test_what_two_sessions_share_is_not_taken_down_by_one(tmp_path: Path) -> None:
    one = home(World(), "a", tiers=[HeapTier(4 * MIB), nvme(tmp_path)])
    wanted = sample(1)
    one.store(wanted)
    one.look(wanted, session=b"session2" * 2)
    assert one.node.sessions.demote(TENANT, SESSION) == 0
    assert one.holds(wanted) == ("cpu",)


# -- S3 of others --------------------------------------------------------------------------


def test_what_others_put_into_s3_is_found_now_and_then_and_when_a_node_is_lost() -> None:
    world, bucket = World(), SharedBucket(4 * MIB)
    a = home(world, "a", tiers=[HeapTier(4 * MIB), bucket])
    b = home(
        world,
        "b",
        tiers=[HeapTier(4 * MIB), bucket],
        settings=TierSettings(s3=S3TierSettings(rescan_s=60.0)),
    )
    first, second = sample(1, placement=S3_TOO), sample(2, placement=S3_TOO)
    a.store(first)

    def tick() -> None:
        join_scans(b.node, 20)
        b.node.tick()
        join_scans(b.node, 20)
        b.node.check_integrity()

    tick()
    assert b.holds(first) == ()
    b.clock.now_s += 61
    tick()
    assert b.holds(first) == ("s3",)
    assert bucket.headers == 1
    a.store(second)
    world.faults["a", "lookup"] = PeerLost("killed")
    (span,) = b.look(second, "a").spans  # whoever asks for it waits for the look
    assert span.tier == "s3"
    tick()
    assert bucket.headers == 2  # only what was not known
    a.store(sample(3, placement=S3_TOO))
    b.node.clear(Clear(TENANT, SESSION))
    a.store(sample(4, placement=S3_TOO))
    b.clock.now_s += 61
    tick()
    assert b.holds(sample(3)) == (), "it was there before the clear"
    assert b.holds(sample(4)) == ("s3",)


def test_a_lookup_sees_what_another_ones_look_at_s3_has_found_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, bucket = World(), SharedBucket(4 * MIB)
    a = home(world, "a", tiers=[HeapTier(4 * MIB), bucket])
    b = home(world, "b", tiers=[HeapTier(4 * MIB), bucket])
    join_scans(b.node, 20)
    record = sample(1, placement=S3_TOO)
    a.store(record)
    assert b.node.peers._calls is not None

    def lost_meanwhile(node: str, lookup: Lookup, timeout_s: float) -> LookupResult:
        assert b.node._looks.after({node: True}, 20), "the other lookup's look"
        raise PeerLost("killed")

    monkeypatch.setattr(b.node.peers._calls, "lookup", lost_meanwhile)
    (span,) = b.look(record, "a").spans
    assert span.tier == "s3"


# -- who comes back ------------------------------------------------------------------------


def turns_at(at: Home, wanted: Sample, turns: int) -> None:
    """Turns of a session, ten seconds apart."""
    header = wanted.header
    for _ in range(turns):
        at.node.lookup(
            Lookup(header.namespace, wanted.chain, header.tenant, header.session, starts_turn=True)
        )
        over = TurnEnded(header.tenant, header.session, 1.0, 1000, 50, ChainMarks(), 16)
        assert at.node.turn_over(over) is not None
        at.clock.now_s += 10.0


def test_a_session_that_moves_takes_its_history_along() -> None:
    _, first, second = two()
    wanted = sample(1)
    turns_at(first, wanted, 3)
    header = wanted.header
    found = second.node.lookup(
        Lookup(header.namespace, wanted.chain, header.tenant, header.session, ("a",), starts_turn=True)
    )
    assert found.history == b"", "it is for nodes, not for replicas"
    second.node.resumption.work()
    owner = header.tenant + header.session
    learners = [learner_of(at.node.resumption) for at in (first, second)]
    histories = [SessionHistory(learner.history(owner, 0.0)) for learner in learners]
    assert [history.turns for history in histories] == [3, 3]


def test_a_node_that_joins_begins_with_what_a_peer_has_learned() -> None:
    world, first, second = two()
    for number in range(250):
        turns_at(first, sample(number), 1)
    assert second.node.resumption.is_new
    second.node.resumption.start_from(second.node.peers.learned(["a"]))
    second.node.resumption.work()
    assert second.node.stats().returns.restored == "from a peer"
    assert not second.node.resumption.is_new
    assert second.node.resumption.learned() != b""
    world.faults["a", "learned"] = PeerLost("gone")
    assert second.node.peers.learned(["a"]) == b""


def test_of_many_nodes_the_one_that_has_learned_something_is_found() -> None:
    world, first, second = two()
    for number in range(250):
        turns_at(first, sample(number), 1)
    others = ["0", "1", "2", "3"]
    for name in others:
        home(world, name)  # as new as the one that asks
    world.faults["0", "learned"] = PeerLost("gone")
    assert second.node.peers.learned([*others, "a"]) == first.node.resumption.learned() != b""
    world.faults |= dict.fromkeys((("1", "learned"), ("2", "learned")), PeerLate("no answer"))
    assert second.node.peers.learned([*others, "a"]) == b"", "two are waited for"


class TimedTier(MemoryTier):
    """Remembers how long it was given for each write."""

    def __init__(self) -> None:
        super().__init__("nvme", MIB)
        self.seconds: list[float] = []

    def put(self, address: Address, record: Record, *, deadline: Deadline) -> None:
        self.seconds.append(deadline.seconds)
        super().put(address, record, deadline=deadline)


def test_g9_a_fetch_waits_no_longer_for_the_disk_that_keeps_it_than_it_has_time() -> None:
    """Found by the world: it waited as long as a store may take, with the record at hand."""
    disk = TimedTier()
    _world, a, b = two(tiers=[disk])
    a.store(wanted := sample(1))
    (span,) = b.look(wanted, "a").spans
    assert same(b.fetch(wanted, span, deadline_s=3.0), wanted)
    assert len(disk.seconds) == 1
    assert disk.seconds[0] <= 3.0 < TierSettings().store_s_max


class FullTier(MemoryTier):
    """Has no room for the next write, whatever its budget says."""

    is_full = False

    def put(self, address: Address, record: Record, *, deadline: Deadline) -> None:
        if self.is_full:
            self.is_full = False
            raise TierFull("less room than was said")
        super().put(address, record, deadline=deadline)


def test_g9_nor_for_the_room_that_is_made_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by the world, seed 911000000938: what was evicted was deleted with a store's time."""
    disk = FullTier("nvme", MIB)
    _world, a, b = two(tiers=[disk])
    a.store(wanted := sample(1))
    b.store(sample(2))
    (span,) = b.look(wanted, "a").spans
    guard, given = guards_of(b.node)["nvme"], list[float]()
    delete = guard.delete

    def deleted(address: Address, deadline_s: float, when_late: Callable[[], None]) -> None:
        given.append(deadline_s)
        delete(address, deadline_s, when_late)

    monkeypatch.setattr(guard, "delete", deleted)
    disk.is_full = True
    assert same(b.fetch(wanted, span, deadline_s=1.5), wanted)
    assert given
    assert max(given) <= 1.5 < TierSettings().load_s_max
    assert not guard.read_only
