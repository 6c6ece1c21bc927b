"""All nodes' tier actors, by the names that Ray keeps. Knows nothing of what they hold."""

from __future__ import annotations

import logging
from typing import Any

import ray
from ray.util import list_named_actors

from cache_tiers.actor import actor_name

logger = logging.getLogger("samovar.tiers")


def tier_actors() -> dict[str, Any]:
    """Node id -> the handle of its tier actor. Replicas made them, in Serve's namespace."""
    prefix = actor_name("")
    named = [row for row in list_named_actors(all_namespaces=True) if row["name"].startswith(prefix)]
    found = {}
    for row in named:
        try:
            found[row["name"].removeprefix(prefix)] = ray.get_actor(row["name"], row["namespace"])
        except ValueError:
            logger.info("the tier actor %s has just gone", row["name"])
    return found
