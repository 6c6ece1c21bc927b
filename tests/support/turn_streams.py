"""Seeded streams of turns for the predictor's tests: who returns, and when, is known to follow a rule."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from samovar.cache_tiers.forecast.turns import Turn

LONG, SHORT = 8000, 200
TOOK_S = 1.0


@dataclass(frozen=True)
class Rule:
    """`long_returns`: P(comes back) after a `LONG` prompt, `short_returns`: after a `SHORT` one."""

    long_returns: float = 0.8
    short_returns: float = 0.15
    median_s: float = 90.0


def stream(
    rule: Rule, *, seed: int, begin_s: float = 0.0, end_s: float, sessions_per_s: float = 1.0
) -> Iterator[tuple[Turn, float]]:
    """Turns by their beginning, each with the idle time after it (infinite: it was the last)."""
    rng = np.random.default_rng(seed)
    name = 0
    waiting: list[tuple[float, int, int]] = []  # begins, session, turns so far
    next_s = begin_s + rng.exponential(1 / sessions_per_s)
    while True:
        while (waiting and waiting[0][0] <= next_s) or next_s >= end_s:
            if not waiting or waiting[0][0] >= end_s:
                return
            at_s, session, turns = heapq.heappop(waiting)
            yield _turn(rule, rng, waiting, at_s, session, turns)
        name += 1
        at_s, next_s = next_s, next_s + rng.exponential(1 / sessions_per_s)
        yield _turn(rule, rng, waiting, at_s, seed * 1_000_000 + name, 0)


def _turn(
    rule: Rule,
    rng: np.random.Generator,
    waiting: list[tuple[float, int, int]],
    at_s: float,
    session: int,
    turns: int,
) -> tuple[Turn, float]:
    tokens = LONG if rng.random() < 0.5 else SHORT
    turn = Turn(session, at_s, at_s + TOOK_S, tokens, 100)
    idle_s = float("inf")
    if rng.random() < (rule.long_returns if tokens == LONG else rule.short_returns):
        idle_s = rule.median_s * float(np.exp(rng.normal(0.0, 0.6)))
        heapq.heappush(waiting, (turn.ended_s + idle_s, session, turns + 1))
    return turn, idle_s
