"""The pool's cached pages: a tenant who floods it takes a share, and not the others' pages (S12, F35)."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from samovar.cache_tiers.blocks.extent import TAG_BYTES, namespace_digest
from samovar.configs.settings import Settings
from samovar.replicas.kv.page_pool import OutOfPages, PagePool
from samovar.replicas.start.tier_access import shared_tiers
from tests.support.router.router_harness import KEY, OTHER_KEY, make_settings
from tests.unit.replicas.kv.test_page_pool import BLOCK, keys_of

ALICE, BOB, CAROL = (bytes([number]) * TAG_BYTES for number in (1, 2, 3))
PAGES = 40


def chain(tenant: bytes, number: int, blocks: int) -> tuple[bytes, list[bytes], list[int]]:
    namespace = namespace_digest(tenant)
    tokens = [token for block in range(blocks) for token in (number, block, 0, 0)]
    return tenant + number.to_bytes(TAG_BYTES, "big"), keys_of(namespace, tokens, BLOCK), tokens


def turn(pool: PagePool, tenant: bytes, number: int, blocks: int) -> int:
    """As the scheduler does: share what is there, compute and publish the rest, let go. How many hits."""
    owner, keys, tokens = chain(tenant, number, blocks)
    hits = pool.match(keys, tokens)
    for entry in hits:
        pool.acquire(entry.page)
        pool.own(owner, entry.page)
    pages = [entry.page for entry in hits]
    parent = hits[-1].number if hits else 0
    for block in range(len(hits), blocks):
        try:
            pages.append(pool.allocate())
        except OutOfPages:
            break
        published = pool.publish(keys[block], parent, tokens[block * BLOCK : (block + 1) * BLOCK], pages[-1])
        assert published is not None
        parent = published.entry.number
        pool.own(owner, pages[-1])
        pool.check_integrity()
    pool.release(pages)
    pool.check_integrity()
    return len(hits)


def hit_rate(pool: PagePool, tenant: bytes) -> float:
    """Of conversations of half of the pool; nothing is changed."""
    hits = 0
    for number in range(4):
        _, keys, tokens = chain(tenant, number, 5)
        hits += len(pool.match(keys, tokens))
    return hits / 20


def flooded(share: float) -> PagePool:
    """Alice's conversations are half of the pool; then Bob sends three times the pool."""
    pool = PagePool(PAGES + 1, BLOCK, tenant_share=share)
    for number in range(4):
        turn(pool, ALICE, number, 5)
    for number in range(100, 130):
        turn(pool, BOB, number, 4)
    return pool


def test_f35_a_flood_takes_a_share_of_the_pool_by_default_where_there_are_several_keys() -> None:
    share = shared_tiers(make_settings(keys={"alice": KEY, "bob": OTHER_KEY})).tenant_share
    assert share == 0.5
    assert hit_rate(flooded(share), ALICE) >= 0.9
    alone = shared_tiers(Settings()).tenant_share
    assert alone == 1.0
    assert hit_rate(flooded(alone), ALICE) == 0, "it is the share that keeps the flood off"


def test_one_tenant_alone_may_have_the_whole_pool() -> None:
    pool = PagePool(PAGES + 1, BLOCK, tenant_share=0.5)
    for number in range(8):
        turn(pool, BOB, number, 5)
    assert pool.cached == PAGES
    assert pool.evictions == 0
    turn(pool, ALICE, 1, 5)
    assert pool.evictions == 5
    assert len(pool.match(*chain(ALICE, 1, 5)[1:])) == 5


@settings(deadline=None)
@given(
    turns=st.lists(
        st.tuples(
            st.sampled_from([ALICE, BOB, CAROL]), st.integers(0, 5), st.integers(1, 6), st.integers(0, 9)
        ),
        max_size=40,
    ),
    share=st.sampled_from([0.2, 0.5, 1.0]),
)
def test_books_hold_whatever_comes(turns: list[tuple[bytes, int, int, int]], share: float) -> None:
    pool = PagePool(13, BLOCK, tenant_share=share)
    for tenant, number, blocks, chance in turns:
        turn(pool, tenant, number, blocks)
        if chance == 0:
            pool.evict_first(chain(tenant, number, blocks)[0])
        elif chance == 1:
            pool.clear_cache()
        pool.check_integrity()
