"""Run as a program: Samovar on three raylets of this machine, one replica each at most, scaled by load.

Says what `samovar serve` says, and writes a line of JSON every half second: the time, how many replicas run
and how many there should be. Ends at the end of its stdin. Told to `drop`, it takes the tiers of a node away
as soon as its last replica has gone, as a machine does that is simply switched off.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # see cluster/cli/main.py
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"

import ray
from ray import serve
from ray._private.state import state as gcs_state
from ray.cluster_utils import Cluster
from ray.serve.config import HTTPOptions, ProxyLocation

from samovar.cache_tiers.actors.tier import tier_actors
from samovar.cache_tiers.node.drain import inhabited
from samovar.cluster.serve.app import Service
from samovar.cluster.serve.environment import plan_store, ray_environment
from samovar.cluster.serve.graph import QUIET
from samovar.cluster.serve.ray_cluster import close_token, require_token
from samovar.configs.sections import MIB
from samovar.configs.settings import Settings
from samovar.replicas.messages import REPLICA_DEPLOYMENT

LOOK_S = 0.5
NODES = 3
TIER_BYTES = 768 * MIB
"""On each node: so much that two of them can take in what the third has."""


class ServiceHere(Service):
    """On the cluster that is there already."""

    def _start_ray(self) -> None:
        assert ray.is_initialized()
        # The nodes have one address, so another's HTTP proxy would take connections before it can answer.
        http = HTTPOptions(host=self.settings.server.host, port=self.settings.server.port)
        serve.start(proxy_location=ProxyLocation.HeadOnly, http_options=http, logging_config=QUIET)


def settings_of(port: int, cache_dir: Path, *, drains: bool) -> Settings:
    """Small replicas, so that a few guests are many, and quick delays, as the trace is played quickly."""
    return Settings.model_validate(
        {
            "server": {"port": port, "graceful_shutdown_s": 20},
            "engine": {"threads": 1, "device": "cpu", "pool_bytes_max": 96 * MIB, "sequences_max": 4},
            "limits": {"concurrent_per_key": 512, "n_max": 1},
            "cluster": {
                "replicas": 1,
                "replicas_per_node_max": 1,
                "autoscaling": {
                    "enabled": True,
                    "replicas_max": NODES,
                    "target_utilization": 0.5,
                    "queue_wait_s": 1.0,
                    "horizon_s": 6.0,
                    "resumption_weight": 0.25,
                    "upscale_delay_s": 2.0,
                    "downscale_delay_s": 12.0,
                    "metrics_interval_s": 0.5,
                },
            },
            "model": {"cache_dir": cache_dir},
            "router": {"stall_s": 60.0},
            "tiers": {
                "nvme": {"bytes_max": 0},
                "cpu": {"bytes_max": TIER_BYTES},
                "audit_share": 0.0,
                "settle_s": 5.0 if drains else 0.0,
                "node": {"idle_timeout_s": 4.0 if drains else 0.0},
                "lookup_s_max": 2.0,
                "peer": {"lookup_s_max": 1.0, "pull_s_max": 10.0},
            },
        }
    )


def three_raylets() -> Cluster:
    """A head and two more; this process is connected to them."""
    raylet: dict[str, Any] = {
        "num_cpus": 2,
        "object_store_memory": plan_store(None, TIER_BYTES, None).store_bytes,
    }
    cluster = Cluster(initialize_head=True, head_node_args={**raylet, "include_dashboard": False})
    for _ in range(NODES - 1):
        cluster.add_node(**raylet)
    ray.init(address=cluster.address, namespace="samovar", log_to_driver=False, logging_level=logging.ERROR)
    return cluster


def watch(service: Service, out: Path, drops: bool, ended: threading.Event) -> None:
    """Until it has `ended`."""
    had: set[str] = set()
    with out.open("w") as lines:
        while not ended.wait(LOOK_S):
            deployment = serve.status().applications[service.model_app].deployments[REPLICA_DEPLOYMENT]
            states = {str(name): count for name, count in deployment.replica_states.items()}
            lines.write(json.dumps({"at_s": time.time(), "states": states}) + "\n")
            lines.flush()
            if not drops:
                continue
            homes = set(inhabited(gcs_state.actor_table(None).values()))
            gone, had = had - homes, homes
            for node, actor in tier_actors().items():
                if node in gone:
                    ray.kill(actor)


def main(port: int, cache_dir: Path, out: Path, drops: bool) -> None:
    settings = settings_of(port, cache_dir, drains=not drops)
    os.environ.update(ray_environment(settings))
    require_token()
    close_token(os.environ, make=True)
    cluster = three_raylets()
    ended = threading.Event()
    try:
        service = ServiceHere(settings)
        service.start()
        watcher = threading.Thread(target=watch, args=(service, out, drops, ended), daemon=True)
        watcher.start()
        print(f"Samovar is ready: {service.url}", flush=True)
        sys.stdin.read()
        ended.set()
        watcher.join()
        service.stop()
    finally:
        ended.set()
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    logging.getLogger("ray").setLevel(logging.ERROR)
    main(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4] == "drop")
