"""Before a stop: have the tier actors write down what only main memory holds.

Knows Ray and the actors' names; nothing of how a flush is done or of what is worth it.
"""

from __future__ import annotations

import logging
from collections import Counter

import ray
from ray.exceptions import RayError

from cache_tiers.tier_actors import tier_actors

GRACE_S = 2.0
"""A flush looks at the clock between extents, so it ends a little after its time."""

logger = logging.getLogger("samovar.flush")


def flush_tiers(flush_s: float) -> dict[str, int]:
    """Extents by outcome (written, failed, left), all nodes together; `silent`: actors without an answer.

    Takes `flush_s` and a little; raises nothing.
    """
    done: Counter[str] = Counter()
    flushes = [actor.flush.remote(flush_s) for actor in tier_actors().values()]
    if not flushes:
        return {}
    ready, late = ray.wait(flushes, num_returns=len(flushes), timeout=flush_s + GRACE_S)
    done["silent"] = len(late)
    for flush in ready:
        try:
            done.update(ray.get(flush))
        except RayError as error:
            logger.warning("a tier actor could not flush: %s", error)
            done["silent"] += 1
    return dict(done)


def flush_line(done: dict[str, int]) -> str:
    """What came of a flush, for people; empty when there was nothing to say."""
    lost = done.get("failed", 0) + done.get("left", 0)
    said = []
    if done.get("written"):
        said.append(f"{done['written']:,} extents written down")
    if lost:
        said.append(f"{lost:,} not: their conversations will be computed again")
    if done.get("silent"):
        said.append(f"{done['silent']} nodes did not answer")
    return "; ".join(said)
