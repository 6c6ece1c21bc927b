"""Several front doors of one service: what they know of each other, and what they share.

`door_router` and `ray_peers` import Ray, so they are not re-exported here: import the modules.
"""

from router.doors.kept_responses import KeptResponses
from router.doors.known_sessions import KnownSessions, SessionTurn
from router.doors.peers import Peers
from router.doors.tenant_shares import TenantShares

__all__ = ["KeptResponses", "KnownSessions", "Peers", "SessionTurn", "TenantShares"]
