"""A real vLLM alone, over Samovar's tiers, and over LMCache's, where `bench/peers-install.sh` has put them.

All run at the same time on one core, in float32, and are asked in turn, one request at a time: cold, still
warm, after an overflow of vLLM's own pool (main memory), and after a restart of everything (disk). CPU is
that of all processes of an engine until the first token; `after_cpu_s` what it still did then (stores).
Rows: `bench/out/vllm.json`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from bench import _report as report
from bench._peers_client import Client
from bench._peers_model import PeerModel
from bench._peers_processes import Running, until_ready
from bench._peers_servers import Launch, Peer, Place, Vllm, VllmLmcache
from bench.peers import server_cores
from samovar.cluster.serve.app import interrupt_on_signals
from samovar.configs.settings import ModelSettings
from samovar.replicas.model import ensure_model
from tests.support.services.service import free_port

BUILD = Path("build")
BLOCK_TOKENS, PAGES, MODEL_TOKENS = 32, 67, 2048
LENGTHS = (1000, 2000)
FILL_TOKENS = 1500
START_S = 600.0
FLOAT32 = (
    *("--dtype", "float32", "--block-size", str(BLOCK_TOKENS), "--max-model-len", str(MODEL_TOKENS)),
    *("--num-gpu-blocks-override", str(PAGES)),
)


class VllmSamovar(Vllm):
    """vLLM with `samovar-tiers` beside it."""

    name = "vllm+samovar"
    forgets = ""

    def missing(self, build: Path) -> str:
        program = build / self.environment / "bin" / "samovar-tiers"
        return super().missing(build) or (
            "" if program.exists() else f"{program} is not there: make vllm-env"
        )

    def launches(self, place: Place) -> list[Launch]:
        program = str(place.build / self.environment / "bin" / "samovar-tiers")
        flags = {
            "--socket": place.state / "tiers.sock",
            "--metrics-port": place.ports[1],
            "--tiers.nvme.dir": place.state / "kv",
            "--tiers.cpu.bytes-max": 2 << 30,
        }
        words = tuple(str(word) for pair in flags.items() for word in pair)
        tiers = Launch((program, *words), self._env(place), ready_port=place.ports[1])
        return [tiers, *super().launches(place)]

    def _more(self, place: Place) -> tuple[str, ...]:
        return ("--kv-transfer-config", json.dumps(connector(place.state / "tiers.sock")))


PEERS: tuple[Peer, ...] = (Vllm(), VllmSamovar(), VllmLmcache())


def connector(socket: Path) -> dict[str, Any]:
    """Return what vLLM is told of the connector."""
    return {
        "kv_connector": "SamovarConnector",
        "kv_connector_module_path": "samovar.cache_tiers.vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"socket": str(socket)},
    }


@dataclass(frozen=True, slots=True)
class Reading:
    engine: str
    work: str
    tokens: int
    ttft_s: float
    cpu_s: float
    after_cpu_s: float
    cached: int


class Server:
    """One engine with all its processes. `start` after `stop` finds its files again."""

    def __init__(self, peer: Peer, place: Place) -> None:
        self.peer, self._place = peer, place
        self._running = Running(place.cores)
        self._output = report.OUT_DIR / f"vllm-{peer.name}.txt"
        self._output.write_bytes(b"")
        self._client = Client(place.url, place.model.name, self._running.cpu_s, peer.fields)

    def start(self) -> None:
        *before, own = self.peer.launches(self._place)
        for launch in (*before, replace(own, command=(*own.command, *FLOAT32))):
            self._running.start(launch.command, launch.env, self._output)

    def until_ready(self) -> None:
        until_ready(self._running, self._is_ready, self._output, START_S)
        for _ in range(2):  # the first requests of a process pay for what is made once
            self._client.ask(prompt(f"first {random.random()}", 300), "first")
        self._running.processes()
        self._running.settle()

    def _is_ready(self) -> bool:
        try:
            return httpx.get(f"{self._place.url}/health", timeout=5).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    def ask(self, work: str, ids: Sequence[int]) -> Reading:
        self._running.processes()
        reply = self._client.ask(ids, work)
        after_cpu_s = reply.last_cpu_s - reply.first_cpu_s + self._running.settle()
        cpu_s, cached = reply.first_cpu_s, reply.cached_tokens
        return Reading(self.peer.name, work, len(ids), reply.ttft_s, cpu_s, after_cpu_s, cached)

    def stop(self) -> None:
        self._running.stop()


def prompt(seed: object, tokens: int) -> list[int]:
    rng = random.Random(f"vllm {seed}")
    return [rng.randrange(100, 40_000) for _ in range(tokens)]


def measure(servers: Sequence[Server], rounds: int, lengths: Sequence[int]) -> list[Reading]:
    """Ask all of them the same things, in turn; who begins changes from round to round."""
    readings = []

    def all_asked(number: int, work: str, ids: Sequence[int]) -> None:
        for server in (*servers[number % len(servers) :], *servers[: number % len(servers)]):
            readings.append(server.ask(work, ids))
            print(readings[-1], flush=True)

    for server in servers:
        server.until_ready()
    for number in range(rounds):
        for tokens in lengths:
            for work in ("cold", "warm"):
                all_asked(number, work, prompt((number, tokens), tokens))
            for fill in range(2):
                all_asked(number, "fill", prompt((number, tokens, fill), FILL_TOKENS))
            all_asked(number, "return_ram", prompt((number, tokens), tokens))
    for server in servers:
        server.stop()
    for server in servers:
        server.start()
    for server in servers:
        server.until_ready()
    for number in range(rounds):
        for tokens in lengths:
            all_asked(number, "return_restart", prompt((number, tokens), tokens))
    return [one for one in readings if one.work != "fill"]


def rows_of(readings: Sequence[Reading]) -> list[dict[str, Any]]:
    """Return a row for each engine, work and length: medians, and the least that was cached."""
    groups: dict[tuple[str, str, int], list[Reading]] = {}
    for one in readings:
        groups.setdefault((one.engine, one.work, one.tokens), []).append(one)
    return [
        {"engine": engine, "work": work, "tokens": tokens}
        | {
            name: round(median(getattr(one, name) for one in found), 4)
            for name in ("ttft_s", "cpu_s", "after_cpu_s")
        }
        | {"cached": min(one.cached for one in found), "rounds": len(found)}
        for (engine, work, tokens), found in groups.items()
    ]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.vllm", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS)
    names = [peer.name for peer in PEERS]
    parser.add_argument("--engines", nargs="+", choices=names, default=names)
    parser.add_argument("--build", type=Path, default=BUILD, help="folder of the environments")
    args = parser.parse_args(argv)
    interrupt_on_signals()  # so that no server outlives a bench that is told to end
    report.OUT_DIR.mkdir(parents=True, exist_ok=True)
    cores, _ = server_cores(1)
    model = PeerModel("SmolLM2-135M-Instruct", ensure_model(ModelSettings()), gguf=Path())
    build = args.build.absolute()
    servers: list[Server] = []
    skipped: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="bench-vllm-") as state:
        try:
            for peer in (peer for peer in PEERS if peer.name in args.engines):
                if missing := peer.missing(build):
                    skipped.append({"engine": peer.name, "work": "all", "skipped": missing})
                    continue
                folder = Path(state) / peer.name
                folder.mkdir()
                ports = [free_port() for _ in range(3)]
                servers.append(Server(peer, Place(model, build, folder, ports, cores, BLOCK_TOKENS * PAGES)))
                servers[-1].start()
            rows = rows_of(measure(servers, args.rounds, args.lengths)) if servers else []
        finally:
            for server in servers:
                server.stop()
    report.write("vllm", [*rows, *skipped], settings=vars(args) | {"cores": cores, "build": str(build)})
    if rows:
        report.show("seconds to the first token, CPU-s of all processes until then and after it", rows)
    for row in skipped:
        print(f"{row['engine']}: {row['skipped']}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
