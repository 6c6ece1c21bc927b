"""Runs `samovar plan --trace F`: what each policy and each size of a tier would do for recorded traffic.

Checks the options; `runs.py` computes, `plot.py` draws.
The text, tables and JSON are made here, from shares and sums only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from tqdm import tqdm

from samovar.cache_tiers.blocks import CPU, NVME, PEER, S3, TIERS
from samovar.cluster.plan.runs import (
    BUSY_SHARE,
    POLICIES,
    PlanRefused,
    Result,
    Sweep,
    Traffic,
    busy_s,
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
from samovar.configs.loader import load
from samovar.configs.sections import GIB, KIB, PrefetchSettings

GPU_PRESET = "aws"
"""Whose `engine.sequences_max` a replica is taken to have, as services on GPUs do."""
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
    console.print(facts(traffic, fleet, ask.prices, ask.bytes_from, is_enough=ask.replicas is None))
    console.print(policy_table(plan.results, traffic, ask.prices))
    if sweep is not None:
        console.print(sweep_table(sweep))
    for warning in warnings(plan.results, sweep, traffic):
        console.print(f"note: {warning}", highlight=False)
    sentence = answer(sweep, traffic, fleet) if sweep is not None else None
    if sentence is not None:
        console.print(sentence, style="bold", highlight=False)
    if ask.json_to is not None:
        document = as_json(traffic, fleet, plan.results, sweep, ask.prices, sentence)
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
        slots=load(GPU_PRESET, {}, ()).settings.engine.sequences_max,
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
    if any(not 0 <= price < 1e9 for price in price_fields(ask.prices)):
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


TIER_WORDS = {"gpu": "GPU memory a replica", CPU.name: "RAM a node", NVME.name: "NVMe a node"}
WORTH_SHARE = 0.01
"""A gain below this share of the prompt tokens is not worth more memory."""
QUEUES_FROM = 3.0
"""A TTFT above this many times the time of computing means that requests wait for others."""


def price_fields(prices: Prices) -> tuple[float, ...]:
    """Return all prices as a tuple."""
    return astuple(prices)


def busy_share(result: Result, traffic: Traffic) -> float:
    """Return the share of the GPUs' time that prefill or decoding takes, the larger of both."""
    return busy_s(result.gpu_s, traffic, result.fleet) / (result.fleet.replicas * traffic.lasts_s)


def usd_per_h_needed(result: Result, traffic: Traffic, prices: Prices) -> float:
    """Return the cost with as many GPUs as prefill and decoding keep `BUSY_SHARE` busy; same tiers."""
    fleet = result.fleet
    tiers = fleet.usd_per_h(prices) - fleet.replicas * fleet.gpus * prices.gpu_hour
    replicas = busy_s(result.gpu_s, traffic, fleet) / traffic.lasts_s / BUSY_SHARE
    return tiers + replicas * fleet.gpus * prices.gpu_hour


def in_gib(nbytes: float) -> str:
    """Format bytes: `512 GiB`, `8 TiB`."""
    gib = nbytes / GIB
    return f"{gib / 1024:,.4g} TiB" if gib >= 1024 else f"{gib:,.4g} GiB"


def facts(traffic: Traffic, fleet: Fleet, prices: Prices, bytes_from: str, *, is_enough: bool) -> Table:
    """Return the table of the plan's inputs and assumptions."""
    table = Table(title=f"Plan for {traffic.name}", show_header=False, title_justify="left", box=box.SIMPLE)
    table.add_column("what", no_wrap=True)
    table.add_column("value", overflow="fold")
    tokens = sum(turn.input_tokens for turn in traffic.turns)
    sessions = len({turn.session for turn in traffic.turns})
    tiers = ", ".join(
        f"{name} {in_gib(size) if size else 'none'}{'' if name in TIERS.shared else ' a node'}"
        for name, size in fleet.tier_bytes.items()
    )
    speeds = ", ".join(f"{tier} {fleet.price_of(tier).bytes_per_s / 1e9:g}" for tier in fleet.tier_bytes)
    why = f" (so many that computing every prompt would keep them {BUSY_SHARE:.0%} busy)" if is_enough else ""
    of_gpus = f" of {fleet.gpus} GPUs" if fleet.gpus > 1 else ""
    rows = [
        (
            "traffic",
            f"{len(traffic.turns):,} requests of {sessions:,} sessions in {_span(traffic.lasts_s)}, "
            f"{tokens / 1e6:,.1f} M prompt tokens",
        ),
        ("counted", "the later half of the requests; before, caches fill and the predictor learns"),
        ("fleet", f"{fleet.replicas} replicas{of_gpus} on {_count(fleet.nodes, 'node')}{why}"),
        ("tiers", f"gpu {in_gib(fleet.gpu_bytes)} a replica, {tiers}"),
        ("KV of a token", f"{fleet.bytes_per_token:,} bytes ({bytes_from})"),
        (
            "assumed",
            f"{1 / fleet.prefill.a_s:,.0f} prompt tokens/s and replica (less for long contexts), "
            f"{1000 * fleet.decode_token_s:g} ms a token of an answer, {fleet.slots} answers at a time; "
            f"GB/s: {speeds}",
        ),
        (
            "assumed prices",
            f"${prices.gpu_hour:g} a GPU hour; a GiB and month: RAM ${prices.cpu_gib_month:g}, "
            f"NVMe ${prices.nvme_gib_month:g}, S3 ${prices.s3_gib_month:g}",
        ),
        (
            "money",
            f"fleet: as above; {BUSY_SHARE:.0%} busy: as many GPUs as prefill or decoding keeps so busy",
        ),
        ("simulated in", f"blocks of {traffic.block_tokens:,} tokens, of which only whole ones are found"),
        *(("note", note) for note in traffic.notes),
    ]
    for what, value in rows:
        table.add_row(what, Text(value))
    return table


def policy_table(results: Sequence[Result], traffic: Traffic, prices: Prices) -> Table:
    """Return the table with one row per policy."""
    tiers = [tier for tier in ("gpu", *TIERS, PEER) if any(result.hit_tokens.get(tier) for result in results)]
    table = Table(title="By policy", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("policy")
    heads = [
        *(f"{tier} hits\nM tokens" for tier in tiers),
        *("found\n%", "TTFT\np50 s", "\np95 s", "\np99 s", "stored\nGiB", "loaded\nGiB"),
        *(
            "prefetched\nGiB",
            "wasted\n%",
            "GPUs busy\n%",
            "fleet\n$/h",
            f"{BUSY_SHARE:.0%} busy\n$/h",
        ),
    ]
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for result in results:
        stored, loaded = moved(result)
        early = result.early_bytes
        table.add_row(
            result.policy,
            *(f"{result.hit_tokens.get(tier, 0) / 1e6:,.2f}" for tier in tiers),
            f"{100 * result.hit_rate:.1f}",
            *(f"{ttft_s:,.2f}" for ttft_s in result.ttft_s),
            *(f"{nbytes / GIB:,.0f}" for nbytes in (stored, loaded, early)),
            f"{100 * result.early_wasted / early:.0f}" if early else "-",
            f"{100 * busy_share(result, traffic):.0f}",
            f"{result.fleet.usd_per_h(prices):,.2f}",
            f"{usd_per_h_needed(result, traffic, prices):,.2f}",
        )
    return table


def moved(result: Result) -> tuple[int, int]:
    """Return bytes stored or demoted, and bytes loaded on demand."""
    up = sum(nbytes for way, nbytes in result.moved_bytes.items() if way.endswith("->gpu"))
    early = sum(nbytes for way, nbytes in result.moved_bytes.items() if way.endswith("->early"))
    return sum(result.moved_bytes.values()) - up - early, up


def sweep_table(sweep: Sweep) -> Table:
    """Return the table with one row per size."""
    table = Table(
        title=f"By size of {TIER_WORDS[sweep.tier]}, no lower tier\nknee: Kneedle, on the log of sizes",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    table.add_column(f"{sweep.tier}\nGiB", justify="right")
    for name in sweep.results:
        table.add_column(f"{name}\nfound %", justify="right")
        table.add_column("\nTTFT p95 s", justify="right")
    table.add_column("knee of")
    for at, size in enumerate(sweep.sizes):
        cells = []
        for results in sweep.results.values():
            cells += [f"{100 * results[at].hit_rate:.1f}", f"{results[at].ttft_s[1]:,.2f}"]
        knees = ", ".join(name for name, knee in sweep.knees.items() if knee == at)
        table.add_row(f"{size / GIB:,.0f}", *cells, knees)
    most = [f"{100 * sweep.most:.1f}", ""] * len(sweep.results)
    table.add_row("no end", *most, "")
    return table


def warnings(results: Sequence[Result], sweep: Sweep | None, traffic: Traffic) -> Iterator[str]:
    """Yield a warning if requests queue up: the hits of such a fleet say little about the policy.

    Without queues a percentile of TTFT never exceeds the time to compute that percentile of prompts uncached.
    """
    tokens = sorted(turn.input_tokens for turn in traffic.turns)[int(0.95 * len(traffic.turns))]
    places = [(f"{one.policy}", one) for one in results]
    if sweep is not None:
        for name, swept in sweep.results.items():
            sizes = zip(sweep.sizes, swept, strict=True)
            places += [(f"{name} with {in_gib(size)} of {sweep.tier}", one) for size, one in sizes]
    slow = []
    for place, result in places:
        computed_s = result.fleet.prefill.seconds(tokens, 0)
        if result.ttft_s[1] > QUEUES_FROM * computed_s:
            slow.append(f"{place} (TTFT p95 {result.ttft_s[1]:,.0f} s)")
    if slow:
        yield (
            f"requests queue up, so the policy finds less than it could: {', '.join(slow)}; "
            f"computing a prompt takes {computed_s:,.0f} s at p95. Give more --replicas"
        )


def chosen(sweep: Sweep) -> str:
    """Return the policy that the answer is about: the last one named that a server can run."""
    return [name for name in sweep.results if name != "oracle" or len(sweep.results) == 1][-1]


def answer(sweep: Sweep, traffic: Traffic, fleet: Fleet) -> str:
    """Return one sentence on how much memory this traffic needs."""
    name = chosen(sweep)
    hits = [result.hit_rate for result in sweep.results[name]]
    words, knee = TIER_WORDS[sweep.tier], sweep.knees[name]
    if knee is None:
        return (
            f"For this traffic more {words} has no effect: "
            f"{hits[0]:.0%} of the prompt tokens are found with {in_gib(sweep.sizes[0])}."
        )
    if knee == len(hits) - 1:
        return (
            f"With {name} this traffic needs {in_gib(sweep.sizes[knee])} of {words} or more: "
            f"{hits[knee]:.0%} of its prompt tokens are found, of {sweep.most:.0%} that any cache could find."
        )
    full = next(at for at, hit in enumerate(hits) if hit >= max(hits) - WORTH_SHARE)
    said = (
        f"With {name} this traffic needs about {in_gib(sweep.sizes[knee])} of {words}, where "
        f"{hits[knee]:.0%} of the prompt tokens are found, and each further GiB finds less"
    )
    if full <= knee:
        return f"{said}, of {sweep.most:.0%} that any cache could find."
    if sweep.tier == CPU.name:
        rest = sweep.sizes[full] - sweep.sizes[knee]
        more = f"{in_gib(rest)} of NVMe below it raise that to {hits[full]:.0%}"
        return f"{said}; {more} of {sweep.most:.0%} that any cache could find{_worth(traffic, fleet)}."
    more = f"{in_gib(sweep.sizes[full])} raises that to {hits[full]:.0%}"
    return f"{said}; {more} of {sweep.most:.0%} that any cache could find."


def _worth(traffic: Traffic, fleet: Fleet) -> str:
    """Return a phrase that compares loading a mean prompt from NVMe with computing it."""
    tokens = sum(turn.input_tokens for turn in traffic.turns) // len(traffic.turns)
    computed_s = fleet.prefill.seconds(max(1, tokens), 0)
    times = computed_s / fleet.nvme.seconds(tokens * fleet.bytes_per_token)
    if times < 1:
        return ", but loading from there is slower than computing: leave NVMe out"
    return f" (loading a prompt from there is {times:.1f} times as quick as computing it)"


def as_json(
    traffic: Traffic,
    fleet: Fleet,
    results: Sequence[Result],
    sweep: Sweep | None,
    prices: Prices,
    sentence: str | None,
) -> dict[str, Any]:
    """Return everything printed as plain data. Sizes in bytes, shares from 0 to 1."""
    document: dict[str, Any] = {
        "trace": traffic.name,
        "requests": len(traffic.turns),
        "lasts_s": traffic.lasts_s,
        "block_tokens": traffic.block_tokens,
        "bytes_per_token": fleet.bytes_per_token,
        "replicas": fleet.replicas,
        "gpus": fleet.replicas * fleet.gpus,
        "nodes": fleet.nodes,
        "tiers": {"gpu": fleet.gpu_bytes, **fleet.tier_bytes},
        "notes": list(traffic.notes),
        "policies": [_row(result, traffic, prices) for result in results],
        "sweep": None,
        "answer": sentence,
    }
    if sweep is not None:
        knees = {name: None if at is None else sweep.sizes[at] for name, at in sweep.knees.items()}
        rows = [
            {"bytes": size, **_row(result, traffic, prices)}
            for name in sweep.results
            for size, result in zip(sweep.sizes, sweep.results[name], strict=True)
        ]
        document["sweep"] = {"tier": sweep.tier, "knee_bytes": knees, "most": sweep.most, "rows": rows}
    return document


def _row(result: Result, traffic: Traffic, prices: Prices) -> dict[str, Any]:
    stored, loaded = moved(result)
    return {
        "policy": result.policy,
        "requests": result.turns,
        "prompt_tokens": result.prompt_tokens,
        "hit_tokens": result.hit_tokens,
        "hit_rate": round(result.hit_rate, 5),
        "ttft_s": dict(zip(("p50", "p95", "p99"), (round(s, 4) for s in result.ttft_s), strict=True)),
        "stored_bytes": stored,
        "loaded_bytes": loaded,
        "moved_bytes": result.moved_bytes,
        "prefetched_bytes": result.early_bytes,
        "prefetch_wasted_bytes": result.early_wasted,
        "gpu_busy_share": round(busy_share(result, traffic), 4),
        "usd_per_h": round(result.fleet.usd_per_h(prices), 4),
        "usd_per_h_needed": round(usd_per_h_needed(result, traffic, prices), 4),
    }


def _span(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds > 7200 else f"{seconds / 60:.0f} min"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
