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
from collections.abc import Collection, Sequence

from cache_tiers.extent import Address, TierName
from cache_tiers.messages import Take
from cache_tiers.node_books import NodeBooks
from cache_tiers.node_stores import NodeStores
from cache_tiers.peers import PeerCalls, PeerError

logger = logging.getLogger("samovar.tiers")

LOCAL: tuple[TierName, ...] = ("cpu", "nvme")


class NodeDrain:
    """`threads`: extents on their way at a time."""

    def __init__(
        self, books: NodeBooks, stores: NodeStores, calls: PeerCalls | None, node_id: str, threads: int
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
        books: NodeBooks,
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
                outcome = self._calls.take(peer, Take(address, self._node_id, left_s), left_s)
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
