"""What is evicted first with the settings that are shipped: in each tier, in a pool, and in the simulator.

Whose session was closed and what was a one-shot goes before whoever may come back, whatever floor its profile
has; and after a restart, when no session is known, the longest unused goes first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import get_args

import numpy as np
import pytest

from samovar.cache_tiers.blocks import TIERS, TierName
from samovar.cache_tiers.forecast.lineages import RATIO_MIN
from samovar.cache_tiers.forecast.turns import BINS, Curves, Hint, curve_of, hinted, times
from samovar.cache_tiers.policy import IdleSessions, make_policy
from samovar.cluster.plan.simulator.tier import SimTier
from samovar.configs.sections import PolicySettings, ProfileName, ProfilesSettings, TierSettings
from samovar.replicas.kv import ROOT_ENTRY, PagePool
from samovar.router.openai.parse import CacheWish
from samovar.router.routing.session import placement
from tests.support.nodes.catalog_world import ALICE, World, header, tag

SHIPPED = TierSettings()
NOW_S = 100 * 86400.0
USUAL = curve_of(np.full(BINS, 0.03))
WHO: dict[str, tuple[float, Curves]] = {
    "likely, 31 min": (1860.0, USUAL),
    "likely, 10 min": (600.0, USUAL),
    "one-shot, 5 min": (300.0, times(USUAL, RATIO_MIN)),
    "closed, 1 min": (60.0, hinted(USUAL, 0.0, Hint("closed", 0.0, "closed"))),
}
"""Each with its idle time and its forecast, the longest idle first."""
WANTED = ["closed, 1 min", "one-shot, 5 min", "likely, 31 min", "likely, 10 min"]

PROFILES: tuple[ProfileName, ...] = get_args(ProfileName)


def of_a_tier(tier: TierName, profile: ProfileName) -> list[str]:
    """The order in which a node's tier gives up what sessions of a profile have left in it."""
    placed = placement(SHIPPED, "alice", {}, CacheWish(profile=profile))
    assert placed is not None
    sessions = IdleSessions(10)
    world = World(policy=make_policy(SHIPPED.policy), sessions=sessions)
    names = {}
    for number, (name, (idle_s, curve)) in enumerate(WHO.items()):
        world.clock.now_s = NOW_S - idle_s
        one = header([number], session=tag(str(number)), placement=placed)
        sessions.started(ALICE + one.session, world.clock.now_s)
        world.store(tier, one)
        sessions.ended(ALICE + one.session, world.clock.now_s, curve)
        world.catalog.session_changed(ALICE + one.session, ALICE)
        names[one.address] = name
    world.clock.now_s = NOW_S
    return [names[address] for address in world.catalog.hottest(tier)][::-1]


def of_a_pool() -> list[str]:
    """The same of a replica's pool, which has no profiles."""
    now_s = NOW_S
    pool = PagePool(
        len(WHO) + 1, 4, policy=make_policy(SHIPPED.policy), settings=SHIPPED.policy, clock=lambda: now_s
    )
    names = {}
    for number, (name, (idle_s, curve)) in enumerate(WHO.items()):
        now_s = NOW_S - idle_s
        page, owner = pool.allocate(), ALICE + tag(str(number))
        pool.sessions.started(owner, now_s)
        assert pool.publish(bytes([number]) * 32, ROOT_ENTRY, (number,) * 4, page) is not None
        pool.own(owner, page)
        pool.release([page])
        pool.sessions.ended(owner, now_s, curve)
        pool.returns.changed(owner)
        names[page] = name
    now_s = NOW_S
    return [names[pool.allocate()] for _ in WHO]


def of_the_simulator(profile: ProfileName) -> list[str]:
    """The same of a simulated tier."""
    sessions = IdleSessions(10)
    gone: list[int] = []
    tier = SimTier(
        len(WHO),
        16,
        make_policy(SHIPPED.policy),
        SHIPPED.policy,
        sessions,
        on_evicted=lambda blocks, now_s: gone.extend(block.number for block in blocks),
        placed=lambda session: ProfilesSettings().named(profile),
    )
    for number, (idle_s, curve) in enumerate(WHO.values()):
        sessions.started(number, NOW_S - idle_s)
        tier.use([number], number, NOW_S - idle_s, NOW_S - idle_s)
        sessions.ended(number, NOW_S - idle_s, curve)
        tier.changed(number)
    tier.put(range(100, 100 + len(WHO)), "another", NOW_S)
    return [list(WHO)[number] for number in gone]


SHIPPED_ORDERS: dict[str, Callable[[], list[str]]] = {
    "pool": of_a_pool,
    **{f"{tier}, {name}": partial(of_a_tier, tier, name) for tier in TIERS for name in PROFILES},
    **{f"simulator, {name}": partial(of_the_simulator, name) for name in PROFILES},
}


@pytest.mark.parametrize("order", SHIPPED_ORDERS.values(), ids=list(SHIPPED_ORDERS))
def test_who_never_comes_back_goes_first_as_shipped(order: Callable[[], list[str]]) -> None:
    """Those that were never asked for again went last of all for half an hour, in three of four profiles."""
    assert order() == WANTED


@pytest.mark.parametrize("ttl_s", [86_400.0, 30 * 86_400.0], ids=["a day", "a month"])
def test_after_a_restart_the_longest_unused_goes_first(ttl_s: float) -> None:
    """No session is known; the deepest are those of today. Up to the time when all is forgotten, and past it:
    then the wall clock is wrong."""
    kept = SHIPPED.profiles.chat.model_copy(update={"ttl_s": ttl_s})
    settings = SHIPPED.model_copy(update={"profiles": SHIPPED.profiles.model_copy(update={"chat": kept})})
    placed = placement(settings, "alice", {}, CacheWish())
    assert placed is not None
    world = World(policy=make_policy(PolicySettings()), sessions=IdleSessions(10))
    ages_s = sorted({int(ttl_s * 2.0 * (step / 60) ** 4) for step in range(61)})
    addresses = []
    for number, idle_s in enumerate(ages_s):
        ids = range(1000 * number, 1000 * number + len(ages_s) - number)
        one = header(ids, len(ids) - 1, session=tag(str(number)), placement=placed)
        assert world.adopt("nvme", one, float(idle_s)) == ()
        addresses.append(one.address)
    assert world.catalog.hottest("nvme") == addresses
