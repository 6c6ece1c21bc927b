"""`make bench-front`: what a streamed token costs outside the engine, by process, and how late it comes.

A service whose engine costs nothing (`_front_engine`) gets 1 to 1,024 streams; each token says when it was
made. CPU is counted by process while all streams run. Beside it: the same without links (`samovar-serve`:
every token is a message of Ray Serve), the same with two and four ingresses, a bare streaming app under
uvicorn. The engine's own share of the replica's process counts as ingress. `--engine vllm`: the same service
before a real vLLM, and vLLM's own server alone (`_front_vllm`). What the processes take without any stream
(Ray's and Serve's own work: more with each process) is measured before, and told apart: a row has the CPU of
a token with it (`front_cpu_ms_per_token`) and without (`net_cpu_ms_per_token`). Linux only.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import httpx
import psutil

from bench import _front_vllm
from bench import _report as report
from bench._peers_processes import Threads
from bench.footprint import role_of
from bench.soak import working_directory
from samovar.cluster.serve.app import interrupt_on_signals
from tests.support.services.service import free_port

STREAMS = (1, 8, 64, 256, 1024)
PARTS = ("proxy", "ingress", "replica", "ray")
AS_SAMOVAR_SERVE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_ENABLE_AUTO_CONNECT": "0"}
"""What the command sets before it imports Ray."""
START_S, STOP_S = 600.0, 60.0
ROLES = {
    "Proxy": "proxy",
    "SERVE_PROXY": "proxy",
    ":Ingress": "ingress",
    ":Replica": "replica",
    "_front_raw": "ingress",
    "VLLM::": "engine",  # its core, and the workers below it
    "bin/vllm": "ingress",
}

Costs = dict[str, float]


@dataclass(frozen=True, slots=True)
class Server:
    """A kind of server: how it is started and read.

    `command`: (port, milliseconds of a step, more flags) -> command and environment. `path`: answers when it
    is up; `is_endless`: with a stream. `tokens`: port -> those it has made, if only it knows. `is_stamped`:
    tokens say when they were made.
    """

    command: Callable[[int, float, Sequence[str]], tuple[list[str], Mapping[str, str]]]
    path: str = "/health"
    is_endless: bool = False
    is_stamped: bool = True
    tokens: Callable[[int], int] = lambda port: 0


def _vllm(port: int, step_ms: float, flags: Sequence[str]) -> tuple[list[str], Mapping[str, str]]:
    return _front_vllm.alone(port, flags)


def _samovar_vllm(port: int, step_ms: float, flags: Sequence[str]) -> tuple[list[str], Mapping[str, str]]:
    return _front_vllm.behind_samovar(port, flags)


def _raw(port: int, step_ms: float, flags: Sequence[str]) -> tuple[list[str], Mapping[str, str]]:
    return [sys.executable, "-m", "bench._front_raw", str(port), str(step_ms)], AS_SAMOVAR_SERVE


def _samovar(*own: str) -> Server:
    def command(port: int, step_ms: float, flags: Sequence[str]) -> tuple[list[str], Mapping[str, str]]:
        many = str(2 * max(STREAMS))
        made = [sys.executable, "-m", "bench._front_engine", "--step-ms", str(step_ms)]
        made += ["--server.port", str(port), "--tiers.enabled", "false", "--engine.sequences-max", many]
        made += ["--engine.step-tokens-max", many, "--engine.queue-max", many]
        made += ["--limits.concurrent-total", many, "--limits.tokenizer-queue-max", many, *own, *flags]
        return made, AS_SAMOVAR_SERVE

    return Server(command)


SERVERS = {
    "samovar": _samovar(),
    "samovar-2-ingresses": _samovar("--server.ingress-replicas", "2"),
    "samovar-4-ingresses": _samovar("--server.ingress-replicas", "4"),
    "samovar-serve": _samovar("--cluster.links.enabled", "false"),
    "uvicorn": Server(_raw, "/", is_endless=True),
    "samovar-vllm": Server(_samovar_vllm, is_stamped=False, tokens=_front_vllm.tokens_behind),
    "vllm": Server(_vllm, is_stamped=False, tokens=_front_vllm.tokens_alone),
}
OF_ENGINES = {
    "samovar": (["samovar", "samovar-serve", "uvicorn"], STREAMS),
    "vllm": (["samovar-vllm", "vllm"], (64,)),
}
"""Servers and streams that are taken if none are named."""


def role_named(command: Sequence[str]) -> str:
    """Return which part of the road a process is; `ray` is all the rest."""
    name = role_of(command) if not command or command[0].startswith("ray::") else " ".join(command)
    return next((role for part, role in ROLES.items() if part in name), "ray")


class ByRole:
    """CPU seconds of a server's processes, by role."""

    def __init__(self, root: psutil.Process) -> None:
        self._pids: dict[str, list[int]] = defaultdict(list)
        for process in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                self._pids[role_named(process.cmdline())].append(process.pid)
        self._threads = {role: Threads() for role in self._pids}

    def cpu_s(self) -> dict[str, float]:
        return {role: self._threads[role].cpu_s(pids) for role, pids in self._pids.items()}

    def rss(self) -> dict[str, int]:
        return {
            role: sum(psutil.Process(pid).memory_info().rss for pid in pids)
            for role, pids in self._pids.items()
        }


@contextlib.contextmanager
def server(
    name: str, step_ms: float, work: Path, flags: Sequence[str]
) -> Iterator[tuple[int, psutil.Process]]:
    """Run a server until the block ends; gives its port and process."""
    port = free_port()
    kind = SERVERS[name]
    command, env = kind.command(port, step_ms, flags)
    log = work / f"{name}.log"
    process = subprocess.Popen(
        command, stdout=log.open("wb"), stderr=subprocess.STDOUT, env={**os.environ, **env}
    )
    try:
        deadline_s = time.monotonic() + START_S
        while not _answers(f"http://127.0.0.1:{port}{kind.path}", kind):
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"{name} did not start: {log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.2)
        yield port, psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(STOP_S)


def _answers(url: str, kind: Server) -> bool:
    try:
        if kind.is_endless:
            with httpx.stream("GET", url, timeout=2) as response:
                return response.is_success
        return httpx.get(url, timeout=2).is_success
    except httpx.HTTPError:
        return False


@contextlib.contextmanager
def client_of(port: int, *arguments: str) -> Iterator[IO[str]]:
    """Run the client program; gives what it says."""
    command = [sys.executable, "-m", "bench._front_client", "127.0.0.1", str(port), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        yield client.stdout


def measure_lone(name: str, port: int, root: psutil.Process, requests: int) -> dict[str, Any]:
    """Send requests one after the other to a server that is idle; return their row."""
    by_role = ByRole(root)
    with client_of(port, "lone", str(requests)) as client:
        client.readline()
        before = by_role.cpu_s()
        client.readline()
        after = by_role.cpu_s()
        seen = json.loads(client.readline())
    spent = {role: 1000 * (after[role] - before[role]) / requests for role in after}
    return {
        "server": name,
        "requests": requests,
        **{name: value for name, value in seen.items() if name != "first_error"},
        **{f"{role}_ms_a_request": spent.get(role, 0.0) for role in ("proxy", "ingress", "replica", "ray")},
    }


def idle_cpu_s(root: psutil.Process, seconds: float) -> dict[str, float]:
    """Return the CPU seconds that a second without any stream takes, by role."""
    by_role = ByRole(root)
    before, began_s = by_role.cpu_s(), time.monotonic()
    time.sleep(seconds)  # it is what is measured
    after, passed_s = by_role.cpu_s(), time.monotonic() - began_s
    return {role: (after[role] - before[role]) / passed_s for role in after if role != "engine"}


def costs(spent_s: Mapping[str, float], idle_s: Mapping[str, float], seconds: float, tokens: int) -> Costs:
    """Return what a token took in CPU-ms, with and without what is taken while nothing is streamed.

    `spent_s`: CPU seconds by role, of `seconds` in which `tokens` came. `idle_s`: of one without streams.
    """
    each = {role: 1000 * one / max(1, tokens) for role, one in spent_s.items()}
    net_s = sum(one - seconds * idle_s.get(role, 0.0) for role, one in spent_s.items())
    return {
        "front_cpu_ms_per_token": sum(each.values()),
        "net_cpu_ms_per_token": 1000 * net_s / max(1, tokens),
        "idle_cpu_ms_a_second": 1000 * sum(idle_s.values()),
        **{f"{role}_ms": each.get(role, 0.0) for role in PARTS},
        **{f"{role}_idle_ms_a_second": 1000 * idle_s.get(role, 0.0) for role in PARTS},
    }


def measure(
    name: str, port: int, root: psutil.Process, streams: int, seconds: float, idle_s: Mapping[str, float]
) -> dict[str, Any]:
    """Run one client against a server; return its row."""
    by_role = ByRole(root)
    rss_before = by_role.rss()
    with client_of(port, str(streams), str(seconds)) as client:
        if client.readline().strip() != "begun":
            raise RuntimeError(f"{streams} streams did not begin")
        counted = SERVERS[name].tokens(port)
        before = by_role.cpu_s()
        client.readline()
        after, rss = by_role.cpu_s(), by_role.rss()
        counted = SERVERS[name].tokens(port) - counted
        seen = json.loads(client.readline())
    tokens = counted or seen["tokens"]
    spent_s = {role: after[role] - before[role] for role in after if role != "engine"}
    parts = {role for role in ("proxy", "ingress", "replica") if role in rss}
    grown = sum(rss[role] - rss_before[role] for role in parts)
    return {
        "server": name,
        "streams": streams,
        "tokens_s": tokens / seen["seconds"],
        **costs(spent_s, idle_s, seen["seconds"], tokens),
        "client_ms": 1000 * seen["client_cpu_s"] / max(1, tokens),
        "ttft_added_ms": seen["ttft_added_ms"],
        "delay_p50_ms": seen["delay_p50_ms"],
        "delay_p99_ms": seen["delay_p99_ms"],
        "itl_p99_added_ms": seen["itl_p99_added_ms"],
        "tokens_a_chunk": seen["tokens_a_chunk"],
        "kb_a_stream": grown / streams / 1e3,
        **{f"{role}_kb": (rss[role] - rss_before[role]) / streams / 1e3 for role in sorted(parts)},
        "errors": seen["errors"],
        **({"first_error": seen["first_error"][0]} if seen["first_error"] else {}),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.front", description=__doc__)
    parser.add_argument("--engine", choices=list(OF_ENGINES), default="samovar", help="vllm: a real one")
    parser.add_argument("--servers", nargs="+", choices=list(SERVERS))
    parser.add_argument("--streams", nargs="+", type=int)
    parser.add_argument("--seconds", type=float, default=15.0, help="of each measurement")
    parser.add_argument("--lone", type=int, default=200, help="requests one after the other, for the TTFT")
    parser.add_argument("--step-ms", type=float, default=20.0, help="of the scripted engine")
    args, flags = parser.parse_known_args(argv)
    servers, streams_of_each = OF_ENGINES[args.engine]
    interrupt_on_signals()  # a service must not outlive this
    rows: list[dict[str, Any]] = []
    with working_directory() as work:
        for name in args.servers or servers:
            with server(name, args.step_ms, work, flags) as (port, root):
                measure(name, port, root, 16, 1.0, {})  # each ingress makes things at its first request
                if args.lone and SERVERS[name].is_stamped:
                    rows.append(measure_lone(name, port, root, args.lone))
                    report.show(f"{name}, {args.lone} lone requests", rows[-1:])
                idle_s = idle_cpu_s(root, args.seconds)
                for streams in args.streams or streams_of_each:
                    rows.append(measure(name, port, root, streams, args.seconds, idle_s))
                    report.show(f"{name}, {streams} streams", rows[-1:])
                    path = report.write("front", rows, step_ms=args.step_ms, seconds=args.seconds)
    print(path)
    return 1 if any(row["errors"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
