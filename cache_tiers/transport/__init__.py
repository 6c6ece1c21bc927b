"""Bytes between nodes, over NIXL."""

from cache_tiers.transport.link import Export, Link, LinkDown, LinkError
from cache_tiers.transport.peers import (
    PEERS_ASKED_MAX,
    LazyLink,
    PeerBooks,
    PeerCalls,
    PeerError,
    PeerLate,
    PeerLost,
    Way,
)

__all__ = [
    "PEERS_ASKED_MAX",
    "Export",
    "LazyLink",
    "Link",
    "LinkDown",
    "LinkError",
    "PeerBooks",
    "PeerCalls",
    "PeerError",
    "PeerLate",
    "PeerLost",
    "Way",
]
