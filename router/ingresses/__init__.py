"""Several ingresses of one service: what they know of each other, and what they share.

`ray_peers` imports Ray: import the module.
"""

from router.ingresses.door_count import door_count
from router.ingresses.door_metrics import merged
from router.ingresses.kept_responses import KeptResponses
from router.ingresses.known_sessions import KnownSessions, SessionTurn
from router.ingresses.peers import DoorPeers, ToldDoors
from router.ingresses.tenant_shares import DoorShares

__all__ = [
    "DoorPeers",
    "DoorShares",
    "KeptResponses",
    "KnownSessions",
    "SessionTurn",
    "ToldDoors",
    "door_count",
    "merged",
]
