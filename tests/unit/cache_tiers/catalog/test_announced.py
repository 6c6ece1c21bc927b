"""A directory that tells its blocks: who hears it knows exactly what the tiers hold, after any history."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant

from samovar.cache_tiers.blocks.extent import Clear
from samovar.cache_tiers.blocks.tiers import TierName
from samovar.cache_tiers.catalog import Transfer, announced_catalog
from samovar.cache_tiers.events.feed import Batches, EventFeed, hash_of, place_of
from samovar.cache_tiers.events.publisher import EventPublisher
from tests.support.amounts import examples
from tests.support.heard_cache import HeardCache
from tests.support.inside import registry_of
from tests.support.kv_subscriber import Subscriber, free_ports, until
from tests.support.nodes import catalog_world
from tests.support.nodes.catalog_world import ALICE, ALL, BOB, World, chain, header, record_bytes, tag
from tests.unit.cache_tiers.catalog.test_catalog_machine import CatalogMachine

PLACES = {place_of(tier) for tier in ALL}


def held(world: World) -> dict[object, set[int]]:
    """Place -> the full blocks that some copy there has."""
    found: dict[object, set[int]] = {place: set() for place in PLACES}
    for extent in registry_of(world.catalog):
        for tier in extent.copies:
            found[place_of(tier)].update(map(hash_of, extent.block_keys()))
    return found


def announced(world: World, feed: EventFeed) -> World:
    """The same empty world, with a catalog that tells `feed`."""
    old = world.catalog
    world.catalog = announced_catalog(
        feed,
        world.budgets,
        world.policy,
        clock=world.clock,
        tenant_share=lambda tenant: world.shares.get(tenant, 1.0),
        clears=old.clears,
        transfers_max=world.transfers_max,
    )
    return world


class HeardCatalogMachine(CatalogMachine):
    """All that the catalog is put through, with one that listens."""

    @initialize(extents=st.integers(2, 4), share=st.sampled_from([1.0, 1.0, 0.7]))
    def start(self, extents: int, share: float) -> None:
        self.feed, self.batches, self.heard = EventFeed(), Batches(lambda: 1.0), HeardCache()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                catalog_world, "Catalog", lambda *args, **rest: announced_catalog(self.feed, *args, **rest)
            )
            super().start(extents, share)

    @invariant()
    def who_hears_knows_what_is_there(self) -> None:
        if not hasattr(self, "heard"):
            return
        first = self.batches.next_number
        self.batches.add(self.feed.take())
        self.heard.hear_all(self.batches.since(first))
        assert {place: self.heard.at(*place) for place in PLACES} == held(self.world)


TestHeardCatalogMachine = HeardCatalogMachine.TestCase
TestHeardCatalogMachine.settings = settings(max_examples=examples(40), stateful_step_count=50, deadline=None)


def histories(rng: random.Random, steps: int) -> Iterator[tuple[str, TierName, int, int, bytes, bytes]]:
    for _ in range(steps):
        what = rng.choices(("store", "copy", "lose", "clear", "find"), (60, 15, 10, 1, 14))[0]
        first = rng.randrange(6)
        whose = rng.choice((ALICE, BOB)), tag(f"s{rng.randrange(40)}")
        yield what, rng.choice(ALL), first, first + rng.randrange(1, 6), *whose


def test_a_subscriber_knows_the_directory_after_ten_thousand_stores_evictions_and_clears() -> None:
    rng = random.Random(41)
    publisher = EventPublisher("127.0.0.1", free_ports())
    until(lambda: publisher.port is not None)
    sixty = 60 * record_bytes(header(range(8)))
    world = announced(
        World({"cpu": sixty, "nvme": 2 * sixty, "s3": 3 * sixty}, tombstones_max=10**6), publisher.feed
    )
    catalog, evicted = world.catalog, 0
    for tenant in (ALICE, BOB):
        for one in range(40):
            catalog.find(catalog_world.lookup([], tenant=tenant, session=tag(f"s{one}")), ())
    with Subscriber(publisher.port) as router:
        for what, tier, first, end, tenant, session in histories(rng, 10_000):
            world.clock.now_s += rng.random()
            ids = [rng.randrange(3), *range(end + 1)]
            of = header(ids[:end], first, tenant=tenant, session=session, tail_tokens=rng.choice((0, 0, 3)))
            if what == "store":
                catalog.find(catalog_world.lookup([], tenant=tenant, session=session), ())
                answer = catalog.reserve(tier, of, record_bytes(of), clear_seq=catalog.clears.seq)
                if isinstance(answer, Transfer):
                    evicted += len(answer.victims)
                    for victim in answer.victims:
                        catalog.dropped(victim)
                    catalog_world.landed(catalog, answer)
            elif what == "copy":
                copy = catalog.reserve_copy(tier, of.address)
                if isinstance(copy, Transfer):
                    for victim in copy.victims:
                        catalog.dropped(victim)
                    catalog_world.landed(catalog, copy)
            elif what == "lose":
                lost = catalog.lose(of.address, tier)
                if lost is not None:
                    catalog.dropped(lost)
            elif what == "clear":
                for gone in catalog.clear(Clear(tenant, session if rng.random() < 0.8 else None)):
                    catalog.dropped(gone)
            else:
                catalog.find(catalog_world.lookup(ids[:end], tenant=tenant, session=session), ALL)
            if rng.random() < 0.01:
                router.read()
        catalog.check_integrity()
        there = held(world)
        assert sum(map(len, there.values())) > 30
        assert evicted > 300
        heard = router.heard
        until(
            lambda: {place: heard.at(*place) for place in PLACES} == there,
            router.read,
            router.replay,
        )
    publisher.close()


def test_blocks_of_a_tier_have_the_pools_names_and_parents_and_no_tokens() -> None:
    feed, batches, heard = EventFeed(), Batches(lambda: 1.0), HeardCache()
    world = announced(World(), feed)
    of = header((1, 2, 3, 4), 2)
    world.store("cpu", of)
    batches.add(feed.take())
    heard.hear_all(batches.since(0))
    keys = [hash_of(key) for key in chain((1, 2, 3, 4))]
    (believed,) = heard.blocks.values()
    assert {one: known.parent for one, known in believed.items()} == {keys[2]: keys[1], keys[3]: keys[2]}
    assert {known.token_ids for known in believed.values()} == {()}
