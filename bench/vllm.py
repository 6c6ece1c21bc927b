"""A real vLLM alone, over Samovar's tiers, and over LMCache's, where `bench/peers-install.sh` has put them.

All run at the same time on one core, in float32, and are asked in turn the same things: short prompts that
hit nothing, cold, still warm, after an overflow of vLLM's own pool (main memory), decode, several streams,
and after a restart of everything (from a disk, of which nothing is in memory; then, alone, a bucket). What
must hold of their ratios is printed and decides the exit code. Rows: `bench/out/vllm.json`.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from bench import _report as report
from bench._peers_model import PeerModel
from bench._peers_servers import Peer, Place
from bench._vllm_engines import BLOCK_TOKENS, PEERS, POOL_TOKENS, Reading, Server, over_s3, prompt
from bench.peers import server_cores
from samovar.cluster.serve.app import interrupt_on_signals
from samovar.configs.settings import ModelSettings
from samovar.replicas.model import ensure_model
from tests.support.services.service import free_port

BUILD = Path("build")
DROP_CACHES = Path("/proc/sys/vm/drop_caches")
LENGTHS = (1000, 2000, 4000)
SHORT_TOKENS, SHORTS = 64, 12
FILL_TOKENS, FILLS = 2200, 2
DECODE_PROMPT, DECODE_TOKENS = 300, 96
STREAMS, STREAM_PROMPT, STREAM_TOKENS = (4, 16), 100, 48
REPEATS = 3
"""Of decodes in a round: their medians are to differ by no more than some percent."""
OURS, ALONE, LMCACHE = "vllm+samovar", "vllm", "vllm+lmcache"
FIELDS = ("ttft_s", "cpu_s", "after_cpu_s", "gap_s")
Row = dict[str, Any]


class Asked(Protocol):
    """What `measure` needs of a `Server`."""

    def start(self) -> None: ...
    def until_ready(self) -> None: ...
    def ask(self, work: str, prompts: Sequence[Sequence[int]], max_tokens: int = 1) -> Reading: ...
    def stop(self) -> None: ...


@dataclass
class Run:
    """Asks all servers the same things, in turn; who begins changes from round to round."""

    servers: Sequence[Asked]
    lengths: Sequence[int]
    tell: Callable[[Reading], None]
    forget_files: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.readings: list[Reading] = []

    def ready(self) -> None:
        for server in self.servers:
            server.until_ready()

    def round(self, number: int) -> None:
        for short in range(SHORTS):
            self._ask(number + short, "miss", [prompt(("short", number, short), SHORT_TOKENS)])
        for tokens in self.lengths:
            self.compute(number, tokens)
            self._ask(number, "warm", [prompt((number, tokens), tokens)])
            for fill in range(FILLS):
                self._ask(number, "fill", [prompt((number, tokens, fill), FILL_TOKENS)])
            self._ask(number, "return_ram", [prompt((number, tokens), tokens)])
        for again in range(REPEATS):
            turn = number + again
            self._ask(turn, "decode", [prompt(("decode", number, again), DECODE_PROMPT)], DECODE_TOKENS)
            for streams in STREAMS:
                seeds = [("stream", number, again, streams, one) for one in range(streams)]
                prompts = [prompt(seed, STREAM_PROMPT) for seed in seeds]
                self._ask(turn, f"streams_{streams}", prompts, STREAM_TOKENS)

    def compute(self, number: int, tokens: int) -> None:
        self._ask(number, "cold", [prompt((number, tokens), tokens)])

    def restart(self) -> None:
        for server in self.servers:
            server.stop()
        self.forget_files()
        for server in self.servers:
            server.start()
        self.ready()

    def returns(self, number: int, work: str) -> None:
        for tokens in self.lengths:
            self._ask(number, work, [prompt((number, tokens), tokens)])

    def _ask(self, number: int, work: str, prompts: Sequence[Sequence[int]], max_tokens: int = 1) -> None:
        first = number % len(self.servers)
        for server in (*self.servers[first:], *self.servers[:first]):
            self.readings.append(server.ask(work, prompts, max_tokens))
            self.tell(self.readings[-1])


def measure(run: Run, rounds: int) -> list[Reading]:
    run.ready()
    for number in range(rounds):
        run.round(number)
    run.restart()
    for number in range(rounds):
        run.returns(number, "return_nvme")
    return [one for one in run.readings if one.work != "fill"]


def measure_s3(run: Run, rounds: int) -> list[Reading]:
    run.ready()
    for number in range(rounds):
        for tokens in run.lengths:
            run.compute(number, tokens)
    run.restart()
    for number in range(rounds):
        run.returns(number, "return_s3")
    return run.readings


def rows_of(readings: Iterable[Reading]) -> list[Row]:
    """Return a row for each work, length and engine: medians, and the least that was cached."""
    groups: dict[tuple[str, int], dict[str, list[Reading]]] = {}
    for one in readings:
        groups.setdefault((one.work, one.tokens), {}).setdefault(one.engine, []).append(one)
    return [
        {"engine": engine, "work": work, "tokens": tokens}
        | {name: round(median(getattr(one, name) for one in found), 5) for name in FIELDS}
        | {"cached": min(one.cached for one in found), "asked": len(found)}
        for (work, tokens), engines in groups.items()
        for engine, found in engines.items()
    ]


@dataclass(frozen=True, slots=True)
class Bar:
    """`what` is `value`, and at most `at_most`; `value` is None where a row of it is missing."""

    what: str
    value: float | None
    at_most: float

    @property
    def holds(self) -> bool:
        return self.value is None or self.value <= self.at_most


def bars(rows: Sequence[Row]) -> list[Bar]:
    """Return what must hold of the rows' ratios."""
    known = {(row["engine"], row["work"], row["tokens"]): row for row in rows}
    found: list[Bar] = []

    def add(what: str, name: str, mine: tuple[str, str, int], of: tuple[str, str, int], most: float) -> None:
        value = known[mine][name] / known[of][name] if mine in known and of in known else None
        found.append(Bar(f"{what}, {mine[2]} tokens", value, most))

    for tokens in sorted({row["tokens"] for row in rows if row["work"] == "return_ram"}):
        ram = (OURS, "return_ram", tokens)
        add("RAM, CPU of LMCache's", "cpu_s", ram, (LMCACHE, "return_ram", tokens), 0.8)
        add("RAM, time of still warm", "ttft_s", ram, (OURS, "warm", tokens), 1.3)
        add("nvme, time of RAM", "ttft_s", (OURS, "return_nvme", tokens), ram, 1.5)
    for work in ("decode", *(f"streams_{streams}" for streams in STREAMS)):
        tokens = DECODE_PROMPT if work == "decode" else STREAM_PROMPT
        add(f"{work}, CPU of alone", "cpu_s", (OURS, work, tokens), (ALONE, work, tokens), 1.02)
        add(f"{work}, gap of alone", "gap_s", (OURS, work, tokens), (ALONE, work, tokens), 1.02)
    mine, alone = known.get((OURS, "miss", SHORT_TOKENS)), known.get((ALONE, "miss", SHORT_TOKENS))
    paid_ms = 1e3 * (mine["ttft_s"] - alone["ttft_s"]) if mine and alone else None
    found.append(Bar("ms more that a request pays which hits nothing", paid_ms, 3.0))
    return found


def forget_files() -> None:
    """Drop what the kernel keeps of files: a return from disk is one then. Needs root; else it is said."""
    os.sync()
    try:
        DROP_CACHES.write_text("1")
    except OSError as error:
        print(f"files may be read from the kernel's memory: {error}", flush=True)


def tell(reading: Reading) -> None:
    print(
        f"{reading.engine:16} {reading.work:12} {reading.tokens:5} tokens: {reading.ttft_s:.3f} s to the"
        f" first, {reading.cpu_s:.3f} CPU-s, {reading.cached} cached",
        flush=True,
    )


@dataclass
class Bench:
    """Starts the servers of a run and stops them all, whatever happens."""

    build: Path
    state: Path
    lengths: Sequence[int]

    def __post_init__(self) -> None:
        self._cores, _ = server_cores(1)
        self._model = PeerModel("SmolLM2-135M-Instruct", ensure_model(ModelSettings()), gguf=Path())

    def run(self, peers: Sequence[Peer], measure: Callable[[Run], list[Reading]]) -> list[Reading]:
        servers: list[Server] = []
        try:
            for peer in peers:
                folder = self.state / peer.name
                folder.mkdir()
                ports = [free_port() for _ in range(3)]
                place = Place(self._model, self.build, folder, ports, self._cores, POOL_TOKENS)
                servers.append(Server(peer, place))
                servers[-1].start()
            return measure(Run(servers, self.lengths, tell, forget_files)) if servers else []
        finally:
            for server in servers:
                server.stop()


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.vllm", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS)
    names = [*(peer.name for peer in PEERS), "s3"]
    parser.add_argument("--engines", nargs="+", choices=names, default=names)
    parser.add_argument("--build", type=Path, default=BUILD, help="folder of the environments")
    args = parser.parse_args(argv)
    interrupt_on_signals()  # so that no server outlives a bench that is told to end
    report.OUT_DIR.mkdir(parents=True, exist_ok=True)
    build = args.build.absolute()
    missing = {peer.name: peer.missing(build) for peer in PEERS if peer.name in args.engines}
    skipped = [{"engine": name, "work": "all", "skipped": why} for name, why in missing.items() if why]
    with tempfile.TemporaryDirectory(prefix="bench-vllm-") as state, ExitStack() as servers:
        bench = Bench(build, Path(state), args.lengths)
        there = [peer for peer in PEERS if missing.get(peer.name) == ""]
        readings = bench.run(there, lambda run: measure(run, args.rounds))
        if "s3" in args.engines and not missing.get(OURS):
            s3 = servers.enter_context(over_s3(Path(state) / "bucket"))
            readings += bench.run([s3], lambda run: measure_s3(run, args.rounds))
    rows = rows_of(readings)
    settings = vars(args) | {"build": str(build), "block_tokens": BLOCK_TOKENS, "pool_tokens": POOL_TOKENS}
    held = bars(rows)
    verdicts = [
        {
            "what": bar.what,
            "value": "-" if bar.value is None else round(bar.value, 3),
            "at most": bar.at_most,
            "holds": "-" if bar.value is None else "yes" if bar.holds else "NO",
        }
        for bar in held
    ]
    report.write("vllm", [*rows, *skipped], settings=settings, bars=verdicts)
    if rows:
        report.show("medians; CPU-s of all processes", rows)
        report.show("what must hold", verdicts)
    for row in skipped:
        print(f"{row['engine']}: {row['skipped']}")
    return 0 if all(bar.holds for bar in held) else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
