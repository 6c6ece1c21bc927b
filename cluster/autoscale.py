"""How many replicas there should be, from what each says of its load. Pure: the clock is handed in.

Three needs, of which the largest counts: places for sequences, pages of the pool, and seconds of prompts that
wait to be computed; who is expected back counts in part. What is wanted must be wanted for a while before it
is done, and going down leaves a margin, so that a constant load settles at one number. Knows no Ray.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from configs.cluster_settings import AutoscalingSettings
from replicas.replica_load import ReplicaLoad

DOWN_SHARE = 0.85
"""What is left must not be fuller than this much of what is called full, or the next guest brings it back."""

STEP_S_MAX = 5.0
"""A clock that jumps counts for no more than this towards a delay."""

SOMEBODY = 0.5
"""So many requests (averages, as Serve counts them) or expected sessions are somebody."""

NEED_MAX = 1e6


@dataclass(frozen=True, slots=True)
class Demand:
    """Sums over replicas. `open_requests`: as Serve counts them, those on their way to a replica, too."""

    loads: tuple[ReplicaLoad, ...]
    open_requests: float = 0.0

    @property
    def running(self) -> float:
        """Sequences that run or wait."""
        return max(sum(load.running + load.waiting for load in self.loads), self.open_requests)

    def returns(self, limits: AutoscalingSettings) -> float:
        """Sessions that are expected back; none where they are not to count."""
        return sum(load.returns for load in self.loads) if limits.return_weight > 0 else 0.0

    def is_nobody(self, limits: AutoscalingSettings) -> bool:
        """Nobody runs, waits or is expected."""
        sequences = sum(load.running + load.waiting for load in self.loads)
        return sequences == 0 and max(self.open_requests, self.returns(limits)) < SOMEBODY


@dataclass(frozen=True, slots=True)
class ScaleState:
    """For how long (seconds) what has been wanted: `more` and `fewer` replicas, or none.

    `more`: the fewest of those wanted meanwhile, `fewer`: the most. `at_s`: of the last look; None: never.
    """

    at_s: float | None = None
    more_s: float = 0.0
    more: int = 0
    fewer_s: float = 0.0
    fewer: int = 0
    nobody_s: float = 0.0


def replicas_needed(demand: Demand, limits: AutoscalingSettings, *, share: float = 1.0) -> int:
    """As many as carry the load when each may be filled to `share` of what is called full; 0 only for nobody.

    Never fewer for more load, nor for a smaller `share`. No bounds.
    """
    if demand.is_nobody(limits) or not demand.loads:
        return 0
    loads, weight = demand.loads, limits.return_weight
    full = limits.busy_share * share
    sequences = demand.running + weight * demand.returns(limits)
    pages = sum(
        load.pool_share + load.pool_share_waiting + weight * load.returns_pool_share for load in loads
    )
    places = min(load.sequences_max for load in loads)
    # One prompt is computed by one replica, however long it takes.
    queue = min(
        sum(load.prefill_s for load in loads) / (limits.queue_wait_s * share),
        sum(load.prompts for load in loads),
    )
    need = max(1.0, sequences / (full * places), pages / full, queue)
    return math.ceil(min(need, NEED_MAX) - 1e-9)


def wanted_replicas(
    loads: Sequence[ReplicaLoad | None],
    now_s: float,
    limits: AutoscalingSettings,
    state: ScaleState,
    *,
    target: int,
    open_requests: float = 0.0,
) -> tuple[int, ScaleState]:
    """How many there should be now, and the state to come back with.

    `loads`: of all replicas that run; None: that one has not said, or nothing that makes sense. Then there
    may be more, never fewer. `target`: how many there should be so far. `now_s`: of a clock that may jump.
    """
    target = _bounded(target, limits)
    known = tuple(load for load in loads if load is not None)
    demand = Demand(known, open_requests if math.isfinite(open_requests) else 0.0)
    step_s = 0.0 if state.at_s is None else min(max(0.0, now_s - state.at_s), STEP_S_MAX)
    state = replace(state, at_s=now_s)
    if not known or len(known) < len(loads):
        state = replace(state, fewer_s=0.0, fewer=0, nobody_s=0.0)
        return _up(_bounded(replicas_needed(demand, limits), limits), target, step_s, limits, state)
    needed = _bounded(replicas_needed(demand, limits), limits)
    enough = _bounded(replicas_needed(demand, limits, share=DOWN_SHARE), limits)
    is_nobody = demand.is_nobody(limits)
    state = replace(state, nobody_s=state.nobody_s + step_s if is_nobody else 0.0)
    if needed > target:
        state = replace(state, fewer_s=0.0, fewer=0)
        return _up(needed, target, step_s, limits, state)
    state = replace(state, more_s=0.0, more=0)
    if is_nobody and enough == 0 and target == 1:
        state = replace(state, fewer_s=0.0, fewer=0)
        return (0 if state.nobody_s >= limits.to_zero_delay_s else 1), state
    return _down(max(enough, min(target, 1)), target, step_s, limits, state)


def _bounded(replicas: int, limits: AutoscalingSettings) -> int:
    return min(max(replicas, limits.replicas_min), limits.replicas_max)


def _up(
    needed: int, target: int, step_s: float, limits: AutoscalingSettings, state: ScaleState
) -> tuple[int, ScaleState]:
    if needed <= target:
        return target, replace(state, more_s=0.0, more=0)
    is_first = state.more <= target
    more_s = 0.0 if is_first else state.more_s + step_s
    more = needed if is_first else min(state.more, needed)
    if more_s >= limits.upscale_delay_s:
        return more, replace(state, more_s=0.0, more=0)
    return target, replace(state, more_s=more_s, more=more)


def _down(
    enough: int, target: int, step_s: float, limits: AutoscalingSettings, state: ScaleState
) -> tuple[int, ScaleState]:
    if enough >= target:
        return target, replace(state, fewer_s=0.0, fewer=0)
    is_first = state.fewer == 0 or state.fewer >= target
    fewer_s = 0.0 if is_first else state.fewer_s + step_s
    fewer = enough if is_first else max(state.fewer, enough)
    if fewer_s >= limits.downscale_delay_s:
        return fewer, replace(state, fewer_s=0.0, fewer=0)
    return target, replace(state, fewer_s=fewer_s, fewer=fewer)
