"""Several ingresses of one service: what they know of each other, and what they share.

`ray_ingresses` imports Ray: import the module.
"""

from samovar.router.ingresses.all_ingresses import Ingresses, IngressesCleared, ingress_count, merged
from samovar.router.ingresses.known_sessions import KnownSessions, SessionTurn
from samovar.router.ingresses.shared_responses import SharedResponses
from samovar.router.ingresses.tenant_shares import IngressShares

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
