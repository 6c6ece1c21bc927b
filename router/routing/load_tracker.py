"""Tracks the load of the replicas as one ingress knows it. Pure.

A replica's queue is the prompts sent to it that it has not reported as computed yet, and what it reports that
other ingresses have sent. Prompts are priced when they are routed, and the price is scaled by the replica's
pace: how much longer than priced its prompts have taken lately. Load prices per token are learned from
receipts. Of many replicas a few are ranked: the session's home, those beside its blocks, the first by its
hash, and the least loaded. `BOOK` is shared by the router and the client of one process, which Serve creates
independently.
"""

from __future__ import annotations

import heapq
import math
import random
import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from time import monotonic
from typing import get_args

from samovar.cache_tiers.blocks import PEER, TIERS
from samovar.cache_tiers.pricing import UNKNOWN_PREFILL, PrefillPrice, TierMeter
from samovar.replicas.messages import Receipt
from samovar.replicas.serving.ingress_loads import IngressLoad, others_load
from samovar.router.routing.score import (
    NOWHERE,
    Elsewhere,
    LoadPrice,
    Outcome,
    Ranking,
    Rendezvous,
    ReplicaView,
    RoutingRequest,
    Way,
    rank,
)

SUSPECT_S = 20.0
"""A replica that lost an answer is avoided for this long while others can serve: by then Serve has found out
whether it lives."""
HEAD_LEFT_MIN = 0.2
"""Share of its predicted time that an overdue prompt at the head of the queue is assumed to still need."""
PACE_RATE, PACE_MIN, PACE_MAX = 0.3, 0.2, 10.0
"""Learning rate of a replica's pace, and the pace's bounds: other work slows prompts down, and several may be
computed in one step."""
PACED_S_MIN = 0.02  # shorter prompts say nothing about the pace
LOAD_TOKENS_MIN = 64
EVEN_TOKENS = 256
"""See `TierMeter`: here a load is counted in tokens."""
RANKED_ALL_MAX = 16
"""Up to so many replicas all are ranked; of more, home and the best few for each reason to go elsewhere."""
BY_HASH, BESIDE_BLOCKS, LEAST_LOADED = 2, 3, 3
LOOKS_MAX = 16
"""Replicas looked at for one of these reasons: they may be full, leaving, or serve another model."""
CHOSEN_MAX = 65_536
"""Calls whose ranking a router keeps while they are open."""
OVER_MAX = 4096
"""Calls that ended last: one that is routed though its caller has left comes seconds later at most."""


@dataclass(slots=True)
class _Sent:
    """A request sent to a replica. `work_s`: its part of the queue until its prompt is computed."""

    replica: str
    work_s: float
    routed_s: float
    is_admitted: bool = False


@dataclass(slots=True)
class _ReplicaLoad:
    """The state of a replica. `work_s`: of its waiting prompts, as priced. `rank_no`: see `_LeastLoaded`."""

    waiting: dict[str, _Sent] = field(default_factory=dict)  # by ticket, in order of arrival
    work_s: float = 0.0
    open_requests: int = 0
    head_since_s: float = 0.0  # since when the first of `waiting` is the first
    pace: float = 1.0  # measured seconds per priced second
    suspect_until_s: float = -math.inf
    rank_no: int = 0
    others: IngressLoad = field(
        default_factory=IngressLoad
    )  # what other ingresses have sent, as it has reported
    others_no: int = 0  # number of that report
    others_since_s: float = -math.inf

    @property
    def head(self) -> _Sent | None:
        """Return the first prompt that is not computed yet."""
        return next(iter(self.waiting.values()), None)

    def wait_s(self, now_s: float) -> float:
        """Return the seconds that the waiting prompts need, by their prices and the pace.

        Of prompts from other ingresses what the replica has reported, less the time since.
        """
        return self._own_s(now_s) + max(0.0, self.pace * self.others.wait_s - (now_s - self.others_since_s))

    def _own_s(self, now_s: float) -> float:
        head = self.head
        if head is None:
            return 0.0
        head_s = self.pace * head.work_s
        gone_s = now_s - self.head_since_s
        behind_s = max(0.0, self.work_s - head.work_s)  # rounding may have lost the head in a larger sum
        return max(head_s - gone_s, HEAD_LEFT_MIN * head_s) + self.pace * behind_s

    def add(self, ticket: str, sent: _Sent, now_s: float) -> None:
        if not self.waiting:
            self.head_since_s = now_s
        self.waiting[ticket] = sent
        self.work_s += sent.work_s

    def remove(self, ticket: str, now_s: float) -> bool:
        """Remove a waiting prompt; return whether it was the first."""
        sent = self.waiting.get(ticket)
        if sent is None:
            return False
        is_head = self.head is sent
        del self.waiting[ticket]
        # Without rounding left over: of none, and otherwise never below nothing.
        self.work_s = max(0.0, self.work_s - sent.work_s) if self.waiting else 0.0
        if is_head:
            self.head_since_s = now_s
        return is_head


class _LeastLoaded:
    """Names of replicas by load, the least first, in a heap whose outdated entries are skipped.

    Those of equal load come in random order: several ingresses must not all choose the same.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._numbers = 0
        self._heap: list[tuple[float, int, float, int, str]] = []

    def changed(self, name: str, replica: _ReplicaLoad) -> None:
        """Take in a replica's load."""
        self._numbers += 1
        replica.rank_no = self._numbers
        others, rng = replica.others, self._rng
        work_s, opened = replica.work_s + others.wait_s, replica.open_requests + others.open_requests
        load = replica.pace * work_s, opened, rng.random()
        heapq.heappush(self._heap, (*load, replica.rank_no, name))

    def tidy(self, replicas: Mapping[str, _ReplicaLoad]) -> None:
        """Drop the outdated entries, once they are most."""
        if len(self._heap) > 4 * len(replicas) + LOOKS_MAX:
            self._heap = [entry for entry in self._heap if self._is_valid(entry, replicas)]
            heapq.heapify(self._heap)

    def first(
        self,
        count: int,
        replicas: Mapping[str, _ReplicaLoad],
        names: Collection[str],
        wanted: Callable[[str], bool],
    ) -> list[str]:
        """Return `count` of `names` that are wanted, or those there are among the first `LOOKS_MAX` of them.

        Those that are none of `names` serve another model: while one replaces another, they may be many.
        """
        found: list[str] = []
        seen: list[tuple[float, int, float, int, str]] = []
        looks = 0
        try:
            while self._heap and len(found) < count and looks < LOOKS_MAX:
                entry = heapq.heappop(self._heap)
                if not self._is_valid(entry, replicas):
                    continue
                seen.append(entry)
                if entry[-1] in names:
                    looks += 1
                    if wanted(entry[-1]):
                        found.append(entry[-1])
        finally:  # without its entry a replica would be found no more
            for entry in seen:
                heapq.heappush(self._heap, entry)
        return found

    @staticmethod
    def _is_valid(entry: tuple[float, int, float, int, str], replicas: Mapping[str, _ReplicaLoad]) -> bool:
        replica = replicas.get(entry[-1])
        return replica is not None and replica.rank_no == entry[3]


class ReplicaLoadTracker:
    """Queues, paces and load prices of the replicas, from the view of one ingress.

    Thread-safe: Serve's router runs on an event loop of its own. `clock`: monotonic seconds. `rng`: which of
    equally loaded replicas.
    """

    def __init__(self, clock: Callable[[], float] = monotonic, rng: random.Random | None = None) -> None:
        self.ingress = uuid.uuid4().hex
        """Names this ingress to the replicas, which tell each ingress what the others have sent."""
        self.nodes: dict[str, str] = {}
        """Replica -> node, of the replicas that exist now."""
        self.prefill: dict[str, PrefillPrice] = {}
        self.leaving_nodes: frozenset[str] = frozenset()
        self.outcomes: dict[Outcome, int] = {"home": 0, "moved": 0, "spilled": 0, "new": 0}
        self._clock = clock
        self._load_meters: dict[Way, TierMeter] = {
            way: TierMeter(clock=clock, even_bytes=EVEN_TOKENS) for way in get_args(Way)
        }
        self._lock = threading.RLock()
        self._sent: dict[str, _Sent] = {}
        self._others_open = 0  # requests of other ingresses at all replicas
        self._over: OrderedDict[str, None] = OrderedDict()  # the last OVER_MAX calls that ended
        self._replicas: dict[str, _ReplicaLoad] = {}
        self._on_node: dict[str, list[str]] = {}
        self._least_loaded = _LeastLoaded(rng or random.Random())

    def update_replicas(
        self,
        nodes: Mapping[str, str],
        prefill: Mapping[str, PrefillPrice],
        reports: Mapping[str, object] | None = None,
    ) -> None:
        """Replace the set of replicas, with their nodes, prefill prices and `IngressLoads.report`s."""
        with self._lock:
            self.nodes = dict(nodes)
            self.prefill = {name: price for name, price in prefill.items() if name in nodes}
            for name in [name for name in self._replicas if name not in nodes]:
                self._others_open -= self._replicas.pop(name).others.open_requests
            self._on_node = {}
            for name, node in nodes.items():
                self._on_node.setdefault(node, []).append(name)
                if name not in self._replicas:
                    self._changed(name, self._load_of(name))
            for ticket in [ticket for ticket, sent in self._sent.items() if sent.replica not in nodes]:
                del self._sent[ticket]
            for name, report in (reports or {}).items():
                if name in nodes:
                    self._take_report(name, report)

    def _take_report(self, name: str, report: object) -> None:
        number, others = others_load(report, self.ingress)
        known = self._load_of(name)
        if number and number != known.others_no:  # else it is an old one, in news of another replica
            self._others_open += others.open_requests - known.others.open_requests
            known.others, known.others_no, known.others_since_s = others, number, self._clock()
            self._changed(name, known)

    def shortlist(
        self, ask: RoutingRequest, names: Collection[str], ring: Rendezvous, full: Callable[[str], bool]
    ) -> list[str]:
        """Return the replicas of `names`, whose ring is `ring`, that may be best for a request.

        All, if there are no more than `RANKED_ALL_MAX`. O(log n), but for the ring's look at all hashes, and
        for less loaded replicas that are none of `names`.
        """
        if len(names) <= RANKED_ALL_MAX:
            return list(names)
        with self._lock:
            now_s = self._clock()

            def is_wanted(name: str) -> bool:
                return name in names and not (
                    name in ask.avoid or full(name) or self._is_leaving(name, now_s)
                )

            beside = [name for node in ask.nodes for name in self._on_node.get(node, [])[:LOOKS_MAX]]
            beside = heapq.nsmallest(
                BESIDE_BLOCKS, filter(is_wanted, beside), key=lambda name: self._load_of(name).wait_s(now_s)
            )
            by_hash = ring.first(ask.session, LOOKS_MAX)
            chosen = [
                *beside,
                *islice(filter(is_wanted, by_hash), BY_HASH),
                *self._least_loaded.first(LEAST_LOADED, self._replicas, names, is_wanted),
            ]
            if ask.home in names:
                chosen.append(ask.home)
            # If all that were looked at are full or leaving, one has to serve it all the same.
            return list(dict.fromkeys(chosen if len(chosen) > 1 else [*chosen, *by_hash[:BY_HASH]]))

    def views(self, names: Iterable[str], full: Callable[[str], bool]) -> list[ReplicaView]:
        """Return the current view of these replicas."""
        with self._lock:
            now_s = self._clock()
            found = []
            for name in names:
                known = self._replicas.get(name) or _ReplicaLoad()
                found.append(
                    ReplicaView(
                        name=name,
                        node=self.nodes.get(name, ""),
                        wait_s=known.wait_s(now_s),
                        open_requests=known.open_requests + known.others.open_requests,
                        prefill=self.prefill.get(name, UNKNOWN_PREFILL),
                        is_full=full(name),
                        is_leaving=self._is_leaving(name, now_s),
                    )
                )
            return found

    def rank(
        self,
        ask: RoutingRequest,
        views: Sequence[ReplicaView],
        *,
        affinity_penalty_s: float,
        load_bound_factor: float,
        has_tiers: bool = True,
        replicas: int = 0,
    ) -> Ranking:
        """Rank the replicas with the learned load prices, see `score.rank`; without tiers there are none.

        `replicas`: how many there are, where `views` are not all.
        """
        loads = self.loads() if has_tiers else {}
        elsewhere = NOWHERE
        if replicas > len(views):
            everywhere = len(self._sent) + self._others_open
            open_requests = everywhere - sum(view.open_requests for view in views)
            elsewhere = Elsewhere(replicas - len(views), max(0, open_requests))
        return rank(
            ask,
            views,
            loads,
            affinity_penalty_s=affinity_penalty_s,
            load_bound_factor=load_bound_factor,
            elsewhere=elsewhere,
        )

    def loads(self) -> dict[Way, LoadPrice]:
        """Return what loading takes by each way, as receipts tell; before the first of a way it is free."""
        prices = {way: meter.price() for way, meter in self._load_meters.items()}
        return {way: LoadPrice(price.latency_s, 1 / price.bytes_per_s) for way, price in prices.items()}

    def routed(self, ticket: str, replica: str, work_s: float, outcome: Outcome | None) -> None:
        """Record that a call was routed to `replica`. `work_s`: see `score.missing_work_s`."""
        with self._lock:
            if ticket in self._over:
                return  # the caller gave up while Serve was choosing
            self._drop(ticket)
            sent = self._sent[ticket] = _Sent(replica, work_s, self._clock())
            known = self._load_of(replica)
            known.open_requests += 1
            known.add(ticket, sent, sent.routed_s)
            self._changed(replica, known)
            if outcome is not None:
                self.outcomes[outcome] += 1

    def admitted(self, ticket: str, receipt: Receipt) -> None:
        """Record that the call's prompt is computed: it leaves the queue."""
        with self._lock:
            sent = self._sent.get(ticket)
            if sent is None:
                return
            known = self._load_of(sent.replica)
            known.suspect_until_s = -math.inf
            if not sent.is_admitted:
                now_s, since_s = self._clock(), known.head_since_s
                sent.is_admitted = True
                if known.remove(ticket, now_s):
                    _learn_pace(known, sent, now_s - since_s)
                self._changed(sent.replica, known)
            self._learn(receipt)

    def ended(self, ticket: str) -> None:
        """Record that a call has ended, in whatever way. Does nothing if the call is unknown."""
        with self._lock:
            self._drop(ticket)
            self._over[ticket] = None
            while len(self._over) > OVER_MAX:
                self._over.popitem(last=False)

    def failed(self, ticket: str) -> None:
        """Mark the call's replica as suspect: it lost the call or is silent."""
        with self._lock:
            sent = self._sent.get(ticket)
            if sent is not None:
                self._load_of(sent.replica).suspect_until_s = self._clock() + SUSPECT_S

    def counted(self, outcome: Outcome | None) -> None:
        """Count how a session came to its replica, of a call that `routed` has recorded without it."""
        if outcome is not None:
            with self._lock:
                self.outcomes[outcome] += 1

    def open_requests(self, name: str) -> int:
        """Return how many requests a replica has open, of all ingresses, as far as is known."""
        with self._lock:
            known = self._replicas.get(name)
            return 0 if known is None else known.open_requests + known.others.open_requests

    def replica_of(self, ticket: str) -> str:
        """Return the replica a request was sent to; empty if unknown."""
        with self._lock:
            sent = self._sent.get(ticket)
            return "" if sent is None else sent.replica

    def routed_s(self, ticket: str) -> float | None:
        """Return when a request was sent to its replica, by the tracker's clock; None if unknown."""
        with self._lock:
            sent = self._sent.get(ticket)
            return None if sent is None else sent.routed_s

    def check_integrity(self) -> None:
        """Raise `AssertionError` if the state is inconsistent."""
        with self._lock:
            opened = dict.fromkeys(self._replicas, 0)
            waiting: dict[str, list[str]] = {name: [] for name in self._replicas}
            for ticket, sent in self._sent.items():
                assert sent.work_s >= 0, "work of less than nothing"
                opened[sent.replica] += 1
                if not sent.is_admitted:
                    waiting[sent.replica].append(ticket)
            others = sum(known.others.open_requests for known in self._replicas.values())
            assert self._others_open == others, "the sum of others' requests is another"
            for name, known in self._replicas.items():
                assert PACE_MIN <= known.pace <= PACE_MAX, "a pace out of bounds"
                assert known.open_requests == opened[name], f"{name} has not so many open requests"
                assert sorted(known.waiting) == sorted(waiting[name]), f"{name} has another queue"
                total_s = sum(sent.work_s for sent in known.waiting.values())
                assert math.isclose(known.work_s, total_s, abs_tol=1e-6), f"{name} has another load"

    def _load_of(self, name: str) -> _ReplicaLoad:
        known = self._replicas.get(name)
        if known is None:
            known = self._replicas[name] = _ReplicaLoad()
        return known

    def _changed(self, name: str, replica: _ReplicaLoad) -> None:
        self._least_loaded.changed(name, replica)
        self._least_loaded.tidy(self._replicas)

    def _is_leaving(self, name: str, now_s: float) -> bool:
        known = self._replicas.get(name)
        is_suspect = known is not None and known.suspect_until_s > now_s
        return is_suspect or self.nodes.get(name) in self.leaving_nodes

    def _drop(self, ticket: str) -> None:
        sent = self._sent.pop(ticket, None)
        if sent is not None:
            known = self._load_of(sent.replica)
            known.open_requests -= 1
            known.remove(ticket, self._clock())
            self._changed(sent.replica, known)

    def _learn(self, receipt: Receipt) -> None:
        peer = receipt.tokens.get(PEER, 0)
        local = sum(receipt.tokens.get(source, 0) for source in TIERS)
        loaded = peer + local
        if receipt.load_s <= 0 or loaded < LOAD_TOKENS_MIN:
            return
        way: Way = "peer" if peer > local else "node"
        self._load_meters[way].observe(loaded, receipt.load_s)


def _learn_pace(replica: _ReplicaLoad, sent: _Sent, took_s: float) -> None:
    if sent.work_s < PACED_S_MIN:
        return
    seen = min(max(took_s / sent.work_s, PACE_MIN), PACE_MAX)
    replica.pace += PACE_RATE * (seen - replica.pace)


BOOK = ReplicaLoadTracker()
"""The tracker of this process. Always access it through the module: Serve pickles the router's class with its
globals."""
BOOKS: dict[str, ReplicaLoadTracker] = {}
"""Of further models, by their keys in `models`: their replicas, paces and prices of loads are others."""


def book_of(further: str) -> ReplicaLoadTracker:
    """Return the tracker of a further model's replicas; empty: of the first's."""
    if not further:
        return BOOK
    book = BOOKS.setdefault(further, ReplicaLoadTracker())
    book.ingress = BOOK.ingress
    return book
