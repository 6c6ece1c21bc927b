"""The generator: the shapes are those of published traces, and a trace is the same for a seed."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench._trace_generator import FOOL_PERIOD_S, GeneratorOptions, Shape, generate
from samovar.cluster.plan.traces.trace import TraceTurn, common_blocks

DAY_S = 86_400.0


def turns_of(shape: Shape, turns: int, seed: int = 0, **more: Any) -> list[TraceTurn]:
    return list(generate(GeneratorOptions(shape, turns, seed, **more)).turns())


@settings(derandomize=True, deadline=None, max_examples=20)
@given(
    shape=st.sampled_from(["chat", "agentic", "fooling", "rhythm"]),
    seed=st.integers(0, 1000),
    block_tokens=st.sampled_from([16, 100, 512, 1024]),
)
def test_traces_are_in_order_and_chains_are_chains(shape: Shape, seed: int, block_tokens: int) -> None:
    last: dict[int, TraceTurn] = {}
    at_s, seen = 0.0, -1
    for turn in turns_of(shape, 300, seed, block_tokens=block_tokens):
        assert turn.started_s >= at_s
        at_s = turn.started_s
        assert turn.session <= seen + 1
        seen = max(seen, turn.session)
        assert len(turn.blocks) == turn.input_tokens // block_tokens
        before = last.get(turn.session)
        assert turn.service_s is not None
        if before is None:
            assert turn.kept_tokens == 0
        else:
            assert before.service_s is not None
            assert turn.started_s >= before.started_s + before.service_s  # nobody asks twice at a time
            assert turn.kept_tokens <= min(turn.input_tokens, before.input_tokens + before.output_tokens)
            common = common_blocks(before.blocks, turn.blocks)
            assert common == min(turn.kept_tokens // block_tokens, len(before.blocks))
        last[turn.session] = turn


def test_a_rhythm_is_that_of_working_days() -> None:
    """Regulars come back a day later at their hour, or after the weekend; few begin at night."""
    turns = turns_of("rhythm", 6000)
    assert 14 < turns[-1].started_s / DAY_S < 21
    began: dict[int, float] = {}
    ended: dict[int, float] = {}
    idle = []
    for turn in turns:
        began.setdefault(turn.session, turn.started_s)
        if turn.session in ended:
            idle.append(turn.started_s - ended[turn.session])
        ended[turn.session] = turn.started_s + (turn.service_s or 0.0)
    at_work = [at_s for at_s in began.values() if at_s // DAY_S % 7 < 5 and 8 <= at_s % DAY_S / 3600 < 18]
    assert len(at_work) > 0.8 * len(began)
    assert sum(turn.started_s // DAY_S % 7 >= 5 for turn in turns) < 0.05 * len(turns)
    days = [round(one / DAY_S) for one in idle if one > DAY_S / 2]
    assert all(abs(one / DAY_S - round(one / DAY_S)) < 0.15 for one in idle if one > DAY_S / 2)
    assert len(days) > 0.1 * len(turns)
    assert 0.1 < sum(day >= 2 for day in days) / len(days) < 0.5


def test_a_seed_makes_one_trace_and_another_seed_another() -> None:
    trace = generate(GeneratorOptions("chat", 500, seed=5))
    turns = list(trace.turns())
    assert list(trace.turns()) == turns == turns_of("chat", 500, seed=5)
    assert turns_of("chat", 500, seed=6) != turns
    assert trace.counts().turns == 500
    assert trace.coarser(2048).block_tokens == 2048


def test_chat_is_like_chat() -> None:
    turns = turns_of("chat", 20_000)
    per_session = np.array(list(Counter(turn.session for turn in turns).values()))
    assert 0.6 < (per_session == 1).mean() < 0.75  # of a published trace: 69.5 %
    assert 1.4 < per_session.mean() < 1.9  # 1.62
    gaps = _gaps(turns)
    assert 90 < np.median(gaps) < 150  # 123
    assert 450 < np.percentile(gaps, 95) < 750  # 615
    idle = _idle(turns)
    assert idle.min() >= 15
    assert (idle < 20).mean() < 0.03  # nobody is back at once
    assert (idle > 60).mean() > 0.6
    inputs = [turn.input_tokens for turn in turns]
    assert 5500 < np.median(inputs) < 8500  # 6909
    assert 250 < np.median([turn.output_tokens for turn in turns]) < 450  # 350
    shared = Counter(turn.blocks[0] for turn in turns if turn.blocks)
    assert len([count for count in shared.values() if count > 100]) == 8  # the system prompts


def test_agentic_is_like_agents() -> None:
    turns = turns_of("agentic", 30_000)
    tools = np.array([turn.stop == "tool_calls" for turn in turns])
    assert 0.9 < tools.mean() < 0.96
    idle = _idle(turns)
    assert 6 < np.median(idle) < 14  # 9.7
    assert 0.8 < (idle < 60).mean() < 0.9  # .84
    assert sum(turn.kept_tokens for turn in turns) > 0.95 * sum(
        turn.input_tokens for turn in turns if turn.kept_tokens
    )
    assert {turn.role for turn in turns} == {"user", "tool"}


def test_a_fooling_kind_promises_and_never_comes() -> None:
    turns = turns_of("fooling", 8000)
    assert {(turn.stop, turn.tool) for turn in turns} == {("tool_calls", "tool-1")}
    last_seen = {turn.session: index for index, turn in enumerate(turns)}
    comes = [last_seen[turn.session] != index for index, turn in enumerate(turns)]
    ended_s = turns[-1].started_s - 100
    even = [c for c, t in zip(comes, turns, strict=True) if _phase(t) == 0 and t.started_s < ended_s]
    odd = [c for c, t in zip(comes, turns, strict=True) if _phase(t) == 1 and t.started_s < ended_s]
    assert len(odd) > 100
    assert np.mean(even) > 0.7
    assert not any(odd)


def test_memory_does_not_grow_with_the_number_of_turns() -> None:
    trace = generate(GeneratorOptions("chat", 10_000_000))  # as many as are asked for, made when they are
    tracemalloc.start()
    try:
        turns = trace.turns()
        assert sum(1 for _ in islice(turns, 10_000)) == 10_000
        tracemalloc.clear_traces()
        assert sum(1 for _ in islice(turns, 10_000)) == 10_000
        assert tracemalloc.get_traced_memory()[0] < 2 << 20  # more than at the first 10,000th
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "change",
    [
        {"turns": -1},
        {"block_tokens": 0},
        {"system_prompts": 0},
        {"sessions_per_s": 0.0},
        {"sessions_per_s": float("nan")},
    ],
)
def test_options_that_make_no_sense_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        generate(replace(GeneratorOptions(), **change))


def _phase(turn: TraceTurn) -> int:
    return int(turn.started_s // FOOL_PERIOD_S) % 2


def _gaps(turns: list[TraceTurn]) -> Any:
    last: dict[int, float] = {}
    gaps = []
    for turn in turns:
        if turn.session in last:
            gaps.append(turn.started_s - last[turn.session])
        last[turn.session] = turn.started_s
    return np.array(gaps)


def _idle(turns: list[TraceTurn]) -> Any:
    """From the end of a turn to the next one's beginning."""
    last: dict[int, float] = {}
    idle = []
    for turn in turns:
        if turn.session in last:
            idle.append(turn.started_s - last[turn.session])
        assert turn.service_s is not None
        last[turn.session] = turn.started_s + turn.service_s
    return np.array(idle)
