"""Conversations whose clients send more under their id: what they keep, before and with lineages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from bench._policy_patterns import COMPACTION, PatternRow, broken_bars, compacting, compare, traffic_of
from bench._trace_generator import GeneratorOptions, generate
from samovar.cache_tiers.forecast.predictor import Predictor
from samovar.cache_tiers.policy.policies import make_policy
from samovar.cluster.plan.simulator.fleet import Fleet
from samovar.cluster.plan.simulator.sim import Sim
from samovar.cluster.plan.traces.replay import by_session
from samovar.cluster.plan.traces.trace import TraceTurn
from samovar.configs.sections import KIB, PredictorSettings
from tests.support.traffic import BLOCK, turn

BLOCK_BYTES = BLOCK * 128 * KIB
OLDER, YOUNGER, OTHERS = range(3), range(3, 6), range(6, 23)
RAM_BLOCKS = 310  # three conversations too few for all
CHAIN = 16  # blocks of a conversation; the first is the template's, and everybody's


def chain(session: int, blocks: int = CHAIN) -> tuple[int, ...]:
    return (0, *(1000 * (session + 1) + at for at in range(1, blocks)))


def trial() -> list[TraceTurn]:
    """CLIENTS.md, 1: three conversations, three younger ones with side requests, then 17 others."""
    turns: list[TraceTurn] = []
    for session in (*OLDER, *YOUNGER, *OTHERS):
        at_s = 10.0 * session
        turns.append(turn(session, at_s, chain(session)))
        for number in range(3 * (session in YOUNGER)):
            asked = turn(session, at_s + 2.0 + 0.1 * number, (0, 10**6 + 10 * session + number))
            turns.append(replace(asked, lineage=number + 1, is_side=True))
    return turns


def kept(turns: Iterable[TraceTurn]) -> list[int]:
    """How many leading blocks of each of the six conversations a small pool and RAM tier have in the end."""
    fleet = Fleet(gpu_bytes=4 * CHAIN * BLOCK_BYTES, cpu_bytes=RAM_BLOCKS * BLOCK_BYTES)
    sim = Sim(fleet, make_policy(fleet.policy), BLOCK, predictors=[Predictor(PredictorSettings())])
    sim.run(turns)
    sim.check_integrity()
    (node,), (replica,) = sim.nodes, sim.replicas
    found = []
    for session in (*OLDER, *YOUNGER):
        here = [block in replica.gpu or node.source(block) is not None for block in chain(session)]
        found.append([*here, False].index(False))
    return found


def test_a_younger_conversation_with_side_requests_keeps_what_an_older_one_keeps() -> None:
    before = kept(by_session(trial()))
    assert max(before[3:]) <= 1 < min(before[:3])  # the template's block alone
    after = kept(trial())
    assert min(after[3:]) >= min(after[:3])
    assert after[3:] == [CHAIN] * 3


def test_side_requests_take_most_hits_from_a_session_of_one_row_and_few_from_lineages() -> None:
    traffic = traffic_of("chat", generate(GeneratorOptions("chat", 500, 0, sessions_per_s=0.2)))
    (row,) = compare(traffic, ["side"], [1000], seed=0)
    assert row.before_share < 0.3
    assert row.after_share > row.before_share + 0.4
    assert row.after >= row.lru
    assert row.oracle_share > 0.98  # there is room for all


def test_a_compacted_conversation_is_no_worse_off_in_lineages() -> None:
    traffic = compacting("agentic", 600, 2048, 0)
    rows = compare(traffic, [COMPACTION], [200, 400], seed=0)
    assert max(turn.lineage for turn in traffic.turns) > 1
    assert all(row.after >= 0.98 * row.before for row in rows)
    assert list(broken_bars(rows)) == []


def test_a_bar_of_the_patterns_that_is_missed_is_reported() -> None:
    good = PatternRow("chat", "side", 0, 512_000, 1000, 500, 100, 495, 490, 500, 600, 600)
    assert list(broken_bars([good])) == []
    (lost,) = broken_bars([replace(good, after=480, lru=480)])
    assert "0.960 of the hits without it (oracle 1.000)" in lost
    (below,) = broken_bars([replace(good, lru=499)])
    assert "495 < LRU 499" in below
