"""A pool that tells its blocks: who hears it knows exactly which are found, after any history."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant

from samovar.cache_tiers.blocks.extent import ROOT, TAG_BYTES, block_key
from samovar.cache_tiers.events.feed import Batches, EventFeed, hash_of
from samovar.replicas.kv.page_pool import ROOT_ENTRY, AnnouncedPool, PagePool
from tests.support.amounts import examples
from tests.support.heard_cache import HeardCache
from tests.unit.replicas.kv import test_page_pool as of_pool
from tests.unit.replicas.kv.test_page_pool import BLOCK, PoolMachine

OWNER = bytes([7]) * 2 * TAG_BYTES


class Ear:
    """One that listens to a pool."""

    def __init__(self, is_salted: bool = True) -> None:
        self.feed, self.batches, self.heard = EventFeed(), Batches(lambda: 1.0), HeardCache()
        self._is_salted = is_salted

    def pool(self, pages: int, block_tokens: int, **options: object) -> PagePool:
        return AnnouncedPool(self.feed, self._is_salted, pages, block_tokens, **options)

    def knows(self, pool: PagePool) -> None:
        first = self.batches.next_number
        self.batches.add(self.feed.take())
        self.heard.hear_all(self.batches.since(first))
        there = {hash_of(entry.key): entry for chain in pool.index.chains() for entry in chain}
        believed = self.heard.blocks.get(("GPU", None), {})
        # A block whose beginning was evicted is in no chain: it is in the pool until its page is needed.
        assert there.keys() <= believed.keys()
        pages = {hash_of(entry.key) for page in pool.index.pages() if (entry := pool.index.of_page(page))}
        assert believed.keys() == pages
        for one, entry in there.items():
            assert believed[one].token_ids == tuple(entry.token_ids)


class HeardPoolMachine(PoolMachine):
    """All that the pool is put through, with one that listens."""

    @initialize(pages=st.integers(3, 24), name=st.sampled_from(("lru", "t-lru", "ttl", "learned")))
    def start(self, pages: int, name: str) -> None:
        self.ear = Ear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(of_pool, "PagePool", self.ear.pool)
            super().start(pages, name)

    @invariant()
    def who_hears_knows_what_is_there(self) -> None:
        if hasattr(self, "ear"):
            self.ear.knows(self.pool)


TestHeardPoolMachine = HeardPoolMachine.TestCase
TestHeardPoolMachine.settings = settings(max_examples=examples(40), stateful_step_count=60, deadline=None)


def published(pool: PagePool, tokens: list[int], owner: bytes = OWNER) -> list[int]:
    key, parent, pages = ROOT, ROOT_ENTRY, []
    for start in range(0, len(tokens), BLOCK):
        ids = tokens[start : start + BLOCK]
        page = pool.allocate()
        key = block_key(bytes(32), key, ids)
        block = pool.publish(key, parent, ids, page)
        assert block is not None
        pool.own(owner, page)
        parent = block.entry.number
        pages.append(page)
    return pages


@pytest.mark.parametrize("is_salted", [False, True])
def test_a_prompts_blocks_are_told_with_its_tokens_and_whose_it_is(is_salted: bool) -> None:
    ear = Ear(is_salted)
    pool = ear.pool(9, BLOCK)
    tokens = list(range(3 * BLOCK))
    published(pool, tokens)
    ear.knows(pool)
    first, *rest = ear.heard.blocks["GPU", None].values()
    assert [token for one in (first, *rest) for token in one.token_ids] == tokens
    assert (first.parent, first.salt) == (None, OWNER[:TAG_BYTES].hex() if is_salted else None)
    assert {one.salt for one in rest} == {None}


@pytest.mark.guarantee("G12")
def test_what_is_forgotten_is_told_as_removed_and_replayed_to_no_one() -> None:
    ear = Ear()
    pool = ear.pool(9, BLOCK)
    other = bytes([8]) * 2 * TAG_BYTES
    gone, stays = published(pool, [900 + one for one in range(8)]), published(pool, list(range(8)), other)
    pool.release(gone)
    pool.release(stays)
    ear.knows(pool)
    assert pool.forget([OWNER]) == 2
    ear.knows(pool)
    assert len(ear.heard.at("GPU", None)) == 2
    late = HeardCache()
    first, *rest = ear.batches.since(0)
    assert "900" not in str(msgpack.unpackb(first[1]))
    late.hear(*first)
    assert len(late.at("GPU", None)) == 2
    assert rest, "the removal is there for those that knew"


def test_what_was_evicted_is_told() -> None:
    ear = Ear()
    pool = ear.pool(3, BLOCK)
    pool.release(published(pool, list(range(2 * BLOCK))))
    ear.knows(pool)
    pool.release(published(pool, [50 + one for one in range(2 * BLOCK)]))
    ear.knows(pool)
    assert pool.evictions == 2
    assert len(ear.heard.at("GPU", None)) == 2
