"""How many ingresses there are to be."""

from __future__ import annotations

from configs.settings import Settings


def ingress_count(settings: Settings) -> int | None:
    """Return the number of ingresses; None: one on each node.

    One where something is written by one ingress only: a recording, a knowledge base in a file.
    """
    wanted = settings.server.ingress_replicas
    if wanted is not None:
        return wanted
    is_single = settings.server.record is not None or settings.knowledge.is_one_file
    return 1 if is_single or settings.cluster.ray_address == "local" else None
