"""Patterns beside conversations: as recorded from clients, and the conversations stay as they were."""

from __future__ import annotations

import tracemalloc
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import islice, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench._trace_generator import COMPACT_SYSTEMS_MIN, GeneratorOptions, Shape, generate
from bench._trace_patterns import (
    AFTER_ANSWER,
    AHEAD_S,
    QUOTED_TOKENS_MAX,
    SUBAGENTS_PAUSE_S,
    USUAL,
    Patterns,
    mixed,
    parse_patterns,
)
from samovar.cluster.plan.traces.replay import by_session, ended_s, with_blocks
from samovar.cluster.plan.traces.trace import TraceTurn, common_blocks
from tests.support.traffic import made

ALL = Patterns(side=0.5, title=0.5, subagents=0.3, regenerate=0.2, edit=0.2)


def beside(shape: Shape, turns: int, patterns: Patterns, seed: int = 1, **more: Any) -> list[TraceTurn]:
    return list(generate(GeneratorOptions(shape, turns, seed, patterns=patterns, **more)).turns())


def lineages(turns: list[TraceTurn]) -> dict[int, list[TraceTurn]]:
    found: dict[int, list[TraceTurn]] = defaultdict(list)
    for turn in turns:
        found[turn.key].append(turn)
    return found


@settings(derandomize=True, deadline=None, max_examples=8)
@given(
    shape=st.sampled_from(["chat", "agentic"]),
    seed=st.integers(0, 1000),
    block_tokens=st.sampled_from([100, 512]),
)
def test_the_conversations_stay_as_they_were_and_lineages_are_chains(
    shape: Shape, seed: int, block_tokens: int
) -> None:
    options = GeneratorOptions(shape, 120, seed, block_tokens=block_tokens)
    plain = list(generate(options).turns())
    trace = mixed(generate(options), ALL, seed=seed)
    turns = list(trace.turns())
    assert [turn for turn in turns if turn.is_main] == plain
    assert len(turns) > len(plain)
    assert list(trace.turns()) == turns  # once more from the beginning
    assert trace.counts().turns == len(turns)
    assert all(one.started_s <= two.started_s for one, two in pairwise(turns))
    seen = -1
    for turn in turns:
        assert 0 <= turn.session <= seen + 1
        seen = max(seen, turn.session)
        assert len(turn.blocks) == turn.input_tokens // block_tokens
    for of in lineages(turns).values():
        for before, turn in pairwise(of):
            assert turn.kept_tokens <= min(turn.input_tokens, before.input_tokens + before.output_tokens)
            common = common_blocks(before.blocks, turn.blocks)
            expected = min(turn.kept_tokens // block_tokens, len(before.blocks))
            # Of an answer the trace tells no blocks: an edited attempt has others there.
            assert common <= expected if before.is_side else common == expected


def test_three_one_shots_follow_an_answer() -> None:
    turns = beside("chat", 400, Patterns(side=1.0), block_tokens=16)
    main = [turn for turn in turns if turn.is_main]
    side = [turn for turn in turns if turn.is_side]
    assert len(side) == 3 * len(main) == 1200
    assert {len(of) for of in lineages(side).values()} == {1}  # never extended
    longest = max(task.instruction_tokens for task in AFTER_ANSWER) + QUOTED_TOKENS_MAX
    assert max(turn.input_tokens for turn in side) <= longest
    roots = Counter(turn.blocks[0] for turn in side)
    assert sorted(roots.values()) == [400, 400, 400]  # each task's instructions are shared by all
    assert not {turn.blocks[0] for turn in main} & set(roots)
    over_s = defaultdict(set)
    for turn in main:
        over_s[turn.session].add(ended_s(turn))
    for turn in side:
        assert any(0 < turn.started_s - at_s < 1 for at_s in over_s[turn.session])


def test_a_title_runs_beside_the_first_turn_only() -> None:
    turns = beside("agentic", 800, Patterns(title=1.0))
    first = {turn.session: turn for turn in reversed(turns) if turn.is_main}
    titles = [turn for turn in turns if turn.is_side]
    assert sorted(turn.session for turn in titles) == sorted(first)
    for title in titles:
        assert first[title.session].started_s < title.started_s < ended_s(first[title.session])


def test_subagents_run_in_a_pause_and_their_parent_returns_after_them() -> None:
    turns = beside("agentic", 1500, Patterns(subagents=0.4))
    main: dict[int, list[TraceTurn]] = defaultdict(list)
    for turn in turns:
        if turn.is_main:
            main[turn.session].append(turn)
    agents = [of for of in lineages(turns).values() if of[0].is_side]
    assert len({of[0].blocks[0] for of in agents}) == 1  # one system prompt, of sub-agents alone
    assert agents[0][0].blocks[0] not in {turn.blocks[0] for of in main.values() for turn in of}
    assert {len(of) for of in agents} <= set(range(3, 21))
    assert max(len(of) for of in agents) > 15
    pauses: dict[tuple[int, float], int] = Counter()
    for of in agents:
        at_s = of[0].started_s
        before = [turn for turn in main[of[0].session] if turn.started_s < at_s][-1]
        after_s = next(turn.started_s for turn in main[of[0].session] if turn.started_s > at_s)
        assert ended_s(of[-1]) < after_s <= before.started_s + AHEAD_S
        assert after_s - ended_s(before) >= SUBAGENTS_PAUSE_S
        assert [turn.stop for turn in of] == ["tool_calls"] * (len(of) - 1) + ["stop"]
        pauses[of[0].session, before.started_s] += 1
    assert set(pauses.values()) == {2, 3, 4, 5, 6}


def test_regenerated_and_edited_turns_fork_within_their_own_lineage() -> None:
    turns = beside("chat", 600, Patterns(regenerate=0.3, edit=0.6))
    side = [turn for turn in turns if turn.is_side]
    assert {turn.lineage for turn in turns} == {0}
    again, edited = (
        [turn for turn in side if (turn.kept_tokens == turn.input_tokens) == is_again]
        for is_again in (True, False)
    )
    assert min(len(again), len(edited)) > 20
    of_session = lineages(turns)
    for turn in edited:
        of = of_session[turn.key]
        at = of.index(turn)
        assert at + 1 < len(of)  # what replaces it
        assert ended_s(turn) <= of[at + 1].started_s
        assert of[at + 1].kept_tokens <= turn.kept_tokens < turn.input_tokens  # ... and does not extend it


def test_a_compacted_conversation_goes_on_in_a_new_lineage() -> None:
    least = COMPACT_SYSTEMS_MIN * 17_000
    turns = list(generate(GeneratorOptions("agentic", 800, 3, compact_tokens=least)).turns())
    assert all(turn.is_main for turn in turns)
    assert max(turn.lineage for turn in turns) > 3
    last: dict[int, TraceTurn] = {}
    system = 17_000 // 512
    for turn in turns:
        before = last.get(turn.session)
        if before is not None and before.lineage != turn.lineage:
            assert turn.lineage == before.lineage + 1  # the old one falls silent
            assert turn.kept_tokens == 0
            assert common_blocks(before.blocks, turn.blocks) == system
        last[turn.session] = turn
    (joined,) = [t for t in by_session(turns) if t.started_s == turn.started_s and t.session == turn.session]
    assert joined.key == turn.session


def test_a_pattern_draws_the_same_whichever_others_are_on() -> None:
    alone = beside("chat", 300, Patterns(side=0.3))
    with_others = beside("chat", 300, Patterns(side=0.3, edit=0.9, regenerate=0.5))
    one, other = ([(t.started_s, t.input_tokens) for t in of if t.lineage] for of in (alone, with_others))
    assert one == other
    assert len(alone) < len(with_others)
    assert beside("chat", 300, ALL, seed=1) != beside("chat", 300, ALL, seed=2)


def test_one_row_a_session_sees_each_prompt_after_the_last_of_any_lineage() -> None:
    turns = beside("chat", 300, Patterns(side=1.0), block_tokens=16)
    joined = list(by_session(turns))
    assert [turn.key for turn in joined] == [turn.session for turn in turns]
    assert [turn.is_main for turn in joined] == [turn.is_main for turn in turns]
    back = [(one, other) for one, other in zip(turns, joined, strict=True) if one.is_main and one.kept_tokens]
    assert back
    assert all(other.kept_tokens == 0 for _, other in back)  # the last prompt was a side request's
    plain = made(300)
    assert [(t.key, t.kept_tokens) for t in by_session(plain)] == [(t.key, t.kept_tokens) for t in plain]


def test_blocks_that_are_not_told_are_made_for_each_lineage() -> None:
    told = generate(GeneratorOptions("agentic", 300, 1))
    untold = told.changed(lambda turns: (replace(turn, blocks=()) for turn in turns), "")
    turns = [turn for turn in with_blocks(mixed(untold, Patterns(side=1.0)).turns()) if turn.is_main]
    for before, turn in ((a, b) for of in lineages(turns).values() for a, b in pairwise(of)):
        assert common_blocks(before.blocks, turn.blocks) == min(turn.kept_tokens // 512, len(before.blocks))


def test_memory_does_not_grow_with_the_trace() -> None:
    trace = mixed(generate(GeneratorOptions("chat", 10_000_000)), Patterns(side=0.2, subagents=0.01))
    tracemalloc.start()
    try:
        turns = trace.turns()
        assert sum(1 for _ in islice(turns, 6000)) == 6000
        tracemalloc.clear_traces()
        assert sum(1 for _ in islice(turns, 6000)) == 6000
        assert tracemalloc.get_traced_memory()[0] < 8 << 20  # what is read ahead, again
    finally:
        tracemalloc.stop()


def test_patterns_are_named_with_or_without_a_share() -> None:
    assert parse_patterns("side") == Patterns(side=USUAL.side)
    assert parse_patterns("side=.5 + subagents") == Patterns(side=0.5, subagents=USUAL.subagents)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tags", "no pattern 'tags': choose of side, title, subagents, regenerate, edit"),
        ("", "no pattern ''"),
        ("side=2", "share of the pattern side is 2.0, and must be 0 to 1"),
        ("side=nan", "share of the pattern side is nan"),
        ("edit=often", "share of the pattern edit is 'often', and must be 0 to 1"),
        ("side+side=.1", "pattern side is given twice"),
    ],
)
def test_patterns_that_make_no_sense_are_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_patterns(text)


@pytest.mark.parametrize("tokens", [0, 33_999, 1_000_000])
def test_compaction_at_a_length_that_makes_no_sense_is_refused(tokens: int) -> None:
    with pytest.raises(
        ValueError, match=f"compact_tokens is {tokens}, and must be 34000 to 190000 for agentic"
    ):
        generate(GeneratorOptions("agentic", compact_tokens=tokens))
