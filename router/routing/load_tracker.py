"""Tracks the load of the replicas as one ingress knows it. Pure.

A replica's queue is the prompts sent to it that it has not reported as computed yet. Prompts are priced
when they are routed, and the price is scaled by the replica's pace: how much longer than priced its prompts
have taken lately. Load prices per token are learned from receipts. `BOOK` is shared by the router and the
client of one process, which Serve creates independently.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from time import monotonic

from cache_tiers.pricing import UNKNOWN_PREFILL, PrefillPrice
from replicas.messages import Receipt
from router.routing.score import LoadPrice, Outcome, Ranking, ReplicaView, RoutingRequest, Way, rank

SUSPECT_S = 20.0
"""A replica that lost an answer is avoided for this long while others can serve: by then Serve has found out
whether it lives."""
HEAD_LEFT_MIN = 0.2
"""Share of its predicted time that an overdue prompt at the head of the queue is assumed to still need."""
PACE_RATE, PACE_MIN, PACE_MAX = 0.3, 0.2, 10.0
"""Learning rate of a replica's pace, and the pace's bounds: other work slows prompts down, and several may be
computed in one step."""
PACED_S_MIN = 0.02  # shorter prompts say nothing about the pace
LOAD_RATE = 0.2  # learning rate of load prices
LOAD_TOKENS_MIN = 64
CHOSEN_MAX = 65_536
"""Calls whose ranking a router keeps while they are open."""
FIRST_LOADS: Mapping[Way, LoadPrice] = {
    "node": LoadPrice(5e-3, 20e-6),
    "peer": LoadPrice(20e-3, 60e-6),
}


@dataclass(slots=True)
class _Sent:
    """A request sent to a replica. `work_s`: its part of the queue until its prompt is computed."""

    replica: str
    work_s: float
    is_admitted: bool = False


class ReplicaLoadTracker:
    """Queues, paces and load prices of the replicas, from the view of one ingress.

    Thread-safe: Serve's router runs on an event loop of its own. `clock`: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self.nodes: dict[str, str] = {}
        """Replica -> node, of the replicas that exist now."""
        self.prefill: dict[str, PrefillPrice] = {}
        self.leaving_nodes: frozenset[str] = frozenset()
        self.outcomes: dict[Outcome, int] = {"home": 0, "moved": 0, "spilled": 0, "new": 0}
        self.loads: dict[Way, LoadPrice] = dict(FIRST_LOADS)
        self._clock = clock
        self._lock = threading.RLock()
        self._sent: dict[str, _Sent] = {}
        self._over: OrderedDict[str, None] = OrderedDict()  # the last CHOSEN_MAX calls that ended
        self._head_since_s: dict[str, float] = {}  # replica -> since when its first prompt is at the head
        self._pace: dict[str, float] = {}  # replica -> measured seconds per priced second
        self._suspects: dict[str, float] = {}  # replica -> end of suspicion

    def update_replicas(self, nodes: Mapping[str, str], prefill: Mapping[str, PrefillPrice]) -> None:
        """Replace the set of replicas, with their nodes and prefill prices."""
        with self._lock:
            self.nodes = dict(nodes)
            self.prefill = {name: price for name, price in prefill.items() if name in nodes}
            for states in (self._head_since_s, self._pace, self._suspects):
                for name in [name for name in states if name not in nodes]:
                    del states[name]
            for ticket in [ticket for ticket, sent in self._sent.items() if sent.replica not in nodes]:
                del self._sent[ticket]

    def views(self, names: Iterable[str], full: Callable[[str], bool]) -> list[ReplicaView]:
        """Return the current view of these replicas."""
        with self._lock:
            now_s = self._clock()
            open_of: dict[str, int] = {}
            queue_of: dict[str, list[float]] = {}
            for sent in self._sent.values():
                open_of[sent.replica] = open_of.get(sent.replica, 0) + 1
                if not sent.is_admitted:
                    queue_of.setdefault(sent.replica, []).append(sent.work_s)
            return [
                ReplicaView(
                    name=name,
                    node=self.nodes.get(name, ""),
                    wait_s=self._wait_s(name, queue_of.get(name, []), now_s),
                    open_requests=open_of.get(name, 0),
                    prefill=self.prefill.get(name, UNKNOWN_PREFILL),
                    is_full=full(name),
                    is_leaving=self.nodes.get(name) in self.leaving_nodes
                    or self._suspects.get(name, now_s) > now_s,
                )
                for name in names
            ]

    def rank(
        self,
        ask: RoutingRequest,
        views: Iterable[ReplicaView],
        *,
        affinity_penalty_s: float,
        load_bound_factor: float,
        has_tiers: bool = True,
    ) -> Ranking:
        """Rank the replicas with the learned load prices, see `score.rank`; without tiers there are none."""
        loads = self.loads if has_tiers else {}
        return rank(
            ask,
            list(views),
            loads,
            affinity_penalty_s=affinity_penalty_s,
            load_bound_factor=load_bound_factor,
        )

    def routed(self, ticket: str, replica: str, work_s: float, outcome: Outcome | None) -> None:
        """Record that a call was routed to `replica`. `work_s`: see `score.missing_work_s`."""
        with self._lock:
            if ticket in self._over:
                return  # the caller gave up while Serve was choosing
            self._drop(ticket)
            if self._head(replica) is None:
                self._head_since_s[replica] = self._clock()
            self._sent[ticket] = _Sent(replica, work_s)
            if outcome is not None:
                self.outcomes[outcome] += 1

    def admitted(self, ticket: str, receipt: Receipt) -> None:
        """Record that the call's prompt is computed: it leaves the queue."""
        with self._lock:
            sent = self._sent.get(ticket)
            if sent is None:
                return
            self._suspects.pop(sent.replica, None)
            if not sent.is_admitted:
                now_s, is_head = self._clock(), self._head(sent.replica) is sent
                sent.is_admitted = True
                if is_head:
                    self._learn_pace(sent, now_s - self._head_since_s.get(sent.replica, now_s))
                    self._head_since_s[sent.replica] = now_s
            self._learn(receipt)

    def ended(self, ticket: str) -> None:
        """Record that a call has ended, in whatever way. Does nothing if the call is unknown."""
        with self._lock:
            self._drop(ticket)
            self._over[ticket] = None
            while len(self._over) > CHOSEN_MAX:
                self._over.popitem(last=False)

    def failed(self, ticket: str) -> None:
        """Mark the call's replica as suspect: it lost the call or is silent."""
        with self._lock:
            sent = self._sent.get(ticket)
            if sent is not None:
                self._suspects[sent.replica] = self._clock() + SUSPECT_S

    def replica_of(self, ticket: str) -> str:
        """Return the replica a request was sent to; empty if unknown."""
        with self._lock:
            sent = self._sent.get(ticket)
            return "" if sent is None else sent.replica

    def check_integrity(self) -> None:
        """Raise `AssertionError` if the state is inconsistent."""
        with self._lock:
            assert all(sent.work_s >= 0 for sent in self._sent.values()), "work of less than nothing"
            assert all(PACE_MIN <= pace <= PACE_MAX for pace in self._pace.values()), "a pace out of bounds"

    def _drop(self, ticket: str) -> None:
        sent = self._sent.get(ticket)
        if sent is not None and self._head(sent.replica) is sent:
            self._head_since_s[sent.replica] = self._clock()
        self._sent.pop(ticket, None)

    def _head(self, replica: str) -> _Sent | None:
        """Return the first of a replica's prompts that is not computed yet."""
        for sent in self._sent.values():
            if sent.replica == replica and not sent.is_admitted:
                return sent
        return None

    def _wait_s(self, replica: str, queue: list[float], now_s: float) -> float:
        """Return the seconds a replica needs for a queue of prompts, by their prices and its pace."""
        if not queue:
            return 0.0
        pace = self._pace.get(replica, 1.0)
        head_s = pace * queue[0]
        gone_s = now_s - self._head_since_s.get(replica, now_s)
        return max(head_s - gone_s, HEAD_LEFT_MIN * head_s) + pace * sum(queue[1:])

    def _learn_pace(self, sent: _Sent, took_s: float) -> None:
        if sent.work_s < PACED_S_MIN:
            return
        seen = min(max(took_s / sent.work_s, PACE_MIN), PACE_MAX)
        old = self._pace.get(sent.replica, 1.0)
        self._pace[sent.replica] = old + PACE_RATE * (seen - old)

    def _learn(self, receipt: Receipt) -> None:
        peer = receipt.tokens.get("peer", 0)
        local = sum(receipt.tokens.get(source, 0) for source in ("cpu", "nvme", "s3"))
        loaded = peer + local
        if receipt.load_s <= 0 or loaded < LOAD_TOKENS_MIN:
            return
        way: Way = "peer" if peer > local else "node"
        old = self.loads[way]
        per_token = max(0.0, receipt.load_s - old.latency_s) / loaded
        learned = old.seconds_per_token + LOAD_RATE * (per_token - old.seconds_per_token)
        self.loads[way] = LoadPrice(old.latency_s, learned)


BOOK = ReplicaLoadTracker()
"""The tracker of this process. Always access it through the module: Serve pickles the router's class with its
globals."""
