"""Samovar beside llama.cpp, vLLM, and vLLM with LMCache: the same weights, client, cores and prompts.

Each round starts every server once, in an order that turns, asks it everything, and stops it: none runs
beside another. CPU seconds are those of the server's whole process tree, from the request to its first token;
they are the measurement, wall is what the machine made of it. Tokens are those that `usage` counts. Others
run at several settings each, and the table has the best in each row, by name. A server that is not installed
(`bash bench/peers-install.sh`) or that fails is a row with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bench import _report as report
from bench._peers_judge import Aiperf
from bench._peers_model import PeerModel, make_model
from bench._peers_rows import OURS, Reading, bars, rows_of, skipped, table
from bench._peers_servers import PEERS, PRODUCTS, Peer, Place, versions
from bench._peers_works import QUICK, Amounts, OtherStepError, Visit, why
from samovar.cluster.serve.app import interrupt_on_signals
from tests.support.services.service import free_port

BUILD = Path(__file__).parent.parent / "build"


class Bench:
    """All rounds. `cores`: those of the servers."""

    def __init__(
        self,
        peers: Sequence[Peer],
        amounts: Amounts,
        rounds: int,
        model: PeerModel,
        cores: Sequence[int],
        judge: Aiperf | None,
    ) -> None:
        self.peers = peers
        self.amounts = amounts
        self.rounds = rounds
        self.model = model
        self.cores = cores
        self.judge = judge
        self.readings: list[Reading] = []
        self.skipped: list[dict[str, Any]] = []
        self.steps: dict[str, str] = {}

    def run(self) -> None:
        """Measure, and write after each visit what there is, so that a run that is cut off is not lost."""
        here = self._installed()
        with tqdm(total=self.rounds * len(here), unit="visit") as bar:
            for number in range(self.rounds):
                turned = [*here[number % len(here) :], *here[: number % len(here)]] if here else []
                for peer in turned:
                    self._visit(peer, number, bar)
                    bar.update()
                    self.write()

    def write(self) -> Path:
        """Write `bench/out/peers.json`."""
        found = [asdict(bar) for bar in self.bars()]
        settings = {**asdict(self.amounts), "cores": list(self.cores), "rounds": self.rounds}
        installed = versions(self.peers, BUILD)
        return report.write("peers", self.rows(), bars=found, settings=settings, versions=installed)

    def rows(self) -> list[dict[str, Any]]:
        return [*rows_of(self.readings, self.steps), *self.skipped]

    def bars(self) -> list[Any]:
        return bars(self.rows(), PRODUCTS)

    def failures(self) -> list[str]:
        """Return what of ours went wrong: a server of others that does is only a row."""
        return [
            f"{row['engine']}, {row['work']}: {row['skipped']}"
            for row in self.skipped
            if row["engine"].startswith(OURS) and row.get("failed")
        ]

    def _installed(self) -> list[Peer]:
        here = []
        for peer in self.peers:
            reason = peer.missing(BUILD)
            if reason:
                self.skipped.append(skipped(peer.name, reason))
                continue
            here.append(peer)
            if peer.forgets:
                self.skipped.append(skipped(peer.name, peer.forgets, "return_restart"))
        return here

    def _visit(self, peer: Peer, number: int, bar: Any) -> None:
        output = report.OUT_DIR / f"peers-{peer.name}.txt"
        for folder in (report.OUT_DIR, BUILD / "peers"):
            folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"{peer.name}-", dir=BUILD / "peers") as state:
            ports = [free_port() for _ in range(3)]
            place = Place(self.model, BUILD, Path(state), ports, self.cores, self.amounts.pool_tokens)
            tell = lambda what: bar.set_description(f"round {number + 1}, {peer.name}: {what}")  # noqa: E731
            output.write_bytes(b"")
            visit = Visit(peer, place, self.amounts, f"round-{number}", output, tell)
            try:
                visit.run(None if self.judge is None else self.judge.measure)
            except OtherStepError as error:
                visit.readings.clear()
                self.skipped.append(skipped(peer.name, str(error)))
            except Exception as error:  # noqa: BLE001 - a server that fails is a row, and the next one is measured
                self.skipped.append({**skipped(peer.name, why(error), f"round {number + 1}"), "failed": True})
                bar.write(f"{peer.name}, round {number + 1}: {why(error)}")
        # The first start of a run may compile or fill caches; all later ones find them.
        again = any(reading.engine == peer.name and reading.work == "start" for reading in self.readings)
        self.readings += [
            replace(reading, work="start_again") if again and reading.work == "start" else reading
            for reading in visit.readings
        ]
        if visit.step:
            self.steps[peer.name] = visit.step


def server_cores(count: int | None) -> tuple[list[int], list[int]]:
    """Return the cores of the servers, the last ones, and those of the client: the others, if any."""
    cores = sorted(os.sched_getaffinity(0))
    count = max(1, min(count or len(cores) - 1, len(cores)))
    return cores[-count:], cores[:-count] or cores


def arguments(argv: list[str]) -> argparse.Namespace:
    names = list(dict.fromkeys([*PRODUCTS, *PRODUCTS.values()]))
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=__doc__)
    parser.add_argument(
        "--engines",
        nargs="+",
        choices=names,
        default=names,
        help="or products, at all settings; default: all",
    )
    parser.add_argument("--rounds", type=int, default=3, help="starts of each server (default 3)")
    parser.add_argument("--quick", action="store_true", help="1k prompts, a small pool, one round")
    parser.add_argument("--prompts", nargs="+", type=int, help="their tokens (default 1000 2000 4000)")
    parser.add_argument("--pool-tokens", type=int, help="tokens of each server's pool (default 5120)")
    parser.add_argument("--cores", type=int, help="of each server; default: all but one")
    parser.add_argument("--aiperf", type=Path, help="the program, to let it judge each server as well")
    args = parser.parse_args(argv)
    args.amounts = QUICK if args.quick else Amounts()
    if args.prompts:
        args.amounts = replace(args.amounts, prompts=tuple(sorted(args.prompts)))
    if args.pool_tokens:
        args.amounts = replace(args.amounts, pool_tokens=args.pool_tokens)
    if args.quick:
        args.rounds = 1
    if args.rounds < 1:
        parser.error("--rounds: at least 1")
    least = args.amounts.pool_tokens_min
    if args.amounts.pool_tokens < least:
        parser.error(f"--pool-tokens: at least {least}, for the longest prompt beside a stream")
    return args


def main(argv: list[str]) -> int:
    args = arguments(argv)
    interrupt_on_signals()  # so that no server outlives a bench that is told to end
    report.OUT_DIR.mkdir(parents=True, exist_ok=True)
    model = make_model(BUILD / "peers")
    cores, own = server_cores(args.cores)
    os.sched_setaffinity(0, own)
    judge = None if args.aiperf is None else Aiperf(args.aiperf, model, BUILD / "peers")
    peers = [peer for peer in PEERS if {peer.name, peer.product} & set(args.engines)]
    bench = Bench(peers, args.amounts, args.rounds, model, cores, judge)
    bench.run()
    path = bench.write()
    lines = table(bench.rows(), PRODUCTS)
    if lines:
        report.show(
            "CPU-s until the first token (wall s); c: cached tokens; itl: p99 / p50, alone; rss (pss)", lines
        )
    for row in bench.skipped:
        print(f"{row['engine']}, {row['work']}: {row['skipped']}")
    shown = [asdict(bar) | {"ok": {None: "-", True: "yes", False: "NO"}[bar.ok]} for bar in bench.bars()]
    report.show("what is asked", [{**bar, "value": _short(bar["value"])} for bar in shown])
    print(f"written: {path}; engines: {json.dumps(bench.steps)}")
    for failure in bench.failures():
        print(f"FAILED: {failure}")
    return 1 if bench.failures() else 0


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
