"""`make bench-page`: what the live page costs: CPU of a whole service with its stream open, and with none.

Rounds without and with a stream follow each other, without requests or (`--turns-per-s`) beside the same
traffic: what the machine does besides falls on both. CPU-seconds of all processes of the service, so what
other processes of the machine take is not counted. What the browser draws is not in it. Linux only.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from bench import _report as report
from bench.footprint import POOL_BYTES, SETTLE_S, look
from bench.soak import working_directory
from samovar.cluster.serve.app import interrupt_on_signals
from tests.support.services.service import MODEL, Service

ROUND_S = 30.0
ROUNDS = 3
CONVERSATIONS = 12
WARM_UP_S = 10.0
"""After the first events: changes are looked at more often at first than in the long run (`live.burst_s`)."""
ADDED_PCT_MAX = 1.0
"""Of one core: what an open stream may cost."""


def talk(client: httpx.Client, number: int, turn: int) -> None:
    """Send one turn of a conversation."""
    text = f"Conversation {number}: tell me about tea. " * (8 * (turn + 1))
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 4}
    client.post("/v1/chat/completions", json={**body, "session_id": f"page-{number}"}).raise_for_status()


@contextmanager
def stream_open(url: str) -> Iterator[list[int]]:
    """Read /v1/live while the block runs; give the number of events so far, in a list of one."""
    events, stop = [0], threading.Event()

    def read() -> None:
        with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
            while not stop.is_set():
                with client.stream("GET", "/v1/live") as answer:
                    for line in answer.iter_lines():
                        events[0] += line.startswith("event:")
                        if stop.is_set():
                            return

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield events
    finally:
        stop.set()  # it ends at its next line: a ping comes within seconds
        reader.join(30)


@contextmanager
def traffic(url: str, turns_per_s: float) -> Iterator[None]:
    """Send turns at a steady pace while the block runs."""
    stop = threading.Event()

    def send() -> None:
        with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
            for number in itertools.count():
                if stop.wait(1 / turns_per_s):
                    return
                talk(client, number % CONVERSATIONS, 0)

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    try:
        yield
    finally:
        stop.set()
        sender.join(60)


def measure_round(root: psutil.Process, seconds: float) -> tuple[float, dict[str, float]]:
    """Return the percentage of a core that the service takes, of all its processes and by role."""
    before, begun_s = look(root), time.monotonic()
    time.sleep(seconds)  # it is time that is measured
    after, took_s = look(root), time.monotonic() - begun_s
    roles: dict[str, float] = {}
    for pid, now in after.items():
        if pid in before:
            share = 100 * (now.cpu_s - before[pid].cpu_s) / took_s
            role = now.role.partition(".")[0]  # Ray's title changes with the method that runs
            roles[role] = roles.get(role, 0.0) + share
    return sum(roles.values()), roles


def measure(service: Service, rounds: int, round_s: float, turns_per_s: float) -> list[dict[str, Any]]:
    """Return a row for each round, closed and open in turns."""
    root, rows = psutil.Process(service.process.pid), []
    for number, phase in itertools.product(range(1, rounds + 1), ("closed", "open")):
        with ExitStack() as stack:
            events = stack.enter_context(stream_open(service.url)) if phase == "open" else [0]
            if turns_per_s:
                stack.enter_context(traffic(service.url, turns_per_s))
            time.sleep(WARM_UP_S)
            begun = events[0]
            total, roles = measure_round(root, round_s)
            busiest = sorted(roles.items(), key=lambda item: -item[1])[:4]
            rows.append(
                {
                    "round": number,
                    "stream": phase,
                    "core_pct": total,
                    "events": events[0] - begun,
                    "busiest": ", ".join(f"{role} {share:.2f}" for role, share in busiest),
                    "roles": roles,
                }
            )
    return rows


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians of both phases, and of what an open stream adds, in all and by process."""
    pairs = list(zip(rows[::2], rows[1::2], strict=True))
    roles = {role for row in rows for role in row["roles"]}
    by_role = {
        role: statistics.median(
            two["roles"].get(role, 0.0) - one["roles"].get(role, 0.0) for one, two in pairs
        )
        for role in roles
    }
    adding = sorted(by_role.items(), key=lambda item: -item[1])[:5]
    return {
        "closed_pct": statistics.median(row["core_pct"] for row in rows[::2]),
        "open_pct": statistics.median(row["core_pct"] for row in rows[1::2]),
        "added_pct": statistics.median(two["core_pct"] - one["core_pct"] for one, two in pairs),
        "added_by": ", ".join(f"{role} {share:.2f}" for role, share in adding),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.page_cost", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--round-s", type=float, default=ROUND_S)
    parser.add_argument("--turns-per-s", type=float, default=0.0, help="traffic beside it; 0 = none")
    parser.add_argument("--settle-s", type=float, default=SETTLE_S)
    args, flags = parser.parse_known_args(argv)
    interrupt_on_signals()  # a service must not outlive this
    with working_directory() as work:
        service = Service(Path(work) / "service.log", "--engine.pool-bytes-max", str(POOL_BYTES), *flags)
        try:
            service.wait_ready()
            with httpx.Client(base_url=service.url, timeout=120, trust_env=False) as client:
                for number in range(CONVERSATIONS):
                    talk(client, number, 0)
            time.sleep(args.settle_s)
            rows = measure(service, args.rounds, args.round_s, args.turns_per_s)
        finally:
            service.stop()
    shown = [{key: value for key, value in row.items() if key != "roles"} for row in rows]
    report.show(f"{args.turns_per_s:g} turns a second", shown)
    total = summary(rows)
    report.show("medians, % of one core", [total])
    print(report.write("page_cost", rows, turns_per_s=args.turns_per_s, **total))
    return 0 if total["added_pct"] < ADDED_PCT_MAX else 1


if __name__ == "__main__":
    sys.exit(main())
