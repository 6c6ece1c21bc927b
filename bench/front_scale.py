"""`python -m bench.front_scale`: what a fleet of ingresses costs, and which part of it breaks first.

Measures the product's own parts in this process (choosing a replica, the tables of sessions and what they
send each other, the memory of a row), and computes from them how much of a core each takes at a size, given
as sessions a second, ingresses and replicas. The simulator then says what looking beyond home is worth.
Times are CPU time of one core.
"""

from __future__ import annotations

import argparse
import asyncio
import pickle
import sys
import time
import tracemalloc
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench import _report as report
from bench._trace_generator import GeneratorOptions, generate
from bench.routing_cost import measure as measure_routing
from samovar.cache_tiers.policy.policies import make_policy
from samovar.cache_tiers.sessions.session_table import SessionTable, Sync
from samovar.cluster.plan.simulator.fleet import Fleet
from samovar.cluster.plan.simulator.sim import Sim
from samovar.configs.sections import GIB, PolicySettings
from samovar.configs.settings import RouterSettings
from samovar.router.routing.session_directory import ROWS_MAX

REPLICAS = (64, 1000, 4000)
ROWS = 50_000
TENANT = bytes(16)
SIZES = ((1, 3, 10), (100, 3, 100), (1_000, 10, 1_000), (10_000, 100, 1_000))
"""Sessions a second, ingresses, replicas."""
TURNS_A_SESSION = 1.6
SIM_BLOCK_TOKENS = 2048


@dataclass(frozen=True)
class RowCost:
    """What one row of the table of sessions costs: bytes in memory and on the wire, and CPU microseconds."""

    memory_bytes: float
    wire_bytes: float
    record_us: float
    send_us: float
    take_us: float


def table() -> SessionTable:
    return SessionTable(10 * ROWS, RouterSettings().lineages_max)


def fill(sessions: SessionTable, rows: int, first: int = 0) -> None:
    """Record the first turns of sessions."""
    for number in range(first, first + rows):
        session = (number << 64).to_bytes(16, "big")
        home, node = f"replica-{number % 1000:04d}-abcdefgh", f"{number % 125:056x}"
        sessions.turn(
            TENANT, session, home=home, node=node, tokens=1000 + number % 9000, now_unix_s=1e9 + number
        )


def row_cost() -> RowCost:
    """Measure recording, sending and taking rows, as an ingress and the directory's actor do."""
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    first = table()
    fill(first, ROWS)
    memory = (tracemalloc.get_traced_memory()[0] - before) / ROWS
    tracemalloc.stop()
    sender, taker = table(), table()
    recorded_s, sent_s, taken_s, sent, nbytes = 0.0, 0.0, 0.0, 0, 0
    while len(sender) < ROWS:
        began_s = time.process_time()
        fill(sender, ROWS_MAX, first=len(sender))
        recorded_s += time.process_time() - began_s
        began_s = time.process_time()
        rows, clears, sent = sender.changes(sent, ROWS_MAX)
        wire = pickle.dumps(Sync("", 0, tuple(rows), tuple(clears)), protocol=5)
        sent_s += time.process_time() - began_s
        began_s = time.process_time()
        came: Sync = pickle.loads(wire)  # noqa: S301 - our own bytes, as Ray reads them
        taker.merge(came.rows)
        taken_s += time.process_time() - began_s
        nbytes += len(wire)
    assert len(taker) == len(sender) == ROWS, "rows were lost"
    a_row = 1e6 / ROWS
    return RowCost(memory, nbytes / ROWS, recorded_s * a_row, sent_s * a_row, taken_s * a_row)


def load(
    cost: RowCost, routing_us: float, sessions_s: float, ingresses: int, replicas: int
) -> dict[str, Any]:
    """Return what a size takes: shares of a core, bytes. `routing_us`: of a request at so many replicas."""
    turns_s = sessions_s * TURNS_A_SESSION
    out_s = turns_s * (ingresses - 1)  # every row goes to every other ingress
    actor = (turns_s * cost.take_us + out_s * cost.send_us) / 1e6
    ingress_rows_s = turns_s - turns_s / ingresses
    directory = (turns_s / ingresses * (cost.record_us + cost.send_us) + ingress_rows_s * cost.take_us) / 1e6
    return {
        "sessions_s": sessions_s,
        "ingresses": ingresses,
        "replicas": replicas,
        "actor_cores": actor,
        "actor_out_mb_s": out_s * cost.wire_bytes / 1e6,
        "ingress_directory_cores": directory,
        "ingress_routing_cores": turns_s / ingresses * routing_us / 1e6,
        "hour_of_sessions_mb": 3600 * sessions_s * cost.memory_bytes / 1e6,
        "default_table_s": RouterSettings().sessions_max / sessions_s,
        "messages_s_if_1_in_100_is_named": 0.01 * turns_s * replicas,
    }


def breaks_at(cost: RowCost, ingresses: int) -> float:
    """Return at how many sessions a second the directory's actor needs a whole core."""
    return 1e6 / TURNS_A_SESSION / (cost.take_us + (ingresses - 1) * cost.send_us)


def hits(replicas: int, turns: int, candidates: int) -> dict[str, Any]:
    """Simulate a chat on so many replicas. `candidates`: 1 = a request goes nowhere but home."""
    settings = PolicySettings(name="lru").model_copy(update={"rerank_s": 10.0})
    fleet = Fleet(
        replicas=replicas, gpu_bytes=40 * GIB, cpu_bytes=256 * GIB, policy=settings, candidates=candidates
    )
    options = GeneratorOptions(turns=turns, block_tokens=SIM_BLOCK_TOKENS, sessions_per_s=0.25 * replicas)
    began_s = time.process_time()
    tally = Sim(fleet, make_policy(settings), SIM_BLOCK_TOKENS).run(generate(options).turns())
    took_us = (time.process_time() - began_s) * 1e6 / turns
    return {
        "replicas": replicas,
        "candidates": candidates,
        "hit_rate": tally.hit_rate,
        "sim_us_a_turn": took_us,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.front_scale", description=__doc__)
    parser.add_argument("--turns", type=int, default=60_000, help="of each simulation")
    args = parser.parse_args(argv)
    routing = [asyncio.run(measure_routing(count)) for count in REPLICAS]
    report.show("choosing a replica", routing)
    cost = row_cost()
    report.show("a row of the session directory", [asdict(cost)])
    of_routing = {int(str(row["replicas"])): float(str(row["p50_us"])) for row in routing}
    near = {
        replicas: of_routing[min(of_routing, key=lambda r: abs(r - replicas))] for _, _, replicas in SIZES
    }
    sizes = [load(cost, near[replicas], *size) for size in SIZES for replicas in size[2:]]
    report.show("what a size takes", sizes)
    limits = [
        {"ingresses": ingresses, "sessions_s_of_one_actor_core": breaks_at(cost, ingresses)}
        for ingresses in (3, 10, 100)
    ]
    report.show("where the directory's actor is full", limits)
    worth = [hits(100, args.turns, candidates) for candidates in (1, 4)]
    report.show("what looking at more than home is worth", worth)
    path = report.write(
        "front_scale",
        sizes,
        routing=routing,
        row=asdict(cost),
        limits=limits,
        simulated=worth,
        turns=args.turns,
    )
    print(f"written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
