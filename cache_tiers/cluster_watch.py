"""Watches the cluster for a node: drains it when it is to go (`drain_notice.py`), and meets other nodes.

In a thread of its own, because asking GCS may hang. A detached actor is not moved when its node is drained:
nobody else would save its blocks.
"""

from __future__ import annotations

import logging
import threading
import time

import ray
from ray._private.state import state as gcs_state

from cache_tiers.drain_notice import DrainNotice, takers
from cache_tiers.node import TierNode

logger = logging.getLogger("samovar.tiers")

WATCH_S = 1.0


class ClusterWatch:
    """`drain_s`: see `DrainNotice`."""

    def __init__(self, node: TierNode, node_id: str, drain_s: float) -> None:
        self._node = node
        self._node_id = node_id
        self._notice = DrainNotice(node_id, drain_s)
        self._met: set[str] = set()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="cluster-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Does not wait: GCS may hang."""
        self._stopped.set()

    def _watch(self) -> None:
        while not self._stopped.wait(WATCH_S):
            try:
                self._look()
            except Exception:  # GCS away: the next look may go better
                logger.exception("could not look at the cluster")

    def _look(self) -> None:
        alive = {row["NodeID"] for row in ray.nodes() if row["Alive"]}
        strangers = alive - self._met - {self._node_id}
        self._met = (self._met & alive) | self._node.peers.meet(sorted(strangers))
        draining = gcs_state.get_draining_nodes()
        was_draining = self._notice.is_draining
        deadline_s = self._notice.heard(draining, time.time())
        if deadline_s is not None:
            logger.warning("this node is to go away: saving its blocks, for %.1f s", deadline_s)
            self._node.drain(deadline_s, takers(self._node_id, alive, draining))
        elif was_draining and not self._notice.is_draining:
            self._node.drain_over()
