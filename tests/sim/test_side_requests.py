"""Conversations keep what they had, whatever their clients ask beside them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest

from bench._single_tier import Hits, hits_with
from bench._trace_generator import GeneratorOptions, generate
from bench._trace_patterns import parse_patterns
from samovar.cache_tiers.forecast.predictor import Predictor
from samovar.cache_tiers.forecast.turns import LAST_S, Forecast, resume_within
from samovar.cache_tiers.policy.policies import make_policy
from samovar.cluster.plan.traces.replay import forecasts
from samovar.cluster.plan.traces.trace import TraceTurn
from samovar.configs.sections import PolicyName, PolicySettings, PredictorSettings
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


@pytest.mark.parametrize(
    ("pattern", "blocks", "seeds"),
    # A large cache loses little, and one long prompt is a tenth of that: several traces together.
    [
        ("side", 1000, 1),
        ("title", 1000, 1),
        ("title", 2500, 1),
        pytest.param("side", 2500, 3, marks=pytest.mark.slow),
    ],
)
def test_a_conversation_keeps_what_it_keeps_without_them(pattern: str, blocks: int, seeds: int) -> None:
    def kept(which: str, name: PolicyName = "learned") -> int:
        return sum(found(which, seed, blocks, name).main_hit_tokens for seed in range(1, seeds + 1))

    beside = kept(pattern)
    assert beside >= 0.98 * kept(PLAIN)
    assert beside >= kept(pattern, "lru")


def test_one_shots_are_known_after_a_few_minutes() -> None:
    turns, told = traffic("side", 1)
    later = [(turn, told[at].curve) for at, turn in enumerate(turns) if at > len(turns) // 2]
    side = [resume_within(curve, 0.0, LAST_S) for turn, curve in later if turn.is_side]
    main = [resume_within(curve, 0.0, LAST_S) for turn, curve in later if turn.is_main]
    assert sum(side) / len(side) < 0.0055
    assert sum(main) / len(main) > 0.25
