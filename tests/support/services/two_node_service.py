"""Run as a program: Samovar on two raylets of this machine, one replica on each; told what to do by stdin.

Says what `samovar serve` says. Commands, a line each: `head` (answered by its node id), `drain NODE_ID
SECONDS`, `quit`. Each but the last is answered by a line. The tiers live in main memory only: both nodes have
the same disk.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # see cluster/cli/main.py

import ray
from ray._raylet import GcsClient

from samovar.cluster.serve.app import Service
from samovar.configs.settings import Settings
from tests.support.services.service import for_served_dtype
from tests.support.services.two_nodes import two_raylets

DRAIN_REASON = 2  # DRAIN_NODE_REASON_PREEMPTION: is always accepted


class ServiceHere(Service):
    """On the cluster that is there already."""

    def _start_ray(self) -> None:
        assert ray.is_initialized()


def drain(cluster: Any, node_id: str, seconds: float) -> str:
    import time

    deadline_ms = int((time.time() + seconds) * 1000)
    accepted, why = GcsClient(cluster.address).drain_node(node_id, DRAIN_REASON, "a test", deadline_ms)
    return "draining" if accepted else f"refused: {why}"


def main(port: int, cache_dir: Path) -> None:
    settings = Settings.model_validate(
        {
            "server": {"port": port},
            # The native step would compute these prompts in less time than loading from a peer that was
            # never measured is expected to take.
            "engine": {
                "threads": 1,
                "device": "cpu",
                "step": "lean",
                "pool_bytes_max": for_served_dtype(64 << 20, "lean"),
            },
            "cluster": {"replicas": 2, "replicas_per_node_max": 1},
            "model": {"cache_dir": cache_dir},
            "router": {"stall_s": 60.0},
            "tiers": {
                "nvme": {"bytes_max": 0},
                "cpu": {"bytes_max": 224 << 20},
                "audit_share": 0.0,
                # Two cores for all of it: what is late here is not what is tested.
                **{"lookup_s_max": 5.0, "lookup_share": 100.0, "lookup_idle_share": 1.0},
                "hedge_slack_s": 60.0,
                "peer": {"lookup_s_max": 5.0, "pull_s_max": 30.0},
            },
        }
    )
    with two_raylets(object_store_bytes=448 << 20) as cluster:
        service = ServiceHere(settings)
        service.start()
        print(f"Samovar is ready: {service.url}", flush=True)
        for line in sys.stdin:
            command, *rest = line.split()
            if command == "quit":
                break
            answer = (
                cluster.head_node.node_id if command == "head" else drain(cluster, rest[0], float(rest[1]))
            )
            print(answer, flush=True)
        service.stop()


if __name__ == "__main__":
    logging.getLogger("ray").setLevel(logging.ERROR)
    main(int(sys.argv[1]), Path(sys.argv[2]))
