"""Ray wrappers: the per-node tier actor, its staging buffer, and the cluster watch.

`rpc`, which calls actors, is imported as a module. What needs Ray is imported when it is asked for: an engine
stages records where Ray is not installed.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from samovar.cache_tiers.actors.staging import StagingBuffer, open_outbox

if TYPE_CHECKING:
    from samovar.cache_tiers.actors.cluster_watch import drain_this_node
    from samovar.cache_tiers.actors.keys import cluster_keys, cluster_sealing
    from samovar.cache_tiers.actors.tier import tier_actor, tier_actors

__all__ = [
    "StagingBuffer",
    "cluster_keys",
    "cluster_sealing",
    "drain_this_node",
    "open_outbox",
    "tier_actor",
    "tier_actors",
]

_NEEDS_RAY = {
    "cluster_keys": "keys",
    "cluster_sealing": "keys",
    "drain_this_node": "cluster_watch",
    "tier_actor": "tier",
    "tier_actors": "tier",
}
"""Name -> module."""


def __getattr__(name: str) -> Any:
    if name not in _NEEDS_RAY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_NEEDS_RAY[name]}"), name)
