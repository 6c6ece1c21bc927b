"""What one ingress knows of its replicas' load: what it has sent them and what has not begun yet. Pure.

The queue is kept as a time at which a replica will be through with the prompts sent to it: priced when they
are routed, corrected by what replicas say when a prompt is computed. Also learns what loading tokens takes,
from receipts. Knows nothing of Ray; `BOOK` is shared by the router and the client of one process, which
Serve creates far apart.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from time import monotonic

from cache_tiers.cost import UNKNOWN_PREFILL, PrefillPrice
from replicas.messages import Receipt
from router.score import Ask, LoadPrice, Outcome, Ranking, ReplicaView, Way, rank

SUSPECT_S = 20.0
"""A replica that lost an answer is not chosen for so long while others can serve: by then Serve has found
out whether it lives."""
WAITING_S_MIN = 0.01  # a prompt that is later than predicted is still in front of the next one
LOAD_RATE = 0.2  # how fast load prices follow what is measured
LOAD_TOKENS_MIN = 64
CHOSEN_MAX = 65_536
"""Calls whose ranking a router remembers while they are open."""
FIRST_LOADS: Mapping[Way, LoadPrice] = {
    "node": LoadPrice(5e-3, 20e-6),
    "peer": LoadPrice(20e-3, 60e-6),
}


@dataclass(slots=True)
class _Sent:
    """A request on a replica. `work_s`: what it adds to the queue until its prompt is computed."""

    replica: str
    work_s: float
    is_admitted: bool = False


class LoadBook:
    """`clock`: monotonic seconds. Thread-safe: Serve's router runs on an event loop of its own."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self.nodes: dict[str, str] = {}
        """Replica -> node, of the replicas that are there now."""
        self.prefill: dict[str, PrefillPrice] = {}
        self.leaving_nodes: frozenset[str] = frozenset()
        self.outcomes: dict[Outcome, int] = {"home": 0, "moved": 0, "spilled": 0, "new": 0}
        self.loads: dict[Way, LoadPrice] = dict(FIRST_LOADS)
        self._clock = clock
        self._lock = threading.RLock()
        self._sent: dict[str, _Sent] = {}
        self._through_s: dict[str, float] = {}  # replica -> when its queue will be empty
        self._suspects: dict[str, float] = {}  # replica -> until when

    def saw(self, nodes: Mapping[str, str], prefill: Mapping[str, PrefillPrice]) -> None:
        """The replicas there are, their nodes and what they say prefill takes."""
        with self._lock:
            self.nodes = dict(nodes)
            self.prefill = {name: price for name, price in prefill.items() if name in nodes}
            for books in (self._through_s, self._suspects):
                for name in [name for name in books if name not in nodes]:
                    del books[name]

    def views(self, names: Iterable[str], full: Callable[[str], bool]) -> list[ReplicaView]:
        """How these replicas look now."""
        with self._lock:
            now_s = self._clock()
            open_of: dict[str, int] = {}
            waiting_of: dict[str, int] = {}
            for sent in self._sent.values():
                open_of[sent.replica] = open_of.get(sent.replica, 0) + 1
                waiting_of[sent.replica] = waiting_of.get(sent.replica, 0) + (not sent.is_admitted)
            return [
                ReplicaView(
                    name=name,
                    node=self.nodes.get(name, ""),
                    wait_s=max(
                        self._through_s.get(name, 0.0) - now_s, waiting_of.get(name, 0) * WAITING_S_MIN
                    ),
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
        ask: Ask,
        views: Iterable[ReplicaView],
        *,
        leave_home_s: float,
        spill_factor: float,
        has_tiers: bool = True,
    ) -> Ranking:
        """See `score.rank`; the load prices are those learned, and without tiers there are none."""
        loads = self.loads if has_tiers else {}
        return rank(ask, list(views), loads, leave_home_s=leave_home_s, spill_factor=spill_factor)

    def routed(self, ticket: str, replica: str, work_s: float, outcome: Outcome | None) -> None:
        """The call is on its way there; `work_s`: see `score.missing_work_s`."""
        with self._lock:
            self.ended(ticket)
            self._sent[ticket] = _Sent(replica, work_s)
            self._through_s[replica] = max(self._clock(), self._through_s.get(replica, 0.0)) + work_s
            if outcome is not None:
                self.outcomes[outcome] += 1

    def admitted(self, ticket: str, receipt: Receipt) -> None:
        """Its prompt is computed: what waits behind it is all that is left of the queue."""
        with self._lock:
            sent = self._sent.get(ticket)
            if sent is None:
                return
            self._suspects.pop(sent.replica, None)
            if not sent.is_admitted:
                sent.is_admitted = True
                self._requeue(sent.replica)
            self._learn(receipt)

    def ended(self, ticket: str) -> None:
        """It is over, however it ended. Nothing when it is not known."""
        with self._lock:
            sent = self._sent.pop(ticket, None)
            if sent is not None and not sent.is_admitted:
                self._requeue(sent.replica)

    def failed(self, ticket: str) -> None:
        """The replica that this call went to has lost it, or does not say a word."""
        with self._lock:
            sent = self._sent.get(ticket)
            if sent is not None:
                self._suspects[sent.replica] = self._clock() + SUSPECT_S

    def replica_of(self, ticket: str) -> str:
        """Where a request was sent; empty when that is not known."""
        with self._lock:
            sent = self._sent.get(ticket)
            return "" if sent is None else sent.replica

    def check_integrity(self) -> None:
        """Raises AssertionError when the books are wrong; when nothing is open, also that nothing is left."""
        with self._lock:
            assert all(sent.work_s >= 0 for sent in self._sent.values()), "work of less than nothing"
            if not any(not sent.is_admitted for sent in self._sent.values()):
                now_s = self._clock()
                left = {name for name, through_s in self._through_s.items() if through_s > now_s}
                assert not left, f"nothing waits, and {sorted(left)} have a queue"

    def _requeue(self, replica: str) -> None:
        waiting_s = sum(
            sent.work_s for sent in self._sent.values() if sent.replica == replica and not sent.is_admitted
        )
        self._through_s[replica] = (
            min(self._through_s.get(replica, 0.0), self._clock() + waiting_s) if waiting_s else self._clock()
        )

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


BOOK = LoadBook()
"""Of this process. Always reached through the module: Serve pickles the router's class with its globals."""
