"""`make bench-footprint`: what a service costs without requests: CPU-seconds of its start, idle CPU, memory.

By process, of a service that runs (`--pid`, of `samovar serve`) or of one started here, `--starts` times on
the same directories: the first start of a model measures the machine, the later ones are what a user waits
for. A process's start counts its children that have ended. `rss_mb` counts memory that several processes
share once for each of them; `pss_mb` counts it once in all, so only that may be added up. Linux only.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from bench import _report as report
from bench.soak import working_directory
from samovar.cluster.serve.app import interrupt_on_signals
from tests.support.services.service import Service

IDLE_S = 60.0
SETTLE_S = 15.0
"""After the ready line: what a start leaves to do is done then."""
POOL_BYTES = 512 * 2**20
LIBRARIES = {"torch": "libtorch_cpu", "tokenizers": "tokenizers.abi3"}
SCRIPT = re.compile(r"([\w.]+)\.py$")


@dataclass(frozen=True, slots=True)
class Seen:
    """One process at one moment. Bytes; `cpu_s` with its ended children."""

    role: str
    started_s: float
    cpu_s: float
    rss: int
    pss: int
    uss: int
    threads: int
    libraries: tuple[str, ...] = ()


def role_of(command: Sequence[str]) -> str:
    """Return a short name for a process: Ray names its workers, the others by program or script."""
    if not command:
        return "?"
    if command[0].startswith("ray::"):
        return command[0].split()[0]
    name = Path(command[0]).name
    for word in command[1:]:
        if word.startswith("# samovar serve"):  # asleep
            return "samovar"
        if name.startswith("python") and not word.startswith("-"):
            found = SCRIPT.search(Path(word).name)
            return found[1] if found else Path(word).name
    return name


def look(root: psutil.Process) -> dict[int, Seen]:
    """Return every process of the tree by its pid; one that ends meanwhile is left out."""
    found = {}
    for process in (root, *root.children(recursive=True)):
        try:
            with process.oneshot():
                times, memory = process.cpu_times(), process.memory_full_info()
                found[process.pid] = Seen(
                    role_of(process.cmdline()),
                    process.create_time(),
                    sum(times[:4]),
                    memory.rss,
                    memory.pss,
                    memory.uss,
                    process.num_threads(),
                    _libraries(process.pid),
                )
        except (psutil.NoSuchProcess, psutil.ZombieProcess, FileNotFoundError):
            continue
    return found


def _libraries(pid: int) -> tuple[str, ...]:
    maps = Path(f"/proc/{pid}/maps").read_text()
    return tuple(name for name, part in LIBRARIES.items() if part in maps)


def rows_of(before: dict[int, Seen], after: dict[int, Seen], seconds: float) -> list[dict[str, Any]]:
    """Return a row for each process of `after`, the busiest first, and their sum.

    `start_cpu_s`: until `before`, or to its end for one that has come since. `idle_pct`: of one core.
    """
    rows = []
    for pid, now in after.items():
        then = before.get(pid, now)
        rows.append(
            {
                "process": now.role,
                "pid": pid,
                "start_cpu_s": then.cpu_s,
                "idle_pct": 100 * (now.cpu_s - then.cpu_s) / seconds,
                "rss_mb": now.rss / 1e6,
                "pss_mb": now.pss / 1e6,
                "uss_mb": now.uss / 1e6,
                "threads": now.threads,
                "has": " ".join(now.libraries),
            }
        )
    rows.sort(key=lambda row: -float(row["idle_pct"]))
    sums = {key: sum(row[key] for row in rows) for key in rows[0] if key not in ("process", "pid", "has")}
    return [*rows, {"process": "all", "pid": "", **sums, "has": ""}]


def measure(pid: int, idle_s: float) -> list[dict[str, Any]]:
    """Watch a service for `idle_s`, and return its rows."""
    root = psutil.Process(pid)
    before, begun_s = look(root), time.monotonic()
    time.sleep(idle_s)  # it is time that is measured
    return rows_of(before, look(root), time.monotonic() - begun_s)


def measure_start(work: Path, number: int, flags: Sequence[str], idle_s: float) -> list[dict[str, Any]]:
    """Start a service on the directories of the starts before, and return its rows."""
    own = ["--engine.pool-bytes-max", str(POOL_BYTES), "--model.cache-dir", str(work)]
    own += ["--tiers.nvme.dir", str(work / "kv")]
    service = Service(work / f"service-{number}.log", *own, *flags)
    try:
        begun_s = time.monotonic()
        service.wait_ready()
        ready_s = time.monotonic() - begun_s
        until_ready_s = sum(one.cpu_s for one in look(psutil.Process(service.process.pid)).values())
        time.sleep(SETTLE_S)
        rows = measure(service.process.pid, idle_s)
    finally:
        service.stop()
    rows[-1] |= {"ready_s": ready_s, "ready_cpu_s": until_ready_s}
    return [{"start": number, **row} for row in rows]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.footprint", description=__doc__)
    parser.add_argument("--pid", type=int, help="of a running `samovar serve`; else one is started")
    parser.add_argument("--idle-s", type=float, default=IDLE_S)
    parser.add_argument("--starts", type=int, default=2)
    args, flags = parser.parse_known_args(argv)
    interrupt_on_signals()  # a service must not outlive this
    rows: list[dict[str, Any]] = []
    if args.pid is not None:
        rows = measure(args.pid, args.idle_s)
        report.show(f"pid {args.pid}, {args.idle_s:g} s without a request", rows)
    else:
        with working_directory() as work:
            for number in range(1, args.starts + 1):
                rows += (of := measure_start(work, number, flags, args.idle_s))
                total = of[-1]
                report.show(f"start {number}", [{k: v for k, v in row.items() if k in of[0]} for row in of])
                print(f"ready in {total['ready_s']:.1f} s, {total['ready_cpu_s']:.1f} CPU-s")
    print(report.write("footprint", rows, idle_s=args.idle_s))
    return 0


if __name__ == "__main__":
    sys.exit(main())
