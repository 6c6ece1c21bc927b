"""Several front doors of one service: what they know of each other, and what they share.

`door_router` and `ray_peers` import Ray, so they are not re-exported here: import the modules.
"""

from router.doors.door_count import door_count
from router.doors.door_metrics import merged
from router.doors.kept_bodies import KeptBodies
from router.doors.kept_responses import KeptResponses
from router.doors.known_sessions import KnownSessions, SessionTurn
from router.doors.peers import DoorPeers, ToldDoors
from router.doors.tenant_shares import DoorShares

__all__ = [
    "DoorPeers",
    "DoorShares",
    "KeptBodies",
    "KeptResponses",
    "KnownSessions",
    "SessionTurn",
    "ToldDoors",
    "door_count",
    "merged",
]
