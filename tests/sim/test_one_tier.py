"""One cache under a trace: exact LRU, pinned requests, oracles on top, and the traps of such a simulation."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench._single_tier import belady_hits, hits_with
from samovar.cache_tiers.forecast.predictor import Predictor
from samovar.cache_tiers.policy.idle_sessions import IdleSessions
from samovar.cache_tiers.policy.policies import LeastRecentlyUsed, ResidencyPolicy, TimeOracle, make_policy
from samovar.cluster.plan.simulator.tier import SimTier
from samovar.cluster.plan.traces.readers import TraceOptions, open_trace
from samovar.cluster.plan.traces.replay import events, forecasts, next_starts_s, with_blocks
from samovar.cluster.plan.traces.trace import TraceTurn
from samovar.configs.sections import PolicyName, PolicySettings, PredictorSettings
from tests.support.traffic import BLOCK, made, turn

TRACES = Path(__file__).parents[3] / "shared" / "traces"
WEKA = TRACES / "weka_claudecode_turns_dev.csv.gz"
needs_traces = pytest.mark.skipif(not WEKA.is_file(), reason=f"needs the trace {WEKA}")
SETTINGS = PolicySettings()
POLICIES: tuple[PolicyName, ...] = ("lru", "t-lru", "ttl", "type-km", "learned")


def exact_lru_hits(turns: Sequence[TraceTurn], blocks_max: int) -> int:
    """Tokens that a plain block LRU finds, of prompts used leaf first; the prompt in hand stays."""
    blocks: OrderedDict[int, None] = OrderedDict()
    found = 0
    for one in turns:
        hits = 0
        while hits < len(one.blocks) and one.blocks[hits] in blocks:
            hits += 1
        found += hits * one.block_tokens
        mine = set(one.blocks)
        for number in one.blocks:
            if number not in blocks and len(blocks) >= blocks_max:
                victim = next((block for block in blocks if block not in mine), None)
                if victim is None:
                    break
                del blocks[victim]
            blocks[number] = None
        for number in reversed(one.blocks):
            if number in blocks:
                blocks.move_to_end(number)
    return found


def lru_hits(turns: Sequence[TraceTurn], blocks_max: int, *, pins: bool = True) -> int:
    return hits_with(turns, blocks_max, LeastRecentlyUsed(), SETTINGS, pins=pins).hit_tokens


@pytest.mark.parametrize("blocks_max", [50, 300, 1500])
def test_lru_is_exact(blocks_max: int) -> None:
    turns = [replace(one, service_s=1e-9) for one in made(1500)]  # never two at a time
    assert lru_hits(turns, blocks_max) == exact_lru_hits(turns, blocks_max)


def test_unpinned_running_requests_inflate_the_hit_rate() -> None:
    """The trap: what runs longest keeps most, and a cache that takes it away looks better than any can be."""
    held = [turn(100 + n, 0.0, tuple(range(n * 10, n * 10 + 10)), service_s=1e6) for n in range(8)]
    chat = [
        turn(n % 4, 10.0 + n, tuple(range(1000 + n % 4 * 10, 1000 + n % 4 * 10 + 10)), service_s=0.5)
        for n in range(40)
    ]
    pinned, unpinned = lru_hits(held + chat, 100), lru_hits(held + chat, 100, pins=False)
    assert pinned < 0.6 * unpinned


@needs_traces
@pytest.mark.slow
def test_unpinned_running_requests_inflate_the_hit_rate_of_agents() -> None:
    trace = open_trace(WEKA, TraceOptions(spread_h=12.5, block_tokens=4096))
    turns = list(trace.turns())[:12_000]
    assert lru_hits(turns, 250, pins=False) > 1.05 * lru_hits(turns, 250)


def test_what_runs_is_not_pushed_out_and_what_does_not_fit_stays_out() -> None:
    sessions = IdleSessions(10)
    tier = SimTier(5, BLOCK, LeastRecentlyUsed(), SETTINGS, sessions)
    sessions.started("a", 0.0)
    tier.use([1, 2, 3], "a", 0.0, 10.0)
    sessions.started("b", 1.0)
    tier.use([11, 12, 13], "b", 1.0, 5.0)
    assert tier.bypassed == 1
    assert tier.prefix([1, 2, 3]) == 3
    assert tier.prefix([11, 12, 13]) == 2
    sessions.ended("b", 5.0)
    tier.changed("b")
    sessions.started("c", 6.0)
    tier.use([21, 22], "c", 6.0, 7.0)
    assert tier.prefix([1, 2, 3]) == 3
    assert tier.prefix([21, 22]) == 2
    tier.check_integrity()


def test_check_integrity_fires() -> None:
    tier = SimTier(5, BLOCK, LeastRecentlyUsed(), SETTINGS, IdleSessions(10))
    tier.use([1, 2, 3], "a", 0.0, 1.0)
    tier.blocks_max = 2
    with pytest.raises(AssertionError, match="more blocks than fit"):
        tier.check_integrity()


def test_a_block_of_many_outlives_those_of_one() -> None:
    """What new sessions begin with is worth its rate, whoever of them comes back."""
    turns = [turn(n, float(n), (0, 10 * n + 1, 10 * n + 2)) for n in range(200)]
    hits = hits_with(turns, 30, make_policy(PolicySettings(name="learned")), SETTINGS)
    assert hits.hit_tokens >= 195 * BLOCK


@pytest.mark.parametrize("blocks_max", [200, 800])
def test_oracle_is_above_all_and_belady_above_it(blocks_max: int) -> None:
    turns = made(1000)
    next_s = next_starts_s(turns)
    curves = forecasts(turns, Predictor(PredictorSettings()))
    rates = {}
    for name in POLICIES:
        policy: ResidencyPolicy = make_policy(PolicySettings(name=name))
        used = curves if name == "learned" else None
        rates[name] = hits_with(turns, blocks_max, policy, SETTINGS, curves=used, next_s=next_s).rate
    oracle = hits_with(turns, blocks_max, TimeOracle(), SETTINGS, next_s=next_s).rate
    assert oracle >= max(rates.values()) - 0.002
    assert belady_hits(turns, blocks_max).rate >= oracle
    assert rates["learned"] >= rates["lru"] - 0.002


@given(seed=st.integers(0, 50), blocks_max=st.integers(1, 400), name=st.sampled_from(POLICIES))
@settings(derandomize=True, deadline=None, max_examples=25)
def test_no_policy_breaks_the_tier(seed: int, blocks_max: int, name: PolicyName) -> None:
    """`hits_with` checks the tier's books at its end."""
    hits = hits_with(made(60, seed=seed), blocks_max, make_policy(PolicySettings(name=name)), SETTINGS)
    assert 0 <= hits.hit_tokens <= hits.prompt_tokens


def test_belady_by_hand() -> None:
    """Two places; 1 and 3 come again at once, 2 never."""
    turns = [turn(n, float(n), (block,)) for n, block in enumerate([1, 2, 3, 1, 3, 2])]
    assert belady_hits(turns, 2).hit_tokens == 2 * BLOCK
    assert belady_hits(turns, 3).hit_tokens == 3 * BLOCK


def test_events_are_in_order_and_ends_come_first() -> None:
    turns = [turn(0, 0.0, (1,), service_s=5.0), turn(1, 1.0, (2,), service_s=1.0), turn(2, 2.0, (3,))]
    seen = [(event.at_s, event.number, event.is_end) for event in events(turns)]
    assert seen == [
        *((0.0, 0, False), (1.0, 1, False), (2.0, 1, True), (2.0, 2, False), (3.0, 2, True)),
        (5.0, 0, True),
    ]


def test_blocks_that_are_not_told_are_the_sessions_own() -> None:
    long, longer = turn(0, 0.0, (1, 2, 3)), turn(0, 9.0, (1, 2, 3, 4), kept_tokens=3 * BLOCK)
    other = turn(1, 10.0, (1, 2))
    told = list(with_blocks([replace(one, blocks=()) for one in (long, longer, other)]))
    assert [len(one.blocks) for one in told] == [3, 4, 2]
    assert told[1].blocks[:3] == told[0].blocks
    assert not set(told[2].blocks) & set(told[1].blocks)
