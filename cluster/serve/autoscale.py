"""Decides how many replicas and ingresses there should be.

Replicas, from the load that each reports: the largest of three needs counts: slots for sequences, pages of
the pool, and seconds of prefill that wait; sessions that are expected to return count in part. A change must
be wanted for a while before it is made, and scaling down leaves a margin, so that a constant load settles at
one number. The decision is pure, with the clock passed in; `KvPressurePolicy` and `autoscaling_config`
connect it to Ray Serve.

Ingresses: one on each node, while nodes come and go. Serve has no deployment with one replica a node. It has
autoscaling, whose policy here counts nodes, not load; Serve spreads the ingresses over the nodes as well as
it can, and makes a new one where one has died.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from samovar.cache_tiers.node import inhabited
from samovar.configs.cluster import AutoscalingSettings
from samovar.configs.optional_sections import INGRESSES_MAX
from samovar.replicas.serving.served_engine import FIELDS, PREFIX, ReplicaLoad

logger = logging.getLogger(__name__)


DOWN_SHARE = 0.85
"""Scaling down may fill replicas to this share of `target_utilization`, or one session scales up again."""

STEP_S_MAX = 5.0
"""A jump of the clock counts for at most this many seconds towards a delay."""

ONE_SESSION = 0.5
"""From this many requests (Serve's averages) or expected sessions on, there is demand."""

NEED_MAX = 1e6


@dataclass(frozen=True, slots=True)
class Demand:
    """Load summed over replicas. `open_requests`: Serve's count, with those on their way to a replica."""

    loads: tuple[ReplicaLoad, ...]
    open_requests: float = 0.0

    @property
    def running(self) -> float:
        """Return the number of sequences that run or wait."""
        return max(sum(load.running + load.waiting for load in self.loads), self.open_requests)

    def returns(self, limits: AutoscalingSettings) -> float:
        """Return the number of sessions expected to return; 0 if `resumption_weight` is 0."""
        return sum(load.returns for load in self.loads) if limits.resumption_weight > 0 else 0.0

    def is_idle(self, limits: AutoscalingSettings) -> bool:
        """Whether no sequence runs or waits and no session is expected to return."""
        sequences = sum(load.running + load.waiting for load in self.loads)
        return sequences == 0 and max(self.open_requests, self.returns(limits)) < ONE_SESSION


@dataclass(frozen=True, slots=True)
class ScaleState:
    """For how long (seconds) `more` replicas, `fewer` replicas or none have been wanted.

    `more`: the smallest number wanted meanwhile; `fewer`: the largest. `at_s`: time of the last evaluation;
    None: never.
    """

    at_s: float | None = None
    more_s: float = 0.0
    more: int = 0
    fewer_s: float = 0.0
    fewer: int = 0
    idle_s: float = 0.0


def replicas_needed(demand: Demand, limits: AutoscalingSettings, *, share: float = 1.0) -> int:
    """Return how many replicas carry the load if each is filled to at most `share` of `target_utilization`.

    0 only without any demand. Monotonic: never fewer for more load or for a smaller `share`. Not clamped to
    the configured bounds.
    """
    if demand.is_idle(limits) or not demand.loads:
        return 0
    loads, weight = demand.loads, limits.resumption_weight
    full = limits.target_utilization * share
    sequences = demand.running + weight * demand.returns(limits)
    pages = sum(
        load.pool_share + load.pool_share_waiting + weight * load.returns_pool_share for load in loads
    )
    places = min(load.sequences_max for load in loads)
    # One prompt is computed by one replica, however long it is.
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
    """Return how many replicas there should be now, and the state for the next call.

    `loads`: of all running replicas; None: that replica has not reported, or reported nonsense. With a None
    the number may rise but never fall. `target`: the current target. `now_s`: of a clock that may jump.
    """
    target = _bounded(target, limits)
    known = tuple(load for load in loads if load is not None)
    demand = Demand(known, open_requests if math.isfinite(open_requests) else 0.0)
    step_s = 0.0 if state.at_s is None else min(max(0.0, now_s - state.at_s), STEP_S_MAX)
    state = replace(state, at_s=now_s)
    if not known or len(known) < len(loads):
        state = replace(state, fewer_s=0.0, fewer=0, idle_s=0.0)
        return _up(_bounded(replicas_needed(demand, limits), limits), target, step_s, limits, state)
    needed = _bounded(replicas_needed(demand, limits), limits)
    enough = _bounded(replicas_needed(demand, limits, share=DOWN_SHARE), limits)
    is_idle = demand.is_idle(limits)
    state = replace(state, idle_s=state.idle_s + step_s if is_idle else 0.0)
    if needed > target:
        state = replace(state, fewer_s=0.0, fewer=0)
        return _up(needed, target, step_s, limits, state)
    state = replace(state, more_s=0.0, more=0)
    if is_idle and enough == 0 and target == 1:
        state = replace(state, fewer_s=0.0, fewer=0)
        return (0 if state.idle_s >= limits.downscale_to_zero_delay_s else 1), state
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


STALE_REPORTS = 3.0
"""A replica without a new report for this many times `metrics_interval_s` counts as unknown load."""

WINDOW_REPORTS = 6.0
"""A load is the average of this many reports."""

NAMES = tuple(PREFIX + name for name in FIELDS)
STATE, HEARD = "samovar_state", "samovar_heard"
Heard = dict[Any, tuple[float, float]]
"""Replica -> (its clock at its last report, ours when we noticed); the two may differ by any amount."""


class KvPressurePolicy:
    """The autoscaling policy that Ray Serve calls in its controller, ten times a second.

    Reads the replicas' reports and keeps the state for `wanted_replicas`. Never raises: an error here would
    stop the controller from doing anything else. Does not size machines: Ray's own autoscaler starts nodes
    for replicas that cannot be placed. `settings`: the fields of `AutoscalingSettings`, as in JSON. `clock`:
    monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, **settings: Any) -> None:
        self._limits = AutoscalingSettings.model_validate(settings)
        self._clock = clock

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Return how many replicas there should be, and the policy state for the next call."""
        try:
            return self._decide(context)
        except Exception:  # any error: the controller must go on, and calls again at once
            logger.exception("the autoscaling policy failed; nothing is changed")
            return context.target_num_replicas, dict(context.policy_state)

    def _decide(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        now_s = self._clock()
        loads, heard = self._loads(
            context.running_replicas, context.raw_metrics or {}, context.policy_state.get(HEARD, {}), now_s
        )
        wanted, state = wanted_replicas(
            loads,
            now_s,
            self._limits,
            context.policy_state.get(STATE, ScaleState()),
            target=context.target_num_replicas,
            open_requests=float(context.total_num_requests or 0.0),
        )
        return wanted, {STATE: state, HEARD: heard}

    def _loads(
        self, replicas: Sequence[Any], series: Mapping[str, Mapping[Any, Any]], before: Heard, now_s: float
    ) -> tuple[list[ReplicaLoad | None], Heard]:
        """Return each replica's average recent load; a single sample would be too noisy."""
        loads: list[ReplicaLoad | None] = []
        heard: Heard = {}
        for replica in replicas:
            said = {name: series[name][replica] for name in NAMES if series.get(name, {}).get(replica)}
            if not said:
                loads.append(None)
                continue
            spoke_s = max(points[-1].timestamp for points in said.values())
            earlier = before.get(replica)
            noticed_s = now_s if earlier is None or earlier[0] != spoke_s else earlier[1]
            heard[replica] = (spoke_s, noticed_s)
            is_stale = now_s - noticed_s > STALE_REPORTS * self._limits.metrics_interval_s
            means = {name: fmean(point.value for point in points) for name, points in said.items()}
            loads.append(None if is_stale else ReplicaLoad.of_metrics(means))
        return loads, heard


def autoscaling_config(settings: AutoscalingSettings, replicas: int) -> AutoscalingConfig:
    """Return Serve's configuration, starting at `replicas`. The policy delays; Serve's delays are 0."""
    with warnings.catch_warnings():
        # The field is deprecated in favour of an environment variable that nothing reads (ray 2.60).
        warnings.simplefilter("ignore", DeprecationWarning)
        return AutoscalingConfig(
            min_replicas=settings.replicas_min,
            initial_replicas=replicas,
            max_replicas=settings.replicas_max,
            metrics_interval_s=settings.metrics_interval_s,
            look_back_period_s=WINDOW_REPORTS * settings.metrics_interval_s,
            upscale_delay_s=0.0,
            downscale_delay_s=0.0,
            downscale_to_zero_delay_s=0.0,
            policy=AutoscalingPolicy(
                policy_function="samovar.cluster.serve.autoscale:KvPressurePolicy",
                policy_kwargs=settings.model_dump(mode="json"),
            ),
        )


LOOK_S = 2.0


LINGER_LOOKS = 15
"""A node whose replica starts again keeps its ingress meanwhile."""


def nodes_alive() -> dict[str, bool]:
    """Return the nodes that are alive and not leaving, and whether something lives there that is to stay."""
    import ray
    from ray._private.state import state as gcs_state

    leaving = set(gcs_state.get_draining_nodes())
    homes = inhabited(gcs_state.actor_table(None, None, "ALIVE").values())
    return {
        node["NodeID"]: node["NodeID"] in homes
        for node in ray.nodes()
        if node["Alive"] and node["NodeID"] not in leaving
    }


def one_per_node(nodes: int, now: int) -> int:
    """Return how many ingresses `nodes` nodes are to have, where there are `now`; no news is no change."""
    return min(nodes, INGRESSES_MAX) if nodes > 0 else now


class OneIngressPerNode:
    """The autoscaling policy that Ray Serve calls in its controller, ten times a second. Never raises.

    A node has an ingress while it has replicas, and the head always: Ray removes no node where an actor runs,
    so one for an ingress alone would be paid for indefinitely. Of several, Serve stops the one whose node has
    the fewest replicas. Nodes are counted in a thread: GCS may hang, and the controller must not. The thread
    ends when there was no call since its last look: Serve makes another policy at each deployment.
    """

    def __init__(self, nodes: Callable[[], Mapping[str, bool]] = nodes_alive, look_s: float = LOOK_S) -> None:
        self._nodes = nodes
        self._look_s = look_s
        self._looks_left: dict[str, int] = {}  # for which a node counts as one with replicas
        self._is_called = False
        self._pause = threading.Event()
        self._thread: threading.Thread | None = None

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Return how many ingresses there should be."""
        self._is_called = True
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._watch, name="count-nodes", daemon=True)
            self._thread.start()
        return one_per_node(len(self._looks_left), context.target_num_replicas), {}

    def look(self) -> None:
        """Count the nodes once."""
        try:
            left = {
                node: LINGER_LOOKS if is_home else self._looks_left.get(node, 0) - 1
                for node, is_home in self._nodes().items()
            }
            self._looks_left = {node: looks for node, looks in left.items() if looks > 0}
        except Exception:  # GCS unavailable: what was seen last stays
            logger.exception("the nodes of the cluster could not be counted")

    def _watch(self) -> None:
        while self._is_called:
            self._is_called = False
            self.look()
            self._pause.wait(self._look_s)


def one_ingress_per_node() -> AutoscalingConfig:
    """Return Serve's configuration of an ingress on each node."""
    return AutoscalingConfig(
        min_replicas=1,
        initial_replicas=1,
        max_replicas=INGRESSES_MAX,
        upscale_delay_s=0.0,
        downscale_delay_s=0.0,
        policy=AutoscalingPolicy(policy_function="samovar.cluster.serve.autoscale:OneIngressPerNode"),
    )
