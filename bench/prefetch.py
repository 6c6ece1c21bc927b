"""`python -m bench.prefetch`: bringing blocks up before they are asked for, over a link of 1 GB/s.

One node: its RAM over an NVMe tier that holds everything and gives 1 GB/s to demand and guesses together.
Sixteen replicas compute 5,000 prompt tokens a second each, so that loading at 1 GB/s is worth it (128 KiB a
token). Ways: none; at pause; by hazard (who probably returns within 120 s); the same without the waste
meter; queue time and hints; all; an oracle that is told every return 10 s before and ranks by it. Hints are
made up from the trace: of `HINT_SHARE` of the sessions, by a seed, the client says "typing" `TYPING_S` before
each request.
`upper`: of the blocks that are in a tier or GPU when a request comes, those in RAM or GPU.
`fooling` is a generated trace on which half of the time nobody comes back who looks like it.
Writes `bench/out/prefetch.json`.
"""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

from tqdm import tqdm

from bench import _report as report
from bench._trace_generator import GeneratorOptions, generate
from bench.policy import FILES, SESSIONS_PER_H, TRACES
from samovar.cache_tiers.forecast.predictor import Predictor
from samovar.cache_tiers.forecast.turns import Forecast
from samovar.cache_tiers.policy.policies import ResidencyPolicy, TimeOracle, make_policy
from samovar.cache_tiers.pricing.meters import PrefillPrice, TierPrice
from samovar.cluster.plan.simulator.fleet import GB, Fleet
from samovar.cluster.plan.simulator.sim import Foresight, Sim
from samovar.cluster.plan.traces.readers import TraceOptions, detect, open_trace
from samovar.cluster.plan.traces.replay import ended_s, forecasts, next_starts_s
from samovar.cluster.plan.traces.trace import TraceTurn
from samovar.configs.sections import GIB, PredictorSettings, PrefetchSettings

HINT_SHARE = 0.5
TYPING_S = 5.0
ORACLE_S = 10.0
WAYS = ("none", "pause", "hazard", "hazard unmetered", "queue+hint", "all", "oracle")
OFF = PrefetchSettings(
    at_queue=False,
    at_hint=False,
    at_pause=False,
    by_hazard=False,
    bytes_per_s_max=GB,
    inflight_bytes_max=4 * GIB,
).model_copy(update={"burst_s": 4.0, "probability_min": 0.15})
SETTINGS: dict[str, PrefetchSettings] = {
    "none": OFF,
    "pause": OFF.model_copy(update={"at_pause": True}),
    "hazard": OFF.model_copy(update={"by_hazard": True}),
    "hazard unmetered": OFF.model_copy(update={"by_hazard": True, "accuracy_min": 0.0}),
    "queue+hint": OFF.model_copy(update={"at_queue": True, "at_hint": True}),
    "all": OFF.model_copy(update={"at_queue": True, "at_hint": True, "at_pause": True, "by_hazard": True}),
    "oracle": OFF.model_copy(update={"at_queue": True, "at_hint": True}),
}


@dataclass(frozen=True)
class Subject:
    label: str
    turns: Sequence[TraceTurn]
    block_tokens: int
    curves: Sequence[Forecast]
    fleet: Fleet


_subject: Subject | None = None  # of this process and those forked from it


def fleet(ram_tokens: int, replicas: int) -> Fleet:
    """The machine; RAM for so many tokens, and GPUs for little more than what runs."""
    return Fleet(
        replicas=replicas,
        replicas_per_node=replicas,
        gpu_bytes=8 * GIB,
        cpu_bytes=ram_tokens * Fleet().bytes_per_token,
        nvme_bytes=64 * 1024 * GIB,
        nvme=TierPrice(1e-3, GB),
        prefill=PrefillPrice(0.01, 1 / 5000, 3.3e-9),
        slots=8,
        lead_s=120.0,
    )


def load(name: str, ram_tokens: int | None, turns: int = 6000) -> Subject:
    """`chat`, `agentic`, `fooling` (of so many turns), or a path."""
    if name == "fooling":
        trace = generate(GeneratorOptions(shape="fooling", turns=turns, seed=3))
        made = fleet(ram_tokens or 200_000, 12)
    else:
        path = {"chat": TRACES / FILES[0], "agentic": TRACES / FILES[1]}.get(name, Path(name))
        options = TraceOptions()
        if detect(path) == "weka":
            sessions = open_trace(path, TraceOptions(block_tokens=4096)).counts().sessions
            options = TraceOptions(spread_h=sessions / SESSIONS_PER_H, block_tokens=4096)
        trace = open_trace(path, options)
        made = fleet(ram_tokens or 2_560_000, 16)
    told = list(trace.turns())
    curves = forecasts(told, Predictor(PredictorSettings()))
    return Subject(name, told, trace.block_tokens, curves, made)


def hints_of(turns: Sequence[TraceTurn], share: float, before_s: float) -> dict[int, tuple[float, ...]]:
    """By turn, when its session's client says that it is typing: of a seeded share of the sessions."""
    rng = random.Random(7)
    talks: dict[int, bool] = {}
    found: dict[int, tuple[float, ...]] = {}
    for number, (turn, next_s) in enumerate(zip(turns, next_starts_s(turns), strict=True)):
        if turn.session not in talks:
            talks[turn.session] = rng.random() < share
        if talks[turn.session] and next_s < float("inf"):
            found[number] = (max(next_s - before_s, ended_s(turn) + 0.1),)
    return found


def measure(way: str) -> dict[str, object]:
    """One way, on the subject of this process."""
    subject = _subject
    assert subject is not None
    settings = SETTINGS[way]
    is_oracle = way == "oracle"
    hints = {}
    if settings.at_hint:
        share, before_s = (1.0, ORACLE_S) if is_oracle else (HINT_SHARE, TYPING_S)
        hints = hints_of(subject.turns, share, before_s)
    made = replace(subject.fleet, prefetch=settings)
    policy: ResidencyPolicy = TimeOracle() if is_oracle else make_policy(made.policy)
    sim = Sim(
        made,
        policy,
        subject.block_tokens,
        Foresight(subject.curves, next_starts_s(subject.turns) if is_oracle else None, hints),
        count_from_s=subject.turns[len(subject.turns) // 2].started_s,
        tick_s=1.0 if subject.turns[-1].started_s < 3 * 3600 else 5.0,
    )
    tally = sim.run(subject.turns)
    sim.check_integrity()
    early = sim.nodes[0].early
    assert early is not None
    stats = early.prefetcher.stats()
    judged = stats.used + stats.late + stats.wasted
    return {
        "trace": subject.label,
        "way": way,
        "upper": round(tally.upper_share, 4),
        "hit_rate": round(tally.hit_rate, 4),
        "ttft_p50_s": round(tally.ttft_at(50), 3),
        "ttft_p95_s": round(tally.ttft_at(95), 3),
        "early_gib": round(early.early_bytes / GIB, 1),
        "guessed_gib": round((stats.started.get("hazard", 0) + stats.started.get("pause", 0)) / GIB, 1),
        "wasted_share": round((stats.wasted + stats.late) / judged, 3) if judged else None,
        "hazard_on": stats.is_on["hazard"],
        "guesses": stats.guesses,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", default=os.environ.get("TRACE", "chat,fooling"))
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--ram-tokens", type=int)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args(argv)
    ways = args.ways.split(",")
    if unknown := set(ways) - set(WAYS):
        parser.error(f"no such way: {', '.join(sorted(unknown))}; there are {', '.join(WAYS)}")
    global _subject
    rows = []
    for name in args.traces.split(","):
        _subject = load(name, args.ram_tokens)
        with ProcessPoolExecutor(args.jobs, mp_context=get_context("fork")) as pool:
            rows += list(tqdm(pool.map(measure, ways), total=len(ways), desc=name))
    report.show(f"prefetch at 1 GB/s ({HINT_SHARE:.0%} of the sessions send hints)", rows)
    print(f"written: {report.write('prefetch', rows, hint_share=HINT_SHARE, typing_s=TYPING_S)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
