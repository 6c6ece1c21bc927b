"""Several ingresses of one service: what they know of each other, and what they share.

`ray_ingresses` imports Ray: import the module.
"""

from router.ingresses.all_ingresses import Ingresses, IngressesCleared, ingress_count
from router.ingresses.ingress_metrics import merged
from router.ingresses.known_sessions import KnownSessions, SessionTurn
from router.ingresses.shared_responses import SharedResponses
from router.ingresses.tenant_shares import IngressShares

__all__ = [
    "IngressShares",
    "Ingresses",
    "IngressesCleared",
    "KnownSessions",
    "SessionTurn",
    "SharedResponses",
    "ingress_count",
    "merged",
]
