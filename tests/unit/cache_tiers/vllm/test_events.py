"""What routers are told of the tiers: a router that believes it finds what there is, and nothing else."""

from __future__ import annotations

import random
from typing import Any

import pytest

from samovar.cache_tiers.blocks import CPU, NVME, S3
from samovar.cache_tiers.events.feed import REMOTE, STORAGE, BlockPlace
from samovar.cache_tiers.messages import BlockRange, LookupResult
from samovar.cache_tiers.vllm import events
from samovar.cache_tiers.vllm.events import Announced, Chain, Removed, Stored
from samovar.cache_tiers.vllm.lookups import PromptLookup
from tests.support.fake_vllm import BLOCK_TOKENS, FakeVllm, prompt
from tests.unit.cache_tiers.vllm.test_connector_laws import Node, engines, node, until_held

__all__ = ["engines", "node"]
MEMORY = BlockPlace("CPU", "LOCAL")
BLOCKS = 8


class Router:
    """Believes what it is told. A block may be in several places, and comes once to each."""

    def __init__(self) -> None:
        self.believes: dict[Any, set[BlockPlace]] = {}

    def hear(self, told: list[Stored | Removed]) -> None:
        for event in told:
            if isinstance(event, Stored):
                assert event.first < event.end <= len(event.chain.hashes)
                for one in event.chain.hashes[event.first : event.end]:
                    assert event.place not in self.believes.setdefault(one, set()), "told twice"
                    self.believes[one].add(event.place)
            else:
                assert event.hashes
                for one in event.hashes:
                    self.believes[one].remove(event.place)  # `KeyError`: it was never there

    def there(self) -> dict[Any, BlockPlace]:
        assert all(len(places) < 2 for places in self.believes.values())
        return {one: place for one, places in self.believes.items() for place in places}


class World:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.announced = Announced(lambda: self.now_s)
        self.router = Router()

    def looks_up(self, tiers: list[str], *, seed: int = 0, life: str = "life", ago_s: float = 0.0) -> None:
        """A lookup of a prompt whose first blocks are in those tiers, begun a while ago."""
        spans = tuple(
            BlockRange(bytes([at]) * 32, b"t" * 16, at, 0, 1, tier, 100)  # type: ignore[arg-type]
            for at, tier in enumerate(tiers)
        )
        self.now_s += 1
        began_s, tokens = self.now_s - ago_s, BLOCKS * BLOCK_TOKENS + 1
        made = PromptLookup(b"n" * 32, b"t" * 16, b"s" * 16, began_s, tokens, 1.0)
        made.keys, made.found = self.keys(seed), (LookupResult(life, 0, spans),)
        self.announced.looked_up(self.chain(seed), made)
        self.router.hear(self.announced.take())

    def keys(self, seed: int) -> list[bytes]:
        return [bytes([seed, at]) * 16 for at in range(BLOCKS)]

    def chain(self, seed: int) -> Chain:
        hashes = tuple(f"hash {seed} {at}" for at in range(BLOCKS))
        return Chain(hashes, prompt(seed, BLOCKS), BLOCK_TOKENS, None)

    def stores(self, first: int, taken: dict[int, int], *, ranks: int = 1, seed: int = 0) -> None:
        self.now_s += 1
        self.announced.storing("r", self.chain(seed), self.keys(seed), first)
        for rank, blocks in taken.items():
            self.announced.taken({"r": {rank: blocks}}, ranks)
        self.router.hear(self.announced.take())

    def there(self, seed: int = 0) -> list[BlockPlace | None]:
        believed = self.router.there()
        return [believed.get(one) for one in self.chain(seed).hashes]


@pytest.fixture
def world() -> World:
    return World()


def test_a_lookup_tells_what_there_is_and_where(world: World) -> None:
    world.looks_up([CPU.name, CPU.name, NVME.name, S3.name])
    assert world.there() == [MEMORY, MEMORY, STORAGE, REMOTE] + 4 * [None]
    world.looks_up([CPU.name, NVME.name, NVME.name])  # the second has sunk, the fourth is gone
    assert world.there() == [MEMORY, STORAGE, STORAGE] + 5 * [None]


def test_a_store_is_told_when_every_rank_has_it(world: World) -> None:
    world.stores(2, {0: 5})
    assert world.there() == [None, None] + 5 * [MEMORY] + [None]
    world.announced.gone()
    world.router.hear(world.announced.take())
    world.stores(0, {0: 4}, ranks=2)
    assert world.there() == 8 * [None]
    assert world.announced.is_waiting
    world.stores(0, {0: 4, 1: 3}, ranks=2)
    assert world.there() == 3 * [MEMORY] + 5 * [None]


def test_a_store_that_is_never_told_is_not_waited_for(world: World) -> None:
    world.announced.storing("r", world.chain(0), world.keys(0), 0)
    assert world.announced.is_waiting
    world.now_s += events.TOLD_S + 1
    assert not world.announced.is_waiting


def test_a_lookup_from_before_a_store_does_not_unsay_it(world: World) -> None:
    world.stores(0, {0: 4})
    world.looks_up([], ago_s=3)
    assert world.there() == 4 * [MEMORY] + 4 * [None]
    world.looks_up([])
    assert world.there() == 8 * [None]


def test_a_node_in_another_life_has_no_memory_of_before(world: World) -> None:
    world.looks_up([CPU.name, NVME.name])
    world.looks_up([NVME.name], seed=1, life="other")
    assert world.there() == [None, STORAGE] + 6 * [None]


def test_what_is_forgotten_is_told_as_removed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "KEYS_MAX", 12)
    for seed in range(3):
        world.looks_up(BLOCKS * [CPU.name], seed=seed)
    assert len(world.router.there()) == 12
    assert world.there(2) == 8 * [MEMORY]


@pytest.mark.parametrize("seed", range(10))
def test_a_router_believes_what_was_last_seen(world: World, seed: int) -> None:
    rng = random.Random(seed)
    last: dict[int, list[BlockPlace | None]] = {}
    places = {CPU.name: MEMORY, NVME.name: STORAGE, S3.name: REMOTE}
    for _ in range(60):
        chain = rng.randrange(3)
        tiers = [rng.choice(list(places)) for _ in range(rng.randrange(BLOCKS + 1))]
        world.looks_up(tiers, seed=chain)
        last[chain] = [places[tier] for tier in tiers] + (BLOCKS - len(tiers)) * [None]
        assert [world.there(one) for one in last] == list(last.values())


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_router_hears_of_an_engine(node: Node, engines: Any, ranks: int) -> None:
    engine: FakeVllm = engines(events=True, ranks=ranks)
    router, ids = Router(), prompt(1, 10)
    until_held(engine, ids)
    engine.settle()
    assert engine.scheduler.announced is not None
    router.hear(engine.scheduler.announced.take())
    hashes = engine.request(ids).block_hashes
    assert [router.there().get(one) for one in hashes] == 10 * [MEMORY]
    node.stop()
    node.start()
    other: FakeVllm = engines(events=True, ranks=ranks)  # of what was there before it
    router = Router()
    assert other.run(other.request(ids)) == 10 * BLOCK_TOKENS
    assert other.scheduler.announced is not None
    router.hear(other.scheduler.announced.take())
    assert [router.there().get(one) for one in hashes] == 10 * [STORAGE]
    assert other.scheduler.clear(30.0)
    router.hear(other.scheduler.announced.take())
    assert router.there() == {}


def test_an_engine_without_events_keeps_none(engines: Any) -> None:
    engine = engines()
    until_held(engine, prompt(1, 3))
    assert engine.scheduler.announced is None
