"""A node's tiers without Ray: lookup, store, load, transfer, scan, clear, drain, peers."""

from samovar.cache_tiers.node.build import (
    STARTS_FILE,
    TICK_S,
    KillPoint,
    build_link,
    build_tiers,
    count_start,
)
from samovar.cache_tiers.node.drain import (
    HEAD_RESOURCE,
    DrainNotice,
    NodeLeave,
    has_refuge,
    inhabited,
    is_worth_another,
    takers,
)
from samovar.cache_tiers.node.manager import (
    START_SCAN_S_MAX,
    NodeIdentity,
    NodeMedia,
    NodePorts,
    NodeSessions,
    TierNode,
)
from samovar.cache_tiers.node.peers import PeerExports
from samovar.cache_tiers.node.resumption import NodeResumption
from samovar.cache_tiers.node.state import put_aside
from samovar.cache_tiers.node.transfer import LentRoom

__all__ = [
    "HEAD_RESOURCE",
    "STARTS_FILE",
    "START_SCAN_S_MAX",
    "TICK_S",
    "DrainNotice",
    "KillPoint",
    "LentRoom",
    "NodeIdentity",
    "NodeLeave",
    "NodeMedia",
    "NodePorts",
    "NodeResumption",
    "NodeSessions",
    "PeerExports",
    "TierNode",
    "build_link",
    "build_tiers",
    "count_start",
    "has_refuge",
    "inhabited",
    "is_worth_another",
    "put_aside",
    "takers",
]
