"""Builds Samovar's Ray Serve applications: the replicas of a model, of each an application, and the ingress.

There are several so that a model can be exchanged under traffic: the new replicas are up before a new ingress
routes to them, and the old ones stay until the old ingress has finished (`rollout.py`). Starts nothing.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.schema import LoggingConfig

from samovar.cache_tiers.sessions import ON_HEAD
from samovar.cluster.engines import vllm_python
from samovar.cluster.serve.autoscale import autoscaling_config, one_ingress_per_node
from samovar.cluster.serve.preflight import uses_gpu
from samovar.cluster.serve.rollout import FRONT_APP, INGRESS_DEPLOYMENT, MODEL_APP_PREFIX
from samovar.configs.imports import OWN_PYTHON
from samovar.configs.settings import Settings
from samovar.replicas.messages import REPLICA_DEPLOYMENT
from samovar.replicas.serving.deployment import Replica
from samovar.replicas.vllm import VllmReplica
from samovar.router.ingress import app as ingress_app
from samovar.router.ingresses import ingress_count

REQUEST_ROUTERS = {
    "samovar": "samovar.router.routing.request_router.SessionRouter",
    "consistent_hash": "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter",
}
"""`router.policy` -> import path: Serve loads it in its own processes. `pow2` is Serve's default."""

KINDS: dict[str, type[Replica]] = {"samovar": Replica, "vllm": VllmReplica}
"""`engine.kind` -> the deployment's class."""

INGRESS_ROUTER = "samovar.router.proxy.ingress_router.IngressRouter"
HEALTH_PERIOD_S = 2.0
RANK_CPUS = 0.001
"""Of a rank without a GPU where replicas reserve no CPU: Ray refuses an empty bundle."""
QUIET = LoggingConfig(log_level="WARNING", enable_access_log=False)


@dataclass(frozen=True, slots=True)
class FurtherModel:
    """A model that is served beside the first (`models`): its own settings, and what runs of it.

    `model_dir`: as in `build_model_app`. `app`: the application of its replicas.
    """

    settings: Settings
    model_dir: str | None
    app: str
    replicas: int


NO_FURTHER: Mapping[str, FurtherModel] = {}


def serve_logs(settings: Settings) -> LoggingConfig:
    """Return what Serve's own loggers write, in the form of ours."""
    if settings.telemetry.log_format == "text":
        return QUIET
    return LoggingConfig(log_level="WARNING", enable_access_log=False, encoding="JSON")


def model_app_name(settings: Settings, fingerprint: bytes) -> str:
    """Return the application's name: equal for equal model and serving settings, to update it in place."""
    served = settings.engine.model_dump_json() + settings.model.model_dump_json()
    return MODEL_APP_PREFIX + hashlib.sha256(fingerprint + served.encode()).hexdigest()[:12]


def build_model_app(
    settings: Settings,
    model_dir: str | None,
    replicas: int,
    kind: type[Replica] | None = None,
    *,
    further: str = "",
) -> serve.Application:
    """Return the application of the model's replicas.

    `kind`: builds their engine (`Replica.build`); None: the one of the settings. Raises `StartFailed` if vLLM
    is to be it and cannot be had. `further`: the model's key in `models`, if it is not the first.

    `model_dir` must be readable on every node that runs a replica; None: each replica looks for it. With
    autoscaling, `replicas` is the initial number. `settings.cluster` says how many share a node's cores and
    memory: if it is unchanged, another number of `replicas` does not restart the running ones.
    """
    engine = settings.engine
    replica: Any = serve.deployment(
        name=REPLICA_DEPLOYMENT,
        # The engine has its own bounded queue and reports when it is full; Serve must neither hold
        # requests back before that nor queue many more behind it.
        max_ongoing_requests=engine.sequences_max + engine.queue_max,
        max_queued_requests=engine.queue_max,
        # First its answers finish, then blocks that only it holds go to the tiers.
        graceful_shutdown_timeout_s=settings.server.graceful_shutdown_s + settings.tiers.settle_s,
        graceful_shutdown_wait_loop_s=0.2,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=engine.stuck_step_s,
        **_where(settings, has_gpu=uses_gpu(settings)),
        request_router_config=_request_router(settings, further),
        logging_config=serve_logs(settings),
        **_how_many(settings, replicas),
    )(kind or KINDS[settings.engine.kind])
    _set_version(replica, settings, model_dir or "")
    application: serve.Application = replica.bind(settings, model_dir)
    return application


def build_front_app(
    settings: Settings,
    model_dir: str | None,
    model_app: str,
    replicas: int,
    *,
    is_update: bool = False,
    further: Mapping[str, FurtherModel] = NO_FURTHER,
) -> serve.Application:
    """Return the ingress application for the replicas in `model_app`, and for those of `further` models.

    `model_dir`: as in `build_model_app`. `is_update`: admit no request before a replica has been seen,
    because an older ingress still serves.
    """
    wanted: dict[str, Any] = {"replicas": _at_least(settings, replicas)}
    if further:
        wanted["models"] = {name: _at_least(one.settings, one.replicas) for name, one in further.items()}
    ingress: Any = serve.deployment(
        name=INGRESS_DEPLOYMENT,
        max_ongoing_requests=4 * settings.limits.concurrent_total,  # our own limit is reached first
        # An old ingress finishes its requests while a new one admits others. A stop of the whole service
        # drains it before, and bounds that wait itself (`app.Service.stop`).
        max_surge_percent=100,
        user_config=wanted,  # changed without a restart
        graceful_shutdown_timeout_s=settings.limits.request_timeout_s,
        graceful_shutdown_wait_loop_s=0.2,
        health_check_period_s=HEALTH_PERIOD_S,
        request_router_config=RequestRouterConfig(request_router_class=INGRESS_ROUTER),
        logging_config=serve_logs(settings),
        **_ingresses(settings),
    )(ingress_app.Ingress)
    _set_version(ingress, settings, model_dir or "", model_app, *(one.app for one in further.values()))
    if not further:
        application: serve.Application = ingress.bind(settings, model_dir, model_app, is_update)
        return application
    others = {name: (one.settings, one.model_dir, one.app) for name, one in further.items()}
    beside: serve.Application = ingress.bind(settings, model_dir, model_app, is_update, others)
    return beside


def run_targets(
    settings: Settings,
    model_dir: str,
    model_app: str,
    replicas: int,
    *,
    is_update: bool = False,
    kind: type[Replica] | None = None,
    further: Mapping[str, FurtherModel] = NO_FURTHER,
) -> dict[str, serve.RunTarget]:
    """Return all applications by name, in the order in which they start. `kind`: see `build_model_app`.

    `settings`: those of the first model, with what holds for all; `further`: the models beside it.
    """
    front = build_front_app(settings, model_dir, model_app, replicas, is_update=is_update, further=further)
    first = settings.model_copy(update={"models": {}})
    models = {model_app: build_model_app(first, model_dir, replicas, kind)}
    for name, one in further.items():
        models[one.app] = build_model_app(one.settings, one.model_dir, one.replicas, kind, further=name)
    targets = {name: serve.RunTarget(app, name=name, route_prefix=None) for name, app in models.items()}
    return targets | {FRONT_APP: serve.RunTarget(front, name=FRONT_APP, route_prefix="/")}


def _where(settings: Settings, *, has_gpu: bool) -> dict[str, Any]:
    """Return what a replica reserves: on several GPUs a bundle for each, all on one node.

    The replica is in the first bundle, and starts a rank in each other one (`replicas/start/ray_ranks.py`).
    """
    cluster, ranks = settings.cluster, settings.engine.tensor_parallel
    own: dict[str, Any] = {
        "num_cpus": cluster.replica_cpus,
        "num_gpus": 1 if has_gpu else 0,
        "resources": cluster.replica_resources,
    }
    if settings.engine.kind == "vllm":
        python = vllm_python(settings)
        variables = {"PYTHONPATH": str(python.path), OWN_PYTHON: sys.executable}
        own["runtime_env"] = {"py_executable": str(python.python), "env_vars": variables}
        own["num_gpus"] *= ranks  # vLLM starts them itself, in one process tree on one node
        ranks = 1
    if ranks == 1:
        return {"ray_actor_options": own, "max_replicas_per_node": cluster.replicas_per_node_max}
    bundle = {"GPU": 1.0} if has_gpu else {"CPU": max(cluster.replica_cpus, RANK_CPUS)}
    first = bundle | cluster.replica_resources
    if cluster.replica_cpus > 0:
        first["CPU"] = cluster.replica_cpus
    # Without `max_replicas_per_node`: Ray refuses it beside bundles. GPUs limit the number by themselves.
    return {
        "ray_actor_options": own,
        "placement_group_bundles": [first, *(bundle for _ in range(ranks - 1))],
        "placement_group_strategy": "STRICT_PACK",
    }


def _ingresses(settings: Settings) -> dict[str, Any]:
    """Return how many ingresses there are, and where: a single one is on the head, which never drains."""
    count = ingress_count(settings)
    if count == 1:
        return {"num_replicas": 1, "ray_actor_options": {"num_cpus": 0, "resources": ON_HEAD}}
    where = {"autoscaling_config": one_ingress_per_node()} if count is None else {"num_replicas": count}
    return {"ray_actor_options": {"num_cpus": 0}, **where}


def _how_many(settings: Settings, replicas: int) -> dict[str, Any]:
    scaling = settings.cluster.autoscaling
    if not scaling.enabled:
        return {"num_replicas": replicas}
    first = min(max(replicas, scaling.replicas_min), scaling.replicas_max)
    return {"autoscaling_config": autoscaling_config(scaling, first)}


def _at_least(settings: Settings, replicas: int) -> int:
    """Return how many replicas must answer for a broadcast to be complete."""
    scaling = settings.cluster.autoscaling
    return scaling.replicas_min if scaling.enabled else replicas


def _set_version(deployment: Any, settings: Settings, *names: str) -> None:
    """Set a version from the configuration, so that a mere change of the replica count restarts none.

    Serve draws a random version each time an application is deployed from code, and restarts everything; it
    has no public way to change that (ray 2.60, `_private/client.py`, `deploy_applications`).
    """
    parts = (settings.model_dump_json(), *names)
    deployment._version = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _request_router(settings: Settings, further: str) -> RequestRouterConfig:
    router = settings.router
    path = REQUEST_ROUTERS.get(router.policy)
    if path is None:
        return RequestRouterConfig(request_routing_stats_period_s=router.stats_period_s)
    own: dict[str, Any] = {
        "affinity_penalty_s": router.affinity_penalty_s,
        "load_bound_factor": router.load_bound_factor,
        "has_tiers": settings.tiers.enabled,
    }
    if further:
        own["further"] = further
    return RequestRouterConfig(
        request_router_class=path,
        request_router_kwargs=own if router.policy == "samovar" else {},
        request_routing_stats_period_s=router.stats_period_s,
    )
