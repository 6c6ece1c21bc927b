"""What the simulator, `samovar plan` and the benchmarks of policies judge is what the service ships."""

from __future__ import annotations

import inspect
import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from bench.policy import kept_for, load, policy_settings
from samovar.cache_tiers.forecast.turns import BINS, curve_of
from samovar.cache_tiers.policy import IdleSessions, make_policy
from samovar.cluster.plan.plan import PlanAsk, fleet_of
from samovar.cluster.plan.runs import policy_of
from samovar.cluster.plan.simulator.fleet import Fleet
from samovar.cluster.plan.simulator.node import SimNode
from samovar.cluster.plan.simulator.sim import Sim
from samovar.cluster.plan.simulator.tier import Block, SimTier
from samovar.cluster.plan.traces.replay import TraceOpenings
from samovar.configs.loader import load as load_settings
from samovar.configs.sections import (
    GIB,
    PolicyName,
    PolicySettings,
    PrefetchSettings,
    ProfileName,
    ProfileSettings,
    ProfilesSettings,
)
from samovar.configs.settings import Settings
from tests.support.clock import Clock
from tests.support.constants import tuned
from tests.support.traffic import BLOCK, turn

BLOCK_BYTES = BLOCK * Fleet().bytes_per_token
SHIPPED = Settings()
SETTINGS: dict[str, Any] = {
    "slots": SHIPPED.engine.sequences_max,
    "loads_parallel": SHIPPED.tiers.io_threads,
    "hedge_factor": SHIPPED.tiers.hedge_factor,
    "hedge_slack_s": SHIPPED.tiers.hedge_slack_s,
    "affinity_penalty_s": SHIPPED.router.affinity_penalty_s,
    "load_bound_factor": SHIPPED.router.load_bound_factor,
    "sessions_max": SHIPPED.tiers.predictor.sessions_max,
    "policy": SHIPPED.tiers.policy,
    "profiles": SHIPPED.tiers.profiles,
    "prefetch": SHIPPED.tiers.prefetch,
    "lead_s": SHIPPED.tiers.policy.horizon_s_min,  # as `node/manager.py` builds it
}
MACHINE = {
    *("replicas", "replicas_per_node", "gpus", "gpu_bytes", "cpu_bytes", "nvme_bytes", "s3_bytes"),
    *("bytes_per_token", "prefill", "decode_token_s", "cpu", "nvme", "s3", "peer", "first"),
    "candidates",  # of a large fleet; the router ranks all
}
"""Sizes and speeds: a machine's, not settings."""


def test_every_field_of_a_fleet_is_a_machines_or_a_shipped_setting() -> None:
    assert {field.name for field in fields(Fleet)} == MACHINE | SETTINGS.keys()
    on_gpus = SETTINGS | {"slots": load_settings("aws", {}, ()).settings.engine.sequences_max}
    for fleet, shipped in ((Fleet(), SETTINGS), (fleet_of(PlanAsk(Path("trace"))), on_gpus)):
        assert {name: getattr(fleet, name) for name in SETTINGS} == shipped


@pytest.mark.parametrize("name", get_args(PolicyName))
def test_policies_are_run_with_the_shipped_settings(name: PolicyName) -> None:
    for settings in (policy_of(name)[1], policy_settings(name)):
        shipped = PolicySettings(name=name)
        assert settings == shipped
        assert settings.fixed() == shipped.fixed()
    assert policy_of("oracle")[1] == policy_settings("oracle") == SHIPPED.tiers.policy
    openings = inspect.signature(TraceOpenings).parameters["lineages_max"].default
    assert openings == SHIPPED.tiers.predictor.sessions_max


@pytest.mark.parametrize("name", get_args(ProfileName))
def test_a_simulated_tier_keeps_what_its_profile_says_and_a_pool_what_is_worth_most(name: str) -> None:
    profile = SHIPPED.tiers.profiles.named(name)
    gone: list[Block] = []
    tiers = [
        SimTier(
            2,
            BLOCK,
            make_policy(PolicySettings()),
            PolicySettings(),
            IdleSessions(9),
            on_evicted=lambda blocks, now_s: gone.extend(blocks),
            placed=placed,
        )
        for placed in (lambda _: profile, None)
    ]
    for tier in tiers:
        tier.use([1, 2], "a", 0.0, 10.0)
        tier.put([3], "b", 20.0)
    of_a_tier, of_a_pool = gone
    assert (of_a_tier.min_ttl_s, of_a_tier.expires_s) == (profile.min_ttl_s, 10.0 + profile.ttl_s)
    assert (of_a_pool.min_ttl_s, of_a_pool.expires_s) == (0.0, math.inf)
    lower = SimTier(9, BLOCK, make_policy(PolicySettings()), PolicySettings(), IdleSessions(9))
    lower.take_in([of_a_tier], 20.0)
    lower.touch([], "a", 10.0 + profile.ttl_s)
    assert len(lower) == 0, "a copy is kept as its original was"


@pytest.mark.parametrize("name", get_args(ProfileName))
def test_a_simulated_fleet_keeps_what_the_profile_of_its_turn_says(name: str) -> None:
    short = ProfilesSettings(batch=ProfileSettings(ttl_s=50.0))
    fleet = Fleet(gpu_bytes=0, cpu_bytes=8 * GIB, profiles=short)
    turns = [replace(turn(0, at_s, (1, 2)), profile=name) for at_s in (0.0, 100.0)]
    tally = Sim(fleet, make_policy(fleet.policy), BLOCK).run(turns)
    assert (tally.hit_tokens["cpu"] == 0) is (name == "batch")


def test_what_was_not_used_for_its_time_is_gone() -> None:
    profiles = ProfilesSettings()
    policy = make_policy(PolicySettings())
    pool = SimTier(9, BLOCK, policy, PolicySettings(), IdleSessions(9))
    tier = SimTier(9, BLOCK, policy, PolicySettings(), IdleSessions(9), placed=lambda _: profiles.chat)
    for each in (pool, tier):
        each.use([1, 2], "a", 0.0, 10.0)
        each.use([1, 3], "b", 100.0, 110.0)
        each.touch([], "b", 10.0 + profiles.chat.ttl_s)
        each.check_integrity()
    assert [number in pool for number in (1, 2, 3)] == [True, True, True]
    assert [number in tier for number in (1, 2, 3)] == [True, False, True]
    assert tier.use([1], "b", 110.0 + profiles.chat.ttl_s, 1e6) == 0


def test_a_month_is_a_month_for_all_profiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.policy.RHYTHM_TURNS", 50)
    subject = load(Path("rhythm"), [], 0)
    assert subject.profiles == SHIPPED.tiers.profiles
    longer = kept_for(subject, 30 * 86_400.0)
    for name in get_args(ProfileName):
        profile = longer.profiles.named(name)
        assert profile == subject.profiles.named(name).model_copy(update={"ttl_s": 30 * 86_400.0})
    assert longer.label == "rhythm, kept 30 days"


@pytest.mark.parametrize(("blocks", "moved"), [(8, 0), (20, 2)])
def test_a_simulated_guess_has_the_room_that_a_nodes_sinking_keeps_free(blocks: int, moved: int) -> None:
    """A tenth of a tier, though the simulated one is full: nothing else goes for a guess."""
    wide = PrefetchSettings(by_hazard=True, bytes_per_s_max=64 * GIB, inflight_bytes_max=16 * GIB)
    fleet = Fleet(
        cpu_bytes=blocks * BLOCK_BYTES,
        nvme_bytes=64 * BLOCK_BYTES,
        prefetch=tuned(wide, holdout_share=0.0),
    )
    node = SimNode(0, fleet, make_policy(fleet.policy), BLOCK, None, Clock(), lambda _: fleet.profiles.chat)
    below = tuple(range(10))
    assert node.early is not None
    node.early.returned(1, below, 0.0)
    node.sessions.started(1, 0.0)
    node.sessions.ended(1, 1.0, curve_of(np.full(BINS, 0.5)), tokens=10 * BLOCK)
    node.tiers["nvme"].put(below, 1, 1.0)
    node.tiers["cpu"].put(range(100, 100 + blocks), 2, 1.0)
    node.early.tick(2.0)
    assert node.early.prefetcher.moving_bytes == moved * BLOCK_BYTES
    node.check_integrity()
