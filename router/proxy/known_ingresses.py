"""The ingresses that a proxy knows, and the order in which a request tries them. Pure.

`KNOWN` is shared by Serve's request router of the ingresses, which learns of them in a thread of its own,
and the proxy's guard, which Serve creates independently.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from samovar.replicas.messages import ReplyTo
from samovar.router.routing import Rendezvous

ADDRESS = "samovar_calls"
"""Where an ingress takes calls, in what it tells Serve of itself."""
BY_HASH = 3
"""Ingresses tried in the order of a session's hash; all others come after them."""


@dataclass(frozen=True, slots=True)
class ListedIngress:
    """An ingress, the node it is on, and where it takes calls; None: Serve carries its requests."""

    name: str
    node: str
    address: ReplyTo | None


def by_session(session: str, names: Sequence[str], ring: Rendezvous) -> list[list[str]]:
    """Return the ingresses in the order in which a session's request tries them, in groups of equals."""
    first = ring.first(session, BY_HASH)
    others = [name for name in names if name not in first]
    return [*([name] for name in first), *([others] if others else [])]


class KnownIngresses:
    """The ingresses of one deployment, as one proxy knows them.

    `update` may be called by another thread than the rest.
    """

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()
        self._known: tuple[dict[str, ListedIngress], list[ListedIngress], Rendezvous] = (
            {},
            [],
            Rendezvous([]),
        )
        self._open: Counter[str] = Counter()

    def update(self, ingresses: Sequence[ListedIngress], node: str) -> None:
        """Take in which ingresses there are; `node`: the proxy's own."""
        by_name = {ingress.name: ingress for ingress in ingresses}
        near = [ingress for ingress in ingresses if ingress.node == node] or list(ingresses)
        self._known = by_name, near, Rendezvous(sorted(by_name))

    def order(self, session: str) -> list[ListedIngress]:
        """Return the ingresses, the best first: a session's own, else the less busy of two on this node."""
        by_name, near, ring = self._known
        if session and len(by_name) > 1:
            groups = by_session(session, list(by_name), ring)
            return [by_name[name] for group in groups for name in group]
        two = near if len(near) <= 2 else self._rng.sample(near, 2)
        first = sorted(two, key=lambda ingress: self._open[ingress.name])
        return [*first, *(ingress for ingress in by_name.values() if ingress not in first)]

    @contextmanager
    def busy(self, ingress: ListedIngress) -> Iterator[None]:
        """Count a request of this proxy that is open at an ingress."""
        self._open[ingress.name] += 1
        try:
            yield
        finally:
            self._open[ingress.name] -= 1
            if not self._open[ingress.name]:
                del self._open[ingress.name]


KNOWN: dict[Hashable, KnownIngresses] = {}
"""By deployment, as Serve names it."""


def learn(
    deployment: Hashable,
    ingresses: Iterable[tuple[str, str | None, Mapping[str, Any]]],
    node: str | None,
) -> None:
    """Take in the ingresses of a deployment: names, nodes, and what they told Serve. `node`: this one."""
    known = [
        ListedIngress(name, there or "", ReplyTo.of(told.get(ADDRESS))) for name, there, told in ingresses
    ]
    KNOWN.setdefault(deployment, KnownIngresses()).update(known, node or "")
