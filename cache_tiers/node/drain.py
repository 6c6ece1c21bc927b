"""Before a node goes away: what is most likely to be wanted again is brought to where others reach it.

To S3 where there is one, else to other nodes, which are asked to fetch it: a session's blocks all to one, so
that one question finds them. The last to be evicted is the first to be saved. Nothing is dropped here: when
the time is up, what was not saved is computed again.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from cache_tiers.blocks import Address, TierName
from cache_tiers.messages import PushRequest
from cache_tiers.node.state import NodeState
from cache_tiers.node.store import NodeStores
from cache_tiers.transport import PeerCalls, PeerError

logger = logging.getLogger(__name__)

LOCAL: tuple[TierName, ...] = ("cpu", "nvme")


class NodeDrain:
    """`threads`: extents on their way at a time."""

    def __init__(
        self, books: NodeState, stores: NodeStores, calls: PeerCalls | None, node_id: str, threads: int
    ) -> None:
        self._books = books
        self._stores = stores
        self._calls = calls
        self._node_id = node_id
        self._threads = threads
        self._lock = threading.Lock()
        self._run: _Run | None = None
        self.is_draining = False
        self.counts: Counter[str] = Counter()
        """Extents by outcome: s3, peer, failed, left."""

    def drain(self, deadline_s: float, peers: Sequence[str]) -> dict[str, int]:
        """Save what is here only, until `deadline_s` from now. Blocks. Extents by outcome.

        What is stored while this goes on is saved as well. Once at a time: a second call does nothing.
        """
        with self._lock:
            if self.is_draining:
                return dict(self.counts)
            self.is_draining = True
            ends_s = self._books.clock() + deadline_s
            run = _Run(self._books, self._stores, self._calls, self._node_id, peers, ends_s)
            self._run = run
        done: set[Address] = set()
        while todo := [address for address in self._hottest() if address not in done]:
            done.update(todo)
            run.todo.extend(todo)
            run.carry_out(min(self._threads, len(todo)))
            if run.is_over:
                break
        with self._lock:
            self.counts.update(run.counts)
            self.counts["left"] += len(run.todo)
            counts = dict(self.counts)
        logger.info("drained: %s", counts)
        return counts

    def over(self) -> None:
        """The node stays after all; a drain under way ends, and it may be drained again."""
        with self._lock:
            self.is_draining = False
            if self._run is not None:
                self._run.stopped.set()

    def _hottest(self) -> list[Address]:
        with self._books.lock:
            directory = self._books.directory
            found = [address for tier in LOCAL for address in directory.hottest(tier)]
            return [address for address in dict.fromkeys(found) if "s3" not in directory.copies(address)]


class _Run:
    """One drain. `todo`: what nobody has begun with."""

    def __init__(
        self,
        books: NodeState,
        stores: NodeStores,
        calls: PeerCalls | None,
        node_id: str,
        peers: Sequence[str],
        ends_s: float,
    ) -> None:
        self._books = books
        self._stores = stores
        self._calls = calls
        self._node_id = node_id
        self._ends_s = ends_s
        self._lock = threading.Lock()
        self._peers = [peer for peer in peers if peer != node_id]
        self._turn = itertools.count()
        self._peer_of: dict[bytes, str] = {}  # session -> who takes its blocks
        self.stopped = threading.Event()
        self.todo: deque[Address] = deque()
        self.counts: Counter[str] = Counter()

    @property
    def is_over(self) -> bool:
        """The time is up, or it was called off."""
        return self.stopped.is_set() or self._books.clock() >= self._ends_s

    def carry_out(self, threads: int) -> None:
        """Until `todo` is empty or the time is up; a thread that hangs is left behind."""
        workers = [
            threading.Thread(target=self._work, name=f"drain-{number}", daemon=True)
            for number in range(threads)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(max(0.0, self._ends_s - self._books.clock()))

    def _work(self) -> None:
        while not self.is_over:
            with self._lock:
                if not self.todo:
                    return
                address = self.todo.popleft()
            outcome = self._save(address)
            with self._lock:
                self.counts[outcome] += 1

    def _save(self, address: Address) -> str:
        books = self._books
        with books.lock:
            info = books.directory.info(address)
        if info is None:
            return "failed"
        guard = books.guards.get("s3")
        if guard is not None and guard.is_writable and info.placement.allows("s3"):
            left_s = self._ends_s - books.clock()
            if left_s > 0 and self._stores.copy_now(address, "s3"):
                return "s3"
        return "peer" if self._to_peer(address, info.sessions) else "failed"

    def _to_peer(self, address: Address, sessions: frozenset[bytes]) -> bool:
        """To its session's peer, else to the next in turn; one that does not answer is not asked again."""
        refused: set[str] = set()
        while self._calls is not None:
            peer = self._peer(sessions, refused)
            left_s = self._ends_s - self._books.clock()
            if peer is None or left_s <= 0:
                return False
            try:
                outcome = self._calls.take(peer, PushRequest(address, self._node_id, left_s), left_s)
            except PeerError as error:
                logger.warning("node %s takes nothing: %s", peer[:8], error)
                with self._lock:
                    if peer in self._peers:
                        self._peers.remove(peer)
                continue
            if outcome in ("taken", "held"):
                return True
            refused.add(peer)
        return False

    def _peer(self, sessions: frozenset[bytes], refused: Collection[str]) -> str | None:
        with self._lock:
            peers = [peer for peer in self._peers if peer not in refused]
            if not peers:
                return None
            known = (self._peer_of.get(session) for session in sorted(sessions))
            peer = next((one for one in known if one in peers), None)
            if peer is None:
                peer = peers[next(self._turn) % len(peers)]
                self._peer_of.update(dict.fromkeys(sessions, peer))
            return peer


# When do a node's tiers leave it? Pure: it is told when replicas ask, which actors live where, and the time.
#
# Ray's cluster autoscaler lets a node go when no worker runs there and its object store has no primary
# copies. A detached actor with blocks in main memory is both, so that a node without replicas would be paid
# for ever. Knows nothing of how blocks are saved, or how the actor ends.

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


# Is this node to go away, and when? Pure: it is told what the cluster says.

DEADLINE_SHARE = 0.9
"""As much of the time that is left goes to saving blocks: the last ones need to arrive, too."""


class DrainNotice:
    """`drain_s`: how long a drain may take when the notice has no deadline."""

    def __init__(self, node_id: str, drain_s: float) -> None:
        self._node_id = node_id
        self._drain_s = drain_s
        self.is_draining = False

    def heard(self, deadlines_ms: Mapping[str, int], now_unix_s: float) -> float | None:
        """`deadlines_ms`: nodes that are to go -> unix milliseconds, 0: none. Seconds for a drain that is to
        begin now; None: nothing is to begin. A notice that was taken back may come again.
        """
        was_draining, self.is_draining = self.is_draining, self._node_id in deadlines_ms
        if not self.is_draining or was_draining:
            return None
        deadline_ms = deadlines_ms[self._node_id]
        if deadline_ms <= 0:
            return self._drain_s
        return max(0.0, (deadline_ms / 1000 - now_unix_s) * DEADLINE_SHARE)


def takers(node_id: str, alive: Collection[str], draining: Collection[str]) -> tuple[str, ...]:
    """Nodes that blocks may be pushed to; in another order for each giver, so that not all begin with one."""
    others = sorted(node for node in alive if node != node_id and node not in draining)
    turn = int(node_id[:8], 16) % len(others) if others and _is_hex(node_id[:8]) else 0
    return tuple(others[turn:] + others[:turn])


def _is_hex(text: str) -> bool:
    return bool(text) and all(letter in "0123456789abcdef" for letter in text.lower())
