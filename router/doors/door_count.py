"""How many front doors there are to be."""

from __future__ import annotations

from configs.optional_sections import DOORS_MAX
from configs.settings import Settings


def door_count(settings: Settings) -> int | None:
    """Return the number of front doors; None: one on each node.

    One where something is written by one front door only: a recording, the knowledge base.
    """
    wanted = settings.server.ingress_replicas
    if wanted is not None:
        return wanted
    is_single = settings.server.record is not None or settings.knowledge.enabled
    return 1 if is_single or settings.cluster.ray_address == "local" else None


def one_per_node(nodes: int, now: int) -> int:
    """Return how many front doors `nodes` nodes are to have, where there are `now`; no news is no change."""
    return min(nodes, DOORS_MAX) if nodes > 0 else now
