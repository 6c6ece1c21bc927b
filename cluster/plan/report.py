"""Builds the text, tables and JSON of `samovar plan --trace F`. Computes only shares and sums."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from samovar.cache_tiers.blocks import CPU, NVME, PEER, TIERS
from samovar.cluster.plan.runs import BUSY_SHARE, Result, Sweep, Traffic
from samovar.cluster.plan.simulator.fleet import Fleet, Prices
from samovar.configs.sections import GIB

TIER_WORDS = {"gpu": "GPU memory a replica", CPU.name: "RAM a node", NVME.name: "NVMe a node"}
WORTH_SHARE = 0.01
"""A gain below this share of the prompt tokens is not worth more memory."""
QUEUES_FROM = 3.0
"""A TTFT above this many times the time of computing means that requests wait for others."""


def price_fields(prices: Prices) -> tuple[float, ...]:
    """Return all prices as a tuple."""
    return astuple(prices)


def busy_share(result: Result, traffic: Traffic) -> float:
    """Return the share of the GPUs' time that prefill takes."""
    return result.gpu_s / (result.fleet.replicas * traffic.lasts_s)


def usd_per_h_needed(result: Result, traffic: Traffic, prices: Prices) -> float:
    """Return the cost with as many GPUs as the remaining prefill keeps `BUSY_SHARE` busy; same tiers."""
    fleet = result.fleet
    tiers = fleet.usd_per_h(prices) - fleet.replicas * fleet.gpus * prices.gpu_hour
    return tiers + result.gpu_s / traffic.lasts_s / BUSY_SHARE * fleet.gpus * prices.gpu_hour


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
            f"{1000 * fleet.decode_token_s:g} ms a token of an answer; GB/s: {speeds}",
        ),
        (
            "assumed prices",
            f"${prices.gpu_hour:g} a GPU hour; a GiB and month: RAM ${prices.cpu_gib_month:g}, "
            f"NVMe ${prices.nvme_gib_month:g}, S3 ${prices.s3_gib_month:g}",
        ),
        (
            "money",
            f"fleet: as above; {BUSY_SHARE:.0%} busy: as many GPUs as the rest to compute keeps so busy",
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
