"""The catalog by example: what is found, who must go, what it costs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from samovar.cache_tiers.blocks.extent import Clear, Placement, namespace_digest
from samovar.cache_tiers.blocks.tiers import TierName
from samovar.cache_tiers.catalog.index import ROW_SCAN_MAX, SESSIONS_MAX, TAILS_MAX, HeldExtent
from samovar.cache_tiers.catalog.types import Held, ReservationRefused
from samovar.cache_tiers.forecast.turns import Floats
from samovar.cache_tiers.messages import Lookup
from samovar.cache_tiers.policy.eviction_queue import LazyHeap
from samovar.cache_tiers.policy.policies import Candidates, LeastRecentlyUsed
from tests.support.nodes.catalog_world import (
    ALICE,
    ALL,
    BIG,
    BOB,
    FOREVER,
    NAMESPACE,
    World,
    chain,
    header,
    landed,
    lookup,
    tag,
)

A, B = tag("s1"), tag("s2")


def budgets(cpu: int = BIG, nvme: int = BIG, s3: int = BIG) -> dict[TierName, int]:
    return {"cpu": cpu, "nvme": nvme, "s3": s3}


# find


def test_one_extent_covers_a_run() -> None:
    world = World()
    world.store("cpu", header(range(10)))
    world.store("cpu", header(range(4), 2))
    assert world.spans(range(12)) == [(0, 10, "cpu")]
    assert world.spans(range(5)) == [(0, 5, "cpu")]
    assert world.spans([*range(7), 99, 100]) == [(0, 7, "cpu")]
    assert world.spans([99, *range(7)]) == []
    assert world.spans([]) == []


def test_gaps_and_overlaps() -> None:
    world = World()
    world.store("cpu", header(range(4)))
    world.store("cpu", header(range(12), 8))
    world.store("cpu", header(range(11), 6))
    assert world.spans(range(20)) == [(0, 4, "cpu"), (6, 2, "cpu"), (8, 4, "cpu")]


def test_the_cheapest_tier_first() -> None:
    world = World()
    whole = header(range(8))
    world.store("s3", whole)
    world.store("nvme", header(range(6), 2))
    world.store("cpu", header(range(4), 3))
    assert world.spans(range(8)) == [
        (0, 2, "s3"),
        (2, 1, "nvme"),
        (3, 1, "cpu"),
        (4, 2, "nvme"),
        (6, 2, "s3"),
    ]
    assert world.spans(range(8), ["nvme", "s3"]) == [(0, 2, "s3"), (2, 4, "nvme"), (6, 2, "s3")]
    assert world.spans(range(8), ["s3"]) == [(0, 8, "s3")]
    assert world.spans(range(8), []) == []
    world.copy("cpu", whole)
    assert world.spans(range(8)) == [(0, 8, "cpu")]


def test_only_what_is_committed_is_found() -> None:
    world = World()
    reservation = world.reserved("cpu", header(range(3)))
    assert world.spans(range(3)) == []
    assert world.catalog.info(header(range(3)).address) is None
    assert world.finish(reservation)
    assert world.spans(range(3)) == [(0, 3, "cpu")]


def test_g2_another_tenant_never_finds_it_nor_touches_it() -> None:
    """Even where the namespaces are one and the same, as if the salt had failed."""
    world = World()
    mine = header(range(3), tail_tokens=2)
    world.store("cpu", mine)
    before = world.catalog.info(mine.address)
    world.clock.now_s += 5
    assert world.catalog.find(lookup(range(3), tenant=BOB, session=B), ALL) == ((), ())
    assert world.catalog.info(mine.address) == before
    world.store("cpu", header(range(3), tenant=BOB))  # the very same run is another extent
    (span,), () = world.catalog.find(lookup(range(3), tenant=BOB), ALL)
    assert span.tenant == BOB
    assert world.catalog.pin(replace(mine.address, tenant=tag("eve")), "cpu") is None
    assert len(world.catalog.clear(Clear(BOB))) == 1
    assert world.spans(range(3)) == [(0, 3, "cpu")]


def test_g3_another_namespace_never_finds_it() -> None:
    world = World()
    world.store("cpu", header(range(3), tail_tokens=1))
    other = namespace_digest(b"other weights")
    assert world.catalog.find(lookup(range(3), namespace=other), ALL) == ((), ())
    forged = Lookup(other, lookup(range(3)).keys, ALICE, A)  # our keys under its own namespace
    assert world.catalog.find(forged, ALL) == ((), ())


def test_g1_a_header_that_lies_about_its_place_is_not_found_there() -> None:
    world = World()
    honest = header(range(6), 2, tail_tokens=1)
    world.store("cpu", replace(honest, first_block=3))
    assert world.catalog.find(lookup(range(8)), ALL) == ((), ())


def test_an_extent_of_the_same_name_with_another_form_is_refused() -> None:
    world = World()
    honest = header(range(6), 2, tail_tokens=3)
    world.store("cpu", honest)
    for lie in (
        replace(honest, first_block=3),
        replace(honest, parent=chain([1, 2])[1]),
        replace(honest, token_counts=(4, 4, 4, 4, 2)),
        replace(honest, shape=replace(honest.shape, layers=3)),
    ):
        assert world.reserve("nvme", lie) == ReservationRefused("differs")
        (eviction,) = world.adopt("nvme", lie)
        assert eviction.reason == "differs"
        world.catalog.dropped(eviction)
    assert world.catalog.copies(honest.address) == ("cpu",)


def test_tails_are_found_by_their_parent_and_never_as_full_blocks() -> None:
    world = World()
    deep = header(range(4), 2, tail_tokens=3)
    short = header([], tail_tokens=2)
    world.store("nvme", deep)
    world.store("cpu", short)
    spans, tails = world.catalog.find(lookup(range(6)), ALL)
    assert [(span.first, span.offset, span.blocks) for span in spans] == [(2, 0, 2)]
    assert [(tail.key, tail.tokens) for tail in tails] == [(deep.keys[-1], 3), (short.keys[-1], 2)]
    assert [(tail.span.first, tail.span.offset, tail.span.tier) for tail in tails] == [
        (4, 2, "nvme"),
        (0, 0, "cpu"),
    ]
    _, tails = world.catalog.find(lookup([50]), ALL)
    assert [tail.tokens for tail in tails] == [2]
    tail_key = Lookup(NAMESPACE, short.keys[0], ALICE, A)  # asked for as if it were a full block
    assert world.catalog.find(tail_key, ALL)[0] == ()


def test_the_number_of_tails_is_bounded_and_the_deepest_come_first() -> None:
    world = World()
    for tokens in (1, 2, 3):
        for at in range(TAILS_MAX):
            ids = [*range(3), 1000 + at]
            world.store(
                "cpu",
                header(ids[: 3 + (tokens == 3)], 3, tail_tokens=tokens)
                if tokens == 3
                else replace(header(ids[:3], 3, tail_tokens=tokens), keys=(chain([tokens, at])[1],)),
            )
    _, tails = world.catalog.find(lookup([*range(3), 1000]), ALL)
    assert len(tails) == TAILS_MAX
    assert (tails[0].span.first, tails[0].tokens) == (4, 3)


def test_a_lookup_touches_and_tags_only_what_is_its_own() -> None:
    world = World()
    whole, partly, tailed, apart = (
        header(range(3)),
        header(range(9), 3),
        header(range(5), 3, tail_tokens=1),
        header([70]),
    )
    for of in (whole, partly, tailed, apart):
        world.store("nvme", of)
    world.clock.now_s += 10
    world.spans(range(6), ["s3"], session=B)  # not even where its tier is down
    now_s = world.clock.now_s
    for of, used_s, sessions in (
        (whole, now_s, {A, B}),
        (partly, now_s, {A}),  # its other blocks are of A alone
        (tailed, now_s, {A}),  # whether the tail is B's as well nobody knows
        (apart, now_s - 10, {A}),
    ):
        info = world.catalog.info(of.address)
        assert info is not None
        assert info.last_used_s == used_s
        assert info.sessions == sessions


def test_a_tail_is_touched_by_its_own_session_or_on_demand() -> None:
    world = World()
    tail = header([], tail_tokens=2)
    world.store("cpu", tail)
    world.clock.now_s += 10
    world.spans([5], session=B)
    assert world.catalog.info(tail.address).last_used_s == world.clock.now_s - 10  # type: ignore[union-attr]
    world.spans([5], session=A)
    assert world.catalog.info(tail.address).last_used_s == world.clock.now_s  # type: ignore[union-attr]
    world.clock.now_s += 10
    world.catalog.touch(tail.address)
    assert world.catalog.info(tail.address).last_used_s == world.clock.now_s  # type: ignore[union-attr]


def test_tags_are_bounded() -> None:
    world = World()
    shared = header(range(2))
    world.store("cpu", shared)
    for session in range(3 * SESSIONS_MAX):
        world.spans(range(2), session=tag(f"n{session}"))
    info = world.catalog.info(shared.address)
    assert info is not None
    assert len(info.sessions) == SESSIONS_MAX


def test_keys_that_are_no_keys_are_refused() -> None:
    with pytest.raises(ValueError, match="33 bytes"):
        World().catalog.find(Lookup(NAMESPACE, bytes(33), ALICE, A), ALL)


# What it costs, in operations.


def test_a_lookup_does_not_look_at_what_it_does_not_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    # A beginning that very many sessions have in common, each in an extent of its own.
    for session in range(4 * ROW_SCAN_MAX):
        of = header([1, 2, 3, 1000 + session], session=tag(f"n{session}"))
        answer = world.catalog.reserve("cpu", of, 100, clear_seq=0)
        assert not isinstance(answer, Held | ReservationRefused)
        assert landed(world.catalog, answer)
    looked_at = 0
    has_block = HeldExtent.has_block

    def counted(extent: HeldExtent, offset: int, key: bytes) -> bool:
        nonlocal looked_at
        looked_at += 1
        return has_block(extent, offset, key)

    monkeypatch.setattr(HeldExtent, "has_block", counted)
    assert world.spans([1, 2, 3, 1005]) == [(0, 4, "cpu")]
    assert looked_at <= 4 * (ROW_SCAN_MAX + 1) + ROW_SCAN_MAX + 1
    looked_at = 0
    world.store("cpu", header(range(5000, 5500)))
    looked_at = 0
    assert world.spans(range(5000, 5500)) == [(0, 500, "cpu")]
    assert looked_at <= 2, "a run of one extent costs no look at each block"


class CountingPolicy(LeastRecentlyUsed):
    """Notes how many copies it was asked about."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def worth(self, of: Candidates, *more: Any) -> Floats:
        self.asked.append(len(of))
        return super().worth(of, *more)


def test_an_eviction_asks_about_a_few_copies_and_looks_at_few() -> None:
    policy = CountingPolicy()
    world = World(budgets(cpu=2000 * 100), policy=policy)

    def store(number: int) -> int:
        world.clock.now_s += 1
        answer = world.catalog.reserve("cpu", header([number]), 100, clear_seq=0)
        assert not isinstance(answer, Held | ReservationRefused)
        for victim in answer.victims:
            world.catalog.dropped(victim)
        assert landed(world.catalog, answer)
        return len(answer.victims)

    for number in range(2000):
        assert store(number) == 0
    for number in range(0, 2000, 2):
        world.catalog.find(lookup([number]), ALL)
    for number in range(2000, 2500):
        assert store(number) == 1
    assert sum(policy.asked) <= 2 * 2500, "each copy of one session is no more than a step of its group"
    for number in range(1000):  # the odd ones were the oldest
        assert bool(world.catalog.copies(header([number]).address)) == (number % 2 == 0)
    world.catalog.check_integrity()


def test_a_heap_in_which_everything_was_used_is_looked_at_a_part_at_a_time() -> None:
    places = dict.fromkeys(range(1000), 0.0)
    heap = LazyHeap[int](lambda item: (places[item], 0))
    for item in places:
        heap.add(item)
    for item in places:
        places[item] = 2000.0 - item
    assert heap.first(moves_max=100) is None
    assert len(heap.take(3, moves_max=100)) == 3
    assert heap.moves <= 210
    heap.check_integrity()
    while heap.first(moves_max=100) is None:
        pass
    rest = heap.take(1000, moves_max=10_000)
    assert rest == sorted(rest, reverse=True)
    assert (len(rest), len(heap), heap.first(10)) == (997, 0, None)


def test_a_heap_does_not_fill_up_with_the_dead() -> None:
    heap = LazyHeap[int](lambda item: (float(item), 0))
    for item in range(10_000):
        heap.add(item)
        heap.discard(item - 10)
        heap.check_integrity()
    assert len(heap._entries) < 200
    heap.discard(-5)
    with pytest.raises(ValueError, match="already"):
        heap.add(9999)


# Making room


def test_the_oldest_goes_first_and_the_kept_last() -> None:
    world = World(budgets(cpu=300))
    kept = header([1], placement=Placement(min_ttl_s=100.0))
    old, new = header([2]), header([3])
    for of in (kept, old, new):
        world.store("cpu", of, 100)
        world.clock.now_s += 10
    (victim,) = world.store("cpu", header([4]), 100).victims
    assert victim.address == old.address
    world.clock.now_s += 100
    (victim,) = world.store("cpu", header([5]), 100).victims
    assert victim.address == kept.address


def test_what_is_kept_does_not_hide_what_may_go() -> None:
    world = World(budgets(cpu=20_000))
    for number in range(199):
        world.store("cpu", header([number], placement=Placement(min_ttl_s=1e6)), 100)
    world.clock.now_s += 1
    batch = header([1000])
    world.store("cpu", batch, 100)
    (victim,) = world.store("cpu", header([1001]), 100).victims
    assert victim.address == batch.address


def test_many_small_victims_are_the_coldest_too() -> None:
    """More than a policy is asked about at a time: what is kept does not go before the last of the others."""
    world = World(budgets(cpu=20_000))
    for number in range(100):
        world.store("cpu", header([number], placement=Placement(min_ttl_s=1e6)), 100)
        world.store("cpu", header([1000 + number]), 100)
        world.clock.now_s += 1
    victims = world.store("cpu", header([5000]), 9000).victims
    assert [victim.address for victim in victims] == [header([1000 + at]).address for at in range(90)]


def test_a_tenant_near_its_share_gives_its_own_first_and_then_what_is_coldest() -> None:
    world = World(budgets(cpu=1000), {BOB: 0.5})
    for number in range(20):
        world.store("cpu", header([number], tenant=BOB if number < 9 else ALICE), 50)
        world.clock.now_s += 1
    victims = world.store("cpu", header([50], tenant=BOB), 100).victims
    assert [(victim.address, victim.reason) for victim in victims] == [
        (header([0], tenant=BOB).address, "quota"),
        (header([1], tenant=BOB).address, "room"),
    ]


def test_storing_again_is_a_use() -> None:
    world = World(budgets(cpu=200))
    for number in range(2):
        world.store("cpu", header([number]), 100)
        world.clock.now_s += 1
    assert world.reserve("cpu", header([0])) == Held()
    (victim,) = world.store("cpu", header([2]), 100).victims
    assert victim.address == header([1]).address


def test_a_cold_extent_that_sinks_is_still_cold_below() -> None:
    world = World(budgets(nvme=300))
    cold = header([1])
    world.store("cpu", cold, 100)
    for number in (2, 3):
        world.clock.now_s += 1
        world.store("nvme", header([number]), 100)
    world.copy("nvme", cold)
    (victim,) = world.store("nvme", header([4]), 100).victims
    assert victim.address == cold.address


def test_the_deeper_extent_of_a_session_goes_first() -> None:
    world = World(budgets(cpu=300))
    for first in (4, 0, 2):
        world.store("cpu", header(range(first + 2), first), 100)
    world.spans(range(6))
    victims = world.store("cpu", header([90]), 200).victims
    assert [victim.address for victim in victims] == [
        header(range(6), 4).address,
        header(range(4), 2).address,
    ]


def test_the_deepest_of_a_long_session_goes_first() -> None:
    """Of more extents than a policy is asked about at a time."""
    world = World(budgets(cpu=10_000))
    for first in range(100):
        world.store("cpu", header(range(first + 1), first), 100)
    (victim,) = world.store("cpu", header([90]), 100).victims
    assert victim.address == header(range(100), 99).address


def test_what_a_lower_tier_holds_goes_before_what_would_be_lost() -> None:
    world = World(budgets(cpu=200))
    dirty, clean = header([1]), header([2])
    world.store("cpu", dirty, 100)
    world.clock.now_s += 1
    world.store("cpu", clean, 100)
    world.copy("nvme", clean)
    (victim,) = world.store("cpu", header([3]), 100).victims
    assert victim.address == clean.address
    assert world.catalog.copies(clean.address) == ("nvme",)


def test_pinned_copies_stay_and_too_many_of_them_are_a_full_tier() -> None:
    world = World(budgets(cpu=200))
    first, second = header([1]), header([2])
    world.store("cpu", first, 100)
    world.store("cpu", second, 100)
    pins = [world.catalog.pin(of.address, "cpu") for of in (first, first, second)]
    assert world.reserve("cpu", header([3]), 100) == ReservationRefused("full")
    assert world.catalog.usage("cpu").extents == 2
    for pin in pins[:1]:
        assert pin is not None
        world.catalog.unpin(pin)
    assert world.reserve("cpu", header([3]), 100) == ReservationRefused("full")
    assert pins[1] is not None
    world.catalog.unpin(pins[1])
    (victim,) = world.store("cpu", header([3]), 100).victims
    assert victim.address == first.address
    with pytest.raises(ValueError, match="more often"):
        world.catalog.unpin(pins[1])


def test_reservations_in_flight_take_room_but_their_victims_are_not_counted_twice() -> None:
    world = World(budgets(cpu=1000))
    for number in range(10):
        world.clock.now_s += 1
        world.store("cpu", header([number]), 100)
    one, two = world.reserved("cpu", header([20]), 100), world.reserved("cpu", header([21]), 100)
    assert (len(one.victims), len(two.victims)) == (1, 1)
    assert world.catalog.usage("cpu").bytes_accounted == 1200  # what is there and what will be
    for reservation in (two, one):
        assert world.finish(reservation)
    assert world.catalog.usage("cpu").bytes_accounted == 1000


def test_bytes_of_a_clear_are_not_room_before_they_are_deleted() -> None:
    world = World(budgets(cpu=200))
    world.store("cpu", header([1]), 100)
    world.store("cpu", header([2], session=B), 100)
    (eviction,) = world.catalog.clear(Clear(ALICE, A))
    (victim,) = world.reserved("cpu", header([3], session=B), 100).victims
    assert victim.address == header([2]).address
    assert world.reserve("cpu", header([4], session=B), 100) == ReservationRefused("full")
    world.catalog.dropped(eviction)
    assert world.reserved("cpu", header([4], session=B), 100).victims == ()


def test_refusals_evict_nothing() -> None:
    world = World(budgets(cpu=300, s3=0), {BOB: 0.5})
    held = header([1])
    world.store("cpu", held, 100)
    world.store("cpu", header([2]), 200)
    pin = world.catalog.pin(header([2]).address, "cpu")
    assert pin is not None
    cases = [
        ("cpu", header([3]), 301, "too big"),
        ("s3", header([3]), 1, "too big"),
        ("cpu", header([3], tenant=BOB), 151, "too big"),
        ("cpu", header([3]), 101, "full"),
        ("nvme", header([3], placement=Placement(lowest="cpu")), 1, "placement"),
        ("s3", header([3], placement=Placement(lowest="nvme")), 1, "placement"),
    ]
    for tier, of, nbytes, reason in cases:
        assert world.reserve(tier, of, nbytes) == ReservationRefused(reason)  # type: ignore[arg-type]
    assert world.reserve("cpu", held, 100) == Held()
    assert world.catalog.reserve_copy("nvme", header([9]).address) == ReservationRefused("gone")
    assert world.catalog.usage("cpu").extents == 2
    with pytest.raises(ValueError, match="some bytes"):
        world.reserve("cpu", header([3]), 0)


# Sinking and expiry


def test_sinking_names_the_coldest_that_may_and_must_go_down() -> None:
    world = World(budgets(cpu=1000))
    names = {}
    for number in range(8):
        world.clock.now_s += 1
        lowest = "cpu" if number == 1 else "s3"
        of = header([number], placement=replace(FOREVER, lowest=lowest))  # type: ignore[arg-type]
        world.store("cpu", of, 100)
        names[of.address] = number
    world.copy("nvme", header([2]))
    moving = world.catalog.reserve_copy("nvme", header([3]).address)

    def sinking(share: float, extents_max: int = 256) -> list[int]:
        return [names[address] for address in world.catalog.sinking("cpu", "nvme", share, extents_max)]

    assert sinking(0.8) == []
    assert sinking(0.7) == [], "what a lower tier has can go as it is"
    assert sinking(0.6) == [0]
    assert sinking(0.3) == [0, 4]
    assert sinking(0.0) == [0, 4, 5, 6, 7]
    assert sinking(0.0, extents_max=5) == [0, 4]
    assert landed(world.catalog, moving)  # type: ignore[arg-type]
    world.spans([0])
    assert sinking(0.2) == [4, 5, 6]
    for tier, to in (("cpu", "cpu"), ("nvme", "cpu")):
        with pytest.raises(ValueError, match="not below"):
            world.catalog.sinking(tier, to, 0.5)  # type: ignore[arg-type]


def test_what_a_lower_tier_has_lost_sinks_again() -> None:
    world = World(budgets(cpu=1000))
    one = header([1], placement=FOREVER)
    world.store("cpu", one, 100)
    world.copy("nvme", one)
    assert world.catalog.sinking("cpu", "nvme", 0.0) == []
    lost = world.catalog.lose(one.address, "nvme")
    assert lost is not None
    world.catalog.check_integrity()
    assert world.catalog.sinking("cpu", "nvme", 0.0) == [], "the delete could hit the new copy"
    world.catalog.dropped(lost)
    assert world.catalog.sinking("cpu", "nvme", 0.0) == [one.address]


def test_expiry_forgets_everywhere_and_in_portions() -> None:
    world = World()
    for number in range(5):
        of = header([number], placement=Placement(ttl_s=100.0 + number))
        world.store("cpu", of)
        world.copy("nvme", of)
    world.clock.now_s += 60
    world.spans([0])
    world.clock.now_s += 42
    assert len(world.catalog.expired(extents_max=1)) == 2
    assert world.catalog.copies(header([1]).address) == ()
    assert {eviction.address for eviction in world.catalog.expired()} == {header([2]).address}
    assert world.catalog.copies(header([0]).address) == ("cpu", "nvme")
    world.catalog.check_integrity()


def test_an_extent_that_expires_in_flight_is_fenced() -> None:
    world = World()
    flight = world.reserved("cpu", header([1], placement=Placement(ttl_s=10.0)))
    world.clock.now_s += 11
    assert world.catalog.expired() == []
    assert not world.catalog.commit(flight)
    world.catalog.abandon(flight)
    world.catalog.check_integrity()
    assert world.catalog.usage("cpu").bytes_accounted == 0


# Adopting what a scan finds


def test_adopting_merges_tiers_and_keeps_the_order_of_use() -> None:
    world = World(budgets(nvme=200))
    cold, warm = header([1]), header([2])
    assert world.adopt("nvme", warm, idle_s=5, nbytes=100) == ()
    assert world.adopt("nvme", cold, idle_s=50, nbytes=100) == ()
    assert world.adopt("s3", cold, idle_s=100) == ()
    assert world.adopt("s3", cold, idle_s=100) == ()
    assert world.catalog.copies(cold.address) == ("nvme", "s3")
    info = world.catalog.info(cold.address)
    assert info is not None
    assert info.last_used_s == world.clock.now_s - 50
    (victim,) = world.store("nvme", header([3]), 100).victims
    assert victim.address == cold.address


def test_adopting_over_the_budget_keeps_the_recently_used() -> None:
    world = World(budgets(nvme=500))
    ages = [5, 80, 20, 90, 10, 40, 70, 30, 60, 50]
    evictions = [one for age in ages for one in world.adopt("nvme", header([age]), age, nbytes=100)]
    assert len(evictions) == 5
    held = [age for age in ages if world.catalog.copies(header([age]).address)]
    assert sorted(held) == [5, 10, 20, 30, 40]
    assert world.catalog.usage("nvme").bytes_accounted == 1000
    for eviction in evictions:
        world.catalog.dropped(eviction)
    assert world.catalog.usage("nvme").bytes_accounted == 500
    world.catalog.check_integrity()


def test_adopting_over_a_tenants_share_touches_nobody_else() -> None:
    world = World(budgets(nvme=1000), {BOB: 0.2})
    world.adopt("nvme", header([1]), 500, nbytes=100)
    for number in range(2, 8):
        world.adopt("nvme", header([number], tenant=BOB), 100 - number, nbytes=100)
    assert world.catalog.tenant_bytes("nvme", BOB) == 200
    assert world.catalog.copies(header([1]).address) == ("nvme",)
    assert world.catalog.copies(header([7], tenant=BOB).address) == ("nvme",)


def test_what_may_not_be_adopted_has_to_go() -> None:
    world = World(budgets(nvme=1000, s3=0))
    (eviction,) = world.adopt("nvme", header([1], placement=Placement(lowest="cpu")))
    assert eviction.reason == "placement"
    (eviction,) = world.adopt("nvme", header([2]), nbytes=1001)
    assert eviction.reason == "room"
    (eviction,) = world.adopt("s3", header([2]), nbytes=10)
    assert eviction.reason == "room"
    assert world.adopt("s3", header([2]), nbytes=10) == (), "its delete is under way"
    assert world.reserve("nvme", header([2]), 100) == ReservationRefused("busy")
    world.catalog.dropped(eviction)
    assert world.catalog.usage("s3").bytes_accounted == 0


def test_a_scan_that_meets_a_write_leaves_it_alone() -> None:
    world = World()
    flight = world.reserved("nvme", header([1]))
    assert world.adopt("nvme", header([1])) == ()
    assert world.catalog.copies(header([1]).address) == ()
    assert world.finish(flight)


def test_a_medium_with_less_room_than_its_budget_evicts_whatever_the_tenants_share() -> None:
    world = World(budgets(nvme=1000), shares={ALICE: 0.5})
    theirs = [header(range(100 * number, 100 * number + 2), tenant=BOB) for number in range(2)]
    for one in theirs:
        world.store("nvme", one, 100)
    coming = world.reserved("nvme", header(range(3)), 100)
    # Of the budget 700 are free, more than the share; the medium has no room at all.
    for one in theirs:
        (victim,) = world.catalog.squeeze("nvme", ALICE, 100)
        assert victim.address == one.address
        world.catalog.dropped(victim)
    assert world.catalog.squeeze("nvme", ALICE, 100) == ()
    assert world.finish(coming)
