"""An eviction rule made by docs/ARCHITECTURE.md alone ("to change X, start at Y"): the latest goes first.

One class, in the place of another that `make_policy` gives. A node's tiers, a replica's pool and the
simulator follow; nothing of them knows which rule it is given.
"""

from __future__ import annotations

import pytest

from samovar.cache_tiers.blocks import Placement
from samovar.cache_tiers.forecast import Floats
from samovar.cache_tiers.policy import IdleSessions, make_policy, policies
from samovar.cache_tiers.policy.policies import Candidates
from samovar.cluster.plan.simulator.tier import SimTier
from samovar.configs.sections import PolicySettings, TierSettings
from samovar.replicas.kv import ROOT_ENTRY, PagePool
from tests.support.nodes.node_harness import heap_bench, sample

LRU = PolicySettings(name="lru")
SESSIONS = [bytes([number]) * 16 for number in range(4)]


class LatestFirst:
    """The whole rule."""

    name = "lru"  # whose place it takes
    superseded_share = 1.0
    looks_at_depth = False
    clean_first = True

    def worth(self, of: Candidates, sessions: IdleSessions, now_s: float, horizon_s: float) -> Floats:
        return -of.used_s

    def shared_worth(
        self, rates: Floats, used_s: Floats, saved_s: Floats, best: Floats, horizon_s: float
    ) -> Floats:
        return -used_s


def held_by_a_node() -> list[int]:
    """Store four records where three have room; return those that are still there."""
    nbytes = sample(0).record.nbytes
    node = heap_bench(bytes_max=3 * nbytes, settings=TierSettings(policy=LRU))
    wanted = [
        sample(number, session=session, placement=Placement(write_behind=(), min_ttl_s=0.0))
        for number, session in enumerate(SESSIONS)
    ]
    for one in wanted:
        node.clock.now_s += 100
        assert node.store(one) == "taken"
    node.node.check_integrity()
    return [number for number, one in enumerate(wanted) if node.copies(one)]


def held_by_a_pool() -> list[int]:
    """Publish three blocks, release them, allocate a page; return the blocks that are still there."""
    now_s = 100.0
    pool = PagePool(4, 4, policy=make_policy(LRU), settings=LRU, clock=lambda: now_s)
    pages = []
    for number in range(3):
        now_s += 100.0
        page = pool.allocate()
        assert pool.publish(bytes([number]) * 32, ROOT_ENTRY, (number,) * 4, page) is not None
        pool.own(SESSIONS[number], page)
        pages.append(page)
    for page in pages:
        now_s += 100.0
        pool.release([page])
    taken = pool.allocate()
    return [number for number, page in enumerate(pages) if page != taken]


def held_by_the_simulator() -> list[int]:
    sessions = IdleSessions(10)
    tier = SimTier(3, 16, make_policy(LRU), LRU, sessions)
    for number in range(4):
        now_s = 100.0 * number
        sessions.started(number, now_s)
        tier.use([number], number, now_s, now_s + 1)
        sessions.ended(number, now_s + 1)
        tier.changed(number)
    return [number for number in range(4) if tier.prefix([number])]


def test_one_class_changes_what_all_evict_first(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = (held_by_a_node, held_by_a_pool, held_by_the_simulator)
    assert [held() for held in asked] == [[1, 2, 3], [1, 2], [1, 2, 3]]
    monkeypatch.setattr(policies, "LeastRecentlyUsed", LatestFirst)
    assert [held() for held in asked] == [[0, 1, 3], [0, 1], [0, 1, 3]]
