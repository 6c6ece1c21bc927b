"""A simulated fleet: what it counts adds up, it agrees with the one-tier replay, and caches help."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench._single_tier import hits_with
from samovar.cache_tiers.forecast.predictor import Predictor
from samovar.cache_tiers.policy.policies import LeastRecentlyUsed, make_policy
from samovar.cache_tiers.pricing.meters import PrefillPrice
from samovar.cluster.plan.simulator.fleet import Fleet, Prices
from samovar.cluster.plan.simulator.sim import Sim, SimTally
from samovar.cluster.plan.traces.trace import TraceTurn
from samovar.configs.sections import GIB, KIB, PolicyName, PolicySettings, PredictorSettings, PrefetchSettings
from tests.support.constants import tuned
from tests.support.traffic import BLOCK, made, turn

BLOCK_BYTES = BLOCK * 128 * KIB


def run(fleet: Fleet, turns: list[TraceTurn]) -> tuple[Sim, SimTally]:
    sim = Sim(fleet, make_policy(fleet.policy), BLOCK)
    tally = sim.run(turns)
    sim.check_integrity()
    return sim, tally


def test_one_gpu_finds_what_the_one_tier_replay_finds() -> None:
    """With computing for nothing and answers as slow as assumed both are the same machine."""
    turns = [replace(one, service_s=0.03 * one.output_tokens) for one in made(1000)]
    policy = PolicySettings(name="lru")
    fleet = Fleet(
        gpu_bytes=600 * BLOCK_BYTES, slots=10_000, prefill=PrefillPrice(0.0, 0.0, 0.0), policy=policy
    )
    _, tally = run(fleet, turns)
    hits = hits_with(turns, 600, LeastRecentlyUsed(), policy)
    found = tally.hit_tokens["gpu"]
    assert found == pytest.approx(hits.hit_tokens, rel=0.01)


def test_tiers_add_hits_and_take_time_off() -> None:
    turns = made(1200)
    gpu = Fleet(replicas=2, gpu_bytes=8 * GIB)
    cpu = replace(gpu, cpu_bytes=64 * GIB)
    nvme = replace(cpu, nvme_bytes=512 * GIB)
    (_, one), (_, two), (sim, three) = run(gpu, turns), run(cpu, turns), run(nvme, turns)
    assert one.hit_rate < two.hit_rate < three.hit_rate
    assert one.computed_s > two.computed_s > three.computed_s
    assert one.ttft_at(50) >= two.ttft_at(50) >= three.ttft_at(50) > 0
    assert three.hit_tokens["nvme"] > 0
    assert sim.moved_bytes()["cpu->nvme"] > 0


def test_by_hand() -> None:
    """Two turns of one session: the second finds the first's blocks, and its seconds are the price's."""
    fleet = Fleet(gpu_bytes=100 * BLOCK_BYTES)
    first, second = turn(0, 0.0, (1, 2)), turn(0, 100.0, (1, 2, 3), kept_tokens=2 * BLOCK)
    _, tally = run(fleet, [first, second])
    assert tally.hit_tokens == {"gpu": 2 * BLOCK}
    price = fleet.prefill
    assert list(tally.ttft_s) == pytest.approx(
        [price.seconds(2 * BLOCK, 0), price.seconds(BLOCK, 2 * BLOCK)], rel=1e-5
    )


def test_one_slot_serves_one_at_a_time() -> None:
    fleet = Fleet(gpu_bytes=100 * BLOCK_BYTES, slots=1)
    turns = [turn(n, 0.0, (10 * n,), output_tokens=100) for n in range(3)]
    _, tally = run(fleet, turns)
    alone = fleet.prefill.seconds(BLOCK, 0)
    served = alone + 100 * fleet.decode_token_s
    assert list(tally.ttft_s) == pytest.approx([alone, alone + served, alone + 2 * served], rel=1e-5)


def test_the_router_spreads_sessions_and_keeps_them_home() -> None:
    fleet = Fleet(replicas=20, replicas_per_node=4, gpu_bytes=8 * GIB, cpu_bytes=16 * GIB)
    sim, _ = run(fleet, made(1500))
    outcomes = sim.router.outcomes
    assert outcomes["home"] > 5 * (outcomes["spilled"] + outcomes["moved"])
    assert sum(len(replica.gpu) > 0 for replica in sim.replicas) == 20


def test_a_session_that_moves_takes_its_blocks_along() -> None:
    """Its home is busy for long: another node loads what the home's node has, as from a peer."""
    fleet = Fleet(
        replicas=2, replicas_per_node=1, gpu_bytes=200 * BLOCK_BYTES, cpu_bytes=400 * BLOCK_BYTES, slots=1
    )
    first = turn(0, 0.0, tuple(range(1, 9)), output_tokens=1)
    busy = turn(1, 50.0, tuple(range(1000, 1180)), output_tokens=9)
    again = turn(0, 50.001, tuple(range(1, 10)), kept_tokens=8 * BLOCK)
    for order in ([first, busy, again], [first, replace(busy, session=2), again]):
        sim, tally = run(fleet, order)
        if sim.router.outcomes["spilled"]:
            assert tally.hit_tokens["peer"] > 0
            return
        assert tally.hit_tokens["gpu"] == 8 * BLOCK


def test_a_predictor_learns_on_each_node() -> None:
    fleet = Fleet(replicas=2, replicas_per_node=1, gpu_bytes=8 * GIB, cpu_bytes=16 * GIB)
    predictors = [Predictor(PredictorSettings()) for _ in range(2)]
    sim = Sim(fleet, make_policy(fleet.policy), BLOCK, predictors=predictors)
    sim.run(made(600))
    assert min(len(one) for one in predictors) > 100
    sim.check_integrity()


@given(
    seed=st.integers(0, 20),
    replicas=st.integers(1, 6),
    gpu=st.integers(0, 40),
    cpu=st.integers(0, 100),
    nvme=st.integers(0, 200),
    s3=st.integers(0, 400),
    name=st.sampled_from(["lru", "learned"]),
)
@settings(derandomize=True, deadline=None, max_examples=20)
def test_what_is_counted_adds_up(
    seed: int, replicas: int, gpu: int, cpu: int, nvme: int, s3: int, name: PolicyName
) -> None:
    fleet = Fleet(
        replicas=replicas,
        replicas_per_node=2,
        gpu_bytes=gpu * BLOCK_BYTES,
        cpu_bytes=cpu * BLOCK_BYTES,
        nvme_bytes=nvme * BLOCK_BYTES,
        s3_bytes=s3 * BLOCK_BYTES,
        slots=3,
        policy=PolicySettings(name=name),
        prefetch=tuned(PrefetchSettings(by_hazard=True), probability_min=0.05),
    )
    turns = made(80, seed=seed)
    sim, tally = run(fleet, turns)
    assert tally.turns == len(turns) == len(tally.ttft_s)
    assert tally.prompt_tokens == sum(one.input_tokens for one in turns)
    assert 0 <= sum(tally.hit_tokens.values()) < tally.prompt_tokens
    assert 0 <= tally.upper_tokens <= tally.reusable_tokens
    assert all(replica.running == 0 and not replica.waiting for replica in sim.replicas)


def test_check_integrity_fires() -> None:
    sim, _ = run(Fleet(), made(20))
    sim.replicas[0].running = -1
    with pytest.raises(AssertionError, match="more requests run"):
        sim.check_integrity()


def test_money_and_nonsense() -> None:
    fleet = Fleet(replicas=9, replicas_per_node=8, cpu_bytes=730 * GIB)
    assert fleet.nodes == 2
    assert fleet.usd_per_h(Prices(gpu_hour=1.0, cpu_gib_month=1.0)) == pytest.approx(9 + 2)
    for wrong in ({"replicas": 0}, {"slots": 0}, {"gpu_bytes": -1}):
        with pytest.raises(ValueError, match=r"at least one|less than 0"):
            Fleet(**wrong)  # type: ignore[arg-type]
