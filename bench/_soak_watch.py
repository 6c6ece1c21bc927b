"""What the soak watches: memory, files and threads of every process, and the tiers' own counters.

Processes of one name count together: a tier actor that was killed and started again is the same line.
"""

from __future__ import annotations

import contextlib
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from samovar.configs.sections import MIB

TOTAL_GROWTH_MAX = 0.05
"""Growth of all processes' memory, from the second quarter to the last, that still counts as flat."""

NAME_GROWTH_MAX, NAME_GROWTH_BYTES = 0.2, 64 * MIB
COUNT_GROWTH_MAX, COUNT_GROWTH = 0.2, 16
"""One name's memory, and its files and threads, may grow by this share or by this much, whichever is more."""

Usage = Counter[str]
"""`memory`, `files`, `threads`, `processes` of one name."""

Sample = dict[str, Usage]
KINDS = ("memory", "files", "threads")


def process_name(process: psutil.Process) -> str | None:
    """The program, or the class of a Ray actor; None for a process that has ended, or has only been forked.

    Ray writes into a worker's title what it is doing, `ray::ServeReplica:samovar:Replica.generate`, and
    while an actor starts its name, `ray::tiers:NODE:TierActor.__init__`.
    """
    try:
        title = process.cmdline()
    except psutil.NoSuchProcess:
        return None
    if not title:
        return None
    name = Path(title[0]).name.partition(".")[0]
    return "ray::TierActor" if name.endswith("TierActor") else name


def sample(root: psutil.Process) -> Sample:
    """What each process below `root` has of its own, by name."""
    by_name: Sample = {}
    for process in [root, *root.children(recursive=True)]:
        name = process_name(process)
        if name is None:
            continue
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            usage = Counter(
                memory=process.memory_full_info().uss,
                files=process.num_fds(),
                threads=process.num_threads(),
                processes=1,
            )
            by_name.setdefault(name, Counter()).update(usage)
    return by_name


@dataclass(frozen=True, slots=True)
class Growth:
    """Medians of the second and of the last quarter."""

    name: str
    kind: str
    early: float
    late: float

    @property
    def is_leak(self) -> bool:
        share, least = TOTAL_GROWTH_MAX, 0
        if self.name != "all":
            share, least = (
                (NAME_GROWTH_MAX, NAME_GROWTH_BYTES)
                if self.kind == "memory"
                else (COUNT_GROWTH_MAX, COUNT_GROWTH)
            )
        return self.late - self.early > max(share * self.early, least)

    def __str__(self) -> str:
        unit, what = (MIB, "MiB memory") if self.kind == "memory" else (1, self.kind)
        return f"{self.name}: {what} from {self.early / unit:.0f} to {self.late / unit:.0f}"


def growths(samples: Sequence[Sample]) -> list[Growth]:
    """Of every name and kind, and of all memory together. Needs at least four samples."""
    quarter = len(samples) // 4
    early, late = samples[quarter : 2 * quarter], samples[-quarter:]

    def growth(name: str, kind: str) -> Growth:
        medians = [
            statistics.median(
                sum(usage[kind] for own, usage in one.items() if name in ("all", own)) for one in part
            )
            for part in (early, late)
        ]
        return Growth(name, kind, *medians)

    names = sorted({name for one in samples for name in one})
    return [growth("all", "memory"), *(growth(name, kind) for name in names for kind in KINDS)]


@dataclass
class TierCounters:
    """Counters of nodes, summed over their tier actors' lives: each actor begins at zero."""

    last: dict[str, Mapping[str, Any]] = field(default_factory=dict)  # incarnation -> its latest statistics
    restarts: int = 0

    def note(self, nodes: Iterable[Mapping[str, Any]]) -> None:
        for node in nodes:
            self.last[node["incarnation"]] = node
            self.restarts = max(self.restarts, node["restarts"])

    def words(self, name: str) -> Counter[str]:
        """A node's counter by words: `moves`, `stores`, `misses`."""
        return sum((Counter(node[name]) for node in self.last.values()), Counter())

    def of_tiers(self, *names: str) -> dict[str, Counter[str]]:
        """Counters of tiers; `verify_failures` by kind."""
        sums: dict[str, Counter[str]] = {}
        for node in self.last.values():
            for tier in node["tiers"]:
                own = sums.setdefault(tier["name"], Counter())
                for name in names:
                    value = tier[name]
                    own.update(value if isinstance(value, dict) else {name: value})
        return sums
