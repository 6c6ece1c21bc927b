"""Runs the simulations of `samovar plan`: each policy on the given fleet, and with other sizes of a tier.

Pure except for reading the trace and for the processes that the runs are spread over.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import get_args

from samovar.cache_tiers.blocks import CPU, NVME
from samovar.cache_tiers.forecast import Forecast, Predictor, TypeKm
from samovar.cache_tiers.policy import ResidencyPolicy, TimeOracle, make_policy
from samovar.cluster.plan.simulator.fleet import Fleet
from samovar.cluster.plan.simulator.sim import Foresight, Sim
from samovar.cluster.plan.traces.readers import TraceOptions, open_trace
from samovar.cluster.plan.traces.replay import forecasts, next_starts_s, with_blocks
from samovar.cluster.plan.traces.trace import TraceTurn
from samovar.configs.sections import GIB, PolicyName, PolicySettings, PredictorSettings

SWEPT = ("gpu", CPU.name, NVME.name)
"""Tiers whose size can be varied."""
POLICIES: tuple[str, ...] = (*get_args(PolicyName), "oracle")
BUSY_SHARE = 0.6
"""The default number of replicas is such that computing every prompt would keep them this busy."""
USES_MAX = 200_000
"""Block uses in a run: a longer trace is simulated in larger blocks."""
PROMPT_BLOCKS = 32
"""A prompt of mean length still has this many blocks, because only whole blocks are found."""
FROM_SHARE = 0.5
"""Counting begins at this share of the turns: before, caches and predictor are cold."""
TICKS = 300
"""Number of prefetcher ticks in a run."""


class PlanRefused(Exception):
    """The request cannot be planned; the message is one sentence for the user."""


@dataclass(frozen=True)
class Traffic:
    """A trace, ready to be simulated. `curves`: forecasts by policy, of each turn."""

    name: str
    turns: Sequence[TraceTurn]
    block_tokens: int
    notes: tuple[str, ...]
    curves: Mapping[str, Sequence[Forecast]]
    next_s: Sequence[float]

    def most_found(self) -> float:
        """Return the hit rate of an unbounded cache over the counted turns."""
        seen: set[int] = set()
        prompt_tokens = found_tokens = 0
        for turn in self.turns:
            old = next((at for at, number in enumerate(turn.blocks) if number not in seen), len(turn.blocks))
            seen.update(turn.blocks[old:])
            if turn.started_s >= self.count_from_s:
                prompt_tokens += turn.input_tokens
                found_tokens += max(0, min(old * self.block_tokens, turn.input_tokens - 1))
        return found_tokens / max(1, prompt_tokens)

    @property
    def count_from_s(self) -> float:
        return self.turns[int(len(self.turns) * FROM_SHARE)].started_s

    @property
    def lasts_s(self) -> float:
        return max(1.0, self.turns[-1].started_s - self.turns[0].started_s)

    def coarser(self, uses_max: int) -> Traffic:
        """Return the same traffic in larger blocks."""
        times = _times(self.turns, self.block_tokens, uses_max)
        if times == 1:
            return self
        size = times * self.block_tokens
        turns = [replace(t, blocks=t.blocks[times - 1 :: times], block_tokens=size) for t in self.turns]
        return replace(self, turns=turns, block_tokens=size)


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one policy on one fleet. `hit_tokens`: by where they were found.

    Tokens and TTFT (`ttft_s`: p50, p95, p99) are over the counted turns, bytes and `gpu_s` (prefill) over
    the whole run.
    """

    policy: str
    fleet: Fleet
    turns: int
    prompt_tokens: int
    hit_tokens: dict[str, int]
    ttft_s: tuple[float, float, float]
    moved_bytes: dict[str, int]
    early_bytes: int
    early_wasted: int
    gpu_s: float

    @property
    def hit_rate(self) -> float:
        return sum(self.hit_tokens.values()) / max(1, self.prompt_tokens)


@dataclass(frozen=True, slots=True)
class Sweep:
    """Results for `tier` at several sizes (bytes: per replica for the GPU, else per node), no lower tiers.

    `results`, `knees`: by policy; a knee is an index of `sizes`, None if more brings nothing. `most`: the
    hit rate of an unbounded cache.
    """

    tier: str
    sizes: tuple[int, ...]
    results: Mapping[str, tuple[Result, ...]]
    knees: Mapping[str, int | None]
    most: float


def read_traffic(path: Path, policies: Sequence[str], options: TraceOptions) -> Traffic:
    """Read the trace and run the predictors over it. Raises `TraceError`, `PlanRefused`."""
    if unknown := [name for name in policies if name not in POLICIES]:
        raise PlanRefused(f"there is no policy {unknown[0]!r}: choose of {', '.join(POLICIES)}")
    trace = open_trace(path, options)
    turns = list(with_blocks(trace.turns()))
    if len(turns) < 2:
        raise PlanRefused(f"{path} has {len(turns)} requests: too few for a plan")
    curves: dict[str, Sequence[Forecast]] = {}
    if "learned" in policies:
        curves["learned"] = forecasts(turns, Predictor(PredictorSettings()))
    if "type-km" in policies:
        curves["type-km"] = forecasts(turns, TypeKm(PredictorSettings()))
    traffic = Traffic(trace.name, turns, trace.block_tokens, trace.notes, curves, next_starts_s(turns))
    return traffic.coarser(USES_MAX)


GPUS_A_REPLICA = (1, 2, 4, 8)
"""The values of `engine.tensor_parallel`."""


def check_gpus_a_replica(gpus: int) -> None:
    """Raise `PlanRefused` for a number of GPUs that no replica can have."""
    if gpus not in GPUS_A_REPLICA:
        raise PlanRefused(f"--tensor-parallel {gpus}: give {', '.join(map(str, GPUS_A_REPLICA))}")


def enough_replicas(traffic: Traffic, fleet: Fleet) -> int:
    """Return how many replicas are `BUSY_SHARE` busy if there are no cache hits."""
    computed_s = sum(fleet.prefill.seconds(turn.input_tokens, 0) for turn in traffic.turns)
    return max(1, math.ceil(busy_s(computed_s, traffic, fleet) / traffic.lasts_s / BUSY_SHARE))


def busy_s(prefill_s: float, traffic: Traffic, fleet: Fleet) -> float:
    """Return for how long the traffic keeps one replica busy: prefill, or decoding with all slots in use."""
    decode_s = sum(turn.output_tokens for turn in traffic.turns) * fleet.decode_token_s / fleet.slots
    return max(prefill_s, decode_s)


def run_policy(traffic: Traffic, fleet: Fleet, name: str) -> Result:
    """Run one simulation."""
    policy, settings = policy_of(name)
    fleet = replace(fleet, policy=settings)
    sim = Sim(
        fleet,
        policy,
        traffic.block_tokens,
        Foresight(traffic.curves.get(name), traffic.next_s),
        count_from_s=traffic.count_from_s,
        tick_s=max(1.0, traffic.lasts_s / TICKS),
    )
    tally = sim.run(traffic.turns)
    sim.check_integrity()
    stats = [node.early.prefetcher.stats() for node in sim.nodes if node.early is not None]
    return Result(
        policy=name,
        fleet=fleet,
        turns=tally.turns,
        prompt_tokens=tally.prompt_tokens,
        hit_tokens=dict(tally.hit_tokens),
        ttft_s=(tally.ttft_at(50), tally.ttft_at(95), tally.ttft_at(99)),
        moved_bytes=sim.moved_bytes(),
        early_bytes=sum(node.early.early_bytes for node in sim.nodes if node.early is not None),
        early_wasted=sum(stat.wasted for stat in stats),
        gpu_s=tally.computed_s,
    )


def policy_of(name: str) -> tuple[ResidencyPolicy, PolicySettings]:
    """Return the policy, and the settings of a run with it."""
    settings = PolicySettings.model_validate({} if name == "oracle" else {"name": name})
    return (TimeOracle() if name == "oracle" else make_policy(settings)), settings


def run_all(
    traffic: Traffic, runs: Sequence[tuple[Fleet, str]], jobs: int, done: Callable[[], object]
) -> list[Result]:
    """Run the simulations, `jobs` at a time in forked processes. `done`: called after each."""
    if jobs == 1:
        found = []
        for fleet, name in runs:
            found.append(run_policy(traffic, fleet, name))
            done()
        return found
    # Forked, so that the trace is neither read again nor pickled.
    jobs = min(jobs, len(runs))
    with ProcessPoolExecutor(jobs, get_context("fork"), _inherit, (traffic,)) as pool:
        futures = [pool.submit(_run_one, run) for run in runs]
        for _ in as_completed(futures):
            done()
        return [future.result() for future in futures]


def jobs_by_default() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


_inherited: list[Traffic] = []  # in a forked process


def _inherit(traffic: Traffic) -> None:
    _inherited[:] = [traffic]


def _run_one(run: tuple[Fleet, str]) -> Result:
    return run_policy(_inherited[0], *run)


def sweep_fleets(traffic: Traffic, fleet: Fleet, tier: str, points: int) -> Iterator[tuple[int, Fleet]]:
    """Yield sizes that double, up to the last power of two (GiB) that all blocks of the trace would fill.

    Without lower tiers, which would find what this one does not, and without prefetching from them.
    """
    units = fleet.replicas if tier == "gpu" else fleet.nodes
    distinct = len({number for turn in traffic.turns for number in turn.blocks})
    all_gib = distinct * traffic.block_tokens * fleet.bytes_per_token / units / GIB
    largest = 1 << math.floor(math.log2(max(all_gib, 1 << points - 1)))
    bare = replace(fleet, prefetch=None, s3_bytes=0)
    for step in reversed(range(points)):
        size = (largest >> step) * GIB
        if tier == "gpu":
            yield size, replace(bare, gpu_bytes=size, cpu_bytes=0, nvme_bytes=0)
        elif tier == CPU.name:
            yield size, replace(bare, cpu_bytes=size, nvme_bytes=0)
        else:
            yield size, replace(bare, nvme_bytes=size)


def sweep_of(tier: str, sizes: Sequence[int], results: Mapping[str, Sequence[Result]], most: float) -> Sweep:
    """Return the sweep with its knees. `results`: by policy, one per size."""
    knees = {
        name: knee([math.log2(size) for size in sizes], [one.hit_rate for one in of])
        for name, of in results.items()
    }
    return Sweep(tier, tuple(sizes), {name: tuple(of) for name, of in results.items()}, knees, most)


def knee(sizes: Sequence[float], hits: Sequence[float], least: float = 0.01) -> int | None:
    """Return the last point furthest above the line between the ends, both axes scaled to 0 ... 1.

    Kneedle's knee of a rising curve, without its smoothing (Satopaa, Albrecht, Irwin and Raghavan, "Finding a
    'Kneedle' in a Haystack", 2011; the package kneed brings scipy for it); over the logs of sizes, because
    sizes are bought by doubling. The last point if the curve is nowhere above the line: more would still
    pay. None if the total gain is less than `least`.
    """
    width, height = sizes[-1] - sizes[0], max(hits) - hits[0]
    if width <= 0 or height < least:
        return None
    above = [(h - hits[0]) / height - (s - sizes[0]) / width for s, h in zip(sizes, hits, strict=True)]
    best = max(above[1:])
    return len(above) - 1 if best <= 1e-9 else max(at for at, one in enumerate(above) if one == best)


def _times(turns: Sequence[TraceTurn], block_tokens: int, uses_max: int) -> int:
    """Return the factor of block size that keeps uses below `uses_max`, with several blocks per prompt."""
    tokens = sum(turn.input_tokens for turn in turns)
    wanted = math.ceil(tokens / uses_max / block_tokens)
    most = max(1, tokens // len(turns) // PROMPT_BLOCKS // block_tokens)
    return max(1, min(wanted, most))
