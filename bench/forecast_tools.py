"""`python -m bench.forecast_tools [--trace PATH]`: what names of tools add to the forecast of when they end.

Of answers that call tools, in the later half of a trace: the standard deviation of log(idle time / median of
the forecast), for those that went on: names withheld, and with times learned by tool, over the network's
forecasts and over counts by kind. `log_idle_sd`: of the idle times themselves. The trace is a file of
TraceLab's format (`_tracelab.py`), or generated (`--seed`), with times of tools that are generated, too.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench import _report as report
from bench import _tracelab as tracelab
from bench._single_tier import hits_with
from bench._trace_generator import GeneratorOptions, generate
from samovar.cache_tiers.forecast import (
    EDGES_S,
    LAST_S,
    Curves,
    Floats,
    Forecast,
    Predictor,
    TypeKm,
    resume_probability,
)
from samovar.cache_tiers.policy import make_policy
from samovar.cluster.plan.traces.replay import ended_s, forecasts, next_starts_s, with_blocks
from samovar.cluster.plan.traces.trace import TraceTurn
from samovar.configs.sections import PolicySettings, PredictorSettings

SD_MAX = 0.94
"""Asked for, of 1.20 where no name is known."""
SHORTEST_S = 0.1
HORIZONS_S = (5.0, 60.0)


@dataclass(frozen=True, slots=True)
class Way:
    name: str
    make: Callable[[int], Predictor | TypeKm]
    has_names: bool = True


WAYS = (
    Way("no names", lambda seed: Predictor(PredictorSettings(), seed=seed), has_names=False),
    Way("times by tool", lambda seed: Predictor(PredictorSettings(), seed=seed)),
    Way("counts by kind, no names", lambda seed: TypeKm(PredictorSettings()), has_names=False),
    Way("counts by kind, times by tool", lambda seed: TypeKm(PredictorSettings())),
)


def medians_s(curves: Curves) -> Floats:
    """When half are back, `[n]`; `LAST_S` where fewer ever are."""
    half = np.log(0.5)
    return np.array(
        [np.interp(-half, -curve, EDGES_S) if curve[-1] <= half else LAST_S for curve in curves.astype(float)]
    )


def score(turns: Sequence[TraceTurn], told: Sequence[Forecast]) -> dict[str, float]:
    """Of tool turns of the later half that went on, within a day."""
    next_s = next_starts_s(turns)
    later = range(len(turns) // 2, len(turns))
    idle = {at: next_s[at] - ended_s(turns[at]) for at in later if turns[at].stop == "tool_calls"}
    back = [at for at, idle_s in idle.items() if 0.0 <= idle_s <= 86_400.0]
    idle_s = np.maximum([idle[at] for at in back], SHORTEST_S)
    curves = np.stack([told[at].curve for at in back])
    found = {
        "turns": float(len(back)),
        "log_idle_sd": float(np.log(idle_s).std()),
        "residual_sd": float((np.log(idle_s) - np.log(np.maximum(medians_s(curves), SHORTEST_S))).std()),
    }
    for horizon_s in HORIZONS_S:
        likely = resume_probability(curves, np.zeros(len(back)), horizon_s)
        found[f"brier_{horizon_s:g}s"] = float(np.square(likely - (idle_s <= horizon_s)).mean())
    return found


def named(turns: Sequence[TraceTurn], *, has_names: bool) -> list[TraceTurn]:
    """The turns, without the names of their tools if they are to have none."""
    return list(turns) if has_names else [replace(turn, tool="") for turn in turns]


def main(argv: Sequence[str] | None = None) -> int:
    """0: the bar holds."""
    parser = argparse.ArgumentParser(prog="bench.forecast_tools", description=__doc__)
    parser.add_argument("--trace", type=Path, help="a file of TraceLab's format; by default generated")
    parser.add_argument("--turns", type=int, default=20_000, help="of a generated trace")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--blocks", type=int, default=0, help="tell hit rates of a cache of so many blocks, too"
    )
    asked = parser.parse_args(argv)
    if asked.trace:
        trace = tracelab.tracelab(asked.trace)
    else:
        trace = generate(GeneratorOptions("tools", asked.turns, asked.seed, block_tokens=1024))
    turns = list(with_blocks(trace.turns()))
    rows: list[dict[str, Any]] = []
    for way in WAYS:
        told = forecasts(named(turns, has_names=way.has_names), way.make(asked.seed))
        row: dict[str, Any] = {"trace": trace.name, "way": way.name, **score(turns, told)}
        if asked.blocks:
            settings = PolicySettings()
            half_s = turns[len(turns) // 2].started_s
            hits = hits_with(
                turns, asked.blocks, make_policy(settings), settings, curves=told, count_from_s=half_s
            )
            row["hit_rate"] = hits.rate
        rows.append(row)
    report.show("answers that call tools: when the session goes on", rows)
    (learned,) = [row["residual_sd"] for row in rows if row["way"] == WAYS[1].name]
    missed = [] if learned <= SD_MAX else [f"residual sd {learned:.2f} > {SD_MAX}"]
    for problem in missed:
        print(f"missed: {problem}")
    print(f"written: {report.write('forecast-tools', rows, module='forecast_tools', missed=missed)}")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
