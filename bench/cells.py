"""`python -m bench.cells`: how much of what an oracle gains over LRU eviction gains, in many cells.

A cell is a trace, a seed, a load and a cache size, simulated as by `bench.policy`. Agents: three
superpositions at 24, 34 and 48 sessions an hour; chat: three seeds of the predictor, its load as recorded.
Forecasts are made once a seed, at 34 sessions an hour: another load moves the sessions' starts alone.
`plain`: by the probability within the tier's whole horizon, without what a soon return counts for.
A run of one policy in one cell takes 5 to 30 s of CPU; finished ones are kept in `bench/out/cells.jsonl` and
not run again: delete it after a change. Writes `bench/out/cells.json`.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Final

import numpy as np

from bench import _report as report
from bench import policy as runs
from bench._single_tier import hits_with
from samovar.cache_tiers.forecast.predictor import Predictor
from samovar.cache_tiers.forecast.turns import Forecast
from samovar.cache_tiers.policy.policies import LikelyReturn, ResidencyPolicy, TimeOracle, make_policy
from samovar.cluster.plan.traces.readers import TraceOptions, open_trace
from samovar.cluster.plan.traces.replay import forecasts, next_starts_s
from samovar.cluster.plan.traces.trace import TraceTurn
from samovar.configs.sections import PredictorSettings, ProfilesSettings

KEPT: Final = report.OUT_DIR / "cells.jsonl"
POLICIES: Final = ("lru", "plain", "learned", "oracle")
LOADS: Final = (34.0, 24.0, 48.0)
BLOCKS: Final = {"chat": (2000, 5000, 10_000, 20_000), "agentic": (2000, 1000, 1500, 3000, 4000)}
BLOCK_TOKENS: Final = {"chat": 512, "agentic": runs.AGENTIC_BLOCK_TOKENS}
GAP_MIN: Final = {("agentic", 34.0, 2_048_000): 0.34, ("chat", 0.0, 2_560_000): 0.33}


@dataclass(frozen=True, slots=True)
class Run:
    """One policy in one cell. `sessions_per_h`: 0: as recorded."""

    trace: str
    seed: int
    sessions_per_h: float
    cache_tokens: int
    policy: str


@dataclass(frozen=True)
class Traffic:
    """A trace at one load, with the forecast of each turn."""

    turns: Sequence[TraceTurn]
    curves: Sequence[Forecast]


def turns_of(trace: str, seed: int, sessions_per_h: float) -> list[TraceTurn]:
    """Read a trace; chat is the same for all seeds and loads."""
    path = runs.TRACES / runs.FILES[trace == "agentic"]
    if trace == "chat":
        return list(open_trace(path, TraceOptions()).turns())
    size = runs.AGENTIC_BLOCK_TOKENS
    sessions = open_trace(path, TraceOptions(block_tokens=size)).counts().sessions
    options = TraceOptions(seed=seed, spread_h=sessions / sessions_per_h, block_tokens=size)
    return list(open_trace(path, options).turns())


def moved(like: Traffic, turns: Sequence[TraceTurn]) -> Traffic:
    """Return the same sessions with other starts, each turn with the forecast that it has in `like`."""
    by_session: dict[int, list[Forecast]] = defaultdict(list)
    for turn, curve in zip(like.turns, like.curves, strict=True):
        by_session[turn.key].append(curve)
    told = {key: iter(curves) for key, curves in by_session.items()}
    return Traffic(turns, [next(told[turn.key]) for turn in turns])


def policy_of(name: str) -> ResidencyPolicy:
    if name == "oracle":
        return TimeOracle()
    return LikelyReturn("learned", (1.0,)) if name == "plain" else make_policy(runs.policy_settings(name))


def hit_rate(traffic: Traffic, run: Run) -> float:
    """Return the token hit rate of one run over the later half of the turns."""
    turns = traffic.turns
    hits = hits_with(
        turns,
        run.cache_tokens // BLOCK_TOKENS[run.trace],
        policy_of(run.policy),
        runs.policy_settings("lru" if run.policy == "lru" else "learned"),
        curves=traffic.curves if run.policy in ("plain", "learned") else None,
        next_s=next_starts_s(turns),
        count_from_s=turns[len(turns) // 2].started_s,
        profiles=ProfilesSettings(),
    )
    return round(hits.rate, 5)


def measure(
    trace: str, seed: int, loads: Sequence[float], blocks: Sequence[int], done: dict[Run, float]
) -> None:
    """Run what is not `done` of one seed, and keep it there and in the file."""
    wanted = [
        Run(trace, seed, load, size * BLOCK_TOKENS[trace], policy)
        for load in loads
        for size in blocks
        for policy in POLICIES
    ]
    wanted = [run for run in wanted if run not in done]
    if not wanted:
        return
    turns = turns_of(trace, seed, runs.SESSIONS_PER_H)
    as_told = Traffic(turns, forecasts(turns, Predictor(PredictorSettings(), seed=seed)))
    at_load: dict[float, Traffic] = {0.0: as_told, runs.SESSIONS_PER_H: as_told}
    for run in wanted:
        load = run.sessions_per_h
        if load not in at_load:
            at_load[load] = moved(as_told, turns_of(trace, seed, load))
        same = Run(trace, 0, load, run.cache_tokens, run.policy)
        is_same = trace == "chat" and run.policy in ("lru", "oracle") and same in done
        done[run] = done[same] if is_same else hit_rate(at_load[load], run)
        with KEPT.open("a") as file:
            file.write(json.dumps(asdict(run) | {"hit_rate": done[run]}) + "\n")
        print(f"{trace} {seed} {load:g}/h {run.cache_tokens} {run.policy} {done[run]:.4f}", flush=True)


def kept() -> dict[Run, float]:
    """Return what earlier calls have measured."""
    lines = KEPT.read_text().splitlines() if KEPT.exists() else []
    rows = [json.loads(line) for line in lines]
    return {Run(**{name: row[name] for name in Run.__slots__}): row["hit_rate"] for row in rows}


@dataclass(frozen=True, slots=True)
class Place:
    """A trace, load and size, over the seeds that all policies have run: `[seeds]` each."""

    trace: str
    sessions_per_h: float
    cache_tokens: int
    hits: dict[str, np.ndarray[tuple[int], np.dtype[np.float64]]]

    def gaps(self, policy: str) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Return the share of the gap between LRU and the oracle that `policy` has closed."""
        lru = self.hits["lru"]
        return (self.hits[policy] - lru) / np.maximum(self.hits["oracle"] - lru, 1e-9)

    def least(self, policy: str) -> float:
        """Return by how much the shipped rule is above `policy` in the worst cell."""
        return float((self.hits["learned"] - self.hits[policy]).min())


def places_of(done: dict[Run, float]) -> list[Place]:
    places = []
    for key in sorted({(run.trace, run.sessions_per_h, run.cache_tokens) for run in done}):
        seeds = [
            seed
            for seed in sorted({run.seed for run in done})
            if all(Run(key[0], seed, *key[1:], policy) in done for policy in POLICIES)
        ]
        if seeds:
            hits = {
                policy: np.array([done[Run(key[0], seed, *key[1:], policy)] for seed in seeds])
                for policy in POLICIES
            }
            places.append(Place(*key, hits))
    return places


def row_of(place: Place) -> dict[str, object]:
    """Return a line of the table."""
    gaps = place.gaps("learned")
    return {
        "trace": place.trace,
        "per_h": f"{place.sessions_per_h:g}" if place.sessions_per_h else "",
        "tokens": place.cache_tokens,
        "seeds": len(gaps),
        **{policy: f"{place.hits[policy].mean():.4f}" for policy in POLICIES},
        "gap_plain": f"{place.gaps('plain').mean():.3f}",
        "gap": f"{gaps.mean():.3f}",
        "gap_from": f"{gaps.min():.3f}",
        "gap_to": f"{gaps.max():.3f}",
        "over_lru": f"{place.least('lru'):+.4f}",
        "over_plain": f"{place.least('plain'):+.4f}",
    }


def broken_bars(places: Sequence[Place]) -> Iterator[str]:
    """What is expected and the cells do not show, in words."""
    for place in places:
        where = f"{place.trace}, {place.sessions_per_h:g} sessions/h, {place.cache_tokens} tokens"
        for beside in ("lru", "plain"):
            if place.least(beside) < -runs.MARGIN:
                yield f"{where}: {place.least(beside):+.4f} below {beside}"
        bar = GAP_MIN.get((place.trace, place.sessions_per_h, place.cache_tokens), 0.0)
        if (gap := float(place.gaps("learned").mean())) < bar:
            yield f"{where}: {gap:.3f} of the gap < {bar}"


def main(argv: Sequence[str] | None = None) -> int:
    """0: every bar holds in the cells that were run."""
    parser = argparse.ArgumentParser(prog="bench.cells", description=__doc__)
    parser.add_argument("--traces", default="chat,agentic")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--loads", default=",".join(f"{load:g}" for load in LOADS), help="of agents")
    parser.add_argument("--blocks", help="sizes, in blocks of 512 tokens (chat) or 1024 (agentic)")
    asked = parser.parse_args(argv)
    done = kept()
    KEPT.parent.mkdir(parents=True, exist_ok=True)
    for trace in asked.traces.split(","):
        sizes = [int(size) for size in asked.blocks.split(",")] if asked.blocks else BLOCKS[trace]
        loads = [float(load) for load in asked.loads.split(",")] if trace == "agentic" else [0.0]
        for seed in map(int, asked.seeds.split(",")):
            measure(trace, seed, loads, sizes, done)
    places = places_of(done)
    report.show("hits, and share of the gap from LRU to the oracle", [row_of(place) for place in places])
    bars = list(broken_bars(places))
    for bar in bars:
        print(f"below the bar: {bar}")
    found = [asdict(run) | {"hit_rate": rate} for run, rate in done.items()]
    print(f"written: {report.write('cells', found, below_the_bar=bars)}")
    return 1 if bars else 0


if __name__ == "__main__":
    raise SystemExit(main())
