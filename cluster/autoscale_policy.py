"""The autoscaling policy as Ray Serve calls it, ten times a second, in its controller.

A thin shell round `autoscale.py`: it reads what the replicas have sent and keeps the state. Never raises:
an error here would stop the controller from doing anything else. Knows no sizes of machines: Ray's own
autoscaler starts nodes for replicas that find no place.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from cluster.autoscale import ScaleState, wanted_replicas
from configs.cluster_settings import AutoscalingSettings
from replicas.replica_load import FIELDS, PREFIX, ReplicaLoad

logger = logging.getLogger("samovar.autoscale")

STALE_REPORTS = 3.0
"""A replica that has said nothing new for so many times `report_s` has no load that anybody knows."""

WINDOW_REPORTS = 6.0
"""A load is the average of so many reports."""

NAMES = tuple(PREFIX + name for name in FIELDS)
STATE, HEARD = "samovar_state", "samovar_heard"
Heard = dict[Any, tuple[float, float]]
"""Replica -> (its clock when it spoke last, ours when we noticed): the two may differ by anything."""


class KvPressurePolicy:
    """`settings`: the fields of `AutoscalingSettings`, as JSON has them. `clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, **settings: Any) -> None:
        self._limits = AutoscalingSettings.model_validate(settings)
        self._clock = clock

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """How many replicas there should be, and what to be called with next time."""
        try:
            return self._decide(context)
        except Exception:  # whatever it is: the controller has more to do than this, and tries again at once
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
        """What each replica has said lately, on average: a look at one moment would be a matter of luck."""
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
            is_stale = now_s - noticed_s > STALE_REPORTS * self._limits.report_s
            means = {name: fmean(point.value for point in points) for name, points in said.items()}
            loads.append(None if is_stale else ReplicaLoad.of_metrics(means))
        return loads, heard


def autoscaling_config(settings: AutoscalingSettings, replicas: int) -> AutoscalingConfig:
    """What Serve is told. `replicas`: so many first. Delays are the policy's, so that Serve's are none."""
    with warnings.catch_warnings():
        # The field is called deprecated in favour of an environment variable which nothing reads (ray 2.60).
        warnings.simplefilter("ignore", DeprecationWarning)
        return AutoscalingConfig(
            min_replicas=settings.replicas_min,
            initial_replicas=replicas,
            max_replicas=settings.replicas_max,
            metrics_interval_s=settings.report_s,
            look_back_period_s=WINDOW_REPORTS * settings.report_s,
            upscale_delay_s=0.0,
            downscale_delay_s=0.0,
            downscale_to_zero_delay_s=0.0,
            policy=AutoscalingPolicy(
                policy_function="cluster.autoscale_policy:KvPressurePolicy",
                policy_kwargs=settings.model_dump(mode="json"),
            ),
        )
