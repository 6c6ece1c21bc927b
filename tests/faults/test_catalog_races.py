"""Movers that race, messages that come twice or late, clears in between: the catalog alone decides."""

from __future__ import annotations

import pytest

from samovar.cache_tiers.blocks.extent import Clear, Placement
from samovar.cache_tiers.catalog.gone import Clears
from samovar.cache_tiers.catalog.transfers import Transfer
from samovar.cache_tiers.catalog.types import Held, ReservationRefused
from samovar.cache_tiers.media.tier import Scanned
from samovar.cache_tiers.messages import Lookup
from tests.support.clock import Clock
from tests.support.nodes.catalog_world import ALICE, ALL, BOB, World, header, lookup, record_bytes, tag

A, B = tag("s1"), tag("s2")


def test_f18_two_movers_race_for_one_copy() -> None:
    world = World()
    of = header(range(3))
    world.store("cpu", of)
    first = world.catalog.reserve_copy("nvme", of.address)
    assert isinstance(first, Transfer)
    assert world.catalog.reserve_copy("nvme", of.address) == ReservationRefused("busy")
    assert world.reserve("nvme", of) == ReservationRefused("busy")
    assert isinstance(world.catalog.reserve_copy("s3", of.address), Transfer)
    assert world.finish(first)
    assert world.catalog.reserve_copy("nvme", of.address) == Held()


def test_f18_duplicates_and_late_completions_of_an_old_generation_change_nothing() -> None:
    world = World()
    of = header(range(3))
    old = world.reserved("cpu", of)
    world.catalog.abandon(old)
    new = world.reserved("cpu", of)
    assert new.generation != old.generation
    for late in (old, old):
        assert not world.catalog.commit(late)
        world.catalog.abandon(late)
        world.catalog.check_integrity()
    assert world.catalog.copies(of.address) == ()
    assert world.finish(new)
    assert not world.catalog.commit(new), "a second completion"
    world.catalog.abandon(new)
    assert world.spans(range(3)) == [(0, 3, "cpu")]
    eviction = world.catalog.lose(of.address, "cpu")
    assert eviction is not None
    world.catalog.dropped(eviction)
    newest = world.store("cpu", of)
    world.catalog.dropped(eviction)  # told twice
    world.catalog.check_integrity()
    assert world.spans(range(3)) == [(0, 3, "cpu")]
    assert world.catalog.usage("cpu").bytes_accounted == newest.nbytes


def test_f18_a_record_is_not_written_while_its_old_copy_is_deleted() -> None:
    """The delete would hit the new record."""
    world = World()
    of = header([1])
    world.store("cpu", of)
    eviction = world.catalog.lose(of.address, "cpu")
    assert eviction is not None
    assert world.reserve("cpu", of) == ReservationRefused("busy")
    world.catalog.dropped(eviction)
    world.store("cpu", of)


def test_f18_a_late_unpin_does_not_loosen_a_new_copy() -> None:
    world = World({"cpu": 100, "nvme": 0, "s3": 0})
    of = header([1])
    world.store("cpu", of, 100)
    old = world.catalog.pin(of.address, "cpu")
    eviction = world.catalog.lose(of.address, "cpu")
    assert old is not None
    assert eviction is not None
    world.catalog.dropped(eviction)
    world.store("cpu", of, 100)
    new = world.catalog.pin(of.address, "cpu")
    assert new is not None
    world.catalog.unpin(old)
    with pytest.raises(ValueError, match="more often"):
        world.catalog.unpin(old)
    assert world.reserve("cpu", header([2]), 100) == ReservationRefused("full")
    world.catalog.unpin(new)
    world.store("cpu", header([2]), 100)


@pytest.mark.parametrize("session", [A, None])
def test_f36_g12_a_clear_during_moves_leaves_nothing(session: bytes | None) -> None:
    world = World()
    of, fresh = header(range(3), tail_tokens=1), header(range(8), 3)
    before = world.catalog.clears.seq
    world.store("cpu", of)
    moving = world.catalog.reserve_copy("nvme", of.address)
    storing = world.reserved("cpu", fresh)
    pin = world.catalog.pin(of.address, "cpu")
    assert isinstance(moving, Transfer)
    assert pin is not None
    (eviction,) = world.catalog.clear(Clear(ALICE, session))
    world.catalog.check_integrity()
    assert (eviction.address, eviction.reason) == (of.address, "cleared")
    assert world.catalog.find(lookup(range(8)), ALL) == ((), ())
    assert world.catalog.reserve_copy("s3", of.address) == ReservationRefused("gone")
    for flight in (moving, storing):
        assert not world.catalog.commit(flight), "cleared, and came back"
        world.catalog.check_integrity()
        assert world.reserve(flight.tier, of if flight is moving else fresh) == ReservationRefused("busy")
        assert world.catalog.usage(flight.tier).bytes_accounted >= flight.nbytes, "its record may be there"
        world.catalog.abandon(flight)
    world.catalog.dropped(eviction)
    world.catalog.unpin(pin)
    for tier in ALL:
        assert world.catalog.usage(tier).bytes_accounted == 0
    # What was promised before the clear comes too late; what is computed after it is new.
    for late in (of, fresh):
        assert world.reserve("cpu", late, clear_seq=before) == ReservationRefused("tombstone")
    assert world.catalog.clears.seq > before
    world.store("cpu", of)
    assert world.spans(range(3)) == [(0, 3, "cpu")]


def test_f36_g12_a_clear_touches_nobody_else() -> None:
    world = World()
    mine, shared, others = header([1]), header([2]), header([3], session=B)
    foreign = header([1], tenant=BOB)
    for of in (mine, shared, others, foreign):
        world.store("cpu", of)
    world.spans([2], session=B)
    flight = world.catalog.reserve_copy("nvme", shared.address)
    assert isinstance(flight, Transfer)
    (eviction,) = world.catalog.clear(Clear(ALICE, A))
    assert eviction.address == mine.address
    assert world.finish(flight)
    assert world.catalog.copies(shared.address) == ("cpu", "nvme")
    info = world.catalog.info(shared.address)
    assert info is not None
    assert info.sessions == {B}
    evictions = world.catalog.clear(Clear(ALICE, B))
    assert {eviction.address for eviction in evictions} == {shared.address, others.address}
    assert world.catalog.copies(foreign.address) == ("cpu",)
    assert world.reserve("cpu", header([9], tenant=BOB), clear_seq=0) != ReservationRefused("tombstone")
    assert world.reserve("cpu", header([9]), clear_seq=0) == ReservationRefused("tombstone")


def test_f36_an_extent_that_another_session_stores_too_is_its_own() -> None:
    world = World()
    world.store("cpu", header([1]))
    assert world.reserve("cpu", header([1], session=B)) == Held()
    assert world.catalog.clear(Clear(ALICE, A)) == []
    assert len(world.catalog.clear(Clear(ALICE, B))) == 1


def test_f36_a_record_that_a_scan_finds_after_a_clear_is_deleted() -> None:
    world = World()
    of = header(range(3))
    world.catalog.clear(Clear(ALICE, A))
    scanned = Scanned(of, record_bytes(of), 0.0)
    (eviction,) = world.catalog.adopt("s3", scanned, 0.0, is_cleared=True)
    world.catalog.check_integrity()
    assert eviction.reason == "cleared"
    assert world.spans(range(3)) == []
    world.catalog.dropped(eviction)
    assert world.catalog.adopt("s3", scanned, 0.0) == ()
    assert world.spans(range(3)) == [(0, 3, "s3")]


def test_f36_a_copy_of_a_shared_extent_does_not_bring_its_cleared_session_back() -> None:
    world = World()
    of = header([1])
    world.store("nvme", of)
    world.spans([1], session=B)
    world.catalog.clear(Clear(ALICE, A))
    assert world.catalog.adopt("s3", Scanned(of, 100, 0.0), 0.0, is_cleared=True) == ()
    info = world.catalog.info(of.address)
    assert info is not None
    assert info.sessions == {B}
    assert info.tiers == ("nvme", "s3")
    assert len(world.catalog.clear(Clear(ALICE, B))) == 2


def test_a_clear_of_what_nobody_has_leaves_no_tombstone() -> None:
    world = World()
    clears = world.catalog.clears
    for number in range(50):
        world.catalog.clear(Clear(ALICE, tag(f"never{number}")))
    world.catalog.clear(Clear(BOB))
    assert clears.tombstones == 0
    assert world.spans([1], session=tag("asks")) == []
    began = world.catalog.clears.seq
    world.catalog.clear(Clear(ALICE, tag("asks")))  # may be computing what it did not find
    assert clears.tombstones == 1
    assert world.reserve("cpu", header([1], session=tag("asks")), clear_seq=began) == ReservationRefused(
        "tombstone"
    )
    world.store("cpu", header([2], session=B))
    world.catalog.clear(Clear(ALICE, B))
    assert clears.tombstones == 2


def test_of_a_tenant_that_asks_more_than_can_be_remembered_every_clear_counts() -> None:
    clears = Clears(3, 0.0, Clock())
    for number in range(4):
        clears.asked(ALICE, tag(f"s{number}"))
        clears.check_integrity()
    assert clears.may_store(ALICE, tag("s0")), "it asked, and was forgotten"
    assert clears.may_store(ALICE, None)
    assert not clears.may_store(BOB, tag("s0"))
    assert not clears.may_store(BOB, None)
    clears.asked(BOB, tag("s0"))
    assert clears.may_store(BOB, tag("s0"))
    assert clears.may_store(BOB, None)


def test_f36_tombstones_are_bounded_and_forget_on_the_safe_side() -> None:
    clears = Clears(3, 0.0, Clock())
    for seq in range(1, 6):
        clears.add(Clear(ALICE, tag(f"s{seq}")), is_held=True)
        assert clears.seq == seq
        clears.check_integrity()
    assert clears.tombstones == 3
    assert clears.forbids_store(ALICE, tag("s1"), 1), "it was forgotten: all that is as old as it is refused"
    assert clears.forbids_store(ALICE, tag("other"), 1)
    assert not clears.forbids_store(ALICE, tag("other"), 2)
    assert not clears.forbids_store(BOB, tag("other"), 0), "one tenant's clears never touch another's"
    assert clears.forbids_store(ALICE, tag("s5"), 4)
    assert not clears.forbids_store(ALICE, tag("s5"), 5)
    clears.add(Clear(ALICE, tag("s3")), is_held=True)
    clears.check_integrity()
    assert clears.tombstones == 3
    clears.add(Clear(ALICE), is_held=True)
    assert clears.forbids_store(ALICE, tag("never seen"), 6)
    with pytest.raises(ValueError, match="at least one"):
        Clears(0, 0.0, Clock())


def test_f35_a_flood_evicts_the_floods_own_blocks() -> None:
    """Bob may take half: whatever he stores, he takes room from Bob."""
    world = World({"cpu": 1000, "nvme": 1000, "s3": 0}, {BOB: 0.5})
    for number in range(5):
        world.store("cpu", header([number]), 100)
    world.clock.now_s += 60  # Alice's are the coldest of all
    for number in range(200):
        world.clock.now_s += 1
        for victim in world.store("cpu", header([100, number], tenant=BOB), 100).victims:
            assert victim.address.tenant == BOB
            assert victim.reason == "quota"
        assert world.catalog.tenant_bytes("cpu", BOB) <= 500
    for number in range(5):
        assert world.spans([number]) == [(0, 1, "cpu")]
    assert world.spans([100, 199], tenant=BOB) == [(0, 2, "cpu")], "the newest of his stays"


def test_f35_a_quota_counts_what_is_in_flight_and_what_is_pinned() -> None:
    world = World({"cpu": 1000, "nvme": 0, "s3": 0}, {BOB: 0.2})
    flights = [world.reserved("cpu", header([number], tenant=BOB), 100) for number in range(2)]
    assert world.reserve("cpu", header([3], tenant=BOB), 100) == ReservationRefused("quota")
    assert world.finish(flights[0])
    pin = world.catalog.pin(header([0], tenant=BOB).address, "cpu")
    assert pin is not None
    assert world.reserve("cpu", header([3], tenant=BOB), 100) == ReservationRefused("quota")
    world.catalog.unpin(pin)
    (victim,) = world.reserved("cpu", header([3], tenant=BOB), 100).victims
    assert victim.address == header([0], tenant=BOB).address


def test_f26_a_clock_that_jumps_back_expires_and_evicts_no_more_than_before() -> None:
    world = World({"cpu": 300, "nvme": 0, "s3": 0})
    kept = Placement(min_ttl_s=50.0, ttl_s=100.0)
    for number in range(2):
        world.store("cpu", header([number], placement=kept), 100)
    world.clock.now_s -= 3600
    assert world.catalog.expired() == []
    world.store("cpu", header([2], placement=kept), 100)
    world.clock.now_s += 40
    # The newest is not taken for the oldest, though the clock says less than at the others' use.
    (victim,) = world.store("cpu", header([3], placement=kept), 100).victims
    assert victim.address in {header([0]).address, header([1]).address}
    assert world.catalog.expired() == []
    world.clock.now_s += 61  # and time does go on: the first two are 101 s old, the last 61
    assert {eviction.address for eviction in world.catalog.expired()} == {
        *(header([number]).address for number in (0, 1, 2)),
    } - {victim.address}
    assert world.spans([3]) == [(0, 1, "cpu")]


@pytest.mark.parametrize("years", [-10, 10])
def test_f26_a_wall_clock_years_off_at_a_start_empties_nothing(years: int) -> None:
    world = World()
    now_unix_s = 1.7e9
    for number in range(20):
        of = header([number], placement=Placement(ttl_s=1000.0))
        scanned = Scanned(of, 100, now_unix_s - number)
        assert world.catalog.adopt("nvme", scanned, now_unix_s + years * 365 * 86400.0) == ()
        world.catalog.check_integrity()
    assert world.catalog.expired() == []
    world.clock.now_s += 50
    assert world.catalog.expired() == []
    for number in range(20):
        assert world.spans([number]) == [(0, 1, "nvme")]
    world.clock.now_s += 1001
    assert len(world.catalog.expired()) == 20, "and the clock does not make anything last for ever"


def test_f14_another_tenant_with_the_same_words_finds_and_forgets_nothing() -> None:
    """With our namespace, our keys, our session's tag: the tenant's own tag decides."""
    world = World()
    of = header(range(4), tail_tokens=3)
    world.store("cpu", of)
    asked = Lookup(of.namespace, lookup(range(4)).keys, BOB, of.session)
    assert world.catalog.find(asked, ALL) == ((), ())
    assert world.catalog.clear(Clear(BOB, of.session)) == []
    assert world.catalog.clear(Clear(BOB)) == []
    world.catalog.check_integrity()
    assert world.spans(range(4)) == [(0, 4, "cpu")]
