"""Hints as clients would send them, made from what a trace's sessions do next, for `bench.policy --hints`.

A client that tells anything tells all of it: half of the sessions do, or another share. What is told of a
time is off by a factor, log-normal. Nothing is told of the time before an answer's end.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, fields

from samovar.cache_tiers.forecast import Hint
from samovar.cluster.plan.traces.replay import ended_s, next_starts_s
from samovar.cluster.plan.traces.trace import TraceTurn


@dataclass(frozen=True, slots=True)
class Telling:
    """What clients tell, and how many: `share` of the sessions.

    `tool_s`: so long before the request with its result that a tool has finished. `typing_s`: so long before
    its next message that a person types. `closed_s`: so long after its last answer that a session is over.
    `duration_error`: at an answer that calls tools, how long they will take, with this standard deviation of
    the log. NaN: not told.
    """

    share: float = 0.5
    tool_s: float = math.nan
    typing_s: float = math.nan
    closed_s: float = math.nan
    duration_error: float = math.nan


HINTS = tuple(one.name for one in fields(Telling))
TELLINGS = {
    "as-clients-do": Telling(tool_s=2.0, closed_s=60.0),
    "and-durations": Telling(tool_s=2.0, closed_s=60.0, duration_error=1.0),
    "durations-off-by-1.5": Telling(share=1.0, duration_error=1.5),
}
"""What `bench.policy --hints all` tells; the first two have bars."""


def parse_telling(text: str) -> Telling:
    """Read `tool_s=2,closed_s=60,share=0.5`. Raises `ValueError`, which names what is wrong."""
    values: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name not in HINTS:
            raise ValueError(f"{part!r}: no such hint; there are {', '.join(HINTS)}")
        values[name] = number = float(value)
        if not 0.0 <= number < math.inf:
            raise ValueError(f"{part!r}: must be 0 or more")
    return Telling(**values)


def hints_of(turns: Sequence[TraceTurn], telling: Telling, seed: int) -> list[Hint]:
    """Return what is told of these turns, by time."""
    rng = random.Random(seed)
    tells: dict[int, bool] = {}
    told: list[Hint] = []
    for turn, next_s in zip(turns, next_starts_s(turns), strict=True):
        if not tells.setdefault(turn.session, rng.random() < telling.share):
            continue
        over_s, key = ended_s(turn), turn.key
        if next_s == math.inf:
            if telling.closed_s == telling.closed_s:
                told.append(Hint(key, over_s + telling.closed_s, "closed"))
            continue
        calls = turn.stop == "tool_calls"
        if calls and telling.duration_error == telling.duration_error and next_s > over_s:
            factor = math.exp(telling.duration_error * rng.gauss(0.0, 1.0))
            told.append(Hint(key, over_s, None, (next_s - over_s) * factor))
        ahead_s = telling.tool_s if calls else telling.typing_s
        if next_s - ahead_s > over_s:  # never of NaN
            told.append(Hint(key, next_s - ahead_s, "tool_finished" if calls else "typing"))
    return sorted(told, key=lambda hint: hint.at_s)
