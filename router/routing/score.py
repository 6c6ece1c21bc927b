"""Ranks replicas by the expected time to first token. Pure.

Cost: `queue wait + missing work + a term for leaving home`. Missing work is the time to load or to compute
the prompt's tokens there, whichever is less. If the session has no home, its rendezvous hash takes the
home's place, so that ingresses without information decide alike. A bound on the load keeps sessions from
piling up on one replica (Mirrokni et al., "Consistent Hashing with Bounded Loads", 2018).
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from samovar.cache_tiers.pricing import PrefillPrice


class Rendezvous:
    """Orders members by a key: its home first, then the successive fallbacks.

    Every caller computes the same order from the session key and the replicas' names, without shared state;
    a replica that joins or leaves moves only its own share of the sessions (Thaler and Ravishankar, "Using
    name-based mappings to increase hit rates", 1998). The order among some of the members is that among all.
    """

    def __init__(self, members: Iterable[str]) -> None:
        self._members = sorted(members)
        self._digests = np.array([_digest(member) for member in self._members], np.uint64)

    def first(self, key: str, count: int) -> list[str]:
        """Return the first `count` members. A few operations on an array of all: 20 us for a thousand."""
        weights = _mixed(self._digests ^ np.uint64(_digest(key)))
        if count < len(weights):
            best = np.argpartition(weights, len(weights) - count)[len(weights) - count :]
        else:
            best = np.arange(len(weights))
        order = best[np.lexsort((best, weights[best]))][::-1]
        return [self._members[at] for at in order]


def rendezvous_order(key: str, members: Iterable[str]) -> list[str]:
    """Return all members in rendezvous order of `key`. For a few: an array costs more than they do."""
    own = _digest(key)
    return sorted(members, key=lambda name: (_mixed(_member_digest(name) ^ own), name), reverse=True)


def _digest(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


_member_digest = functools.lru_cache(8192)(_digest)
"""Of replicas' names, which come again with every request."""


_UINT64 = 2**64 - 1


def _mixed(values: Any) -> Any:
    """Return a hash of a number, or of each of an array of uint64.

    SplitMix64's finaliser (Steele et al., "Fast splittable PRNGs", 2014).
    """
    values = (values ^ (values >> 30)) * 0xBF58476D1CE4E5B9 & _UINT64
    values = (values ^ (values >> 27)) * 0x94D049BB133111EB & _UINT64
    return values ^ (values >> 31)


Outcome = Literal["home", "moved", "spilled", "new"]
"""How a session came to its replica: home; moved: its home is lost or leaving; spilled: another replica was
quicker; new: it has no home yet."""

Way = Literal["node", "peer"]


@dataclass(frozen=True, slots=True)
class LoadPrice:
    """Price of loading tokens into a pool: from the replica's own node, or from a peer."""

    latency_s: float
    seconds_per_token: float

    def seconds(self, tokens: int) -> float:
        return self.latency_s + tokens * self.seconds_per_token


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """The router's current view of a replica.

    `wait_s`: until it could start another prompt. `open_requests`: its open requests from all callers.
    `is_full`: it accepts no more. `is_leaving`: its node is draining, or it does not answer.
    """

    name: str
    node: str
    wait_s: float
    open_requests: int
    prefill: PrefillPrice
    is_full: bool = False
    is_leaving: bool = False


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """What the router knows of a request.

    `cached_tokens`: tokens of the prompt, out of `prompt_tokens`, that `home` and `nodes` hold.
    """

    session: str
    prompt_tokens: int
    cached_tokens: int = 0
    home: str = ""
    nodes: tuple[str, ...] = ()
    avoid: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Ranking:
    """`names`: the ranked replicas, the best first. `outcomes` and `work_s` are by replica name."""

    names: tuple[str, ...]
    outcomes: Mapping[str, Outcome] = field(default_factory=dict)
    work_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Replicas that are not ranked, as others are better for certain, and the open requests of them all."""

    replicas: int
    open_requests: int


NOWHERE = Elsewhere(0, 0)


def rank(
    ask: RoutingRequest,
    views: Sequence[ReplicaView],
    loads: Mapping[Way, LoadPrice],
    *,
    affinity_penalty_s: float,
    load_bound_factor: float,
    elsewhere: Elsewhere = NOWHERE,
) -> Ranking:
    """Return all of `views` in the order in which they should be tried. O(n log n)."""
    by_name = {view.name: view for view in views}
    order = rendezvous_order(ask.session, by_name)
    usable = [name for name in order if not _is_last_resort(by_name[name], ask)]
    anchor = ask.home if ask.home in usable else (usable or order or [""])[0]
    bound = _bound(views, elsewhere, load_bound_factor)
    home = by_name.get(ask.home)
    work_s = {view.name: missing_work_s(ask, view, loads, home) for view in views}

    place_of = {name: place for place, name in enumerate(order)}

    def key(name: str) -> tuple[bool, bool, bool, float, int]:
        view = by_name[name]
        is_over = name != ask.home and view.open_requests + 1 > bound
        cost_s = view.wait_s + work_s[name] + (0.0 if name == anchor else affinity_penalty_s)
        last = _is_last_resort(view, ask)
        return last, view.is_full, is_over, cost_s, place_of[name]

    names = tuple(sorted(order, key=key))
    outcomes = {name: _outcome(name, ask, usable) for name in names}
    return Ranking(names, outcomes, work_s)


def missing_work_s(
    ask: RoutingRequest, view: ReplicaView, loads: Mapping[Way, LoadPrice], home: ReplicaView | None = None
) -> float:
    """Return the seconds from this replica's first step for the prompt until its first token.

    No replica is assumed to compute faster than `home`: prices differ by how busy a machine was when they
    were measured, and that is no reason to leave.
    """
    cached = min(max(ask.cached_tokens, 0), max(ask.prompt_tokens - 1, 0))

    def computing_s(new_tokens: int, context_tokens: int) -> float:
        return max(one.prefill.seconds(new_tokens, context_tokens) for one in (view, home or view))

    all_s = computing_s(max(1, ask.prompt_tokens), 0)
    if cached == 0:
        return all_s
    rest_s = computing_s(ask.prompt_tokens - cached, cached)
    if view.name == ask.home:
        return rest_s
    if view.node and view.node in ask.nodes:
        way: Way = "node"
    elif ask.nodes:
        way = "peer"
    else:
        return all_s
    price = loads.get(way)
    return all_s if price is None else min(all_s, price.seconds(cached) + rest_s)


def _is_last_resort(view: ReplicaView, ask: RoutingRequest) -> bool:
    return view.is_leaving or view.name in ask.avoid


def _bound(views: Sequence[ReplicaView], elsewhere: Elsewhere, load_bound_factor: float) -> float:
    total = sum(view.open_requests for view in views) + elsewhere.open_requests + 1
    return math.ceil(load_bound_factor * total / max(1, len(views) + elsewhere.replicas))


def _outcome(name: str, ask: RoutingRequest, usable: Sequence[str]) -> Outcome:
    if not ask.home and not ask.nodes:
        return "new"
    if name == ask.home:
        return "home"
    return "spilled" if ask.home in usable else "moved"
