"""Conversations whose clients send more under their id: what they keep, before and with lineages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from cache_tiers.forecast.predictor import Predictor
from cache_tiers.policy.policies import make_policy
from cluster.simulator.fleet import Fleet
from cluster.simulator.sim import Sim
from cluster.traces.replay import by_session
from cluster.traces.trace import TraceTurn
from configs.sections import KIB, PredictorSettings
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
