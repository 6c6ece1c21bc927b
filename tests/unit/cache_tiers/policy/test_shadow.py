"""What least recently used would have had, beside nodes that follow it or do not, and the simulator."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from bench._single_tier import hits_with
from bench._trace_generator import GeneratorOptions, generate
from bench.shadow_cost import bytes_an_extent
from samovar.cache_tiers.blocks import CPU, NVME, BlockShape, Clear, Placement
from samovar.cache_tiers.forecast.kaplan_meier import TypeKm
from samovar.cache_tiers.media.memory import HeapTier
from samovar.cache_tiers.messages import BlockRange, LruStats
from samovar.cache_tiers.policy.idle_sessions import IdleSessions
from samovar.cache_tiers.policy.policies import make_policy
from samovar.cache_tiers.policy.shadow import LOG_MAX, ShadowLru, ShadowRows
from samovar.cluster.plan.simulator.tier import SimTier
from samovar.cluster.plan.traces.replay import ended_s, events, forecasts
from samovar.cluster.plan.traces.trace import TraceTurn
from samovar.configs.sections import PolicyName, PolicySettings, PredictorSettings
from tests.support.nodes.node_harness import MIB, TENANT, bench, heap_bench, nvme, sample
from tests.support.nodes.turn_player import StoredRun, TurnPlayer, key_of
from tests.support.traffic import BLOCK, made

BIG = BlockShape(layers=1, layer_bytes=8192, block_tokens=BLOCK)
"""Blocks beside whose bytes a record's header hardly counts: the simulator knows of no headers."""
ROOM = 2000
COARSE = 2048
BYTES = 1000
TIERED = Placement(CPU.name, (NVME.name,), NVME.name)
DEMOTED = Placement(CPU.name, (), NVME.name)


@cache
def turns() -> Sequence[TraceTurn]:
    return made(700)


@cache
def played(policy: PolicyName) -> tuple[int, LruStats]:
    """Tokens that a node with this policy finds, and what its shadow says."""
    player = TurnPlayer(policy, BIG, ROOM)
    player.play(turns())
    player.node.node.check_integrity()
    player.node.node.resumption.shadow.check_integrity()
    return player.found * BLOCK, player.node.node.stats().returns.lru


def keys(*blocks: int) -> bytes:
    return b"".join(map(key_of, blocks))


def shadow(**bytes_max: int) -> ShadowLru:
    return ShadowLru(bytes_max, lambda: 0.0)


def store(of: ShadowLru, *blocks: int, placement: Placement = TIERED, is_checked: bool = True) -> None:
    of.log.append((StoredRun(keys(*blocks), placement), len(blocks) * BYTES))
    of.work()
    if is_checked:
        of.check_integrity()


def look(of: ShadowLru, *blocks: int, real: int = 0, is_checked: bool = True) -> dict[str, int]:
    """Ask for a chain of which the real tiers have the first `real` blocks; return what LRU had, by tier."""
    before = of.stats().lru_tokens
    spans = (BlockRange(b"", TENANT, 0, 0, real, CPU.name, real * BYTES),) if real else ()
    of.log.append((keys(*blocks), spans))
    after = of.stats().lru_tokens
    if is_checked:
        of.check_integrity()
    return {tier: (after[tier] - before[tier]) // 16 for tier in after if after[tier] > before[tier]}


# -- beside the truth --------------------------------------------------------------------


def test_a_node_that_follows_lru_gains_nothing_and_regrets_nothing() -> None:
    found, lru = played("lru")
    assert sum(lru.found_tokens.values()) == found > 300_000
    assert sum(lru.lru_tokens.values()) == pytest.approx(found, rel=0.01)
    assert lru.gain == pytest.approx(0.0, abs=0.001)


def test_the_gain_is_what_a_second_node_with_lru_would_find_less() -> None:
    (learned, lru), (least_recent, _) = played("learned"), played("lru")
    gain = lru.gained_tokens - lru.regretted_tokens
    assert lru.regretted_tokens > 0
    assert gain == pytest.approx(learned - least_recent, rel=0.05)
    assert gain > 0.2 * least_recent
    assert lru.gain == gain / lru.asked_tokens


def test_the_gain_is_the_simulators_for_the_same_trace() -> None:
    """Beside the simulator's own cache; its LRU evicts blocks where ours, as the product, evicts extents."""
    options = GeneratorOptions(turns=2500, seed=1, block_tokens=COARSE)
    chats = list(generate(options).turns())
    curves = forecasts(chats, TypeKm(PredictorSettings()))
    settings, blocks_max = PolicySettings(name="type-km"), 1000
    sessions, of = IdleSessions(10_000), shadow(cpu=blocks_max * BYTES)
    tier = SimTier(blocks_max, COARSE, make_policy(settings), settings, sessions)
    for event in events(chats):
        turn = event.turn
        if event.is_end:
            sessions.ended(turn.key, event.at_s)
            tier.changed(turn.key)
            for changed in sessions.told(turn.key, curves[event.number], event.at_s):
                tier.changed(changed)
            continue
        sessions.started(turn.key, event.at_s)
        found = tier.use(turn.blocks, turn.key, event.at_s, ended_s(turn))
        look(of, *turn.blocks, real=found, is_checked=False)
        store(of, *turn.blocks[found:], is_checked=False)
    of.check_integrity()
    known = hits_with(chats, blocks_max, make_policy(settings), settings, curves=curves)
    lru = hits_with(chats, blocks_max, make_policy(PolicySettings(name="lru")), PolicySettings(name="lru"))
    stats = of.stats()
    gain = (stats.gained_tokens - stats.regretted_tokens) // StoredRun.shape.block_tokens * COARSE
    assert known.hit_tokens > 1.3 * lru.hit_tokens
    assert gain == pytest.approx(known.hit_tokens - lru.hit_tokens, rel=0.10)


def test_rows_go_as_a_plain_lru_of_blocks_would_have_them() -> None:
    """Chains that branch and grow, each turn a row of its own, in a cache that holds some of them."""
    rng, room = random.Random(0), 60
    of, truth = shadow(cpu=room * BYTES), OrderedDict[int, None]()
    chains: list[list[int]] = [[]]
    fresh = iter(range(1, 10_000))
    asked = had = 0
    for _ in range(600):
        chain = rng.choice(chains)
        chain = chain[: rng.randrange(len(chain) + 1)] if rng.random() < 0.2 else chain
        prompt = [*chain, next(fresh)]
        found = next((at for at, block in enumerate(prompt) if block not in truth), len(prompt))
        asked, had = asked + found, had + look(of, *prompt).get(CPU.name, 0)
        of.log.append((StoredRun(keys(*prompt), TIERED), len(prompt) * BYTES))
        of.work()
        of.check_integrity()
        for block in reversed(prompt):
            truth[block] = None
            truth.move_to_end(block)
        while len(truth) > room:
            truth.popitem(last=False)
        chains = [*chains[-12:], prompt]
    assert asked > 2000
    assert had == pytest.approx(asked, rel=0.03)


def test_a_lookup_is_a_use() -> None:
    of = shadow(cpu=2 * BYTES)
    store(of, 1)
    store(of, 2)
    assert look(of, 1, real=1) == {"cpu": 1}
    store(of, 3)
    assert look(of, 2) == {}
    assert look(of, 1, real=1) == {"cpu": 1}


# -- what it counts ----------------------------------------------------------------------


def test_what_is_found_more_is_gained_and_what_lru_would_have_kept_is_regretted() -> None:
    of = shadow(cpu=3 * BYTES)
    store(of, 1, 2, 3)
    assert look(of, 1, 2, 3, 4, real=1) == {"cpu": 3}
    store(of, 7, 8)
    assert look(of, 7, 8, 9, real=3) == {"cpu": 2}
    found = of.stats()
    assert (found.lookups, found.asked_tokens) == (2, 7 * 16)
    assert (found.gained_tokens, found.regretted_tokens, found.regrets) == (16, 32, 1)
    assert found.found_tokens == {"cpu": 4 * 16}
    assert found.gain == (16 - 32) / (7 * 16)


def test_a_gap_ends_what_was_found() -> None:
    of = shadow(cpu=9 * BYTES)
    spans = [BlockRange(b"", TENANT, at, 0, 1, CPU.name, BYTES) for at in (0, 2)]
    store(of, 7)
    of.log.append((keys(1, 2, 3), spans))
    assert of.stats().gained_tokens == 16


def test_blocks_of_another_node_are_not_the_tiers() -> None:
    of = shadow(cpu=9 * BYTES)
    store(of, 7)
    of.log.append((keys(1), (BlockRange(b"", TENANT, 0, 0, 1, "peer", BYTES),)))
    assert of.stats().gained_tokens == 0


def test_what_was_gained_is_computed_and_kept_as_of_then() -> None:
    of = shadow(cpu=9 * BYTES)
    store(of, 7)
    look(of, 1, 2, real=2)
    assert look(of, 1, 2, 3) == {"cpu": 2}


def test_nothing_was_asked_and_there_is_no_gain_to_tell() -> None:
    assert shadow(cpu=1).stats().gain is None


# -- tiers -------------------------------------------------------------------------------


def test_without_a_copy_below_what_goes_from_memory_goes_down_and_comes_up_when_it_is_used() -> None:
    of = shadow(cpu=2 * BYTES, nvme=4 * BYTES)
    for blocks in ((1, 2), (3, 4)):
        store(of, *blocks, placement=DEMOTED)
    assert look(of, 1, 2) == {"nvme": 2}
    assert look(of, 1, 2) == {"cpu": 2}
    assert look(of, 3, 4) == {"nvme": 2}


def test_with_one_below_it_only_leaves_memory_and_the_lower_tier_forgets_its_own_longest_unused() -> None:
    of = shadow(cpu=2 * BYTES, nvme=4 * BYTES)
    for blocks in ((1, 2), (3, 4), (5, 6)):
        store(of, *blocks)
    assert [look(of, *blocks) for blocks in ((1, 2), (3, 4), (5, 6))] == [{}, {"nvme": 2}, {"nvme": 2}]


def test_what_may_not_be_lower_is_gone() -> None:
    of = shadow(cpu=2 * BYTES, nvme=9 * BYTES)
    for blocks in ((1, 2), (3, 4)):
        store(of, *blocks, placement=Placement(CPU.name, (), CPU.name))
    assert look(of, 1, 2) == {}
    assert len(of) == 1


def test_a_chain_goes_from_its_end() -> None:
    of = shadow(cpu=3 * BYTES)
    store(of, 1)
    store(of, 2)  # the key commits to what is before it
    look(of, 1, 2, real=2)
    store(of, 7, 8)
    assert look(of, 1, 2) == {"cpu": 1}


def test_what_branches_off_within_a_row_shares_its_beginning() -> None:
    of = shadow(cpu=99 * BYTES)
    store(of, 1, 2, 3, 4)
    assert look(of, 1, 2, 8, 9, real=2) == {"cpu": 2}
    store(of, 8, 9)
    assert look(of, 1, 2, 8, 9, real=4) == {"cpu": 4}
    assert look(of, 1, 2, 3, 4, real=4) == {"cpu": 4}


def test_what_the_tiers_store_again_is_not_held_twice() -> None:
    of = shadow(cpu=99 * BYTES)
    store(of, 1, 2, 3, 4)
    look(of, 1, 2, 3, 4, 5, real=2)  # two were evicted, two remain
    store(of, 3, 4, 5)
    assert look(of, 1, 2, 3, 4, 5, real=5) == {"cpu": 5}


# -- what any policy would have lost -----------------------------------------------------


def test_what_was_cleared_or_found_bad_is_not_regretted(tmp_path: Path) -> None:
    node, wanted = bench([HeapTier(4 * MIB), nvme(tmp_path)]), sample(1)
    node.store(wanted)
    node.node.clear(Clear(wanted.header.tenant, wanted.header.session))
    other = sample(2)
    node.store(other)
    node.node.resumption.shadow.log.append((wanted.chain, ()))
    node.node.resumption.shadow.log.append((other.chain, ()))
    found = node.node.stats().returns.lru
    assert found.regrets == 1, "the one that is held, and was not told as found"
    assert found.asked_tokens == 2 * 3 * 4


def test_a_restart_finds_what_the_files_had(tmp_path: Path) -> None:
    low, wanted = Placement(NVME.name, (), NVME.name), sample(1, placement=Placement("nvme", (), "nvme"))
    first = bench([nvme(tmp_path)])
    first.store(wanted)
    first.node.close()
    again = bench([nvme(tmp_path)])
    assert low == wanted.header.placement
    again.node.tick()
    again.node.resumption.shadow.log.append((wanted.chain, again.look(wanted).spans))
    found = again.node.stats().returns.lru
    assert (found.gained_tokens, found.regretted_tokens) == (0, 0)
    assert found.lru_tokens["nvme"] == found.found_tokens["nvme"] == 12
    again.node.resumption.shadow.check_integrity()


def test_only_lookups_that_begin_a_turn_count() -> None:
    node, wanted = heap_bench(), sample(1)
    node.store(wanted)
    node.look(wanted)
    assert node.node.stats().returns.lru.lookups == 0


# -- what it costs -----------------------------------------------------------------------


def test_it_takes_150_bytes_an_extent_at_most() -> None:
    assert bytes_an_extent(300) <= 150


def test_a_log_that_nobody_reads_is_bounded() -> None:
    of = shadow(cpu=BYTES)
    for number in range(2 * LOG_MAX):
        of.log.append((keys(number), ()))
    assert of.stats().lookups == LOG_MAX


def test_rows_are_found_whatever_was_added_and_removed() -> None:
    rng, rows, kept = random.Random(1), ShadowRows(), dict[int, int]()
    for number in range(2000):
        if kept and rng.random() < 0.45:
            rows.remove(kept.pop(rng.choice(list(kept))))
        else:
            kept[number] = rows.add(keys(number, number + 1), 7, 1, number + 1)
    rows.check_integrity()
    assert len(rows) == len(kept)
    assert all(rows.walk(keys(one, one + 1)) == ([(row, 2)], 2) for one, row in kept.items())
    assert rows.walk(keys(5000)) == ([], 0)
