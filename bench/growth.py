"""What a node's books cost as they grow: `python -m bench.growth --sessions 1000 10000`.

One process and a real `TierNode` without workers; records of a kilobyte, so that the books alone are
measured. First a full RAM tier above a disk that has all of it (the normal state of a busy node): what its
tick costs each second, how long it holds the node's lock at once, what evicting for a store costs right after
a second has passed. Then a start over what lies on that disk, with lookups beside the scan, and the first
eviction from it. At last the table of sessions, which each ingress and the directory's actor have (`--rows`).
CPU time of this thread, which other work changes little, but for what has "s" or "lookup" in its name.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from tqdm import tqdm

from bench import _report as report
from bench._router_tally import percentile
from bench.front_scale import fill
from samovar.cache_tiers.blocks import Placement
from samovar.cache_tiers.media import NvmeTier
from samovar.cache_tiers.media.memory import HeapTier
from samovar.cache_tiers.node import START_SCAN_S_MAX
from samovar.cache_tiers.sessions.session_table import SessionTable, SessionView
from samovar.configs.imports import keep_collections_short
from samovar.configs.settings import RouterSettings
from samovar.router.routing.session_directory import ROWS_MAX
from tests.support.inside import state_of
from tests.support.nodes.node_harness import MIB, TENANT, Bench, Sample, bench, sample

EXTENTS_EACH = 2
STORES_A_SECOND = 200
SECONDS = 20
FIRST_STORES = 5
LOOKUP_EVERY_S = 0.005
PAGES, PAGE = 200, 50
ON_DISK = Placement(write_behind=("nvme",))


class WatchedLock:
    """A node's lock that notes the longest time, in seconds of this thread's CPU, for which it was held."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self._depth, self._since_s = 0, 0.0
        self.longest_s = 0.0

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1
        if self._depth == 1:
            self._since_s = time.thread_time()

    def __exit__(self, *_: object) -> None:
        if self._depth == 1:
            self.longest_s = max(self.longest_s, time.thread_time() - self._since_s)
        self._depth -= 1
        self._lock.release()


def record_of(number: int) -> Sample:
    session = (number // EXTENTS_EACH).to_bytes(16, "big")
    return sample(number, 1, tenant=TENANT, session=session, placement=ON_DISK)


def disk(folder: Path) -> NvmeTier:
    return NvmeTier(
        folder,
        bytes_max=1 << 40,
        durability="none",
        direct_io=False,
        quarantine_bytes_max=MIB,
        wall_clock=lambda: 2000.0,
    )


def node_of(folder: Path, extents: int, disk_bytes: int = 1 << 40) -> Bench:
    nbytes = extents * record_of(0).record.nbytes
    budgets = {"cpu": nbytes, "nvme": disk_bytes}
    return bench([HeapTier(nbytes), disk(folder)], budgets=budgets, scan_s_max=START_SCAN_S_MAX)


def thread_ms(call: Any) -> float:
    began_s = time.thread_time()
    call()
    return 1000 * (time.thread_time() - began_s)


def watch(node: Bench) -> WatchedLock:
    state = state_of(node.node)
    watched = WatchedLock(state.lock)
    state.lock = watched  # type: ignore[assignment]
    return watched


def work(node: Bench) -> None:
    """As `Bench.work`, without its checks of everything."""
    while node.node.work():
        pass


def of_table(rows: int) -> dict[str, Any]:
    """Measure one table of `rows` sessions: a page of `GET /v1/sessions`, and what a new ingress is sent."""
    before = psutil.Process().memory_info().rss
    sessions = SessionTable(rows, RouterSettings().lineages_max)
    fill(sessions, rows)
    held = psutil.Process().memory_info().rss - before
    pages: list[float] = []
    last: SessionView | None = None
    for _ in range(PAGES):
        began_s = time.thread_time()
        page = sessions.page(None, PAGE, last)
        pages.append(1000 * (time.thread_time() - began_s))
        last = page[-1] if page else None  # from the first again
    began_s, seq, sent = time.thread_time(), 0, 0
    while sent < rows:
        changed, _, seq = sessions.changes(seq, ROWS_MAX)
        sent += len(changed)
    return {
        "rows": rows,
        "bytes a row": held // rows,
        "page of 50 ms, p50": percentile(pages, 0.5),
        "page of 50 ms, p99": percentile(pages, 0.99),
        "all changes s": time.thread_time() - began_s,
    }


def measured(sessions: int, folder: Path) -> dict[str, Any]:
    extents = EXTENTS_EACH * sessions
    node = node_of(folder, extents)
    before = psutil.Process().memory_info().rss
    for number in tqdm(range(extents), desc=f"{sessions} sessions", leave=False, disable=None):
        assert node.offer(record_of(number)) == "taken"
        work(node)
        if number % STORES_A_SECOND == 0:
            node.clock.now_s += 1.0
            node.node.tick()
    held = psutil.Process().memory_info().rss - before
    watched = watch(node)
    ticks, stores = [], []
    for number in range(extents, extents + SECONDS):
        node.clock.now_s += 1.0
        ticks.append(thread_ms(node.node.tick))
        work(node)
        one = record_of(number)
        stores.append(thread_ms(lambda one=one: node.offer(one)))
        work(node)
    in_ticks_ms = 1000 * watched.longest_s
    on_disk = state_of(node.node).catalog.usage("nvme").bytes_accounted
    node.node.close()
    began_s, cpu_s = time.monotonic(), time.process_time()
    again = node_of(folder, extents, on_disk)
    answers_s = time.monotonic() - began_s
    draws, lookups = random.Random(extents), []
    while "nvme" in {name for name, guard in state_of(again.node).guards.items() if not guard.ready}:
        one = record_of(draws.randrange(extents))
        asked_s = time.monotonic()
        again.look(one)
        lookups.append(1000 * (time.monotonic() - asked_s))
        time.sleep(LOOKUP_EVERY_S)
    known_s, known_cpu_s = time.monotonic() - began_s, time.process_time() - cpu_s
    first = watch(again)
    for number in range(extents + SECONDS, extents + SECONDS + FIRST_STORES):
        again.offer(record_of(number))
        work(again)
    row = {
        "sessions": sessions,
        "extents": extents,
        "tick ms": statistics.median(ticks[5:]),
        "lock held ms, longest": in_ticks_ms,
        "store after a second ms": statistics.median(stores[5:]),
        "bytes an extent": held // extents,
        "start: answers after s": answers_s,
        "start: all known after s": known_s,
        "start: CPU us an extent": 1e6 * known_cpu_s / extents,
        "lookup beside the scan ms, p50": percentile(lookups, 0.5),
        "lookup beside the scan ms, p99": percentile(lookups, 0.99),
        "first stores: lock held ms, longest": 1000 * first.longest_s,
    }
    again.node.close()
    return row


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sessions", type=int, nargs="+", default=[1000, 10000])
    parser.add_argument("--rows", type=int, nargs="*", default=[100_000, 1_000_000])
    args = parser.parse_args(argv)
    keep_collections_short()  # as a tier actor does
    rows = []
    for sessions in args.sessions:
        with tempfile.TemporaryDirectory(prefix="samovar-growth-") as folder:
            rows.append(measured(sessions, Path(folder)))
    report.show("a node's books as they grow", rows)
    tables = [of_table(rows) for rows in args.rows]
    report.show("the table of sessions as it grows", tables)
    report.write("growth", [*rows, *tables])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
