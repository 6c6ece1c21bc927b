"""Ray wrappers: per-node tier actor, session directory actor, staging buffer and cluster watch.

`rpc`, which calls actors, is imported as a module. What needs Ray is imported when it is asked for: an engine
stages records where Ray is not installed.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cache_tiers.actors.staging import StagingBuffer, open_outbox
from cache_tiers.session_table import Move, Sync, Synced

if TYPE_CHECKING:
    from cache_tiers.actors.sessions import ON_HEAD, session_actor
    from cache_tiers.actors.tier import tier_actor, tier_actors

__all__ = [
    "ON_HEAD",
    "Move",
    "StagingBuffer",
    "Sync",
    "Synced",
    "open_outbox",
    "session_actor",
    "tier_actor",
    "tier_actors",
]

_NEEDS_RAY = {
    "ON_HEAD": "sessions",
    "session_actor": "sessions",
    "tier_actor": "tier",
    "tier_actors": "tier",
}


def __getattr__(name: str) -> Any:
    if name not in _NEEDS_RAY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_NEEDS_RAY[name]}"), name)
