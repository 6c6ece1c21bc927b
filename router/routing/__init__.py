"""Session identity, and the choice of the replica that serves a request.

`ray_clients` and `request_router` import Ray, so they are not re-exported here: import the modules.
"""

from samovar.router.routing.replica_client import (
    ClearCounts,
    ReplicaClient,
    ReplicaFailed,
    ReplicaLost,
    ReplicasOfAll,
)
from samovar.router.routing.score import (
    LoadPrice,
    Outcome,
    Rendezvous,
    ReplicaView,
    RoutingRequest,
    Way,
    rank,
)
from samovar.router.routing.session import (
    SESSION_PREFIX,
    check_id,
    placement,
    session_key,
    session_name,
    session_tag,
    tags_of_id,
    turn_context,
)
from samovar.router.routing.session_directory import DirectoryLost, SessionDirectory, TurnEnd

__all__ = [
    "SESSION_PREFIX",
    "ClearCounts",
    "DirectoryLost",
    "LoadPrice",
    "Outcome",
    "Rendezvous",
    "ReplicaClient",
    "ReplicaFailed",
    "ReplicaLost",
    "ReplicaView",
    "ReplicasOfAll",
    "RoutingRequest",
    "SessionDirectory",
    "TurnEnd",
    "Way",
    "check_id",
    "placement",
    "rank",
    "session_key",
    "session_name",
    "session_tag",
    "tags_of_id",
    "turn_context",
]
