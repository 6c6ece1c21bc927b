"""Replays a trace as a sequence of events, and precomputes forecasts and next starts. Pure.

Times are the trace's.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from samovar.cache_tiers.blocks import KEY_BYTES, marks_of
from samovar.cache_tiers.forecast import Forecast, Forecaster, LineageChains, Opening, SessionKey, forecast
from samovar.cluster.plan.traces.trace import TraceTurn, common_blocks


@dataclass(frozen=True, slots=True)
class Event:
    """The start or end of a turn. `number`: its index in the trace, from 0 on."""

    at_s: float
    number: int
    turn: TraceTurn
    is_end: bool


def events(turns: Iterable[TraceTurn], *, takes_time: bool = True) -> Iterator[Event]:
    """Yield starts and ends in time order; at equal times ends come first.

    `turns`: ordered by start. They run as long as the trace states or assumes; without `takes_time`, 0 s.
    """
    ends: list[tuple[float, int, TraceTurn]] = []
    for number, turn in enumerate(turns):
        while ends and ends[0][0] <= turn.started_s:
            at_s, which, over = heapq.heappop(ends)
            yield Event(at_s, which, over, is_end=True)
        yield Event(turn.started_s, number, turn, is_end=False)
        heapq.heappush(ends, (ended_s(turn) if takes_time else turn.started_s, number, turn))
    while ends:
        at_s, which, over = heapq.heappop(ends)
        yield Event(at_s, which, over, is_end=True)


def ended_s(turn: TraceTurn) -> float:
    """Return when a turn ends, as the trace states or assumes."""
    return turn.turn().ended_s


def next_starts_s(turns: Sequence[TraceTurn]) -> list[float]:
    """Return when the lineage of each turn goes on; infinity if it does not."""
    following: dict[int, float] = {}
    found = [math.inf] * len(turns)
    for at in range(len(turns) - 1, -1, -1):
        found[at] = following.get(turns[at].key, math.inf)
        following[turns[at].key] = turns[at].started_s
    return found


def forecasts(turns: Sequence[TraceTurn], forecaster: Forecaster) -> list[Forecast]:
    """Return the forecast of `forecaster` at the end of each turn; it learns on the way.

    It sees no cache, so the forecasts are the same for all sizes and policies.
    """
    found: dict[int, Forecast] = {}
    openings = TraceOpenings()
    for event in events(turns):
        if event.is_end:
            openings.ended(event.turn)
            found[event.number] = forecast(forecaster, event.turn.turn())
        else:
            forecaster.arrived(event.turn.key, event.at_s, openings.began(event.turn, event.at_s))
    return [found[number] for number in range(len(turns))]


class TraceOpenings:
    """What a node knows of each turn's prompt, from its block ids. `lineages_max`: see `LineageChains`."""

    def __init__(self, lineages_max: int = 100_000) -> None:
        self._chains = LineageChains(lineages_max)

    def began(self, turn: TraceTurn, at_s: float) -> Opening:
        """Record the beginning of a turn."""
        return self._chains.began(turn.key, turn.session, _keys(turn), at_s)

    def ended(self, turn: TraceTurn) -> None:
        """Record the end of a turn."""
        keys = _keys(turn)
        marks = marks_of([keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)])
        self._chains.ended(
            turn.key,
            marks,
            input_tokens=turn.input_tokens,
            tokens=turn.input_tokens + turn.output_tokens,
            block_tokens=turn.block_tokens,
        )


def _keys(turn: TraceTurn) -> bytes:
    """Return stand-ins for the keys of the prompt's blocks: their ids."""
    keys = np.zeros((len(turn.blocks), KEY_BYTES // 8), dtype=np.int64)
    keys[:, 0] = turn.blocks
    return keys.tobytes()


def by_session(turns: Iterable[TraceTurn]) -> Iterator[TraceTurn]:
    """Yield the same turns as seen by a server that keeps one row for a whole session, as before lineages.

    What a prompt keeps then counts against the session's last prompt, of any lineage. `turns`: with their
    blocks (see `with_blocks`).
    """
    last: dict[int, tuple[int, tuple[int, ...]]] = {}
    for turn in turns:
        lineage, blocks = last.get(turn.session, (turn.lineage, ()))
        last[turn.session] = turn.lineage, turn.blocks
        kept = turn.kept_tokens
        if lineage != turn.lineage:
            kept = common_blocks(blocks, turn.blocks) * turn.block_tokens
        yield replace(turn, kept_tokens=kept, by_session=True)


class Growth:
    """Estimates the tokens that a session's next turn adds: a moving mean over its turns so far."""

    NEWER = 0.3

    def __init__(self) -> None:
        self._mean: dict[SessionKey, float] = {}

    def after(self, session: SessionKey, new_tokens: int) -> float:
        """Record the tokens that a turn has added, and return the new mean."""
        mean = self._mean.get(session, float(new_tokens))
        self._mean[session] = mean = mean + self.NEWER * (new_tokens - mean)
        return mean


def with_blocks(turns: Iterable[TraceTurn]) -> Iterator[TraceTurn]:
    """Yield the same turns; blocks that the trace does not give are generated, unique to the lineage.

    The part of its lineage's chain that a prompt keeps has the same blocks, as far as the last prompt had
    them.
    """
    last: dict[int, tuple[int, ...]] = {}
    ids = -1
    for turn in turns:
        full = turn.input_tokens // turn.block_tokens
        if turn.blocks or not full:
            yield turn
            continue
        kept = last.get(turn.key, ())[: min(full, turn.kept_tokens // turn.block_tokens)]
        new = full - len(kept)
        blocks = (*kept, *range(ids, ids - new, -1))
        ids -= new
        last[turn.key] = blocks
        yield replace(turn, blocks=blocks)
