"""When do a node's tiers leave it? Pure: it is told when replicas ask, which actors live where, and the time.

Ray's cluster autoscaler lets a node go when no worker runs there and its object store has no primary copies.
A detached actor with blocks in main memory is both, so that a node without replicas would be paid for ever.
Knows nothing of how blocks are saved, or how the actor ends.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from typing import Any, Literal

COMPANIONS = frozenset({"TierActor", "ProxyActor"})
"""Classes of actors that are there for a node's replicas: the tiers, and Serve's proxy, which Serve ends."""
HEAD_RESOURCE = "node:__internal_head__"
DEAD = "DEAD"

Stage = Literal["staying", "leaving", "gone"]


class NodeLeave:
    """`leave_s`: without a replica for so long, the tiers leave; 0: never. Thread-safe.

    When it `is_due`, somebody looks who lives here, and says `used` or `empty`, again and again; then comes
    the saving, and `go`.
    """

    def __init__(self, leave_s: float, now_s: float) -> None:
        self._leave_s = leave_s
        self._used_s = now_s
        self._empty_s: float | None = None  # since when nobody was seen
        self._lock = threading.Lock()
        self._stage: Stage = "staying"

    @property
    def stage(self) -> Stage:
        return self._stage

    def used(self, now_s: float) -> bool:
        """A replica of this node has asked, or there is a reason to stay as good as that one.

        True: this called a leaving off. Once the tiers are gone it does nothing.
        """
        with self._lock:
            self._used_s = max(self._used_s, now_s)
            self._empty_s = None
            was_leaving = self._stage == "leaving"
            if was_leaving:
                self._stage = "staying"
            return was_leaving

    def is_due(self, now_s: float) -> bool:
        """Nobody asked for so long that it is worth to look whether a replica is there at all."""
        with self._lock:
            return self._is_due(now_s)

    def empty(self, now_s: float) -> bool:
        """There is no replica here, and another place for the blocks. True: that lasts: begin to save."""
        with self._lock:
            if self._is_due(now_s):
                self._empty_s = now_s if self._empty_s is None else self._empty_s
                if now_s - self._empty_s >= self._leave_s:
                    self._stage = "leaving"
            return self._stage == "leaving"

    def go(self) -> bool:
        """All is saved. True: nobody asked meanwhile, and from now on there is no way back."""
        with self._lock:
            if self._stage == "leaving":
                self._stage = "gone"
            return self._stage == "gone"

    def _is_due(self, now_s: float) -> bool:
        return self._leave_s > 0 and self._stage != "gone" and now_s - self._used_s >= self._leave_s


def inhabited(actors: Collection[Mapping[str, Any]]) -> set[str]:
    """Nodes where an actor lives or starts that is no companion: a replica, most likely.

    `actors`: rows of Ray's actor table. Whatever else it is, it keeps Ray from letting that node go.
    """
    return {
        row["Address"]["NodeID"]
        for row in actors
        if row["State"] != DEAD and row["ActorClassName"] not in COMPANIONS
    }


def has_refuge(extents: int, *, others: Collection[str], takers: Collection[str], s3_is_up: bool) -> bool:
    """Is there another place for so many extents? `others`: nodes that live; `takers`: those with a replica
    and tiers. The last node stays, whatever S3 has: whoever comes next comes to it.
    """
    return bool(others) and (extents == 0 or s3_is_up or bool(takers))


def is_worth_another(before: Mapping[str, int], after: Mapping[str, int]) -> bool:
    """Drain again? Some of it was saved, and some was not for lack of time. Extents by outcome, in all."""

    def gained(*outcomes: str) -> int:
        return sum(after.get(outcome, 0) - before.get(outcome, 0) for outcome in outcomes)

    return gained("left") > 0 and gained("s3", "peer") > 0
