"""The replicas as Serve's router knows them, where the ingress of the same process finds them. Pure.

`ROSTER` is shared by the router and the client of one process, which Serve creates independently, as
`load_tracker.BOOK` is.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from samovar.replicas.messages import GenerateRequest, ReplyTo
from samovar.router.routing import score
from samovar.router.routing.load_tracker import ReplicaLoadTracker

Replica = TypeVar("Replica")

OTHERS_MAX = 32
"""Of the replicas that are not ranked so many are tried, when all that are ranked are full."""


class FittingReplicas(Generic[Replica]):
    """Replicas that can serve a model, by name; made once for each set of replicas, not for each request."""

    def __init__(self, by_name: Mapping[str, Replica], rng: random.Random) -> None:
        self.by_name = by_name
        self.ring = score.Rendezvous(self.by_name)
        self._rng = rng
        self._in_turn = rng.sample(list(self.by_name), len(self.by_name))

    def others(self, ranked: Sequence[str]) -> list[Replica]:
        """Return some that are not ranked: from a place drawn by lot on, in an order of this process."""
        if len(ranked) == len(self._in_turn):
            return []
        at = self._rng.randrange(len(self._in_turn))
        some = (self._in_turn[at : at + OTHERS_MAX] + self._in_turn[:at])[:OTHERS_MAX]
        return [self.by_name[name] for name in some if name not in ranked]


@dataclass(frozen=True, slots=True)
class RankOptions:
    """See `RouterSettings`. `has_tiers`: other replicas than home can load blocks."""

    affinity_penalty_s: float = 0.05
    load_bound_factor: float = 1.25
    has_tiers: bool = True


def ranking(
    tracker: ReplicaLoadTracker,
    request: GenerateRequest,
    session: str,
    known: FittingReplicas[Replica],
    is_full: Callable[[str], bool],
    options: RankOptions,
) -> score.Ranking:
    """Return the order in which the replicas should be tried. Of many, only some."""
    ask = _ask(request, session)
    names = tracker.shortlist(ask, known.by_name, known.ring, is_full)
    return tracker.rank(
        ask,
        tracker.views(names, is_full),
        affinity_penalty_s=options.affinity_penalty_s,
        load_bound_factor=options.load_bound_factor,
        has_tiers=options.has_tiers,
        replicas=len(known.by_name),
    )


def _ask(request: GenerateRequest, session: str) -> score.RoutingRequest:
    route, resumed = request.route, request.resume
    nodes = tuple(dict.fromkeys((*((route.node,) if route.node else ()), *route.peers)))
    return score.RoutingRequest(
        session=session,
        prompt_tokens=len(request.prompt_token_ids) + (len(resumed.token_ids) if resumed else 0),
        cached_tokens=route.cached_tokens,
        home=route.home,
        nodes=nodes,
        avoid=frozenset(route.avoid),
    )


def serves(served: str, model: str) -> bool:
    """Return whether a replica has this model, or has not reported its model yet."""
    return not model or not served or served == model


@dataclass(frozen=True, slots=True)
class ListedReplica:
    """A running replica. `open_max`: requests that it may have open; `address`: None: Serve carries calls."""

    name: str
    model: str
    open_max: int
    address: ReplyTo | None


class Roster:
    """The running replicas, and the order in which an ingress tries them itself.

    `update` may be called by another thread than the rest: what it replaces is replaced at once.
    """

    def __init__(self, rng: random.Random | None = None) -> None:
        self.queued: set[str] = set()
        """Tickets of requests that Serve has not sent to a replica yet."""
        self._rng = rng or random.Random()
        self._replicas: tuple[ListedReplica, ...] = ()
        self._options = RankOptions()
        self._candidates: dict[str, FittingReplicas[ListedReplica]] = {}  # by model

    def update(self, replicas: Iterable[ListedReplica], options: RankOptions) -> None:
        """Replace the set of replicas."""
        self._replicas, self._options, self._candidates = tuple(replicas), options, {}

    def ranked(
        self, request: GenerateRequest, session: str, tracker: ReplicaLoadTracker
    ) -> tuple[list[ListedReplica], score.Ranking | None]:
        """Return the replicas in the order in which they should be tried; None: only one may be."""
        known = self._known(request.model)
        if request.route.only in known.by_name:
            return [known.by_name[request.route.only]], None
        if not known.by_name:
            return [], None

        def is_full(name: str) -> bool:
            return tracker.open_requests(name) >= known.by_name[name].open_max

        found = ranking(tracker, request, session, known, is_full, self._options)
        return [known.by_name[name] for name in found.names if not is_full(name)], found

    def _known(self, model: str) -> FittingReplicas[ListedReplica]:
        """Return the replicas that serve a model; all, if none does."""
        candidates = self._candidates
        known = candidates.get(model)
        if known is None:
            replicas = self._replicas
            fitting = [one for one in replicas if serves(one.model, model)] or replicas
            known = candidates[model] = FittingReplicas({one.name: one for one in fitting}, self._rng)
        return known


ROSTER = Roster()
"""The roster of this process. Always access it through the module, as `load_tracker.BOOK`."""
ROSTERS: dict[str, Roster] = {}
"""Of further models, as `load_tracker.BOOKS`: requests that wait for one model are in no other's way."""


def roster_of(further: str) -> Roster:
    """Return the roster of a further model's replicas; empty: of the first's."""
    return ROSTERS.setdefault(further, Roster()) if further else ROSTER
