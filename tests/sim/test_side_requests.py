"""Conversations keep what they had, whatever their clients ask beside them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest

from cache_tiers.forecast.predictor import Predictor
from cache_tiers.forecast.survival import LAST_S, Forecast, resume_within
from cache_tiers.policy.policies import make_policy
from cluster.simulator.single_tier import Hits, hits_with
from cluster.traces.generator import GeneratorOptions, generate
from cluster.traces.patterns import parse_patterns
from cluster.traces.replay import forecasts
from cluster.traces.trace import TraceTurn
from configs.sections import PolicyName, PolicySettings, PredictorSettings
from tests.support.traffic import BLOCK

TURNS = 1500
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
@pytest.mark.parametrize("pattern", ["side", "title"])
@pytest.mark.parametrize("seed", [1])
def test_a_conversation_keeps_what_it_keeps_without_them(pattern: str, seed: int, blocks: int) -> None:
    plain, beside = (found(which, seed, blocks) for which in (PLAIN, pattern))
    assert beside.main_hit_tokens >= 0.98 * plain.main_hit_tokens
    assert beside.main_hit_tokens >= found(pattern, seed, blocks, "lru").main_hit_tokens


def test_one_shots_are_known_after_a_few_minutes() -> None:
    turns, told = traffic("side", 1)
    later = [(turn, told[at].curve) for at, turn in enumerate(turns) if at > len(turns) // 2]
    side = [resume_within(curve, 0.0, LAST_S) for turn, curve in later if turn.is_side]
    main = [resume_within(curve, 0.0, LAST_S) for turn, curve in later if turn.is_main]
    assert sum(side) / len(side) < 0.005
    assert sum(main) / len(main) > 0.25
