"""Watches the cluster for a node: drains it when it is to go (`drain_notice.py`), lets its tiers leave when
nobody needs them there (`node_leave.py`), and meets other nodes.

In a thread of its own, because asking GCS may hang. A detached actor is not moved when its node is drained:
nobody else would save its blocks.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray._private.state import state as gcs_state
from ray._raylet import GcsClient  # type: ignore[attr-defined]

from cache_tiers.drain_notice import DrainNotice, takers
from cache_tiers.node import TierNode
from cache_tiers.node_leave import HEAD_RESOURCE, NodeLeave, has_refuge, inhabited, is_worth_another

logger = logging.getLogger("samovar.tiers")

WATCH_S = 1.0
PREEMPTION = 2
"""Ray's reason for a drain that a node cannot refuse."""


class ClusterWatch:
    """`drain_s`: see `DrainNotice`. `end`: of the actor, for good; called when `node` is closed."""

    def __init__(
        self, node: TierNode, node_id: str, drain_s: float, leave: NodeLeave, end: Callable[[], None]
    ) -> None:
        self._node = node
        self._node_id = node_id
        self._drain_s = drain_s
        self._leave = leave
        self._end = end
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
        if self._leave.stage == "gone":
            self._end()  # it could not before
            return
        alive = {row["NodeID"]: row for row in ray.nodes() if row["Alive"]}
        if self._met - alive.keys():
            self._node.peers.lost.set()  # before its sessions ask for what it left in S3
        strangers = alive.keys() - self._met - {self._node_id}
        self._met = (self._met & alive.keys()) | self._node.peers.meet(sorted(strangers))
        draining = gcs_state.get_draining_nodes()
        was_draining = self._notice.is_draining
        deadline_s = self._notice.heard(draining, time.time())
        if deadline_s is not None:
            logger.warning("this node is to go away: saving its blocks, for %.1f s", deadline_s)
            self._node.drain_over()  # if it was leaving anyway
            self._node.drain(deadline_s, takers(self._node_id, alive.keys(), draining))
        elif was_draining and not self._notice.is_draining:
            self._node.drain_over()
        elif not self._notice.is_draining and self._leave.is_due(time.monotonic()):
            self._look_around(alive, draining)

    def _look_around(self, alive: Mapping[str, Mapping[str, Any]], draining: Mapping[str, int]) -> None:
        """No replica has asked for long: leave, if there is none, and another place for the blocks."""
        now_s, leave = time.monotonic(), self._leave
        homes = self._homes()
        others = alive.keys() - draining.keys() - {self._node_id}
        peers = takers(self._node_id, self._met & others & homes, draining)
        stats = self._node.stats()
        may_leave = (
            self._node_id in alive
            and HEAD_RESOURCE not in alive[self._node_id]["Resources"]  # Ray never lets that one go
            and self._node_id not in homes
            and has_refuge(
                sum(row.extents for row in stats.tiers if row.name != "s3"),
                others=others,
                takers=peers,
                s3_is_up=any(row.name == "s3" and row.state == "up" for row in stats.tiers),
            )
        )
        if not may_leave:
            leave.used(now_s)  # no need to look again before long
            self._node.drain_over()
        elif leave.empty(now_s):
            logger.info("no replica lives here any more: saving the blocks, for %.1f s", self._drain_s)
            self._node.drain_over()
            saved = self._node.drain(self._drain_s, peers)
            if not is_worth_another(stats.drained, saved):
                self._go()

    def _go(self) -> None:
        if self._node_id in self._homes() or not self._leave.go():
            logger.info("there is a replica again: the tiers stay")
            self._leave.used(time.monotonic())
            self._node.drain_over()
            return
        logger.warning("the tiers leave this node")
        try:
            self._node.close()
        finally:
            self._end()

    def _homes(self) -> set[str]:
        return inhabited(gcs_state.actor_table(None).values())


def drain_this_node(node_id: str, why: str, left_s: float) -> bool:
    """Tell the cluster that the node goes in `left_s`; False: it does not listen. May raise, and hang."""
    deadline_ms = int((time.time() + left_s) * 1000)
    address = ray.get_runtime_context().gcs_address
    is_accepted, refusal = GcsClient(address).drain_node(node_id, PREEMPTION, why, deadline_ms)
    if not is_accepted:
        logger.warning("the node is not drained: %s", refusal)
    return bool(is_accepted)
