"""Other nodes as seen from this one: the calls to them, and the health of each. No Ray, no NIXL.

`PeerCalls` is what a node can request from another; `PeerTable` keeps a breaker and counters for each.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from samovar.cache_tiers.blocks import Bytes
from samovar.cache_tiers.media import Breaker
from samovar.cache_tiers.messages import (
    ExtentRequest,
    FetchFailed,
    Lookup,
    LookupResult,
    PeerStats,
    PushRequest,
)
from samovar.cache_tiers.transport.link import Export, LinkDown
from samovar.configs.sections import PeerSettings

logger = logging.getLogger(__name__)

Way: TypeAlias = str
"""How a record comes from a node: `nixl`, `tls`, `ray`, or a shared tier's name."""

PEERS_ASKED_MAX = 2
"""Nodes waited for in one lookup, while the request waits: one that is not there takes no time."""

PEERS_KNOWN_MAX = 256
"""Nodes remembered; above that, the one unheard of the longest is forgotten."""

OPEN_S_TIMES_MAX = 30
"""Limit of a peer's breaker's open time, as a multiple of its first open time."""


class PeerError(Exception):
    """The peer did not answer, or could not."""


class PeerLost(PeerError):
    """The node does not exist, or no longer."""


class PeerLate(PeerError):
    """The peer did not answer within the time limit."""


class PeerCalls(Protocol):
    """Calls to other nodes. Thread-safe; each ends within `timeout_s` and raises only `PeerError`."""

    def lookup(self, node: str, lookup: Lookup, timeout_s: float) -> LookupResult: ...

    def export(self, node: str, ask: ExtentRequest, timeout_s: float) -> Export | FetchFailed:
        """Have the peer share the whole record over its link."""
        ...

    def release(self, node: str, export: Export) -> None:
        """Release an export. Does not wait, never raises: what is not released expires."""
        ...

    def read(self, node: str, ask: ExtentRequest, timeout_s: float) -> Bytes | FetchFailed:
        """Read the whole record by Ray's own object transfer, unverified."""
        ...

    def check(self, node: str, ask: ExtentRequest) -> None:
        """Tell the peer to check this extent: it looks wrong. Does not wait, never raises."""
        ...

    def learned(self, node: str, timeout_s: float) -> bytes:
        """Return what the peer has learned of who comes back (`learner.encode`); empty: too little."""
        ...

    def take(self, node: str, take: PushRequest, timeout_s: float) -> str:
        """Tell the peer to take an extent; return taken | held | failed:REASON."""
        ...


class PeerLink(Protocol):
    """What is used of `link.NixlLink` and `tls_link.TlsLink`; see there."""

    def share(self, data: Bytes) -> Export | None: ...

    def bring(self, export: Export, deadline_s: float) -> Bytes | None: ...

    def release(self, generation: int) -> None: ...

    def close(self) -> None: ...

    def check_integrity(self) -> None: ...


@dataclass(slots=True)
class _PeerHealth:
    """`breaker`: of the node as such; `link_breaker`: only of the link to it."""

    breaker: Breaker
    link_breaker: Breaker
    pulls: Counter[str] = field(default_factory=Counter)
    nbytes: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=dict)
    failures: Counter[str] = field(default_factory=Counter)
    bad: Counter[str] = field(default_factory=Counter)


def _allows(breaker: Breaker, trials: list[Breaker] | None) -> bool:
    is_allowed = breaker.allows()
    if is_allowed and trials is not None and breaker.state == "half-open":
        trials.append(breaker)
    return is_allowed


class PeerTable:
    """A breaker and counters per peer. Not thread-safe: the caller locks."""

    def __init__(self, settings: PeerSettings, clock: Callable[[], float]) -> None:
        self._settings = settings
        self._clock = clock
        self._peers: dict[str, _PeerHealth] = {}  # longest unheard of first

    def allows(self, node: str, trials: list[Breaker] | None = None) -> bool:
        """Return whether it may be called now. If so, report `succeeded` or `failed`.

        `trials`: gets the breaker if that call is its trial; who does not make it gives it back (`untried`).
        """
        return _allows(self._of(node).breaker, trials)

    def succeeded(self, node: str) -> None:
        self._of(node).breaker.succeeded()

    def failed(self, node: str, what: str) -> None:
        peer = self._of(node)
        peer.breaker.failed()
        peer.failures[what] += 1

    def allows_link(self, node: str, trials: list[Breaker] | None = None) -> bool:
        """Return whether the link may be tried. If so, report `link_succeeded` or `link_failed`.

        `trials`: as in `allows`.
        """
        return _allows(self._of(node).link_breaker, trials)

    def link_succeeded(self, node: str) -> None:
        self._of(node).link_breaker.succeeded()

    def link_failed(self, node: str, what: str) -> None:
        peer = self._of(node)
        peer.link_breaker.failed()
        peer.failures[what] += 1

    def could_not(self, node: str, what: str) -> None:
        """Count an answer that it does not have it, or has no room: not a failure of the node."""
        self._of(node).failures[what] += 1

    def bad(self, node: str, kind: str) -> None:
        peer = self._of(node)
        peer.bad[kind] += 1
        peer.breaker.failed()

    def pulled(self, node: str, way: Way, nbytes: int, seconds: float) -> None:
        peer = self._of(node)
        peer.pulls[way] += 1
        peer.nbytes[way] += nbytes
        peer.seconds[way] = peer.seconds.get(way, 0.0) + seconds

    def stats(self) -> dict[str, PeerStats]:
        return {
            node: PeerStats(
                "up" if peer.breaker.state == "closed" else "open",
                dict(peer.pulls),
                dict(peer.nbytes),
                dict(peer.seconds),
                dict(peer.failures),
                dict(peer.bad),
            )
            for node, peer in self._peers.items()
        }

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is wrong."""
        assert len(self._peers) <= PEERS_KNOWN_MAX, "more peers than are to be remembered"
        for peer in self._peers.values():
            peer.breaker.check_integrity()
            peer.link_breaker.check_integrity()
            assert peer.pulls.keys() == peer.nbytes.keys() == peer.seconds.keys(), "ways differ"

    def _of(self, node: str) -> _PeerHealth:
        peer = self._peers.pop(node, None)
        if peer is None:
            peer = _PeerHealth(self._breaker(), self._breaker())
            while len(self._peers) >= PEERS_KNOWN_MAX:
                del self._peers[next(iter(self._peers))]
        self._peers[node] = peer
        return peer

    def _breaker(self) -> Breaker:
        settings = self._settings
        open_s_max = OPEN_S_TIMES_MAX * settings.breaker_open_s
        return Breaker(settings.breaker_failures, settings.breaker_open_s, open_s_max, self._clock)


class LazyLink:
    """The node's link, opened on first use, and abandoned for good when it is down. Thread-safe.

    Most nodes never need one, and NIXL takes a second to start. `open_link`: raises `LinkDown`; None:
    there is no link, for `reason`. `way`: what it is.
    """

    def __init__(
        self, open_link: Callable[[], PeerLink] | None, reason: str = "", *, way: Way = "nixl"
    ) -> None:
        self.way = way
        self._open_link = open_link
        self._lock = threading.Lock()
        self._link: PeerLink | None = None
        self._reason = reason

    @property
    def state(self) -> str:
        """Current way for transfers: nixl | tls | ray: REASON."""
        return f"ray: {self._reason}" if self._reason else self.way

    @property
    def is_usable(self) -> bool:
        """Whether it is up, or has not been needed yet."""
        return not self._reason

    def get(self) -> PeerLink:
        """Return the link. Blocks while it is being opened. Raises `LinkDown`."""
        with self._lock:
            if self._link is None:
                if self._reason or self._open_link is None:
                    raise LinkDown(self._reason or "no link is configured")
                try:
                    self._link = self._open_link()
                except LinkDown as error:
                    self._gone(error)
                    raise
            return self._link

    def down(self, error: LinkDown) -> None:
        """Abandon a link that reported it is down."""
        with self._lock:
            link, self._link = self._link, None
            if link is not None:
                self._gone(error)
        if link is not None:
            link.close()

    def close(self) -> None:
        """Close the link; none is opened any more."""
        with self._lock:
            link, self._link = self._link, None
            self._reason = self._reason or "closed"
        if link is not None:
            link.close()

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is wrong."""
        with self._lock:
            assert self._link is None or not self._reason, "a link that is down is still there"
            link = self._link
        if link is not None:
            link.check_integrity()

    def _gone(self, error: LinkDown) -> None:
        self._reason = str(error) or type(error).__name__
        logger.warning("no %s on this node, other nodes' blocks come by Ray: %s", self.way, self._reason)
