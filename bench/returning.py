"""A user comes back: time to the first token, by where the blocks of the conversation are.

A real `samovar serve` and HTTP. Conversations of several lengths are served and stored; the pool is
overrun by other users; then the user returns with a new turn of 32 tokens. Once with everything to
be computed again, once with the pages still in the pool, and from each tier alone: main memory
(`cpu`), disk (`nvme`, with a cold page cache) and an S3 server (`s3`, rclone on this machine).
With `--restarts`, instead: the first returns of a service that was started again, each of a conversation
of its own.
Prompts are token ids, so that lengths are exact; every answer is compared with that of the others.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from tqdm import tqdm

from bench import _report as report
from samovar.cluster.serve.s3_demo import S3Demo
from samovar.configs.settings import Settings
from tests.support.services.service import MODEL, Service, until

TURN_TOKENS = 32
HISTORIES = (512, 1024, 2048, 4096, 8064)  # 8k: the model ends at 8192, and the turn has to fit
SPARE_TOKENS = 1152  # the pool holds one long conversation and a little more
VOCAB = 49152
BYTES_PER_TOKEN = {"auto": 23040, "int8": 11880}  # SmolLM2-135M: 30 layers, 3 heads of 64; a scale each
MIB = 1024 * 1024
SOURCES = ("recompute", "gpu", "cpu", "nvme", "s3")


@dataclass
class Reading:
    """One request: seconds and CPU seconds of all the service's processes until its first token."""

    ttft_s: float
    cpu_s: float
    cached: int
    by_source: dict[str, int]
    receipt: dict[str, Any]
    token: str


@dataclass
class Row:
    history_tokens: int
    source: str
    readings: list[Reading] = field(default_factory=list)

    def json(self) -> dict[str, Any]:
        ttfts = [reading.ttft_s for reading in self.readings]
        cpu = [reading.cpu_s for reading in self.readings]
        return {
            "history_tokens": self.history_tokens,
            "source": self.source,
            "ttft_s": statistics.median(ttfts),
            "ttft_cpu_s": statistics.median(cpu),
            "cached_tokens": int(statistics.median(reading.cached for reading in self.readings)),
            "ttft_raw_s": ttfts,
            "ttft_cpu_raw_s": cpu,
            "load_ms": [reading.receipt["load_ms"] for reading in self.readings],
            "decision": sorted({reading.receipt["decision"] for reading in self.readings}),
        }


def tokens_of(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000, VOCAB) for _ in range(length)]


class Client:
    """Completions by token ids, one at a time."""

    def __init__(self, service: Service) -> None:
        self._http = httpx.Client(base_url=service.url, timeout=600)
        self._service = service

    def ask(self, ids: list[int], session: str, **fields: Any) -> Reading:
        body = {
            "model": MODEL,
            "prompt": ids,
            "max_tokens": 1,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "session_id": session,
            "ignore_eos": True,
            "cache_profile": "documents",
            **fields,
        }
        cpu_before = self._cpu_s()
        started_s = time.perf_counter()
        ttft_s, cpu_s, token, last = 0.0, 0.0, "", {}
        with self._http.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != httpx.codes.OK:
                raise RuntimeError(f"{response.status_code}: {response.read().decode()[:300]}")
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                if not ttft_s:
                    ttft_s, cpu_s = time.perf_counter() - started_s, self._cpu_s() - cpu_before
                last = json.loads(line.removeprefix("data: "))
                token += "".join(choice.get("text") or "" for choice in last["choices"])
        details = last["usage"]["prompt_tokens_details"]
        return Reading(
            ttft_s, cpu_s, details["cached_tokens"], details["cached_tokens_by_tier"], last["receipt"], token
        )

    def _cpu_s(self) -> float:
        total = 0.0
        for process in self._service.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def tier(self, name: str) -> dict[str, Any]:
        rows = self._http.get("/cache/stats").raise_for_status().json()["nodes"][0]["tiers"]
        return next(row for row in rows if row["name"] == name)

    def is_quiet(self) -> bool:
        """Nothing is stored or copied any more."""
        stats = self._http.get("/cache/stats").raise_for_status().json()
        staged = sum(replica["staged_bytes"] for replica in stats["replicas"])
        moves = stats["nodes"][0]["moves"]
        ended = sum(n for name, n in moves.items() if name.rsplit(":")[-1] in ("done", "failed"))
        begun = sum(n for name, n in moves.items() if name.endswith(":planned"))
        return staged == 0 and stats["nodes"][0]["queue"] == 0 and ended == begun


class Bench:
    """`folder`: where disk and S3 tiers live over all the services of the run."""

    def __init__(
        self,
        folder: Path,
        histories: list[int],
        repeats: int,
        kv_dtype: str = "auto",
        key_file: Path | None = None,
    ) -> None:
        self.folder = folder
        self.key_file = key_file
        self.kv_dtype = kv_dtype
        self.histories = histories
        self.repeats = repeats
        self.rows = {(n, source): Row(n, source) for n in histories for source in SOURCES}
        # What other users bring: more than the pool has.
        self.overrun = [max(histories), max(histories) // 2 + SPARE_TOKENS]
        steps = len(histories) * (repeats * 5 + 1) + len(self.overrun)
        self.bar = tqdm(total=steps, unit="request", smoothing=0)

    def history(self, n: int) -> list[int]:
        return tokens_of(n, seed=n)

    def turn(self, n: int, repeat: int) -> list[int]:
        """The same turn for every source: its answer must be the same."""
        return [*self.history(n), *tokens_of(TURN_TOKENS, seed=10_000 * n + repeat)]

    def flags(self, s3: Settings, *, cpu: bool, nvme: bool, bucket: bool) -> tuple[str, ...]:
        tiers = s3.tiers.s3
        assert tiers.access_key_id is not None
        assert tiers.secret_access_key is not None
        pool_bytes = (max(self.histories) + SPARE_TOKENS) * BYTES_PER_TOKEN[self.kv_dtype]
        flags = [
            *("--engine.pool-bytes-max", str(pool_bytes), "--engine.kv-dtype", self.kv_dtype),
            *("--limits.request-timeout-s", "1800", "--tiers.audit-share", "0"),
            *("--tiers.nvme.dir", str(self.folder / "kv")),
            *("--tiers.policy.name", "lru"),  # others' turns push this one out, however likely it resumes
            *("--tiers.cpu.bytes-max", str(3072 * MIB if cpu else 0)),
            *("--tiers.nvme.bytes-max", str(4096 * MIB if nvme else 0)),
        ]
        if self.key_file is not None:
            flags += ["--tiers.encryption-key-file", str(self.key_file)]
        if bucket:
            flags += ["--tiers.s3.bucket", str(tiers.bucket), "--tiers.s3.endpoint", str(tiers.endpoint)]
        return tuple(flags)

    @contextlib.contextmanager
    def service(self, s3: Settings, **tiers: bool) -> Iterator[Client]:
        assert s3.tiers.s3.access_key_id is not None
        assert s3.tiers.s3.secret_access_key is not None
        env = {
            "SAMOVAR_AUTH__SERVER_SECRET": "bench-" * 6,
            "SAMOVAR_TIERS__S3__ACCESS_KEY_ID": s3.tiers.s3.access_key_id.get_secret_value(),
            "SAMOVAR_TIERS__S3__SECRET_ACCESS_KEY": s3.tiers.s3.secret_access_key.get_secret_value(),
        }
        service = Service(report.OUT_DIR / "return-serve.txt", *self.flags(s3, **tiers), env=env)
        try:
            yield Client(service.wait_ready())
        finally:
            service.stop()

    def take(self, n: int, source: str, client: Client, ids: list[int], **fields: Any) -> None:
        reading = client.ask(ids, f"user-{n}", **fields)
        self.bar.update()
        expected = 0 if source == "recompute" else 0.95 * n
        got = reading.cached if source == "recompute" else reading.by_source[source]
        if got < expected or (source == "recompute" and got):
            raise RuntimeError(f"{n} tokens were to come by {source}: {reading.by_source}, {reading.receipt}")
        self.rows[n, source].readings.append(reading)

    def overrun_pool(self, client: Client) -> None:
        """Others come back, and their blocks take all the pages."""
        for length in self.overrun:
            client.ask(
                [*tokens_of(length, seed=length + 1), *tokens_of(8, time.time_ns())], f"other-{length}"
            )

    def run(self, s3: Settings) -> None:
        with self.service(s3, cpu=True, nvme=True, bucket=True) as client:
            for length in self.overrun:
                client.ask(tokens_of(length, seed=length + 1), f"other-{length}")
                self.bar.update()
            for n in self.histories:
                self._first_visit(client, n)
            until("everything is stored", client.is_quiet, 300)
            for n in self.histories:
                for repeat in range(self.repeats):
                    self.overrun_pool(client)
                    until("everything is stored", client.is_quiet, 300)
                    self.take(n, "cpu", client, self.turn(n, repeat))
        self._from_below(s3, "nvme", cpu=False, nvme=True, bucket=False)
        self._from_below(s3, "s3", cpu=False, nvme=False, bucket=True)

    def _first_visit(self, client: Client, n: int) -> None:
        """Recompute, under a salt of its own, beside the pages still in the pool: neighbours in time."""
        client.ask(self.history(n), f"user-{n}")
        self.bar.update()
        until("the turn is stored", client.is_quiet, 300)
        for repeat in range(self.repeats):
            self.take(n, "gpu", client, self.turn(n, repeat))
        for repeat in range(self.repeats):
            salt = {"cache_salt": f"fresh-{time.time_ns()}", "prompt_cache_retention": "in_memory"}
            self.take(n, "recompute", client, self.turn(n, repeat), **salt)
        until("everything is stored", client.is_quiet, 300)

    def _from_below(self, s3: Settings, source: str, **tiers: bool) -> None:
        with self.service(s3, **tiers) as client:
            wanted = sum(self.histories)
            until(f"{source} has been looked through", lambda: client.tier(source)["tokens"] >= wanted, 120)
            for n in self.histories:
                for repeat in range(self.repeats):
                    self.overrun_pool(client)
                    until("everything is stored", client.is_quiet, 300)
                    drop_page_cache(self.folder)
                    self.take(n, source, client, self.turn(n, repeat))

    def check_answers(self) -> int:
        """Turns whose first token was not the same from everywhere."""
        wrong = 0
        for n in self.histories:
            for repeat in range(self.repeats):
                tokens = {self.rows[n, source].readings[repeat].token for source in SOURCES}
                wrong += len(tokens) > 1
        return wrong


FIRST_RETURNS = 4


def first_returns(folder: Path, n: int, restarts: int) -> list[dict[str, Any]]:
    """Return a row for each of the first returns after each start, of conversations of `n` tokens."""
    pool_bytes = str((n + SPARE_TOKENS) * FIRST_RETURNS * BYTES_PER_TOKEN["auto"])
    flags = ["--engine.pool-bytes-max", pool_bytes, "--tiers.nvme.dir", str(folder / "kv")]
    env = {"SAMOVAR_AUTH__SERVER_SECRET": "bench-" * 6}
    rows = []
    for start in range(1 + restarts):
        service = Service(report.OUT_DIR / "return-serve.txt", *flags, env=env)
        try:
            client = Client(service.wait_ready())
            for number in range(FIRST_RETURNS):
                history = tokens_of(n, seed=n + number)
                turn = history if start == 0 else [*history, *tokens_of(TURN_TOKENS, seed=start)]
                read = client.ask(turn, f"user-{n}-{number}")
                of = {"ttft_s": read.ttft_s, "cpu_s": read.cpu_s, "cached_tokens": read.cached}
                rows.append({"history_tokens": n, "restart": start, "return": number + 1, **of})
            until("everything is stored", client.is_quiet, 300)
        finally:
            service.stop()
    return [row for row in rows if row["restart"]]


def drop_page_cache(folder: Path) -> None:
    """What was written is on the medium, and reading it starts there."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def show(rows: dict[tuple[int, str], Row], histories: list[int]) -> None:
    table = []
    for n in histories:
        ttft = {source: rows[n, source].json()["ttft_s"] for source in SOURCES}
        line: dict[str, Any] = {"history": n, **{f"{source} s": ttft[source] for source in SOURCES}}
        line |= {f"{s} /gpu": ttft[s] / ttft["gpu"] for s in ("cpu", "nvme", "s3")}
        line |= {f"recompute/{s}": ttft["recompute"] / ttft[s] for s in ("cpu", "nvme", "s3")}
        table.append(line)
    report.show(f"TTFT of a returning turn of {TURN_TOKENS} tokens, medians", table)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="samovar bench returning", description=__doc__)
    parser.add_argument("--histories", type=int, nargs="+", default=list(HISTORIES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kv-dtype", choices=BYTES_PER_TOKEN, default="auto")
    parser.add_argument("--encrypted", action="store_true", help="records in nvme and S3 are encrypted")
    parser.add_argument("--restarts", type=int, default=0)
    args = parser.parse_args(argv)
    report.OUT_DIR.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="samovar-return-") as made:
        folder = Path(made)
        if args.restarts:
            firsts = [row for n in args.histories for row in first_returns(folder / str(n), n, args.restarts)]
            report.show("the first returns after a start", firsts)
            print(f"written: {report.write('return-first', firsts, module='returning')}")
            return 0
        demo = S3Demo(folder / "s3").start()
        try:
            key_file = folder / "outer-key" if args.encrypted else None
            if key_file is not None:
                key_file.touch(0o600)
                key_file.write_text(os.urandom(32).hex())
            bench = Bench(folder, args.histories, args.repeats, args.kv_dtype, key_file)
            bench.run(demo.settings(Settings()))
        finally:
            demo.stop()
    bench.bar.close()
    rows = [row.json() for row in bench.rows.values()]
    wrong = bench.check_answers()
    show(bench.rows, args.histories)
    told = {"wrong_tokens": wrong, "kv_dtype": args.kv_dtype, "is_encrypted": args.encrypted}
    print(f"written: {report.write('return', rows, module='returning', **told)}")
    print(f"{wrong} turns whose first token depended on where the blocks came from")
    return 1 if wrong else 0


if __name__ == "__main__":
    import sys

    raise SystemExit(main(sys.argv[1:]))
