"""Ranks as Ray actors, each in its bundle of the replica's placement group.

The group is the replica's own (`cluster/serve/graph.py`): when the replica ends, however it ends, Serve
removes the group, and Ray ends the ranks.
"""

from __future__ import annotations

from typing import Any

import ray
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from samovar.replicas.ranks import RankStart


class RankServer:
    """The actor of one rank: the model is loaded and served in its one call."""

    def serve(self, start: str) -> None:
        """Be a rank until rank 0 has gone. `start`: `RankStart` as JSON."""
        from samovar.replicas.ranks import serve_rank, start_of

        serve_rank(start_of(start))


class RankActor:
    """Rank 0's hold on a rank's actor, a `RankProcess`."""

    def __init__(self, rank: int, actor: Any, served: ray.ObjectRef) -> None:
        self._rank = rank
        self._actor = actor
        self._served = served

    def failure(self) -> str | None:
        ended, _ = ray.wait([self._served], timeout=0)
        if not ended:
            return None
        try:
            ray.get(self._served)
        except ray.exceptions.RayError as error:
            return f"rank {self._rank}: {str(error).strip().splitlines()[-1]}"
        return f"rank {self._rank} has ended"

    def stop(self) -> None:
        ray.kill(self._actor)


def launch_rank(start: RankStart) -> RankActor:
    """Start a rank in the bundle of its number; its GPU is the one that Ray lets it see."""
    group = get_current_placement_group()
    assert group is not None, "a replica on several GPUs has a placement group"
    is_gpu = group.bundle_specs[start.rank].get("GPU", 0) > 0
    actor_class = ray.remote(num_cpus=0, num_gpus=1 if is_gpu else 0)(RankServer)
    actor = actor_class.options(
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=start.rank)
    ).remote()
    return RankActor(start.rank, actor, actor.serve.remote(start.as_json()))
