"""`make soak`: 200 sessions for 20 minutes, while everything that can go wrong with the cache does.

A real `samovar serve` whose pools and tiers are far too small, so that blocks sink, are evicted and come
back all the time; disks and S3 that fail, rot and fill up; the tier actor killed, S3 frozen, files flipped
and deleted, clients that hang up. At the end: no wrong token (see `_soak_oracle.py`), no failed request, no
page held by nobody, the books equal to the disk, memory, files and threads flat. Exit code 1 when not.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
from tqdm import tqdm

from bench import _report as report
from bench._soak_clients import FAILURES, Asker, Tally, guest
from bench._soak_faults import Saboteur, disk_use, fault_flags
from bench._soak_oracle import Oracle
from bench._soak_watch import Growth, Sample, TierCounters, growths, sample
from samovar.cache_tiers.blocks import TIERS
from samovar.cache_tiers.media.files import PAGE_BYTES
from samovar.configs.sections import MIB
from samovar.configs.settings import ModelSettings
from samovar.replicas.model.store import ensure_model
from tests.support.services.service import MODEL, Service, serving, until

WATCH_S = 2.0
CHECKS_AT_ONCE = 8
QUIET_S = 180.0
JUDGED_MINUTES = 5.0
"""A shorter run is over before its pools and caches are full: its growth says nothing."""

TURNS_PER_S = 4.0
"""Pauses are such that this many clients speak a second if answers take no time: about what two cores can."""


@dataclass
class Books:
    """What is held when all is quiet. `disk_bytes`: what the files in the nvme directory take."""

    pages: int = 0
    running: int = 0
    bytes_held: int = 0
    disk_bytes: int = 0
    disk_files: int = 0
    missing_bytes: int = 0

    def problems(self) -> Iterator[str]:
        """What is not as it should be. Files that were deleted behind a tier's back may still be counted."""
        if self.pages or self.running:
            yield f"{self.pages} pages are held, {self.running} sequences run, for nobody"
        slack = PAGE_BYTES * self.disk_files
        if not self.disk_bytes - slack <= self.bytes_held <= self.disk_bytes + self.missing_bytes + slack:
            yield (
                f"the nvme tier counts {self.bytes_held} bytes, its {self.disk_files} files take "
                f"{self.disk_bytes} (deleted by us: {self.missing_bytes})"
            )


@dataclass
class Found:
    """All that a run found."""

    minutes: float
    tally: Tally = field(default_factory=Tally)
    checked: int = 0
    repeated: Counter[str] = field(default_factory=Counter)
    wrong: list[dict[str, Any]] = field(default_factory=list)
    harm: Counter[str] = field(default_factory=Counter)
    tiers: TierCounters = field(default_factory=TierCounters)
    replicas: list[dict[str, Any]] = field(default_factory=list)
    books: Books = field(default_factory=Books)
    growths: list[Growth] = field(default_factory=list)

    def of_replicas(self, name: str) -> Counter[str]:
        """A counter of the replicas by words."""
        return sum((Counter(replica[name]) for replica in self.replicas), Counter())

    def problems(self) -> Iterator[str]:
        """Why this run failed; nothing: it did not."""
        for row in self.wrong:
            yield f"WRONG ANSWER in {row['turn']['session']}, turn {row['turn']['number']}: {row['what']}"
        if not self.checked:
            yield "no answer was checked"
        if not sum(self.tally.tokens[tier] for tier in TIERS):
            yield "no token came from a tier: this run shows nothing"
        for error, count in self.tally.errors.most_common():
            yield f"{count} x {error}"
        mismatches = self.of_replicas("audits")["mismatch"]
        if mismatches:
            yield f"audit: {mismatches} restored prompts were not what computing gives"
        if sum(replica["integrity_failures"] for replica in self.replicas):
            yield "an engine's books were wrong"
        yield from self.books.problems()
        if self.minutes >= JUDGED_MINUTES:
            yield from (f"grows: {growth}" for growth in self.growths if growth.is_leak)


class Soak:
    """One run against one service."""

    def __init__(self, args: argparse.Namespace, service: Service, nvme_dir: Path) -> None:
        self._args = args
        self._service = service
        self._nvme_dir = nvme_dir
        self._root = psutil.Process(service.process.pid)
        self._saboteur = Saboteur(self._root, nvme_dir, args.seed)
        self._samples: list[Sample] = []
        self.found = Found(minutes=args.minutes)

    async def run(self) -> None:
        found, args = self.found, self._args
        url = f"{self._service.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=600) as client:
            ask = Asker(client, MODEL)
            oracle = Oracle(ask)
            until_s = time.monotonic() + 60 * args.minutes
            gap_s = args.sessions / TURNS_PER_S
            await asyncio.gather(
                self._watch(until_s, oracle),
                self._saboteur.run(until_s),
                *(
                    guest(n, ask, oracle, found.tally, until_s=until_s, gap_s=gap_s, check_share=args.check)
                    for n in range(args.sessions)
                ),
            )
            turns = list(found.tally.last_turns.values())
            print(f"the last turns of {len(turns)} sessions again, with and without the cache", flush=True)
            for error in await oracle.check_all(turns, at_once=CHECKS_AT_ONCE):
                if not isinstance(error, FAILURES):
                    raise error
                found.tally.failed(error)
        found.checked, found.repeated, found.wrong = oracle.checked, oracle.repeated, oracle.wrong
        found.harm = self._saboteur.counts
        found.growths = growths(self._samples) if len(self._samples) >= 4 else []

    def settle(self) -> None:
        """Wait until nothing happens any more, and look at the books."""
        until("all sequences are over", self._service.idle, QUIET_S)
        before: list[Books] = [Books(pages=-1)]

        def quiet() -> bool:
            """Two looks in a row see the same: audits, stores and moves are done."""
            now = self._look()
            was, before[0] = before[0], now or Books(pages=-1)
            return now is not None and now == was

        try:
            until("nothing is stored or moved", quiet, QUIET_S)
        except AssertionError as error:  # then what was seen last is judged
            self.found.tally.failed(error)
        self.found.books = before[0]

    def _look(self) -> Books | None:
        """None: something is under way."""
        with self._service.http() as http:
            stats = http.get("/cache/stats").raise_for_status().json()
        self.found.tiers.note(stats["nodes"])
        self.found.replicas = stats["replicas"]
        busy = sum(node["queue"] for node in stats["nodes"])
        busy += sum(replica["staged_bytes"] for replica in stats["replicas"])
        if busy or not stats["nodes"] or len(stats["replicas"]) != self._args.replicas:
            return None
        tiers = {tier["name"]: tier for node in stats["nodes"] for tier in node["tiers"]}
        disk_bytes, disk_files = disk_use(self._nvme_dir)
        return Books(
            pages=sum(replica["pages_active"] for replica in stats["replicas"]),
            running=sum(replica["running"] + replica["waiting"] for replica in stats["replicas"]),
            bytes_held=tiers["nvme"]["bytes_held"],
            disk_bytes=disk_bytes,
            disk_files=disk_files,
            missing_bytes=self._saboteur.missing_bytes,
        )

    async def _watch(self, until_s: float, oracle: Oracle) -> None:
        seconds = until_s - time.monotonic()
        async with httpx.AsyncClient(base_url=self._service.url, timeout=60) as http:
            with tqdm(total=round(seconds), unit="s") as bar:
                while (left_s := until_s - time.monotonic()) > 0:
                    self._samples.append(await asyncio.to_thread(sample, self._root))
                    try:
                        answer = (await http.get("/cache/stats")).raise_for_status()
                        self.found.tiers.note(answer.json()["nodes"])
                    except httpx.HTTPError as error:
                        self.found.tally.failed(error)
                    counts = self.found.tally.counts
                    bar.set_postfix(turns=counts["turns"], checked=oracle.checked, wrong=len(oracle.wrong))
                    bar.update(round(seconds - left_s) - bar.n)
                    await asyncio.sleep(min(WATCH_S, max(0.0, until_s - time.monotonic())))


def service_flags(args: argparse.Namespace, work: Path) -> Iterator[str]:
    """A service that has room for nothing, in directories of its own."""
    requests = 2 * args.sessions + CHECKS_AT_ONCE
    settings = {
        "replicas": args.replicas,
        "model.cache-dir": work,
        "engine.device": "cpu",  # where the engine is exact: the oracle is
        "engine.sequences-max": 16,
        "engine.queue-max": requests,
        "engine.pool-bytes-max": args.pool_mib * MIB,
        "limits.concurrent-per-key": requests,
        "limits.sequences-per-key": requests,
        "limits.concurrent-total": max(512, requests),
        "limits.tokenizer-queue-max": requests,
        "limits.reply-memory-bytes-max": 0,
        "tiers.nvme.dir": work / "kv",
        "tiers.cpu.bytes-max": args.cpu_mib * MIB,
        "tiers.nvme.bytes-max": args.nvme_mib * MIB,
        "tiers.s3.bytes-max": args.s3_mib * MIB,
        "tiers.nvme.quarantine-bytes-max": 16 * MIB,
        "tiers.audit-share": 0.5,
        "tiers.breaker-open-s-max": 10,
    }
    yield "--with-s3-demo"
    for name, value in settings.items():
        yield from (f"--{name}", str(value))
    yield from fault_flags(args.seed)


@contextlib.contextmanager
def working_directory() -> Iterator[Path]:
    """For one run's files, with the model that is converted already."""
    models = ensure_model(ModelSettings()).parent
    with tempfile.TemporaryDirectory(prefix="samovar-soak-") as name:
        (Path(name) / "models").symlink_to(models, target_is_directory=True)
        yield Path(name)


def summary(args: argparse.Namespace, found: Found) -> dict[str, Any]:
    """One row: what a reader wants to know first."""
    tally = found.tally
    prompt_tokens = max(1, sum(tally.tokens.values()) - tally.tokens["answer"])
    shares = {
        f"from_{source}": round(tally.tokens[source] / prompt_tokens, 3)
        for source in ("gpu", "cpu", "nvme", "s3", "compute")
    }
    total = next((growth for growth in found.growths if growth.name == "all"), Growth("all", "memory", 0, 0))
    return {
        "minutes": args.minutes,
        "sessions": args.sessions,
        "replicas": args.replicas,
        "turns": tally.counts["turns"],
        "hung_up": tally.counts["hung up"],
        "checked_without_cache": found.checked,
        "wrong_answers": len(found.wrong),
        "errors": sum(tally.errors.values()),
        "audits": dict(found.of_replicas("audits")),
        "verify_failures": sum(sum(c.values()) for c in found.tiers.of_tiers("verify_failures").values()),
        "actor_restarts": found.tiers.restarts,
        "pages_held": found.books.pages,
        "nvme_bytes_counted": found.books.bytes_held,
        "nvme_bytes_on_disk": found.books.disk_bytes,
        "memory_early_mib": round(total.early / MIB),
        "memory_late_mib": round(total.late / MIB),
        "ttft_p50_s": round(statistics.median(tally.ttft_s), 3) if tally.ttft_s else None,
        "prompt_tokens": prompt_tokens,
        "answer_tokens": tally.tokens["answer"],
        **shares,
    }


def show(row: dict[str, Any], found: Found) -> None:
    report.show("soak", [{"what": key, "value": str(value)} for key, value in row.items()])
    tiers = found.tiers
    words = {
        "harm done": found.harm,
        "prompt tokens of turns": Counter(found.tally.tokens),
        "... of the last ones, later": found.repeated,
        "decisions": found.tally.decisions,
        "misses of loads": found.of_replicas("misses"),
        "stores": tiers.words("stores"),
        "moves": tiers.words("moves"),
        "misses of the node": tiers.words("misses"),
        **{f"caught in {name}": counts for name, counts in tiers.of_tiers("verify_failures").items()},
        **{
            f"faults of {name}": counts
            for name, counts in tiers.of_tiers(
                "read_errors", "write_errors", "quarantined", "evicted_extents", "breaker_opened"
            ).items()
        },
    }
    report.show(
        "what happened",
        [
            {"what": what, "counts": ", ".join(f"{word} {count}" for word, count in sorted(counts.items()))}
            for what, counts in words.items()
        ],
    )
    table: dict[str, dict[str, Any]] = {}
    for growth in found.growths:
        unit = MIB if growth.kind == "memory" else 1
        line = table.setdefault(growth.name, {"process": growth.name})
        line[growth.kind] = f"{growth.early / unit:.0f} -> {growth.late / unit:.0f}"
    rows = [{"files": "", "threads": "", **line} for line in table.values()]
    columns = ("process", "memory", "files", "threads")
    if rows:
        title = "second quarter -> last quarter (memory in MiB, processes of one name together)"
        report.show(title, [{column: row[column] for column in columns} for row in rows])


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="samovar bench soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--sessions", type=int, default=200, help="clients at the same time")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--check", type=float, default=0.2, help="share of turns asked again at once")
    parser.add_argument("--pool-mib", type=int, default=48, help="of each replica")
    parser.add_argument("--cpu-mib", type=int, default=96)
    parser.add_argument("--nvme-mib", type=int, default=256)
    parser.add_argument("--s3-mib", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=1, help="of the faults")
    args = parser.parse_args(argv)
    report.OUT_DIR.mkdir(parents=True, exist_ok=True)
    with working_directory() as work:
        output = report.OUT_DIR / "soak-serve.txt"
        with serving(output, *service_flags(args, work)) as service:
            soak = Soak(args, service, work / "kv")
            asyncio.run(soak.run())
            soak.settle()
    found = soak.found
    row = summary(args, found)
    show(row, found)
    problems = list(found.problems())
    path = report.write(
        "soak",
        [row],
        problems=problems,
        wrong=found.wrong,
        harm=found.harm,
        decisions=found.tally.decisions,
        tokens=found.tally.tokens,
        tokens_repeated=found.repeated,
        replicas=found.replicas,
        tiers=list(found.tiers.last.values()),
        books=asdict(found.books),
        growths=[asdict(growth) for growth in found.growths],
    )
    print(f"written: {path}")
    if args.minutes < JUDGED_MINUTES:
        print(f"growth is not judged in less than {JUDGED_MINUTES:g} minutes")
    for problem in problems:
        print(f"FAILED: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
