"""Conversations keep what they had, whatever their clients ask beside them, and slow tiers are spared it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest

from cache_tiers.forecast.predictor import Predictor
from cache_tiers.forecast.survival import LAST_S, Forecast, resume_within
from cache_tiers.policy.policies import make_policy
from cluster.simulator.fleet import Fleet
from cluster.simulator.sim import Foresight, Sim
from cluster.simulator.single_tier import Hits, hits_with
from cluster.traces.generator import GeneratorOptions, generate
from cluster.traces.patterns import parse_patterns
from cluster.traces.replay import forecasts
from cluster.traces.trace import TraceTurn
from configs.sections import KIB, PolicyName, PolicySettings, PredictorSettings
from tests.support.traffic import BLOCK

BLOCK_BYTES = BLOCK * 128 * KIB
TURNS = 1200
PLAIN = ""


@cache
def traffic(pattern: str, seed: int) -> tuple[Sequence[TraceTurn], Sequence[Forecast]]:
    """Generated chats, and what is forecast of them; with what is asked beside them."""
    patterns = None if pattern == PLAIN else parse_patterns(pattern)
    options = GeneratorOptions(turns=TURNS, seed=seed, block_tokens=BLOCK, patterns=patterns)
    turns = list(generate(options).turns())
    return turns, forecasts(turns, Predictor(PredictorSettings()))


def found(pattern: str, seed: int, blocks: int, name: PolicyName = "learned") -> Hits:
    turns, curves = traffic(pattern, seed)
    settings = PolicySettings(name=name)
    from_s = traffic(PLAIN, seed)[0][TURNS // 2].started_s
    told = curves if name == "learned" else None
    return hits_with(turns, blocks, make_policy(settings), settings, curves=told, count_from_s=from_s)


@pytest.mark.parametrize("blocks", [1000, 2500])
@pytest.mark.parametrize("pattern", ["side", "title", "subagents"])
@pytest.mark.parametrize("seed", [1])
def test_a_conversation_keeps_what_it_keeps_without_them(pattern: str, seed: int, blocks: int) -> None:
    plain, beside = (found(which, seed, blocks) for which in (PLAIN, pattern))
    assert beside.main_hit_tokens >= 0.98 * plain.main_hit_tokens
    assert beside.main_hit_tokens >= found(pattern, seed, blocks, "lru").main_hit_tokens


@pytest.mark.parametrize("pattern", ["regenerate", "edit"])
def test_attempts_and_edits_are_turns_of_their_lineage_and_all_of_it_is_found_as_by_lru(pattern: str) -> None:
    for blocks in (1000, 2500):
        assert found(pattern, 1, blocks).hit_tokens >= found(pattern, 1, blocks, "lru").hit_tokens


def test_one_shots_are_known_after_a_few_minutes() -> None:
    turns, told = traffic("side", 1)
    later = [(turn, told[at].curve) for at, turn in enumerate(turns) if at > len(turns) // 2]
    side = [resume_within(curve, 0.0, LAST_S) for turn, curve in later if turn.is_side]
    main = [resume_within(curve, 0.0, LAST_S) for turn, curve in later if turn.is_main]
    assert sum(side) / len(side) < 0.005
    assert sum(main) / len(main) > 0.25


def test_what_is_never_asked_for_again_is_not_written_to_the_lower_tier_when_that_is_full() -> None:
    turns, told = traffic("side", 1)
    written, hits = {}, {}
    for least in (0.0, 0.02):
        fleet = Fleet(
            gpu_bytes=300 * BLOCK_BYTES,
            cpu_bytes=1500 * BLOCK_BYTES,
            nvme_bytes=3000 * BLOCK_BYTES,
            policy=PolicySettings(copied_probability_min=least),
        )
        sim = Sim(fleet, make_policy(fleet.policy), BLOCK, Foresight(told))
        tally = sim.run(turns)
        sim.check_integrity()
        written[least] = sim.moved_bytes()["cpu->nvme"]
        hits[least] = tally.main_hit_tokens
    assert written[0.02] < 0.8 * written[0.0]
    assert hits[0.02] >= hits[0.0]
