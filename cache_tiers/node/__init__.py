"""A node's tiers without Ray: lookup, store, load, transfer, scan, clear, drain, peers."""

from cache_tiers.node.drain import (
    HEAD_RESOURCE,
    DrainNotice,
    NodeLeave,
    has_refuge,
    inhabited,
    is_worth_another,
    takers,
)
from cache_tiers.node.manager import FIRST_PRICES, NodeSessions, TierNode, predictor_path
from cache_tiers.node.peer_transfers import PeerExports
from cache_tiers.node.resumption import NodeResumption
from cache_tiers.node.state import put_aside

__all__ = [
    "FIRST_PRICES",
    "HEAD_RESOURCE",
    "DrainNotice",
    "NodeLeave",
    "NodeResumption",
    "NodeSessions",
    "PeerExports",
    "TierNode",
    "has_refuge",
    "inhabited",
    "is_worth_another",
    "predictor_path",
    "put_aside",
    "takers",
]
