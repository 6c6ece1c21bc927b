"""`python -m bench.sim_speed`: simulated turns a second and memory, and what ten million turns would take.

A generated chat on a large fleet with LRU and with the type-KM predictor learning on every node. The
router looks at a request's home and three replicas drawn at random, not at all. Each run is a process of its
own, so that peak memory is its own. Time is CPU time of one core, so that others on the machine do
not count; ten million turns are extrapolated from it, and from the growth of memory over the second half.
"""

from __future__ import annotations

import argparse
import itertools
import os
import resource
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import psutil
from tqdm import tqdm

from bench import _report as report
from bench._trace_generator import GeneratorOptions, generate
from samovar.cache_tiers.forecast.kaplan_meier import TypeKm
from samovar.cache_tiers.policy.policies import make_policy
from samovar.cluster.plan.simulator.fleet import Fleet
from samovar.cluster.plan.simulator.sim import Sim
from samovar.cluster.plan.traces.trace import TraceTurn
from samovar.configs.sections import GIB, MIB, PolicySettings, PredictorSettings

GOAL_TURNS = 10_000_000
BLOCK_TOKENS = 2048
SESSIONS_PER_S_REPLICA = 0.25  # with 1.6 turns a session about half of what a replica can compute


def measure(policy: str, replicas: int, turns: int) -> dict[str, object]:
    """One run in this process."""
    settings = PolicySettings.model_validate({"name": policy}).model_copy(update={"rerank_s": 10.0})
    fleet = Fleet(
        replicas=replicas,
        gpu_bytes=40 * GIB,
        cpu_bytes=256 * GIB,
        policy=settings,
    )
    predictors = []
    if policy == "type-km":
        predictors = [TypeKm(PredictorSettings(sessions_max=4096)) for _ in range(fleet.nodes)]
    sim = Sim(fleet, make_policy(settings), BLOCK_TOKENS, predictors=predictors)
    options = GeneratorOptions(
        turns=turns, block_tokens=BLOCK_TOKENS, sessions_per_s=SESSIONS_PER_S_REPLICA * replicas
    )
    made = generate(options).turns()
    process = psutil.Process()
    middle: list[float] = []

    def watched() -> Iterator[TraceTurn]:
        yield from itertools.islice(made, turns // 2)
        middle.append(process.memory_info().rss)
        yield from made

    began_s = time.process_time()
    tally = sim.run(tqdm(watched(), total=turns, desc=policy, mininterval=5.0))
    took_s = time.process_time() - began_s
    grown = max(0.0, process.memory_info().rss - middle[0]) / (turns / 2)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "policy": policy,
        "replicas": replicas,
        "turns": turns,
        "turns_per_cpu_s": round(turns / took_s),
        "peak_gib": round(peak / GIB, 2),
        "hit_rate": round(tally.hit_rate, 4),
        "mib_per_1000_turns": round(grown * 1000 / MIB, 3),
        "goal_cpu_h": round(GOAL_TURNS / turns * took_s / 3600, 2),
        "goal_gib_at_most": round((peak + grown * (GOAL_TURNS - turns)) / GIB, 1),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=200_000)
    parser.add_argument("--policies", default="lru,type-km")
    args = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows = []
    for policy in args.policies.split(","):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            rows.append(pool.submit(measure, policy, args.replicas, args.turns).result())
    report.show(f"the simulator, and {GOAL_TURNS:,} turns extrapolated", rows)
    print(f"written: {report.write('sim_speed', rows)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
