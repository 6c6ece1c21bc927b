"""Drains the Ray node of a worker's pod that Kubernetes is about to stop: `preStop` of `kuberay.py`.

Ray ends at SIGTERM, with the answers under way and the blocks in memory. Before it, a drain lets Serve take
the node's HTTP proxy out of readiness, start replicas elsewhere and let running answers finish, and lets the
tiers push their blocks to S3 or to peers. `python -m samovar.cluster.manifests.prestop SECONDS`.
"""

from __future__ import annotations

import logging
import math
import signal
import sys
import threading
import time

import ray
from ray._private.state import state as gcs_state

from samovar.cache_tiers.actors import drain_this_node, rpc, tier_actors

logger = logging.getLogger(__name__)

POLL_S = 0.5
ALARM_SPARE_S = 10
"""To find Ray, and to say how it ended."""
ANSWER_S = 5.0
"""How long the node's tiers may take to say how far they are."""


def leave(node_id: str, seconds: float) -> bool:
    """Drain a node, and block until nothing on it is needed any more; return False after `seconds`.

    False, too, if Ray refuses the drain. Raises Ray's errors if the head does not answer.
    """
    ends_s, pause = time.monotonic() + seconds, threading.Event()
    if not drain_this_node(node_id, "its pod is stopped", seconds):
        return False
    while (left_s := ends_s - time.monotonic()) > 0:
        if not (waits_for := still_here(node_id)):
            return True
        logger.info("waiting for %s", waits_for)
        pause.wait(min(POLL_S, left_s))
    return False


def still_here(node_id: str) -> str:
    """Return what a draining node is still needed for, in words; "" for nothing."""
    actors = {
        row["ActorClassName"]
        for row in gcs_state.actor_table(None).values()
        if row["State"] != "DEAD" and row["Address"]["NodeID"] == node_id
    }
    if others := actors - {"TierActor"}:  # replicas, ingresses, and the proxy while it has connections
        return ", ".join(sorted(others))
    if not actors:
        return ""
    stats = rpc.ask_all(tier_actors(), "stats", timeout_s=ANSWER_S).get(node_id)
    # Asked once nothing else is here: a replica hands over the end of its turns as the last thing it does.
    return "" if stats is not None and stats.draining and not stats.unsaved else "the tiers"


def main(seconds: float) -> int:
    """Drain the node that this pod is, for at most `seconds`; return the exit code.

    Without a head Ray would be asked for minutes: the alarm ends the process.
    """
    signal.alarm(math.ceil(seconds) + ALARM_SPARE_S)
    logging.basicConfig(level=logging.INFO, format="samovar prestop: %(message)s")
    ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR)
    has_left = leave(ray.get_runtime_context().get_node_id(), seconds)
    logger.info("the node is empty" if has_left else "the node is stopped as it is")
    return 0 if has_left else 1


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1])))
