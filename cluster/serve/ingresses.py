"""How many ingresses a cluster has: one on each node, while nodes come and go.

Serve has no deployment with one replica a node. It has autoscaling, whose policy here counts nodes, not load;
Serve spreads the ingresses over the nodes as well as it can, and makes a new one where one has died.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from samovar.configs.optional_sections import INGRESSES_MAX

logger = logging.getLogger(__name__)

LOOK_S = 2.0


def nodes_alive() -> int:
    """Return the number of nodes that are alive and not leaving."""
    import ray
    from ray._private.state import state as gcs_state

    leaving = set(gcs_state.get_draining_nodes())
    return sum(bool(node["Alive"]) and node["NodeID"] not in leaving for node in ray.nodes())


def one_per_node(nodes: int, now: int) -> int:
    """Return how many ingresses `nodes` nodes are to have, where there are `now`; no news is no change."""
    return min(nodes, INGRESSES_MAX) if nodes > 0 else now


class OneIngressPerNode:
    """The autoscaling policy that Ray Serve calls in its controller, ten times a second. Never raises.

    Nodes are counted in a thread: GCS may hang, and the controller must not. The thread ends when there was
    no call since its last look: Serve makes another policy at each deployment.
    """

    def __init__(self, count: Callable[[], int] = nodes_alive, look_s: float = LOOK_S) -> None:
        self._count = count
        self._look_s = look_s
        self._nodes = 0
        self._is_called = False
        self._pause = threading.Event()
        self._thread: threading.Thread | None = None

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Return how many ingresses there should be."""
        self._is_called = True
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._watch, name="count-nodes", daemon=True)
            self._thread.start()
        return one_per_node(self._nodes, context.target_num_replicas), {}

    def look(self) -> None:
        """Count the nodes once."""
        try:
            self._nodes = self._count()
        except Exception:  # GCS unavailable: what was seen last stays
            logger.exception("the nodes of the cluster could not be counted")

    def _watch(self) -> None:
        while self._is_called:
            self._is_called = False
            self.look()
            self._pause.wait(self._look_s)


def one_ingress_per_node() -> AutoscalingConfig:
    """Return Serve's configuration of an ingress on each node."""
    return AutoscalingConfig(
        min_replicas=1,
        initial_replicas=1,
        max_replicas=INGRESSES_MAX,
        upscale_delay_s=0.0,
        downscale_delay_s=0.0,
        policy=AutoscalingPolicy(policy_function="samovar.cluster.serve.ingresses:OneIngressPerNode"),
    )
