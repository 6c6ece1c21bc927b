"""Watches the cluster for a node: drains it, shuts its tiers down when unused, and meets other nodes.

The decisions are in `node/drain.py`. Runs in its own thread, because GCS queries may hang. Ray does not move
a detached actor when its node is drained, so nothing else would save its blocks.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any

import ray
import urllib3
from ray._private.state import state as gcs_state
from ray._raylet import GcsClient  # type: ignore[attr-defined]

from samovar.cache_tiers.blocks import TIERS
from samovar.cache_tiers.node import (
    HEAD_RESOURCE,
    DrainNotice,
    NodeLeave,
    TierNode,
    has_refuge,
    inhabited,
    is_worth_another,
    takers,
)
from samovar.configs.sections import NodeSettings

logger = logging.getLogger(__name__)

WATCH_S, ALONE_WATCH_S = 1.0, 5.0
"""Between two looks; and where there is no other node to meet, to take blocks, or to hear of. Each look takes
a CPU-millisecond or two here and in GCS."""
PREEMPTION = 2
"""Ray's drain reason code that a node cannot refuse."""


class ClusterWatch:
    """Polls GCS every second (`WATCH_S`, `ALONE_WATCH_S`) and drains, meets peers or shuts down accordingly.

    `drain_s`: see `DrainNotice`. `end`: ends the actor for good; called once `node` is closed.
    """

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
        self._looks = 0
        self._pause_s = WATCH_S
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="cluster-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Signal the thread to stop; does not wait, because GCS may hang."""
        self._stopped.set()

    def _watch(self) -> None:
        while not self._stopped.wait(self._pause_s):
            try:
                self._look()
            except Exception:  # GCS unavailable: retry at the next look
                logger.exception("could not read the cluster's state")

    def _look(self) -> None:
        if self._leave.stage == "gone":
            self._end()  # an earlier attempt failed
            return
        alive = {row["NodeID"]: row for row in ray.nodes() if row["Alive"]}
        self._pause_s = ALONE_WATCH_S if alive.keys() <= {self._node_id} else WATCH_S
        if self._met - alive.keys():
            self._node.peers.lost.set()  # before its sessions ask for what it left in S3
        self._heed(alive, gcs_state.get_draining_nodes())
        self._meet(alive.keys())  # after that: a notice does not wait for nodes that start, or hang

    def _meet(self, alive: Set[str]) -> None:
        strangers = deque(sorted(alive - self._met - {self._node_id}))
        strangers.rotate(self._looks)  # one that hangs takes the time of those behind it
        self._looks += 1
        met = self._node.peers.meet(strangers)
        self._met = (self._met & set(alive)) | met
        if met and self._node.resumption.is_new:
            self._node.resumption.start_from(self._node.peers.learned(sorted(met)))

    def _heed(self, alive: Mapping[str, Mapping[str, Any]], draining: Mapping[str, int]) -> None:
        was_draining = self._notice.is_draining
        deadline_s = self._notice.heard(draining, time.time())
        if deadline_s is not None:
            logger.warning("this node will be removed: saving its blocks for at most %.1f s", deadline_s)
            self._node.drain_over()  # if it was leaving anyway
            self._node.drain(deadline_s, takers(self._node_id, alive.keys(), draining))
        elif self._notice.is_draining:
            # What replicas have stored since, and what had no place before.
            self._node.drain(0.0, takers(self._node_id, alive.keys(), draining))
        elif was_draining:
            self._node.drain_over()
        elif self._leave.is_due(time.monotonic()):
            self._look_around(alive, draining)

    def _look_around(self, alive: Mapping[str, Mapping[str, Any]], draining: Mapping[str, int]) -> None:
        """Handle a node that no replica has used for long.

        Its tiers leave if no replica lives here and the blocks have another place to go.
        """
        now_s, leave = time.monotonic(), self._leave
        homes = self._homes()
        others = alive.keys() - draining.keys() - {self._node_id}
        peers = takers(self._node_id, self._met & others & homes, draining)

        def may_leave() -> bool:
            stats = self._node.stats()
            return (
                self._node_id in alive
                and HEAD_RESOURCE not in alive[self._node_id]["Resources"]  # Ray never removes the head node
                and self._node_id not in homes
                and has_refuge(
                    sum(row.extents for row in stats.tiers if row.name not in TIERS.shared),
                    stats.pending_deletes,
                    others=others,
                    takers=peers,
                    s3_is_up=any(row.name in TIERS.shared and row.state == "up" for row in stats.tiers),
                )
            )

        if not may_leave():
            leave.used(now_s)  # postpone the next look
            self._node.drain_over()
        elif leave.empty(now_s):
            logger.info("no replica runs on this node: saving its blocks for at most %.1f s", self._drain_s)
            self._node.drain_over()
            before = self._node.stats().drained
            saved = self._node.drain(self._drain_s, peers)
            if not is_worth_another(before, saved) and may_leave():  # again: a clear may have come
                self._go()

    def _go(self) -> None:
        if self._node_id in self._homes() or not self._leave.go():
            logger.info("a replica runs here again: the tiers stay")
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
    """Tell the cluster that the node goes away in `left_s` seconds; return False if it is refused.

    May raise, and may hang.
    """
    deadline_ms = int((time.time() + left_s) * 1000)
    address = ray.get_runtime_context().gcs_address
    is_accepted, refusal = GcsClient(address).drain_node(node_id, PREEMPTION, why, deadline_ms)
    if not is_accepted:
        logger.warning("the node is not drained: %s", refusal)
    return bool(is_accepted)


# Spot notices (AWS announces a spot reclaim two minutes ahead).

NOTICE_S = 120.0
"""Notice period that AWS gives, in seconds; assumed when the machine's and the notice's clocks disagree."""
NOTICE_S_MAX = 600.0
GARBAGE = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)
"""What parsing an answer that is no notice may raise."""


class NoticeUnclear(Exception):
    """Raised if there is no answer, or one that is neither a notice nor the absence of one."""


@dataclass(frozen=True, slots=True)
class SpotNotice:
    """A spot interruption notice.

    `action`: terminate, stop or hibernate; each loses the blocks. `left_s`: seconds until then.
    """

    action: str
    left_s: float


class SpotMetadata:
    """Asks the instance metadata service, version 2, for spot notices; `ec2_metadata` keeps the tokens.

    Not by botocore: its fetcher is private, goes through proxies, hides why it failed, and takes a token
    for each question.
    """

    def __init__(self, url: str, answer_s_max: float) -> None:
        from ec2_metadata import EC2Metadata  # vLLM's environment has none, and starts this module's actor

        self._service = EC2Metadata(_Pool(answer_s_max))
        self._service.service_url = f"{url}/latest/"
        self._service.metadata_url = f"{url}/latest/meta-data/"

    def notice(self, now_unix_s: float) -> SpotNotice | None:
        """Return the current notice, or None. Raises `NoticeUnclear`.

        A time that is past or far off means a wrong clock: `NOTICE_S` is used instead.
        """
        try:
            said = self._service.spot_instance_action
            if said is None:
                return None
            action, left_s = str(said.action), said.time.timestamp() - now_unix_s
        except (urllib3.exceptions.HTTPError, *GARBAGE) as error:
            self._service.clear_all()  # the token may have expired: request a new one next time
            raise NoticeUnclear(f"{type(error).__name__}: {error}"[:200]) from error
        if not 0 < left_s <= NOTICE_S_MAX:
            logger.warning("a spot notice for %.0f s from now: using %.0f s", left_s, NOTICE_S)
            left_s = NOTICE_S
        return SpotNotice(action, left_s)


class _Pool(urllib3.PoolManager):
    """Connections with our timeout, no retries and no proxy: none could reach a link-local address."""

    def __init__(self, answer_s_max: float) -> None:
        super().__init__(retries=False)
        self._answer_s_max = answer_s_max

    def request(self, method: str, url: str, **options: Any) -> urllib3.BaseHTTPResponse:  # type: ignore[override]
        return super().request(method, url, **(options | {"timeout": self._answer_s_max}))


class SpotWatch:
    """Polls the instance metadata in its own thread until `drain` has accepted a notice.

    `drain(left_s)` tells the cluster that this node goes away within so many seconds; on False or an
    exception it is called again. Any metadata answer, or its absence, is logged and never fatal. A rebalance
    recommendation is not a notice.
    """

    def __init__(self, settings: NodeSettings, drain: Callable[[float], bool]) -> None:
        self._poll_s = settings.spot_poll_s
        self._metadata = SpotMetadata(settings.spot_notice_url, settings.spot_answer_s_max)
        self._drain = drain
        self._ends_s: float | None = None
        self._trouble = ""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="spot-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Signal the thread to stop; does not wait."""
        self._stopped.set()

    def _watch(self) -> None:
        while not self._stopped.wait(self._poll_s):
            try:
                if self._look():
                    return
            except Exception:  # GCS unavailable, or unexpected: retry at the next look
                logger.exception("the check for a spot notice failed")

    def _look(self) -> bool:
        """Return whether a notice has been handed on."""
        if self._ends_s is None:
            notice = self._asked()
            if notice is None:
                return False
            logger.warning("spot notice: %s in %.0f s", notice.action, notice.left_s)
            self._ends_s = time.monotonic() + notice.left_s
        return self._drain(max(0.0, self._ends_s - time.monotonic()))

    def _asked(self) -> SpotNotice | None:
        try:
            notice = self._metadata.notice(time.time())
        except NoticeUnclear as error:
            self._say(str(error))
            return None
        self._say("")
        return notice

    def _say(self, trouble: str) -> None:
        """Log a change of `trouble` once, not on every poll."""
        if trouble and not self._trouble:
            logger.warning("the instance metadata do not answer, spot notices may be missed: %s", trouble)
        elif self._trouble and not trouble:
            logger.info("the instance metadata answer again")
        self._trouble = trouble
