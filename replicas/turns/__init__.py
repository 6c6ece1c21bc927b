"""Turns of tenants: who is next where work of several waits, and the threads in which it is done.

Nothing here brings torch: ingresses use it, too.
"""

from samovar.replicas.turns.fair_queue import FairQueue
from samovar.replicas.turns.tenant_threads import PlacesTaken, TenantThreads

__all__ = ["FairQueue", "PlacesTaken", "TenantThreads"]
