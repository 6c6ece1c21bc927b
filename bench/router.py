"""`make bench-router`: our router beside Ray's consistent hash and power of two, under the same load.

For each router a real `samovar serve` with three replicas gets the same seeded conversations (see
`_router_load.py`): first in peace, then with one replica killed (SIGKILL, the one where the busiest
session lives), then with one more. Answers are greedy, so all routers must give the same texts; one that
differs is an error. Rounds repeat all of it with other seeds and another order. Exit code 1 for a wrong text,
or when a client of our own router saw an error.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import openai
from tqdm import tqdm

from bench import _report as report
from bench import _router_tally as tally
from bench._router_clients import TASKS, Player
from bench._router_cluster import Cluster
from bench._router_load import EVENT_AT, PHASES, Phase, Schedule, Shape, schedule
from bench._router_tally import Grow, Kill, Record
from bench.soak import working_directory
from samovar.cluster.serve.app import interrupt_on_signals
from samovar.configs.sections import MIB
from tests.support.services.service import MODEL, Service, serving, until

ROUTERS = ("samovar", "consistent_hash", "pow2")
QUIET_S = 120.0
QUICK = {"sessions": 8, "seconds": 10.0, "document_words": (150, 400), "turns_per_s": 1.0}


class Run:
    """One router, one round: a service of its own, all phases."""

    def __init__(self, args: argparse.Namespace, router: str, round_number: int, service: Service) -> None:
        self._args = args
        self._router = router
        self._round = round_number
        self._service = service
        self.records: list[Record] = []
        self.kill: Kill | None = None
        self.grow: Grow | None = None

    async def play(self, turns: Schedule, cluster: Cluster, bar: Any) -> None:
        url, seconds = f"{self._service.url}/v1", self._args.seconds
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=600) as client:
            player = Player(client, MODEL, self._router, self._round, side_requests=self._args.side_requests)
            self.records = player.records
            await player.play("open", turns["open"])
            for phase in self._args.phases:
                # So that what the last phase did to the replicas is not seen in this one.
                await asyncio.to_thread(self._wait_for_replicas, cluster)
                event = {
                    "kill": lambda: self._kill(player, cluster),
                    "grow": lambda: self._grow(cluster),
                }.get(phase)
                bar.set_postfix_str(f"{self._router}, {phase}")
                at_s = EVENT_AT.get(phase, 0.0) * seconds
                await player.play(phase, turns[phase], at_s=at_s, event=event)
                bar.update()

    def _wait_for_replicas(self, cluster: Cluster) -> None:
        until("all replicas are back", lambda: len(cluster.pids()) >= self._args.replicas, QUIET_S)

    def _kill(self, player: Player, cluster: Cluster) -> None:
        victim = player.home(0)  # the most popular session
        pid = cluster.pids()[victim]
        if pid not in {process.pid for process in self._service.processes()}:
            raise RuntimeError(f"process {pid} is none of this service's")
        self.kill = Kill(self._router, self._round, victim, time.monotonic())
        os.kill(pid, signal.SIGKILL)

    def _grow(self, cluster: Cluster) -> None:
        self.grow = Grow(self._router, self._round, frozenset(cluster.pids()), time.monotonic())
        cluster.scale(self._args.replicas + 1)


def service_flags(args: argparse.Namespace, router: str, work: Path) -> Iterator[str]:
    """`work`: a directory of this service's own."""
    settings = {
        "replicas": args.replicas,
        "router.policy": router,
        "model.cache-dir": work,
        "engine.device": "cpu",  # where answers are exact, whatever the batch and the cache
        "engine.threads": 1,
        "engine.pool-bytes-max": args.pool_mib * MIB,
        "tiers.nvme.dir": work / f"kv-{router}",
        "tiers.cpu.bytes-max": args.cpu_mib * MIB,
        "tiers.nvme.bytes-max": args.nvme_mib * MIB,
        "tiers.audit-share": 0,
        "tiers.enabled": str(not args.no_tiers).lower(),
    }
    for name, value in settings.items():
        yield from (f"--{name}", str(value))


def measure(args: argparse.Namespace) -> tuple[list[Record], list[Kill], list[Grow]]:
    """All rounds: what every turn saw, whom we killed, and what was added."""
    records: list[Record] = []
    kills: list[Kill] = []
    grows: list[Grow] = []
    steps = args.rounds * len(args.routers) * len(args.phases)
    with tqdm(total=steps, unit="phase") as bar:
        for number in range(args.rounds):
            turns = schedule(shape(args, args.seed + number))
            for router in args.routers[:: -1 if number % 2 else 1]:
                output = report.OUT_DIR / f"router-serve-{router}.txt"
                with (
                    working_directory() as work,
                    serving(output, *service_flags(args, router, work)) as service,
                    Cluster(service) as cluster,
                ):
                    cluster.pids()  # attached before the clock runs
                    run = Run(args, router, number, service)
                    asyncio.run(run.play(turns, cluster, bar))
                records += run.records
                kills += [run.kill] if run.kill else []
                grows += [run.grow] if run.grow else []
    return records, kills, grows


def shape(args: argparse.Namespace, seed: int) -> Shape:
    return Shape(
        sessions=args.sessions,
        seconds=args.seconds,
        turns_per_s=args.turns_per_s,
        seed=seed,
        document_words=tuple(args.document_words),
        turn_words=tuple(args.turn_words),
        zipf=args.zipf,
    )


def show(
    table: list[dict[str, Any]],
    more: list[dict[str, Any]],
    resumed: list[dict[str, Any]],
    newcomers: list[dict[str, Any]],
) -> None:
    report.show("routers, the same turns", table)
    sources = ("gpu", "cpu", "nvme", "s3", "peer", "compute")
    facts = ("router", "phase", "turns", "spread", "at_home", "main_ttft_p95_s")
    report.show(
        "prompt tokens by source; spread: requests of the busiest replica over the mean",
        [
            {**{name: row[name] for name in facts}}
            | {source: row["tokens"].get(source, 0) for source in sources}
            for row in more
        ],
    )
    if resumed:
        title = "sessions of the killed replica, their first answer after the kill"
        report.show(title, [{k: v for k, v in one.items() if k != "waits_s"} for one in resumed])
    if newcomers:
        report.show("the replica that was added", newcomers)


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="samovar bench router", description=__doc__)
    parser.add_argument("--sessions", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=32.0, help="of each phase")
    parser.add_argument("--turns-per-s", type=float, default=1.2)
    parser.add_argument("--document-words", type=int, nargs=2, default=(300, 1000), metavar=("MIN", "MAX"))
    parser.add_argument("--turn-words", type=int, nargs=2, default=(40, 160), metavar=("MIN", "MAX"))
    parser.add_argument("--zipf", type=float, default=1.2, help="how uneven sessions are; 0 = all alike")
    parser.add_argument(
        "--no-tiers", action="store_true", help="pools only: what a router is worth by itself; no kill then"
    )
    parser.add_argument(
        "--side-requests",
        type=int,
        default=0,
        choices=range(len(TASKS) + 1),
        help="that follow each turn under its session's id",
    )
    parser.add_argument("--seed", type=int, default=1, help="of the first round")
    parser.add_argument("--rounds", type=int, default=1, help="3 or more for figures to quote")
    parser.add_argument("--routers", nargs="+", choices=ROUTERS, default=list(ROUTERS))
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=list(PHASES))
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--pool-mib", type=int, default=192, help="of each replica")
    parser.add_argument("--cpu-mib", type=int, default=512)
    parser.add_argument("--nvme-mib", type=int, default=2048)
    parser.add_argument(
        "--quick", action="store_true", help="less than three minutes: too short for figures to quote"
    )
    args = parser.parse_args(argv)
    if args.quick:
        for name, value in QUICK.items():
            if getattr(args, name) == parser.get_default(name):
                setattr(args, name, value)
    order: list[Phase] = [
        phase for phase in PHASES if phase in args.phases and not (args.no_tiers and phase == "kill")
    ]
    args.phases = order
    return args


def main(argv: list[str]) -> int:
    args = arguments(argv)
    interrupt_on_signals()  # so that no service outlives a bench that is told to end
    report.OUT_DIR.mkdir(parents=True, exist_ok=True)
    records, kills, grows = measure(args)
    table = tally.rows(records, args.routers)
    more = tally.details(records, args.routers, args.replicas)
    resumed = [tally.resumes(records, kill) for kill in kills]
    newcomers = [tally.newcomer(records, grow) for grow in grows]
    wrong = tally.wrong_texts(records)
    expected = tally.expectations(records, resumed)
    show(table, more, resumed, newcomers)
    if expected:
        report.show("samovar's part of the other's", expected)
    path = report.write(
        "router-pools-only" if args.no_tiers else "router",
        table,
        module="router",
        rounds=args.rounds,
        details=more,
        resumes=resumed,
        newcomers=newcomers,
        expectations=expected,
        wrong=[asdict(record) for record in wrong],
    )
    print(f"written: {path}")
    for record in wrong:
        print(f"WRONG TEXT: {record.router}, session {record.session}, turn {record.number}: {record.text!r}")
    errors = sum(len(record.errors) for record in records if record.router == "samovar")
    if errors:
        print(f"FAILED: clients of our router saw {errors} errors")
    return 1 if wrong or errors else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
