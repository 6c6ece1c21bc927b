"""The load of `make bench-router`: who says what, and when. Drawn from a seed before anything runs. Pure.

A few sessions say most (Zipf). The pauses of each are log-normal, as people's are, and scaled so that what
falls to a session fills the phase. Hot sessions also send bursts: side questions to one point of their
conversation, all at once, as an agent does that starts helpers; and they speak soon after a kill. Knows
nothing of routers or answers.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from bench._soak_clients import WORDS

Phase = Literal["open", "steady", "kill", "grow"]
PHASES: tuple[Phase, ...] = ("steady", "kill", "grow")

EVENT_AT: Mapping[Phase, float] = {"kill": 0.3, "grow": 0.0}
"""When in its phase a replica is killed, or asked for; a new one takes a while to come."""

GAP_SIGMA = 1.1
"""Of the log of pauses: quartiles 66, 123 and 264 s in the chat trace (Mooncake)."""

FRESH_SHARE = 0.125
"""Of all sessions: they open while the others go on, the same number in each phase."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What to draw. A phase lasts `seconds`; words are about as many tokens."""

    sessions: int
    seconds: float
    turns_per_s: float
    seed: int = 1
    zipf: float = 1.1
    document_words: tuple[int, int] = (300, 1000)
    turn_words: tuple[int, int] = (8, 30)
    bursts: int = 2
    burst_turns: int = 4
    hot_sessions: int = 3


@dataclass(frozen=True, slots=True)
class Turn:
    """One question. `at_s`: since the phase began; it is sent later when the one before took longer.

    `number` counts a session's turns from 0. A side question (`branch` > 0) is asked to the conversation as
    it was after the turns before `number`, and is no part of it. `branch` < 0: asked about the turn, with
    another prompt (title, tags).
    """

    session: int
    number: int
    at_s: float
    text: str
    branch: int = 0


Schedule = Mapping[Phase, Sequence[Turn]]


def schedule(shape: Shape) -> Schedule:
    """The turns of every phase, by time. `open`: the first turn of nearly all sessions, at once."""
    rng = random.Random(shape.seed)
    fresh = round(shape.sessions * FRESH_SHARE / len(PHASES)) * len(PHASES)
    residents = shape.sessions - fresh
    counts = [0] * shape.sessions
    turns: dict[Phase, list[Turn]] = {"open": [_next(shape, rng, counts, n, 0.0) for n in range(residents)]}
    for index, phase in enumerate(PHASES):
        known = residents + fresh * (index + 1) // len(PHASES)
        newcomers = range(residents + fresh * index // len(PHASES), known)
        recalled_s = {}
        if phase == "kill":
            at_s = EVENT_AT[phase] * shape.seconds
            hot = range(min(shape.hot_sessions, residents))
            recalled_s = {session: min(shape.seconds, at_s + rng.random()) for session in hot}
        turns[phase] = _phase(shape, rng, counts, known, newcomers, recalled_s)
    return turns


def _phase(
    shape: Shape,
    rng: random.Random,
    counts: list[int],
    known: int,
    newcomers: range,
    recalled_s: Mapping[int, float],
) -> list[Turn]:
    """Turns of the first `known` sessions; `newcomers` speak at least once, `recalled_s` at that time, too.

    Moves `counts` on.
    """
    fixed = shape.bursts * shape.burst_turns + len(newcomers) + len(recalled_s)
    wanted = max(1, round(shape.turns_per_s * shape.seconds) - fixed)
    chosen = rng.choices(range(known), weights=zipf_weights(known, shape.zipf), k=wanted)
    drawn = [*newcomers, *chosen]
    before = list(counts)
    turns = []
    for session in sorted({*drawn, *recalled_s}):
        times = _times(rng, drawn.count(session), shape.seconds)
        times += [recalled_s[session]] if session in recalled_s else []
        turns += [_next(shape, rng, counts, session, at_s) for at_s in sorted(times)]
    said = list(turns)
    for burst in range(shape.bursts):
        session = rng.randrange(min(shape.hot_sessions, known))
        at_s = shape.seconds * (burst + rng.random()) / shape.bursts
        number = before[session] + sum(turn.session == session and turn.at_s < at_s for turn in said)
        turns += [
            Turn(session, number, at_s, _question(rng, shape.turn_words), branch + 1)
            for branch in range(shape.burst_turns)
        ]
    return sorted(turns, key=lambda turn: (turn.at_s, turn.session, turn.branch))


def zipf_weights(count: int, exponent: float) -> list[float]:
    """How often each of `count` sessions speaks, relative to the first."""
    return [1 / (rank + 1) ** exponent for rank in range(count)]


def _times(rng: random.Random, count: int, seconds: float) -> list[float]:
    """When one session speaks `count` times: pauses before, between and after fill `seconds`."""
    gaps = [rng.lognormvariate(0, GAP_SIGMA) for _ in range(count + 1)]
    return [seconds * at / sum(gaps) for at in accumulate(gaps[:count])]


def _next(shape: Shape, rng: random.Random, counts: list[int], session: int, at_s: float) -> Turn:
    number = counts[session]
    counts[session] += 1
    text = _question(rng, shape.turn_words)
    if number == 0:
        low, high = (math.log(words) for words in shape.document_words)
        document = rng.choices(WORDS, k=round(math.exp(rng.uniform(low, high))))
        # Told apart by its first words: no two sessions share a block.
        text = f"Document {shape.seed}-{session}: {' '.join(document)}. {text}"
    return Turn(session, number, at_s, text)


def _question(rng: random.Random, words: tuple[int, int]) -> str:
    return f"{' '.join(rng.choices(WORDS, k=rng.randint(*words)))}?"
