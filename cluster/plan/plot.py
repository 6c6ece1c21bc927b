"""Draws a sweep: prompt tokens found against the size of a tier, one line per policy, knees marked."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from samovar.cache_tiers.blocks import CPU, NVME
from samovar.cluster.plan.plan import TIER_WORDS, chosen, in_gib
from samovar.cluster.plan.runs import Sweep
from samovar.cluster.plan.simulator.fleet import Fleet

# Distinguishable by the colour-blind (Okabe and Ito, 2008), and by their markers in print.
COLOURS = {
    **{"lru": "#000000", "t-lru": "#56B4E9", "ttl": "#E69F00", "type-km": "#009E73"},
    **{"learned": "#D55E00", "oracle": "#0072B2"},
}
MARKS = {"lru": "o", "t-lru": "s", "ttl": "^", "type-km": "D", "learned": "v", "oracle": "P"}


def plot(sweep: Sweep, fleet: Fleet, name: str, path: Path) -> None:
    """Write the plot to `path`; its suffix gives the format. Raises `OSError`, `ValueError` (suffix)."""
    figure = Figure(figsize=(8.0, 5.0), layout="constrained")
    axes = figure.add_subplot()
    most = 100 * sweep.most
    for policy, results in sweep.results.items():
        found = [100 * result.hit_rate for result in results]
        most = max(most, *found)
        knee = sweep.knees[policy]
        label = policy if knee is None else f"{policy} (knee at {in_gib(sweep.sizes[knee])})"
        colour = COLOURS[policy]
        axes.plot(sweep.sizes, found, color=colour, marker=MARKS[policy], markersize=5, label=label)
        if knee is not None:
            axes.plot(sweep.sizes[knee], found[knee], "o", mfc="none", mec=colour, markersize=15, mew=1.8)
    axes.axhline(100 * sweep.most, color="gray", linestyle="--", linewidth=1.2, label="everything fits")
    spoken = chosen(sweep)
    if (at := sweep.knees[spoken]) is not None:
        axes.axvline(sweep.sizes[at], color=COLOURS[spoken], linestyle=":", linewidth=1.2)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sweep.sizes, [in_gib(size) for size in sweep.sizes])
    axes.minorticks_off()
    axes.set_ylim(0, max(1.0, 1.12 * most))
    axes.set_xlabel(f"{TIER_WORDS[sweep.tier]} (log scale; no lower tier)")
    axes.set_ylabel(
        "prompt tokens found in gpu"
        + {"gpu": "", CPU.name: " or cpu", NVME.name: ", cpu or nvme"}[sweep.tier]
        + ", %"
    )
    axes.set_title(
        f"{name}\n{fleet.replicas} replicas, {fleet.bytes_per_token / 1024:,.4g} KiB of KV a token",
        fontsize=11,
    )
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", title="policy (ring: its knee)", framealpha=0.9)
    figure.savefig(path, dpi=130)
