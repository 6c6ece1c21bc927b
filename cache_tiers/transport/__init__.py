"""Transfers of bytes between nodes, over NIXL."""

from cache_tiers.transport.link import Export, LinkDown, LinkError, NixlLink
from cache_tiers.transport.peers import (
    PEERS_ASKED_MAX,
    LazyLink,
    PeerCalls,
    PeerError,
    PeerLate,
    PeerLost,
    PeerTable,
    Way,
)

__all__ = [
    "PEERS_ASKED_MAX",
    "Export",
    "LazyLink",
    "LinkDown",
    "LinkError",
    "NixlLink",
    "PeerCalls",
    "PeerError",
    "PeerLate",
    "PeerLost",
    "PeerTable",
    "Way",
]
