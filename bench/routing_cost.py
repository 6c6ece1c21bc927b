"""`python -m bench.routing_cost`: what choosing a replica adds to a request, by how many replicas there are.

Calls the router's own `choose_replicas` and the session directory's `route` in this process, with the books
of a busy ingress; what Serve does around them it does for any router.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from types import SimpleNamespace
from typing import Any

from ray.serve._private.common import DeploymentID, ReplicaID

from bench import _report as report
from samovar.configs.settings import RouterSettings
from samovar.replicas.messages import GenerateRequest, Route, SamplingParams
from samovar.router.routing import load_tracker
from samovar.router.routing.request_router import SessionRouter
from samovar.router.routing.session_directory import SessionDirectory, TurnEnd

REPLICAS = (3, 16, 64, 256, 1000)
OPEN, SESSIONS, CALLS = 200, 20_000, 400
TENANT = bytes(16)


def replica(name: str) -> Any:
    return SimpleNamespace(
        replica_id=ReplicaID(name, DeploymentID("Replica")),
        node_id="node",
        routing_stats={},
        replica_metadata={},
        max_ongoing_requests=288,
    )


async def measure(count: int) -> dict[str, object]:
    """Microseconds of one request: median and 99th percentile."""
    load_tracker.BOOK = tracker = load_tracker.ReplicaLoadTracker()
    names = [f"r{number}" for number in range(count)]
    tracker.update_replicas(dict.fromkeys(names, "node"), {})
    directory = SessionDirectory(None, tracker, RouterSettings())
    for number in range(SESSIONS):
        session = number.to_bytes(16, "big")
        directory.turn_ended(TurnEnd(TENANT, session, names[number % count], 1000))
    for number in range(OPEN):
        tracker.routed(f"open {number}", names[number % count], 0.1, None)
    router = SessionRouter.__new__(SessionRouter)
    router.initialize_state()
    router._replica_queue_len_cache = {}  # of Serve's base class, whose constructor wants a cluster
    replicas = [replica(name) for name in names]
    took_us = []
    for number in range(CALLS):
        began_s = time.perf_counter()
        route = directory.route(TENANT, number.to_bytes(16, "big"))
        asked = GenerateRequest("r", [1] * 64, SamplingParams(max_tokens=1), route=route)
        pending = SimpleNamespace(
            args=[asked],
            metadata=SimpleNamespace(session_id=f"{number}", internal_request_id=f"{number}"),
            routing_context=SimpleNamespace(should_backoff=False),
        )
        ranks = await router.choose_replicas(replicas, pending)
        took_us.append((time.perf_counter() - began_s) * 1e6)
        assert ranks
        assert isinstance(route, Route)
    p99 = statistics.quantiles(took_us, n=100)[98]
    return {"replicas": count, "p50_us": statistics.median(took_us), "p99_us": p99}


def main() -> int:
    rows = [asyncio.run(measure(count)) for count in REPLICAS]
    report.show("what choosing a replica adds", rows)
    print(f"written: {report.write('routing_cost', rows, open_requests=OPEN, sessions=SESSIONS)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
