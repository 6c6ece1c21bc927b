"""`python -m bench.gpu_service`: a whole service on a GPU over HTTP, as people start it, and vLLM beside it.

A model of Llama 8B's shape with random weights is written to main memory and served by `samovar serve
--config local-gpu`, with a pool of 24 GiB so that it can be overrun: cold prompts, the same again from the
pool, returns after an overrun from RAM, streams, streams beside a long prompt, and returns after a restart
from the disk. Where vLLM is installed (`--vllm`), the same client asks it, with its own offloading on. The
service is given nothing but the size of its pool: prices are what its start has measured. Ten minutes;
`--tiny --device cpu` tries the script.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import httpx
import torch
from prometheus_client.parser import text_string_to_metric_families

from bench import _report as report
from bench._gpu_device import Device, dtype_name
from bench._gpu_model import FIRST_ID, LLAMA_8B, Shape, write_random_model
from bench._gpu_returns import RETURN_S_MAX
from bench._gpu_run import Bar, GpuRun, Rows, Section, at_least, at_most
from bench._gpu_service_client import Answer, Ask, Client, percentile_ms
from bench._peers_processes import Running, until_ready
from samovar.configs.sections import GIB, MIB
from tests.support.services.service import free_port

NAME = "bench"
START_S_MAX = 300.0
ASK_S = 300
LIMIT_S = 600.0
TURN_TOKENS = 20
OVERRUN = 1.2
BESIDE = 8
BESIDE_AFTER_S = 1.0
DISK_TIME_MAX = 1.2
SHARED = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Amounts:
    """How much is asked: tokens of prompts; streams at once, their prompts' tokens and their answers'."""

    prompts: tuple[int, ...]
    batches: tuple[int, ...]
    stream_prompt: int
    stream_tokens: int
    pool_tokens: int
    context: int


FULL = Amounts((1024, 8192, 32768, 65536), (1, 8, 32, 64, 65, 96, 128), 512, 96, 196_608, 131_072)
SMALL = Amounts((1024, 3072), (1, 4), 64, 16, 6144, 4096)
TINY = Shape("small Llama", torch.float32, 256, 8, 4, 2, 512, 512, SMALL.context)
"""Slow enough on a CPU that loading pays."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a server runs. `state`: a folder that a restart finds again; `logs`: of what servers print."""

    model: Path
    shape: Shape
    state: Path
    logs: Path
    amounts: Amounts
    is_cuda: bool

    @property
    def pool_bytes(self) -> int:
        return self.amounts.pool_tokens * self.shape.token_bytes


class Server(Protocol):
    """A server: its name, the command that starts it, and whether a restart finds what it had."""

    name: str
    keeps: bool

    def command(self, place: Place, port: int) -> Sequence[str]: ...


PATIENT = {"--tiers.lookup-s-max": 30, "--tiers.lookup-share": 100, "--tiers.lookup-idle-share": 1}
"""A tiny shape is computed in less time than a busy machine takes to look it up."""


class Samovar:
    name, keeps = "samovar", True

    def command(self, place: Place, port: int) -> Sequence[str]:
        flags: dict[str, object] = {
            "--port": port,
            "--model.served-name": NAME,
            "--model.dtype": dtype_name(place.shape.dtype),
            "--engine.pool-bytes-max": place.pool_bytes,
            "--tiers.nvme.dir": place.state / "kv",
            "--limits.request-timeout-s": ASK_S,
            **({"--config": "local-gpu"} if place.is_cuda else PATIENT),
        }
        return [sys.executable, "-m", "samovar", "serve", str(place.model), *words(flags)]


class Vllm:
    """vLLM with its own offloading to main memory on."""

    name, keeps = "vllm", False

    def __init__(self, program: str) -> None:
        self._program = program

    def command(self, place: Place, port: int) -> Sequence[str]:
        flags: dict[str, object] = {
            "--host": "127.0.0.1",
            "--port": port,
            "--served-model-name": NAME,
            "--dtype": dtype_name(place.shape.dtype),
            "--max-model-len": place.amounts.context,
            "--num-gpu-blocks-override": 1 + place.amounts.pool_tokens // 16,
            "--kv-offloading-size": 48,
            "--kv-offloading-backend": "native",
        }
        return [self._program, "serve", str(place.model), *words(flags), "--enable-prompt-tokens-details"]


def words(flags: Mapping[str, object]) -> list[str]:
    return [str(word) for pair in flags.items() for word in pair]


@dataclass
class Visit:
    """One server, from its start to its end; its sections add rows."""

    server: Server
    place: Place
    rows: Rows
    running: Running = field(default_factory=lambda: Running(range(os.cpu_count() or 1)))
    url: str = ""
    computed_s: dict[int, float] = field(default_factory=dict)

    @property
    def client(self) -> Client:
        return Client(self.url, NAME)

    def sections(self) -> list[Section]:
        works: list[tuple[str, Callable[[], None]]] = [
            ("start", self.start),
            ("cold", self.cold),
            ("again", self.again),
            ("returns", self.returns),
            ("streams", self.streams),
            ("beside", self.beside),
        ]
        if self.server.keeps:
            works.append(("restart", self.restart))
        works.append(("stop", self.running.stop))
        return [Section(f"{self.server.name}: {name}", work) for name, work in works]

    def start(self) -> None:
        port = free_port()
        self.url, output = f"http://127.0.0.1:{port}", self.place.logs / f"gpu_service-{self.server.name}.log"
        env = {
            "SAMOVAR_AUTH__SERVER_SECRET": "bench-" * 6,  # what a restart finds is of the same tenant
            "XDG_STATE_HOME": str(self.place.state / "state"),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        began_s = time.monotonic()
        self.running.start(self.server.command(self.place, port), env, output)
        until_ready(self.running, self._answers, output, START_S_MAX)
        self._add("ready", "", time.monotonic() - began_s, "s")
        self.client.ask(self._ids(64, "first"), "first")  # one-time costs

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=2).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    def cold(self) -> None:
        for tokens in self.place.amounts.prompts:
            answer = self.client.ask(self._ids(tokens, f"history {tokens}"), f"history-{tokens}")
            self.computed_s[tokens] = answer.ttft_s
            self._add("cold", str(tokens), answer.ttft_s, "s")

    def again(self) -> None:
        for tokens in self.place.amounts.prompts:
            self._ask_again("again, from the pool", tokens, "again")

    def returns(self) -> None:
        """Overrun the pool with others' prompts, then let each conversation come back."""
        longest = max(self.place.amounts.prompts)
        for number in range(1 + int(OVERRUN * self.place.amounts.pool_tokens / longest)):
            self.client.ask(self._ids(longest, f"other {number}"), f"other-{number}", 1)
        self._stored()
        for tokens in self.place.amounts.prompts:
            bar_s = RETURN_S_MAX.get(tokens) if self.server.keeps else None
            self._ask_again("return after an overrun", tokens, "return", bar_s)
            # The first load of memory registers it with the driver.
            self._ask_again("and once more, from the pool", tokens, "once more")

    def _stored(self) -> None:
        """Add what of the extents that were offered the tiers have taken."""
        if not self.server.keeps:
            return
        text = httpx.get(f"{self.url}/metrics", timeout=30).text
        outcomes = {
            sample.labels["outcome"]: sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == "samovar_stores_total"
        }
        good = sum(outcomes.get(name, 0.0) for name in ("taken", "held"))
        said = ", ".join(f"{name} {count:.0f}" for name, count in sorted(outcomes.items()))
        self._add("extents stored", said, good / max(1.0, sum(outcomes.values())), "of all", at_least(0.9))

    def streams(self) -> None:
        amounts = self.place.amounts
        for batch in amounts.batches:
            asks = [
                Ask(
                    self._ids(amounts.stream_prompt, f"{batch} {at}"),
                    amounts.stream_tokens,
                    f"stream-{batch}-{at}",
                )
                for at in range(batch)
            ]
            began_s = time.perf_counter()
            answers = self.client.ask_all(asks)
            took_s = time.perf_counter() - began_s
            gaps_s = [gap for answer in answers for gap in answer.gaps_s[len(answer.times_s) // 2 :]]
            self._add("gap p50", f"{batch} streams", percentile_ms(gaps_s, 50), "ms")
            self._add("gap p99", f"{batch} streams", percentile_ms(gaps_s, 99), "ms")
            self._add("tokens", f"{batch} streams", batch * amounts.stream_tokens / took_s, "a second")

    def beside(self) -> None:
        amounts, longest = self.place.amounts, max(self.place.amounts.prompts)
        asks = [
            Ask(self._ids(amounts.stream_prompt, f"beside {at}"), 4 * amounts.stream_tokens, f"beside-{at}")
            for at in range(BESIDE)
        ]
        asks.append(Ask(self._ids(longest, "long"), 4, "long", BESIDE_AFTER_S))
        *streams, long = self.client.ask_all(asks)
        gaps_s = [gap for answer in streams for gap in answer.gaps_s]
        shape = f"{BESIDE} streams beside {longest}"
        self._add("the prompt's first token", shape, long.ttft_s, "s")
        self._add("gap p99", shape, percentile_ms(gaps_s, 99), "ms")
        self._add("gap, longest", shape, 1e3 * max(gaps_s), "ms")

    def restart(self) -> None:
        """Stop with SIGTERM, start again, and let each conversation come back from the disk."""
        self.running.stop()
        self.start()
        rate = read_rate(self.place.state / "kv")
        self._add("disk, read", "", rate / 1e9, "GB/s")
        for tokens in self.place.amounts.prompts:
            answer = self._ask_again("return after a restart", tokens, "restarted")
            disk_s = tokens * self.place.shape.token_bytes / rate
            bar = at_most(DISK_TIME_MAX) if answer.loaded.get("nvme") else None
            self._add("of the disk's own time", str(tokens), answer.ttft_s / disk_s, "", bar)

    def _ask_again(self, name: str, tokens: int, turn: str, bar_s: float | None = None) -> Answer:
        prompt = [*self._ids(tokens, f"history {tokens}"), *self._ids(TURN_TOKENS, f"{turn} {tokens}")]
        answer = self.client.ask(prompt, f"history-{tokens}")
        said = [f"{source} {count}" for source, count in answer.loaded.items()]
        said += [str(answer.receipt[key]) for key in ("decision", "miss") if answer.receipt.get(key)]
        shape = ", ".join([str(tokens), *said])
        self._add(name, shape, answer.ttft_s, "s", None if bar_s is None else at_most(bar_s))
        if tokens in self.computed_s:
            self._add(
                f"computed / {name}", str(tokens), self.computed_s[tokens] / answer.ttft_s, "x", at_least(1)
            )
        return answer

    def _add(self, name: str, shape: str, value: float, unit: str, bar: Bar | None = None) -> None:
        self.rows.add(f"{self.server.name}: {name}", shape or "-", value, unit, bar)

    def _ids(self, count: int, seed: str) -> list[int]:
        """Return token ids that are not special, the same for every server."""
        return random.Random(seed).choices(range(FIRST_ID, min(self.place.shape.vocab, 400)), k=count)


READERS = 4
PORTION = 8 * MIB


def read_rate(folder: Path) -> float:
    """Return the bytes a second that a folder's records are read with from the disk, several at a time."""
    files = sorted(
        (path for path in folder.rglob("*") if path.is_file()), key=lambda path: -path.stat().st_size
    )

    def read(path: Path) -> int:
        with path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            return sum(len(part) for part in iter(lambda: file.read(PORTION), b""))

    some = files[:64]
    began_s = time.perf_counter()
    with ThreadPoolExecutor(READERS) as readers:
        nbytes = sum(readers.map(read, some))
    return max(1, nbytes) / (time.perf_counter() - began_s)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_service", description=__doc__)
    parser.add_argument("--out", type=Path, default=report.OUT_DIR / "gpu_service.json")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="a tiny shape: measures nothing")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="no section begins after this")
    parser.add_argument("--vllm", default=shutil.which("vllm"), help="its program; empty: only Samovar")
    parser.add_argument("--folder", type=Path, help="for the model and the tiers' files")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        print("torch sees no CUDA device: nothing was run. `--tiny --device cpu` tries the script itself.")
        return 2
    device = Device(args.device)
    shape, amounts = (TINY, SMALL) if args.tiny else (LLAMA_8B, FULL)
    rows = Rows(judges_speed=not args.tiny)
    command = " ".join([Path(sys.executable).name, "-m", "bench.gpu_service", *argv])
    facts = {"command": command, "machine": report.machine(), "shape": shape.name}
    run = GpuRun(rows, args.out, facts, limit_s=args.limit_s, settle=lambda: None, screen=sys.stdout)
    fast = SHARED if SHARED.is_dir() and shutil.disk_usage(SHARED).free > 24 * GIB else None
    with (
        tempfile.TemporaryDirectory(prefix="samovar-gpu-", dir=args.folder or fast) as model,
        tempfile.TemporaryDirectory(prefix="samovar-gpu-", dir=args.folder) as state,
    ):
        write_random_model(Path(model) / "model", shape, device.torch)
        place = Place(Path(model) / "model", shape, Path(state), args.out.parent, amounts, device.is_cuda)
        servers: list[Server] = [Samovar(), *([Vllm(args.vllm)] if args.vllm else [])]
        for server in servers:
            visit = Visit(server, place, rows)
            try:
                run.run(visit.sections())
            finally:
                visit.running.stop()
    run.finish()
    return 0 if rows.are_good else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
