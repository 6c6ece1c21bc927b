"""What a run under autoscaling was like: replicas by time, when their number changed, hits near it. Pure."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench._service_player import Played

NEAR_S = 30.0
"""So long after a scale event a turn counts as near it."""

Counts = list[tuple[float, int]]
"""(seconds since the start, replicas that run)."""


@dataclass(frozen=True, slots=True)
class Change:
    """The number of running replicas, `before` and `after`."""

    at_s: float
    before: int
    after: int


@dataclass(frozen=True, slots=True)
class Run:
    """`replicas`: by time, ascending."""

    name: str
    played: list[Played]
    replicas: Counts

    def hit_rate(self, begin_s: float, end_s: float) -> float | None:
        """Share of the prompt tokens of returning turns in a window that were not computed again."""
        return hit_rate([one for one in self.played if begin_s <= one.at_s < end_s])

    def turn_rate(self, at_s: float, window_s: float = 10.0) -> float:
        """Turns a second that began before a moment."""
        return sum(at_s - window_s <= one.at_s < at_s for one in self.played) / window_s

    def hits_by_time(self, window_s: float) -> tuple[list[float], list[float]]:
        """Middles of windows, and the hit rate in each that has returning turns."""
        begins = np.arange(0.0, max((one.at_s for one in self.played), default=0.0), window_s)
        found = [(float(begin), self.hit_rate(begin, begin + window_s)) for begin in begins]
        known = [(begin + window_s / 2, rate) for begin, rate in found if rate is not None]
        return [at_s for at_s, _ in known], [rate for _, rate in known]


def hit_rate(played: Sequence[Played]) -> float | None:
    """Of returning turns; None when there is none."""
    back = [one for one in played if one.number]
    if not back:
        return None
    computed = sum(one.tokens.get("compute", 0) for one in back)
    return round(1 - computed / sum(one.prompt_tokens for one in back), 4)


def replicas_by_time(looks: Sequence[Mapping[str, Any]], began_unix_s: float, took_s: float) -> Counts:
    """From what the service wrote (`at_s` unix, `states`)."""
    counts = [
        (round(look["at_s"] - began_unix_s, 2), int(look["states"].get("RUNNING", 0)))
        for look in looks
        if 0 <= look["at_s"] - began_unix_s <= took_s
    ]
    return counts or [(0.0, 0)]


def changes_of(replicas: Counts) -> list[Change]:
    """When the number changed."""
    pairs = itertools.pairwise(replicas)
    return [Change(at_s, before, after) for (_, before), (at_s, after) in pairs if before != after]


def homeless(run: Run) -> list[Played]:
    """Returning turns whose session's last replica was sent away in between."""
    downs = [change.at_s for change in changes_of(run.replicas) if change.after < change.before]
    served_s: dict[str, float] = {}
    for one in run.played:
        served_s[one.replica] = max(served_s.get(one.replica, 0.0), one.at_s)
    before = {(one.session, one.number + 1): one for one in run.played}
    found = []
    for one in run.played:
        last = before.get((one.session, one.number))
        if last is not None and last.replica != one.replica:
            gone = [at_s for at_s in downs if last.at_s < at_s <= one.at_s]
            if gone and served_s[last.replica] < gone[-1]:
                found.append(one)
    return found


def summary(run: Run) -> dict[str, Any]:
    """One line of the table: replicas, seconds to the first token, and hit rates of returning turns.

    `near`: within `NEAR_S` after a scale event; `down`: after one that sent a replica away; `homeless`: see
    there, and how many those are.
    """
    changes = changes_of(run.replicas)
    downs = [change for change in changes if change.after < change.before]
    ttfts = [one.ttft_s for one in run.played]
    back = [one.ttft_s for one in run.played if one.number]
    counts = [count for _, count in run.replicas]

    def near(of: Sequence[Change]) -> list[Played]:
        return [one for one in run.played if any(0 <= one.at_s - change.at_s < NEAR_S for change in of)]

    lost = homeless(run)
    return {
        "run": run.name,
        "turns": len(run.played),
        "mean": round(statistics.mean(counts), 2),
        "most": max(counts),
        "ups": len(changes) - len(downs),
        "downs": len(downs),
        "p50_s": round(statistics.median(ttfts), 3),
        "p95_s": round(float(np.quantile(ttfts, 0.95)), 3),
        "p95_back_s": round(float(np.quantile(back, 0.95)), 3) if back else None,
        "hits": hit_rate(run.played),
        "hits_near": hit_rate(near(changes)),
        "hits_down": hit_rate(near(downs)),
        "homeless": len(lost),
        "hits_homeless": hit_rate(lost),
    }
