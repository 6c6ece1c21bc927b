"""Drains a node before it goes away: saves its likely-reused extents where other nodes reach them.

To S3 if there is one, else to other nodes, which are asked to fetch them: a session's blocks all to one, so
that one lookup finds them. The last to be evicted is saved first. Nothing is dropped here: what was not
saved in time is recomputed.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from samovar.cache_tiers.blocks import SHARED_TIER, TIERS, Address
from samovar.cache_tiers.messages import PushRequest
from samovar.cache_tiers.node.state import NodeState
from samovar.cache_tiers.node.store import NodeStores
from samovar.cache_tiers.transport import PeerCalls, PeerError, PeerLate
from samovar.configs.sections import TierSettings

logger = logging.getLogger(__name__)

AGAIN_S = 1.0
"""What could not be saved is tried again after so long, then after twice as long, and so on."""
TRIES_MAX = 6
"""Until then a breaker has closed, and a node has started again; new takers are tried whenever they come."""


class NodeDrain:
    """Drains a node's extents to S3 or peers."""

    def __init__(
        self,
        state: NodeState,
        stores: NodeStores,
        calls: PeerCalls | None,
        node_id: str,
        settings: TierSettings,
    ) -> None:
        self._state = state
        self._stores = stores
        self._calls = calls
        self._node_id = node_id
        self._threads = settings.io_threads
        self._take_s_max = 2 * settings.peer.pull_s_max  # by each of two ways
        self._lock = threading.Lock()
        self._run: _Run | None = None
        self.is_draining = False
        self.counts: Counter[str] = Counter()
        """Extents by outcome: s3, peer, failed (so far), left."""

    def drain(self, deadline_s: float, peers: Sequence[str]) -> dict[str, int]:
        """Save what is held only here, for at most `deadline_s` seconds; return extents by outcome.

        Blocks. What is stored meanwhile is saved as well. A call after that, while the node drains, saves
        what came since, until the first call's deadline: replicas answer, and store, up to their end. It
        also tries again what failed (`AGAIN_S`), by the `peers` of now, if there are any. One beside another
        does nothing.
        """
        with self._lock:
            if not self.is_draining or self._run is None:
                self.is_draining = True
                ends_s = self._state.clock() + deadline_s
                calls = None if self._calls is None else _Takers(self._calls, self._node_id, self._take_s_max)
                self._run = _Run(self._state, self._stores, calls, ends_s)
            run = self._run
        if not run.turn.acquire(blocking=False):
            return dict(self.counts)
        try:
            run.begin(peers)
            while not run.is_over:
                todo = [address for address in self._hottest() if address not in run.begun]
                if not todo:
                    break
                run.begun.update(todo)
                run.todo.extend(todo)
                run.carry_out(min(self._threads, len(todo)))
            with self._lock:
                counts = run.taken_counts()
                self.counts.update(counts)
        finally:
            run.turn.release()
        if any(counts.values()):
            logger.info("drained: %s", dict(self.counts))
        return dict(self.counts)

    def stats(self) -> dict[str, Any]:
        """Return these fields of `NodeStats`."""
        counts = dict(self.counts)
        return {"draining": self.is_draining, "drained": counts, "unsaved": self._unsaved()}

    def over(self) -> None:
        """End a drain in progress because the node stays; it may be drained again."""
        with self._lock:
            self.is_draining = False
            if self._run is not None:
                self._run.stopped.set()

    def _unsaved(self) -> int:
        """Return how many extents a drain has still to save, but for those that it has given up.

        What is on its way into a tier counts, whichever it is.
        """
        with self._lock:
            run = self._run if self.is_draining else None
        if run is None or run.is_over:
            return 0
        with self._state.lock:
            coming = self._stores.has_stores + len(self._state.catalog.transfers)
        return coming + sum(map(run.waits_for, self._hottest()))

    def _hottest(self) -> list[Address]:
        with self._state.lock:
            catalog = self._state.catalog
            found = [address for tier in TIERS.local for address in catalog.hottest(tier)]
            return [one for one in dict.fromkeys(found) if SHARED_TIER not in catalog.copies(one)]


class _Takers:
    """The peers that take a drained node's extents: a session's all to one. Thread-safe."""

    def __init__(self, calls: PeerCalls, node_id: str, take_s_max: float) -> None:
        self._calls = calls
        self._node_id = node_id
        self._take_s_max = take_s_max
        self._lock = threading.Lock()
        self._peers: list[str] = []
        self._named: set[str] = set()
        self._late: set[str] = set()
        self._turn = itertools.count()
        self._peer_of: dict[bytes, str] = {}  # session -> peer that takes its blocks

    def are(self, peers: Sequence[str]) -> bool:
        """Offer to `peers` from now on, but for those that hang; return whether one was never named."""
        with self._lock:
            self._peers = [peer for peer in peers if peer != self._node_id and peer not in self._late]
            has_new = not self._named.issuperset(self._peers)
            self._named.update(self._peers)
            return has_new

    def give(self, address: Address, sessions: frozenset[bytes], left_s: Callable[[], float]) -> bool:
        """Push to the session's peer, else to the next in turn; return whether one has it.

        One that does not answer is left out until `are` names it again, one that hangs for good: it would
        take the time of all others.
        """
        refused: set[str] = set()
        while (peer := self._next(sessions, refused)) is not None and (time_s := left_s()) > 0:
            within_s = min(time_s, self._take_s_max)
            try:
                outcome = self._calls.take(peer, PushRequest(address, self._node_id, within_s), within_s)
            except PeerError as error:
                logger.warning("node %s takes nothing: %s", peer[:8], error)
                with self._lock:
                    self._peers = [one for one in self._peers if one != peer]
                    if isinstance(error, PeerLate):
                        self._late.add(peer)
                continue
            if outcome in ("taken", "held"):
                return True
            refused.add(peer)
        return False

    def _next(self, sessions: frozenset[bytes], refused: Collection[str]) -> str | None:
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


@dataclass(slots=True)
class _Failure:
    """How often an extent could not be saved, and when that is tried again."""

    tries: int = 0
    again_s: float = 0.0


class _Run:
    """One drain, in passes. `takers`: None: there are no peers.

    `todo`: extents not begun yet; `begun`: all that it has seen. `turn`: who carries out a pass.
    """

    def __init__(self, state: NodeState, stores: NodeStores, takers: _Takers | None, ends_s: float) -> None:
        self._state = state
        self._stores = stores
        self._takers = takers
        self._ends_s = ends_s
        self._lock = threading.Lock()
        self.stopped = threading.Event()
        self.turn = threading.Lock()
        self.todo: deque[Address] = deque()
        self.begun: set[Address] = set()
        self._saved: set[Address] = set()
        self._failed: dict[Address, _Failure] = {}
        self._counts: Counter[str] = Counter()

    @property
    def is_over(self) -> bool:
        """Return whether the time is up or the drain was cancelled."""
        return self.stopped.is_set() or self._left_s() <= 0

    def begin(self, peers: Sequence[str]) -> None:
        """Begin a pass; what failed is tried again if it is time, or if there is a peer that is new."""
        now_s = self._state.clock()
        is_new = bool(peers) and self._takers is not None and self._takers.are(peers)
        with self._lock:
            for address, failure in self._failed.items():
                if is_new:
                    failure.tries = 0
                if is_new or (failure.tries < TRIES_MAX and now_s >= failure.again_s):
                    self.begun.discard(address)

    def taken_counts(self) -> Counter[str]:
        """End a pass; return extents by outcome since the last one, with those that are left."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
            counts["left"] += len(self.todo)
            self.todo.clear()
        return counts

    def waits_for(self, address: Address) -> bool:
        """Return whether an extent that is held only here is still to be saved, or tried again."""
        with self._lock:
            failure = self._failed.get(address)
            return address not in self._saved and (failure is None or failure.tries < TRIES_MAX)

    def carry_out(self, threads: int) -> None:
        """Work until `todo` is empty or the time is up; a hanging thread is left behind."""
        workers = [
            threading.Thread(target=self._work, name=f"drain-{number}", daemon=True)
            for number in range(threads)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(max(0.0, self._left_s()))

    def _work(self) -> None:
        while not self.is_over:
            with self._lock:
                if not self.todo:
                    return
                address = self.todo.popleft()
            outcome = self._save(address)
            with self._lock:
                self._note(address, outcome)

    def _note(self, address: Address, outcome: str) -> None:
        failure = self._failed.pop(address, None)
        if failure is not None:
            self._counts["failed"] -= 1
        self._counts[outcome] += 1
        if outcome != "failed":
            self._saved.add(address)
            return
        failure = failure or _Failure()
        failure.again_s = self._state.clock() + AGAIN_S * 2**failure.tries
        failure.tries += 1
        self._failed[address] = failure

    def _save(self, address: Address) -> str:
        state = self._state
        with state.lock:
            info = state.catalog.info(address)
        if info is None:
            return "failed"
        guard = state.guards.get(SHARED_TIER)
        may_share = guard is not None and guard.is_writable and info.placement.allows(SHARED_TIER)
        if may_share and self._left_s() > 0 and self._stores.copy_now(address, SHARED_TIER):
            return SHARED_TIER
        takers = self._takers
        is_given = takers is not None and takers.give(address, info.sessions, self._left_s)
        return "peer" if is_given else "failed"

    def _left_s(self) -> float:
        return self._ends_s - self._state.clock()


COMPANIONS = frozenset({"TierActor", "ProxyActor", "ServeReplica:samovar:Ingress"})
"""Actor classes that exist only for a node's replicas: the tiers, an ingress, and Serve's proxy.

Once the tiers leave, so does the ingress (`OneIngressPerNode`), and with it Serve's proxy.
"""
HEAD_RESOURCE = "node:__internal_head__"
DEAD = "DEAD"

Stage = Literal["staying", "leaving", "gone"]


class NodeLeave:
    """Decides when a node's tiers leave it. Thread-safe.

    Ray's cluster autoscaler removes a node when no worker runs there and its object store has no primary
    copies. A detached actor with blocks in main memory is both, so a node without replicas would be paid for
    indefinitely. `idle_timeout_s`: after so long without a replica the tiers leave; 0: never. When it
    `is_due`, the caller looks for replicas and calls `used` or `empty` repeatedly; then it saves the blocks
    and calls `go`.
    """

    def __init__(self, idle_timeout_s: float, now_s: float) -> None:
        self._idle_timeout_s = idle_timeout_s
        self._used_s = now_s
        self._empty_s: float | None = None  # since when no replica was seen
        self._lock = threading.Lock()
        self._stage: Stage = "staying"

    @property
    def stage(self) -> Stage:
        return self._stage

    def used(self, now_s: float) -> bool:
        """Note a replica's call or an equal reason to stay; return True if this cancelled a leaving.

        Does nothing once the tiers are gone.
        """
        with self._lock:
            self._used_s = max(self._used_s, now_s)
            self._empty_s = None
            was_leaving = self._stage == "leaving"
            if was_leaving:
                self._stage = "staying"
            return was_leaving

    def is_due(self, now_s: float) -> bool:
        """Return whether no replica has called for so long that looking for one is worth it."""
        with self._lock:
            return self._is_due(now_s)

    def empty(self, now_s: float) -> bool:
        """Note that no replica is here and the blocks have another place; True: it lasts, begin to save."""
        with self._lock:
            if self._is_due(now_s):
                self._empty_s = now_s if self._empty_s is None else self._empty_s
                if now_s - self._empty_s >= self._idle_timeout_s:
                    self._stage = "leaving"
            return self._stage == "leaving"

    def go(self) -> bool:
        """Leave once everything is saved; True: no replica has called meanwhile, and this is final."""
        with self._lock:
            if self._stage == "leaving":
                self._stage = "gone"
            return self._stage == "gone"

    def _is_due(self, now_s: float) -> bool:
        return (
            self._idle_timeout_s > 0
            and self._stage != "gone"
            and now_s - self._used_s >= self._idle_timeout_s
        )


def inhabited(actors: Collection[Mapping[str, Any]]) -> set[str]:
    """Return the nodes where an actor other than a companion lives or starts: a replica, most likely.

    `actors`: rows of Ray's actor table. Whatever else it is, it keeps Ray from removing that node.
    """
    return {
        row["Address"]["NodeID"]
        for row in actors
        if row["State"] != DEAD and row["ActorClassName"] not in COMPANIONS
    }


def has_refuge(
    extents: int, deletes: int, *, others: Collection[str], takers: Collection[str], s3_is_up: bool
) -> bool:
    """Return whether there is another place for so many extents, and no deletion left to do.

    `deletes`: those pending here, which no other node knows of. `others`: live nodes; `takers`: those with a
    replica and tiers. The last node stays, whatever S3 has: the next replica starts on it.
    """
    return bool(others) and deletes == 0 and (extents == 0 or s3_is_up or bool(takers))


def is_worth_another(before: Mapping[str, int], after: Mapping[str, int]) -> bool:
    """Return whether to drain again: some extents were saved and some ran out of time.

    `before`, `after`: extents by outcome, in total.
    """

    def gained(*outcomes: str) -> int:
        return sum(after.get(outcome, 0) - before.get(outcome, 0) for outcome in outcomes)

    return gained("left") > 0 and gained(SHARED_TIER, "peer") > 0


DEADLINE_SHARE = 0.9
"""Share of the time left that goes to saving blocks, because the last ones need time to arrive."""


class DrainNotice:
    """Decides from the cluster's drain notices whether this node goes away, and when. Pure.

    `drain_s`: how long a drain may take if the notice has no deadline.
    """

    def __init__(self, node_id: str, drain_s: float) -> None:
        self._node_id = node_id
        self._drain_s = drain_s
        self.is_draining = False

    def heard(self, deadlines_ms: Mapping[str, int], now_unix_s: float) -> float | None:
        """Return the seconds for a drain that is to begin now, or None if none is to begin.

        `deadlines_ms`: draining nodes -> Unix milliseconds, 0: none. A notice that was withdrawn may come
        again.
        """
        was_draining, self.is_draining = self.is_draining, self._node_id in deadlines_ms
        if not self.is_draining or was_draining:
            return None
        deadline_ms = deadlines_ms[self._node_id]
        if deadline_ms <= 0:
            return self._drain_s
        return max(0.0, (deadline_ms / 1000 - now_unix_s) * DEADLINE_SHARE)


def takers(node_id: str, alive: Collection[str], draining: Collection[str]) -> tuple[str, ...]:
    """Return the nodes to push blocks to, in an order that depends on the giver, to spread the load."""
    others = sorted(node for node in alive if node != node_id and node not in draining)
    turn = int(node_id[:8], 16) % len(others) if others and _is_hex(node_id[:8]) else 0
    return tuple(others[turn:] + others[:turn])


def _is_hex(text: str) -> bool:
    return bool(text) and all(letter in "0123456789abcdef" for letter in text.lower())
