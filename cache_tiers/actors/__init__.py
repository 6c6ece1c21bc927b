"""Ray wrappers: per-node tier actor, session directory actor, staging buffer and cluster watch.

`rpc`, which calls actors, is imported as a module.
"""

from cache_tiers.actors.sessions import ON_HEAD, session_actor
from cache_tiers.actors.staging import StagingBuffer, open_outbox
from cache_tiers.actors.tier import tier_actor, tier_actors
from cache_tiers.session_table import Move, Sync, Synced

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
