"""Runs `samovar plan --trace F`: what each policy and each size of a tier would do for recorded traffic.

Checks the options; `runs.py` computes, `report.py` reports, `plot.py` draws.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console
from tqdm import tqdm

from samovar.cache_tiers.blocks import CPU, NVME, S3
from samovar.cluster.plan import report
from samovar.cluster.plan.runs import (
    POLICIES,
    PlanRefused,
    Result,
    Sweep,
    Traffic,
    check_gpus_a_replica,
    enough_replicas,
    jobs_by_default,
    read_traffic,
    run_all,
    sweep_fleets,
    sweep_of,
)
from samovar.cluster.plan.simulator.fleet import Fleet, Prices
from samovar.cluster.plan.traces.readers import TraceOptions
from samovar.configs.extras import ExtraMissing, require
from samovar.configs.sections import GIB, KIB, PrefetchSettings

PLOT_SUFFIXES = (".png", ".svg", ".pdf")
GIB_MAX = 1 << 30


@dataclass(frozen=True, slots=True)
class PlanAsk:
    """What to plan. `replicas`: None: enough to compute every prompt, each on `tensor_parallel` GPUs.

    `sweep`: the tier to vary over `points` sizes; None: no sweep. `bytes_from`: where `bytes_per_token` comes
    from, in words. `spread_h`, `seed`: see `TraceOptions`. `jobs`: parallel simulations; None: one per core.
    """

    trace: Path
    policies: tuple[str, ...] = ("lru", "learned")
    gpu_gib: float = 64.0
    cpu_gib: float = 256.0
    nvme_gib: float = 2048.0
    s3_gib: float = 0.0
    replicas: int | None = None
    tensor_parallel: int = 1
    bytes_per_token: int = 128 * KIB
    bytes_from: str = "Llama-3-8B's in bf16"
    prefetch: bool = True
    sweep: str | None = CPU.name
    points: int = 5
    json_to: Path | None = None
    plot_to: Path | None = None
    seed: int = 0
    spread_h: float = 24.0
    prices: Prices = field(default_factory=Prices)
    jobs: int | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """The results of a plan. `results`: one per policy, on `fleet`."""

    ask: PlanAsk
    traffic: Traffic
    fleet: Fleet
    results: Sequence[Result]
    sweep: Sweep | None


def run_plan(ask: PlanAsk, console: Console) -> int:
    """Print the plan, and write the requested files.

    Raises `PlanRefused`, `TraceError`, `OSError`.
    """
    check(ask)
    plan = make_plan(ask)
    traffic, fleet, sweep = plan.traffic, plan.fleet, plan.sweep
    console.print(report.facts(traffic, fleet, ask.prices, ask.bytes_from, is_enough=ask.replicas is None))
    console.print(report.policy_table(plan.results, traffic, ask.prices))
    if sweep is not None:
        console.print(report.sweep_table(sweep))
    for warning in report.warnings(plan.results, sweep, traffic):
        console.print(f"note: {warning}", highlight=False)
    sentence = report.answer(sweep, traffic, fleet) if sweep is not None else None
    if sentence is not None:
        console.print(sentence, style="bold", highlight=False)
    if ask.json_to is not None:
        document = report.as_json(traffic, fleet, plan.results, sweep, ask.prices, sentence)
        ask.json_to.write_text(json.dumps(document, indent=1) + "\n")
        console.print(f"written: {ask.json_to}", highlight=False)
    if ask.plot_to is not None:
        assert sweep is not None, "checked before"
        from samovar.cluster.plan.plot import plot  # takes a second to import

        plot(sweep, fleet, traffic.name, ask.plot_to)
        console.print(f"written: {ask.plot_to}", highlight=False)
    return 0


def make_plan(ask: PlanAsk) -> Plan:
    """Run all simulations. Raises `TraceError`, `PlanRefused`, `ValueError`."""
    with tqdm(total=1, desc="reading", unit="trace", leave=False, disable=None):
        options = TraceOptions(seed=ask.seed, spread_h=ask.spread_h)
        traffic = read_traffic(ask.trace, ask.policies, options)
    fleet = fleet_of(ask)
    fleet = replace(fleet, replicas=ask.replicas or enough_replicas(traffic, fleet))
    runs = [(fleet, name) for name in ask.policies]
    fleets = [] if ask.sweep is None else list(sweep_fleets(traffic, fleet, ask.sweep, ask.points))
    runs += [(one, name) for name in ask.policies for _, one in fleets]
    with tqdm(total=len(runs), desc="simulating", unit="run", leave=False, disable=None) as bar:
        found = run_all(traffic, runs, ask.jobs or jobs_by_default(), bar.update)
    results, swept = found[: len(ask.policies)], iter(found[len(ask.policies) :])
    sweep = None
    if ask.sweep is not None:
        of = {name: [next(swept) for _ in fleets] for name in ask.policies}
        sweep = sweep_of(ask.sweep, [size for size, _ in fleets], of, traffic.most_found())
    return Plan(ask, traffic, fleet, results, sweep)


def fleet_of(ask: PlanAsk) -> Fleet:
    """Return the requested fleet, with one replica if their number is open.

    Several GPUs of a replica are taken to be so many times as quick as one: an upper bound.
    """
    gpus, one = ask.tensor_parallel, Fleet()
    prefill = one.prefill
    return Fleet(
        replicas=ask.replicas or 1,
        replicas_per_node=one.replicas_per_node // gpus,
        gpus=gpus,
        prefill=replace(prefill, a_s=prefill.a_s / gpus, b_s=prefill.b_s / gpus),
        decode_token_s=one.decode_token_s / gpus,
        gpu_bytes=int(ask.gpu_gib * GIB),
        cpu_bytes=int(ask.cpu_gib * GIB),
        nvme_bytes=int(ask.nvme_gib * GIB),
        s3_bytes=int(ask.s3_gib * GIB),
        bytes_per_token=ask.bytes_per_token,
        prefetch=PrefetchSettings() if ask.prefetch else None,
    )


def check(ask: PlanAsk) -> None:
    """Check the options before minutes are spent. Raises `PlanRefused`."""
    check_gpus_a_replica(ask.tensor_parallel)
    unknown = [name for name in ask.policies if name not in POLICIES]
    if unknown or not ask.policies:
        what = f"there is no policy {unknown[0]!r}" if unknown else "--policy names none"
        raise PlanRefused(f"{what}. There are: {', '.join(POLICIES)}")
    if len(set(ask.policies)) < len(ask.policies):
        raise PlanRefused("--policy names a policy twice")
    if not ask.trace.is_file():
        raise PlanRefused(f"--trace: there is no file {ask.trace}")
    for option, gib in (
        ("gpu", ask.gpu_gib),
        (CPU.name, ask.cpu_gib),
        (NVME.name, ask.nvme_gib),
        (S3.name, ask.s3_gib),
    ):
        if not 0 <= gib <= GIB_MAX or (option == "gpu" and gib == 0):
            least = "more than 0" if option == "gpu" else "0 or more"
            raise PlanRefused(f"--{option}-gib {gib:g}: must be {least}")
    if any(not 0 <= price < 1e9 for price in report.price_fields(ask.prices)):
        raise PlanRefused("prices must be 0 or more dollars")
    if not 0 < ask.spread_h < 1e6:
        raise PlanRefused(f"--spread-h {ask.spread_h:g}: must be more than 0")
    for option_, path in (("--json", ask.json_to), ("--plot", ask.plot_to)):
        if path is not None and not path.resolve().parent.is_dir():
            raise PlanRefused(f"{option_}: there is no directory {path.parent}")
    if ask.plot_to is not None and ask.plot_to.suffix.lower() not in PLOT_SUFFIXES:
        raise PlanRefused(f"--plot {ask.plot_to}: the name must end in {', '.join(PLOT_SUFFIXES)}")
    if ask.plot_to is not None and ask.sweep is None:
        raise PlanRefused("--plot draws a sweep: leave out --sweep none")
    if ask.plot_to is not None:
        try:
            require("matplotlib", "--plot")
        except ExtraMissing as error:
            raise PlanRefused(str(error)) from error
