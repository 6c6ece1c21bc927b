"""Transfers of bytes between nodes, over NIXL or TLS."""

from samovar.cache_tiers.transport.arena import Arena
from samovar.cache_tiers.transport.link import Export, LinkDown, LinkError, NixlLink
from samovar.cache_tiers.transport.nixl_agent import map_memory
from samovar.cache_tiers.transport.peers import (
    PEERS_ASKED_MAX,
    LazyLink,
    PeerCalls,
    PeerError,
    PeerLate,
    PeerLost,
    PeerTable,
    Way,
)
from samovar.cache_tiers.transport.tls_link import TlsLink

__all__ = [
    "PEERS_ASKED_MAX",
    "Arena",
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
    "TlsLink",
    "Way",
    "map_memory",
]
