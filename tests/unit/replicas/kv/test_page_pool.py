"""The page pool against a plain model of itself: thousands of random operations, books checked after each."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from samovar.cache_tiers.blocks import SESSION_BYTES, TAG_BYTES
from samovar.cache_tiers.blocks.extent import ROOT, block_key, namespace_digest
from samovar.cache_tiers.forecast.turns import BINS, COLD, EDGES_S, curve_of, resume_within
from samovar.cache_tiers.policy.policies import LikelyReturn, make_policy
from samovar.configs.sections import PolicySettings
from samovar.replicas.kv.page_pool import ROOT_ENTRY, TRASH_PAGE, OutOfPages, PagePool
from tests.support.amounts import examples

BLOCK = 4
NAMESPACES = [namespace_digest(b"a"), namespace_digest(b"b")]
SESSION = bytes([1]) * TAG_BYTES + bytes([2]) * SESSION_BYTES
OWNERS = [SESSION + bytes([side]) * SESSION_BYTES for side in (0, 1, 2)]  # one tenant's, and one session's
OWNERS += [bytes([3]) * 2 * TAG_BYTES, bytes([1]) * TAG_BYTES + bytes([4]) * TAG_BYTES]
NAMES = {  # what a clear may name: an owner, a whole session, a tenant
    **{owner: {owner} for owner in OWNERS[1:]},
    OWNERS[0]: set(OWNERS[:3]),
    bytes([1]) * TAG_BYTES: {*OWNERS[:3], OWNERS[4]},
}


def keys_of(
    namespace: bytes,
    tokens: Sequence[int],
    block_tokens: int,
    hashed: Callable[[bytes, bytes, Sequence[int]], bytes] = block_key,
) -> list[bytes]:
    keys: list[bytes] = []
    for start in range(0, len(tokens), block_tokens):
        keys.append(hashed(namespace, keys[-1] if keys else ROOT, tokens[start : start + block_tokens]))
    return keys


class PoolMachine(RuleBasedStateMachine):
    """Page tables come, grow, fork, publish and go. `content` is the oracle: what each page really holds."""

    @initialize(pages=st.integers(3, 24), name=st.sampled_from(("lru", "t-lru", "ttl", "learned")))
    def start(self, pages: int, name: str) -> None:
        policy = PolicySettings(name=name, slo_tokens=4)  # type: ignore[arg-type]
        self.now_s = 100.0
        self.pool = PagePool(
            pages,
            BLOCK,
            policy=make_policy(policy),
            settings=policy,
            clock=lambda: self.now_s,
            saved_s=float if pages % 2 else None,  # where cost counts, a block may stay without its parent
        )
        self.tables: list[list[int]] = []
        # page -> (namespace, all token ids up to and including this block), once it was written in full
        self.content: dict[int, tuple[bytes, tuple[int, ...]]] = {}
        self.owners: dict[int, set[bytes]] = {}
        self.free_at_start = self.pool.available

    def _allocate(self) -> int | None:
        before = self.pool.available
        try:
            page = self.pool.allocate()
        except OutOfPages:
            assert before == 0
            return None
        assert page != TRASH_PAGE
        assert all(page not in table for table in self.tables), "a page that is in use was handed out"
        assert page not in self.pool.index
        self.content.pop(page, None)
        self.owners.pop(page, None)
        return page

    @rule(
        namespace=st.sampled_from(NAMESPACES),
        blocks=st.lists(st.sampled_from([(1, 1, 1, 1), (2, 2, 2, 2), (3, 1, 2, 1)]), min_size=1, max_size=4),
        owner=st.sampled_from(OWNERS),
    )
    def new_sequence(self, namespace: bytes, blocks: list[tuple[int, ...]], owner: bytes) -> None:
        """Match what is cached, allocate the rest, write and publish it, as the scheduler does."""
        tokens = tuple(token for block in blocks for token in block)
        hits = self.pool.match(keys_of(namespace, tokens, BLOCK), tokens)
        for depth, entry in enumerate(hits):
            wanted = (namespace, tokens[: (depth + 1) * BLOCK])
            assert self.content[entry.page] == wanted, "a hit holds another block's content"
            self.pool.acquire(entry.page)
            self._own(entry.page, owner)
        table = [entry.page for entry in hits]
        key, parent = (hits[-1].key, hits[-1].number) if hits else (ROOT, ROOT_ENTRY)
        self.tables.append(table)
        for depth in range(len(hits), len(blocks)):
            page = self._allocate()
            if page is None:
                break
            table.append(page)
            self.content[page] = (namespace, tokens[: (depth + 1) * BLOCK])
            ids = blocks[depth]
            key = block_key(namespace, key, ids)
            published = self.pool.publish(key, parent, ids, page)
            assert published is not None, "no key collides: only a block that no prompt finds may have it"
            if published.duplicate:
                assert self.content[published.entry.page] == self.content[page]
                self.pool.acquire(published.entry.page)
                self.pool.release([page])
                table[-1] = published.entry.page
            self._own(published.entry.page, owner)
            parent = published.entry.number

    def _own(self, page: int, owner: bytes) -> None:
        self.pool.own(owner, page)
        self.owners.setdefault(page, set()).add(owner)

    @rule(tags=st.sets(st.sampled_from(list(NAMES)), min_size=1))
    def forget(self, tags: set[bytes]) -> None:
        """Pages all of whose owners are cleared are found no more; all others still are."""
        cleared = set().union(*(NAMES[tag] for tag in tags))
        published = {page: owners for page, owners in self.owners.items() if page in self.pool.index}
        gone = {page for page, owners in published.items() if owners <= cleared}
        assert self.pool.forget(tags) == len(gone)
        assert not any(page in self.pool.index for page in gone)
        assert all(page in self.pool.index for page in published.keys() - gone)
        self.owners = {page: owners - cleared for page, owners in published.items() if page not in gone}

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        for page in table:
            self.pool.acquire(page)
        self.tables.append(list(table))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def append_unpublished_page(self, data: st.DataObject) -> None:
        table = self.tables[data.draw(st.integers(0, len(self.tables) - 1))]
        page = self._allocate()
        if page is not None:
            table.append(page)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.release(table)

    @rule(
        owner=st.sampled_from(OWNERS),
        what=st.sampled_from(("started", "ended", "told")),
        idle_s=st.floats(0, 99),
    )
    def news(self, owner: bytes, what: str, idle_s: float) -> None:
        self.now_s += idle_s
        if what == "started":
            self.pool.sessions.started(owner, self.now_s)
        elif what == "ended":
            self.pool.sessions.ended(owner, self.now_s, curve_of(np.full(BINS, idle_s / 100)), tokens=8)
        else:
            self.pool.sessions.set_curve(owner, COLD, self.now_s)
        self.pool.returns.changed(owner)

    @rule(owner=st.sampled_from(OWNERS))
    def cool(self, owner: bytes) -> None:
        alone = [
            page
            for page, owners in self.owners.items()
            if owners and owners <= NAMES[owner] and page in self.pool.index
        ]
        idle = [page for page in alone if not self.pool.refs(page)]
        assert self.pool.evict_first(owner) == len(idle)

    @rule()
    def clear(self) -> None:
        cached = self.pool.cached
        assert self.pool.clear_cache() == cached
        assert self.pool.cached == 0

    @invariant()
    def books(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check_integrity(self.tables)
            assert self.pool.active == len({page for table in self.tables for page in table})

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            while self.tables:
                self.pool.release(self.tables.pop())
            self.pool.check_integrity([])
            assert self.pool.available == self.free_at_start


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=examples(150), stateful_step_count=60, deadline=None)


def _publish_chain(pool: PagePool, namespace: bytes, blocks: list[tuple[int, ...]]) -> list[int]:
    key, parent, pages = ROOT, ROOT_ENTRY, []
    for ids in blocks:
        page = pool.allocate()
        key = block_key(namespace, key, ids)
        published = pool.publish(key, parent, ids, page)
        assert published is not None
        parent = published.entry.number
        pages.append(page)
    return pages


def test_least_recently_used_goes_first_and_leaves_before_roots() -> None:
    pool = PagePool(5, BLOCK)
    namespace = NAMESPACES[0]
    old = _publish_chain(pool, namespace, [(1, 1, 1, 1), (1, 1, 1, 2)])
    new = _publish_chain(pool, namespace, [(2, 2, 2, 2), (2, 2, 2, 3)])
    pool.release(old)
    pool.release(new)
    assert [pool.allocate() for _ in range(4)] == [old[1], old[0], new[1], new[0]]
    assert pool.evictions == 4


def test_a_hit_makes_recent() -> None:
    pool = PagePool(4, BLOCK)
    first = _publish_chain(pool, NAMESPACES[0], [(1, 1, 1, 1)])
    second = _publish_chain(pool, NAMESPACES[0], [(2, 2, 2, 2)])
    pool.release(first)
    pool.release(second)
    hits = pool.match(keys_of(NAMESPACES[0], (1, 1, 1, 1), BLOCK), (1, 1, 1, 1))
    pool.acquire(hits[0].page)
    pool.release([hits[0].page])
    pool.allocate()  # the free one
    assert pool.allocate() == second[0]


def test_who_is_likely_to_return_keeps_its_pages_and_who_is_cooled_loses_them_first() -> None:
    now_s = 100.0
    pool = PagePool(5, BLOCK, policy=LikelyReturn("learned"), clock=lambda: now_s)
    chains = {
        owner: _publish_chain(pool, namespace, [(1, 1, 1, 1), (1, 1, 1, 2)])
        for owner, namespace in zip((b"a", b"b"), NAMESPACES, strict=False)
    }
    for owner, hazard in ((b"a", 0.5), (b"b", 0.0)):
        for page in chains[owner]:
            pool.own(owner, page)
        pool.release(chains[owner])
        now_s += 1
        pool.sessions.ended(owner, now_s, curve_of(np.full(BINS, hazard)))
        pool.returns.changed(owner)
    now_s += 5
    assert pool.allocate() == chains[b"b"][1], "used later, but not likely to be wanted"
    assert pool.evict_first(b"a") == 2
    assert [pool.allocate() for _ in range(2)] == chains[b"a"][::-1]
    pool.check_integrity()


def test_a_client_that_types_keeps_its_pages() -> None:
    now_s = 100.0
    pool = PagePool(3, BLOCK, policy=LikelyReturn("learned"), clock=lambda: now_s)
    chains = [_publish_chain(pool, namespace, [(1, 1, 1, 1)]) for namespace in NAMESPACES[:2]]
    for owner, chain in zip((b"a", b"b"), chains, strict=True):
        pool.own(owner, chain[0])
        pool.release(chain)
        pool.sessions.ended(owner, now_s, curve_of(np.full(BINS, 0.05)))
        now_s += 1
    pool.returns.hint(b"a", "typing", None)
    pool.returns.hint(b"nobody", "typing", None)
    assert pool.allocate() == chains[1][0]
    pool.returns.hint(b"a", "closed", None)
    assert resume_within(pool.sessions.curves[pool.sessions.slot(b"a")], 0.0, 1e4) == 0.0


def test_a_regenerated_branch_goes_before_what_the_session_uses() -> None:
    now_s = 100.0
    pool = PagePool(5, BLOCK, policy=LikelyReturn("learned"), clock=lambda: now_s)
    root, left = _publish_chain(pool, NAMESPACES[0], [(1, 1, 1, 1), (2, 2, 2, 2)])
    (other,) = _publish_chain(pool, NAMESPACES[1], [(3, 3, 3, 3)])
    for page, owner in ((root, b"a"), (left, b"a"), (other, b"b")):
        pool.own(owner, page)
    pool.release([root, left])
    pool.release([other])
    pool.sessions.ended(b"b", now_s, curve_of(np.full(BINS, 0.1)))
    now_s += 1
    pool.sessions.started(b"a", now_s)
    pool.acquire(root)
    pool.release([root])
    pool.sessions.ended(b"a", now_s, curve_of(np.full(BINS, 0.5)))
    taken = []
    for _ in range(4):
        now_s += 2.0  # all are ranked anew: how far ahead the pool looks changes with the first eviction
        taken.append(pool.allocate())
    assert taken[1:] == [left, other, root]


def test_what_is_dear_to_compute_stays_where_cost_counts() -> None:
    pool = PagePool(
        4, BLOCK, policy=LikelyReturn("learned"), clock=lambda: 100.0, saved_s=lambda end: float(end)
    )
    deep = _publish_chain(pool, NAMESPACES[0], [(1, 1, 1, 1), (2, 2, 2, 2)])
    flat = _publish_chain(pool, NAMESPACES[1], [(3, 3, 3, 3)])
    for page, owner in ((deep[0], b"a"), (deep[1], b"a"), (flat[0], b"b")):
        pool.own(owner, page)
    pool.release(deep)
    pool.release(flat)
    assert pool.allocate() == flat[0]


@pytest.mark.parametrize("is_used", [False, True])
def test_a_block_whose_parent_went_first_is_published_again_behind_the_next_one(is_used: bool) -> None:
    """Else nothing behind it would be published any more, in any later turn."""
    pool = PagePool(4, BLOCK, policy=LikelyReturn("learned"), clock=lambda: 100.0, saved_s=float)
    blocks = [(1, 1, 1, 1), (2, 2, 2, 2)]
    keys = keys_of(NAMESPACES[0], (*blocks[0], *blocks[1]), BLOCK)
    first, second = _publish_chain(pool, NAMESPACES[0], blocks)
    pool.own(b"a", first, second)
    pool.own(b"b", first)
    pool.release([first, second])
    for owner in (b"a", b"b"):
        pool.sessions.ended(owner, 100.0, curve_of(np.full(BINS, 0.5)))
        pool.returns.changed(owner)
    spare = pool.allocate()
    assert pool.allocate() == first, "the second saves twice as much"
    if is_used:
        pool.acquire(second)
    parent = pool.publish(keys[0], ROOT_ENTRY, blocks[0], first)
    assert parent is not None
    again = pool.publish(keys[1], parent.entry.number, blocks[1], spare)
    assert again is not None
    assert not again.duplicate
    assert [entry.page for entry in pool.match(keys, (*blocks[0], *blocks[1]))] == [first, spare]
    assert pool.owners_of(second) == frozenset()
    if is_used:
        pool.release([second])
    assert pool.free == 1
    pool.check_integrity([[first, spare]])


def test_a_page_that_is_always_in_use_counts_each_of_its_uses() -> None:
    """A system prompt's: of all that have it one is always running, so it is never released."""
    now_s = 10_000.0
    pool = PagePool(3, BLOCK, policy=LikelyReturn("learned"), clock=lambda: now_s)
    (shared,), (other,) = (_publish_chain(pool, namespace, [(1, 1, 1, 1)]) for namespace in NAMESPACES)
    pool.own(b"c", other)
    for number in range(100):
        now_s += 1
        pool.own((b"a", b"b")[number % 2], shared)
    pool.release([shared])
    pool.release([other])
    for owner, per_s in ((b"a", 0.0), (b"b", 0.0), (b"c", 1e-4)):
        pool.sessions.ended(owner, now_s, curve_of(-np.expm1(-per_s * np.diff(EDGES_S))))
        pool.returns.changed(owner)
    now_s += 3000
    assert pool.allocate() == other, "100 uses in 100 s are more than a return in three hours"


@pytest.mark.guarantee("G2", "G3")
def test_another_namespace_never_hits() -> None:
    pool = PagePool(4, BLOCK)
    _publish_chain(pool, NAMESPACES[0], [(1, 1, 1, 1)])
    for namespace, hits in zip(NAMESPACES, (1, 0), strict=False):
        assert len(pool.match(keys_of(namespace, (1, 1, 1, 1), BLOCK), (1, 1, 1, 1))) == hits


def test_f16_forced_hash_collisions_are_misses() -> None:
    """F16: with an 8-bit hash everything collides; token ids and parents turn that into misses."""

    def short_key(namespace: bytes, parent: bytes, token_ids: Sequence[int]) -> bytes:
        return bytes(31) + block_key(namespace, parent, token_ids)[:1]

    pool = PagePool(2000, 2)
    truth: dict[int, tuple[int, ...]] = {}
    collisions = 0
    for first in range(40):
        for second in range(40):
            tokens = (first, first, second, second)
            hits = pool.match(keys_of(NAMESPACES[0], tokens, 2, short_key), tokens)
            for depth, entry in enumerate(hits):
                assert truth[entry.page] == tokens[: 2 * (depth + 1)]
            key, parent = (hits[-1].key, hits[-1].number) if hits else (ROOT, ROOT_ENTRY)
            for depth in range(len(hits), 2):
                ids = tokens[2 * depth : 2 * depth + 2]
                page = pool.allocate()
                key = short_key(NAMESPACES[0], key, ids)
                published = pool.publish(key, parent, ids, page)
                if published is None:
                    collisions += 1
                    break
                truth[page] = tokens[: 2 * (depth + 1)]
                parent = published.entry.number
    pool.check_integrity()
    assert collisions > 500, "the short hash was meant to collide"


def test_a_page_of_several_sessions_is_forgotten_with_the_last_of_them() -> None:
    pool = PagePool(6, BLOCK)
    shared, own = _publish_chain(pool, NAMESPACES[0], [(1, 1, 1, 1), (2, 2, 2, 2)])
    for page, owner in ((shared, b"a"), (shared, b"b"), (own, b"a")):
        pool.own(owner, page)
    pool.release([shared, own])
    assert pool.forget({b"a"}) == 1
    assert shared in pool.index
    assert own not in pool.index
    assert pool.forget({b"b"}) == 1
    assert pool.free == pool.usable
    pool.check_integrity()


def test_a_page_of_very_many_sessions_is_forgotten_only_with_all_of_them() -> None:
    pool = PagePool(4, BLOCK)
    (page,) = _publish_chain(pool, NAMESPACES[0], [(1, 1, 1, 1)])
    tenant = b"t" * TAG_BYTES
    for number in range(200):
        pool.own(tenant + b"%d" % number, page)
    for number in range(200):
        assert pool.forget({tenant + b"%d" % number}) == 0
    pool.check_integrity()
    assert pool.forget({tenant}) == 1
    pool.check_integrity()


def test_g12_a_tenants_tag_stands_for_all_its_owners_and_for_nobody_else() -> None:
    pool = PagePool(8, BLOCK)
    pages = _publish_chain(pool, NAMESPACES[0], [(n, n, n, n) for n in range(5)])
    mine, other = b"m" * TAG_BYTES, b"o" * TAG_BYTES
    for page, owner in zip(pages, (mine + b"1", mine + b"2", other + b"1", mine, other + b"2"), strict=True):
        pool.own(owner, page)
    pool.own(other + b"1", pages[1])
    assert pool.forget({mine}) == 2
    assert {page for page in pages if page in pool.index} == {pages[1], pages[2], pages[4]}
    assert pool.owned(other + b"1") == [pages[2], pages[1]]
    pool.check_integrity()
    assert pool.forget({other + b"1", other + b"2"}) == 3
    pool.check_integrity()


@pytest.mark.guarantee("G12")
def test_forgetting_looks_at_no_page_of_anybody_else() -> None:
    """It runs between two steps of the engine: in a pool of 35,000 pages nobody may wait for it."""
    pages = 35_000
    pool = PagePool(pages + 1, BLOCK)
    tenants = [bytes([number]) * TAG_BYTES for number in range(1, 101)]
    for number in range(pages):
        (page,) = _publish_chain(pool, NAMESPACES[0], [(number, 0, 0, 0)])
        pool.own(tenants[number % 100] + b"%d" % (number // 7), page)
    held = pool.owned(tenants[0] + b"0")
    for unknown in (bytes(TAG_BYTES), bytes(TAG_BYTES) + b"0", tenants[0] + b"unknown"):
        assert lines_run(lambda unknown=unknown: pool.forget({unknown})) < 50
        assert lines_run(lambda unknown=unknown: pool.owned(unknown)) < 50
        assert lines_run(lambda unknown=unknown: pool.evict_first(unknown)) < 50
    assert len(held) == 1
    assert lines_run(lambda: pool.forget({tenants[0] + b"0"})) < 200
    assert not pool.owned(tenants[0] + b"0")


def lines_run(action: Callable[[], object]) -> int:
    """How many lines of Python that was: work, counted and not timed."""
    lines = 0

    def trace(_frame: FrameType, event: str, _argument: object) -> object:
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
    return lines


class TestMisuse:
    def test_release_twice(self) -> None:
        pool = PagePool(3, BLOCK)
        page = pool.allocate()
        pool.release([page])
        with pytest.raises(ValueError, match="more often"):
            pool.release([page])

    def test_acquire_free(self) -> None:
        pool = PagePool(3, BLOCK)
        with pytest.raises(ValueError, match="nothing to share"):
            pool.acquire(1)

    def test_publish_unowned_or_partial(self) -> None:
        pool = PagePool(3, BLOCK)
        key = block_key(NAMESPACES[0], ROOT, (1, 1, 1, 1))
        with pytest.raises(ValueError, match="not referenced"):
            pool.publish(key, ROOT_ENTRY, (1, 1, 1, 1), 1)
        page = pool.allocate()
        with pytest.raises(ValueError, match="full blocks"):
            pool.publish(key, ROOT_ENTRY, (1, 1, 1), page)

    @pytest.mark.guarantee("G10")
    def test_check_integrity_sees_a_lost_page(self) -> None:
        pool = PagePool(4, BLOCK)
        pool.allocate()
        with pytest.raises(AssertionError, match="page tables say"):
            pool.check_integrity([])
        pool._free.pop()
        with pytest.raises(AssertionError, match="is lost"):
            pool.check_integrity()
