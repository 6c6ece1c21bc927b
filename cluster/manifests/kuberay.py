"""Renders a RayService for KubeRay (1.5.1 or newer, for its token): a pure function of settings and secrets.

The operator makes the pods, draws Ray's token and sends the two Serve applications of `samovar deploy`.
Secrets are not in the file: a Secret is mounted, and the applications name its digest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from samovar.cluster.deploy.builders import read_secrets, secrets_digest
from samovar.cluster.deploy.deploy import applications, serve_config
from samovar.cluster.errors import StartFailed
from samovar.cluster.launch.commands import (
    SHM_SPARE_BYTES,
    head_store_bytes,
    node_environment,
    worker_store_bytes,
)
from samovar.cluster.launch.settings import RenderFailed, check_complete, node_settings
from samovar.cluster.serve.graph import model_app_name
from samovar.configs.cluster import KubeSettings
from samovar.configs.fields import Tree
from samovar.configs.loader import load
from samovar.configs.sections import MIB
from samovar.configs.settings import Settings

SECRETS_FILE = Path("/run/samovar/secrets.yaml")
SECRETS_MOUNT = "/run/samovar-secret"
MODELS_MOUNT = "/models"
USER_ID = 1000
"""Of the image's user (`Dockerfile`)."""

STOP_SPARE_S = 30
"""Of a pod's grace, after its drain: Ray's processes end."""
AGENT_PORT = 52365
"""Of Ray's agent on each node, the default of `ray start`."""
PROBE_S = 5
PROBE_FAILURES = 120
"""Of liveness: ten minutes, as long as the head may be away."""
BESIDE_TIERS_BYTES = 1024 * MIB
"""Of a worker's memory, beside Ray's object store: Python, torch and the smallest pool."""

BY_OPERATOR = ("RAY_AUTH_MODE",)
"""Variables that the operator sets itself."""

HEADER = """\
# {name}: written by `samovar render --kuberay`. Do not edit: change the settings and run it again.
# It holds no secrets. Before the first time, and whenever they change (the digest below names their content):
#   kubectl create secret generic {secret} --from-file=secrets.yaml={file}
# Then: kubectl apply -f FILE; the service is {name}-serve-svc, port {port}. Needs KubeRay 1.5.1 or newer.
"""

Object = dict[str, Any]


def render_kuberay(settings: Settings, secrets: Tree, secrets_file: Path) -> str:
    """Return the RayService as YAML, below a comment. Raises `RenderFailed`.

    `settings`: as given; `secrets`: those of the Secret, read from `secrets_file`.
    """
    launch = settings.launch
    on_nodes = node_settings(settings, None, launch.kube.worker_gpus)
    tree = ray_service(on_nodes, secrets)
    header = HEADER.format(
        name=launch.name, secret=launch.kube.secret, file=secrets_file, port=on_nodes.server.port
    )
    return header + "\n" + yaml.dump(tree, Dumper=_Dumper, sort_keys=False, width=1000, allow_unicode=True)


def ray_service(on_nodes: Settings, secrets: Tree) -> Object:
    """Return the RayService as plain data. `on_nodes`: `node_settings`. Raises `RenderFailed`."""
    launch = on_nodes.launch
    server_secret = secrets.get("auth", {}).get("server_secret")
    if not server_secret:
        raise RenderFailed(
            "auth.server_secret is not among the secrets: pods that each draw one could not use each other's "
            "blocks. `openssl rand -hex 32` makes one"
        )
    check_complete(on_nodes, secrets)
    if launch.image is None:
        raise RenderFailed(
            "launch.image is empty: name an image NAME@sha256:DIGEST, built as docs/install.md shows"
        )
    model_app, digest = model_app_name(on_nodes, b""), secrets_digest(secrets, server_secret)
    served = applications(on_nodes, model_app, SECRETS_FILE, digest)
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": {"name": launch.name, "labels": _labels(on_nodes)},
        "spec": {
            "serveConfigV2": yaml.safe_dump(serve_config(on_nodes, served), sort_keys=False, width=1000),
            # Other pods: a second cluster serves before the first one ends.
            "upgradeStrategy": {"type": "NewCluster"},
            "rayClusterConfig": _cluster(
                on_nodes, {"samovar/model-app": model_app, "samovar/secrets": digest}
            ),
        },
    }


def _cluster(on_nodes: Settings, annotations: Mapping[str, str]) -> Object:
    """Return the RayCluster. `annotations`: of all pods; another value there makes another cluster.

    The operator would exchange a model within a cluster in one step, and answers under way would fail.
    """
    launch, kube = on_nodes.launch, on_nodes.launch.kube
    store_bytes, head_bytes = worker_store_bytes(on_nodes), head_store_bytes(on_nodes)
    if store_bytes + BESIDE_TIERS_BYTES > kube.worker_memory_bytes:
        raise RenderFailed(
            f"launch.kube.worker_memory_bytes={kube.worker_memory_bytes} is too little: Ray's object store "
            f"takes {store_bytes} of it, for tiers.cpu.bytes_max={on_nodes.tiers.cpu.bytes_planned}. Raise "
            "the first or lower the second"
        )
    worker = _resources(kube.worker_cpus, kube.worker_memory_bytes, kube.worker_gpus)
    head = _resources(kube.head_cpus, kube.head_memory_bytes, 0)
    cluster: Object = {
        "rayVersion": metadata.version("ray"),
        # The operator draws a token; without one any pod could run code here.
        "authOptions": {"mode": "token"},
        "enableInTreeAutoscaling": kube.workers_min < kube.workers_max,
        "autoscalerOptions": {
            "version": "v2",
            "idleTimeoutSeconds": int(launch.idle_timeout_min * 60),
            "securityContext": _container_security(),
        },
        "headGroupSpec": {
            # No CPUs: no replica is placed on the head.
            "rayStartParams": {
                "num-cpus": "0",
                "port": str(launch.gcs_port),
                "dashboard-host": "0.0.0.0",
                "dashboard-port": str(launch.dashboard_port),
                **_start(on_nodes, head_bytes),
            },
            "template": _pod(on_nodes, "head", head, head_bytes, annotations),
        },
        "workerGroupSpecs": [
            {
                "groupName": "workers",
                "replicas": kube.workers_min,
                "minReplicas": kube.workers_min,
                "maxReplicas": kube.workers_max,
                "rayStartParams": _start(on_nodes, store_bytes),
                "template": _pod(on_nodes, "worker", worker, store_bytes, annotations),
            }
        ],
    }
    if launch.gcs.storage == "redis":
        cluster["gcsFaultToleranceOptions"] = {"redisAddress": str(launch.gcs.redis_address)}
    return cluster


def _start(on_nodes: Settings, store_bytes: int) -> dict[str, str]:
    return {
        "object-store-memory": str(store_bytes),
        "metrics-export-port": str(on_nodes.launch.metrics_port),
        "disable-usage-stats": "true",
    }


def _ports(on_nodes: Settings, *, is_head: bool) -> list[Object]:
    """Return a pod's ports; the operator finds the proxy by the name `serve`."""
    launch = on_nodes.launch
    ports = {"serve": on_nodes.server.port, "metrics": launch.metrics_port}
    if is_head:
        ports = {"gcs-server": launch.gcs_port, "dashboard": launch.dashboard_port, "client": 10001} | ports
    return [{"name": name, "containerPort": port} for name, port in ports.items()]


def _resources(cpus: float, memory_bytes: int, gpus: int) -> Object:
    """Return requests and limits, equal: a pod that memory is taken from loses its conversations."""
    amounts = {"cpu": f"{round(cpus * 1000)}m", "memory": f"{memory_bytes // MIB}Mi"}
    if gpus:
        amounts["nvidia.com/gpu"] = str(gpus)
    return {"requests": amounts, "limits": dict(amounts)}


def _pod(
    on_nodes: Settings, role: str, resources: Object, store_bytes: int, annotations: Mapping[str, str]
) -> Object:
    launch, kube, tiers = on_nodes.launch, on_nodes.launch.kube, on_nodes.tiers
    environment = {
        name: value for name, value in node_environment(on_nodes).items() if name not in BY_OPERATOR
    }
    mounts, volumes = _volumes(on_nodes, store_bytes)
    stop_s = int(on_nodes.server.graceful_shutdown_s + tiers.settle_s + tiers.flush_s)
    return {
        "metadata": {
            "labels": _labels(on_nodes) | {"app.kubernetes.io/component": role},
            "annotations": dict(annotations),
        },
        "spec": {
            "terminationGracePeriodSeconds": stop_s + STOP_SPARE_S,
            "automountServiceAccountToken": role == "head",  # the autoscaler speaks to Kubernetes
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": USER_ID,
                "runAsGroup": USER_ID,
                "fsGroup": USER_ID,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "initContainers": [_secrets_for_owner(str(launch.image))],
            "containers": [
                {
                    "name": f"ray-{role}",
                    "image": launch.image,
                    "ports": _ports(on_nodes, is_head=role == "head"),
                    "env": [{"name": name, "value": value} for name, value in sorted(environment.items())],
                    "resources": resources,
                    **_probes(role),
                    **({"lifecycle": _pre_stop(stop_s)} if role == "worker" else {}),
                    "securityContext": _container_security(),
                    "volumeMounts": mounts,
                }
            ],
            "volumes": [*volumes, _secret_volume(kube)],
        },
    }


def _labels(on_nodes: Settings) -> Object:
    return {"app.kubernetes.io/name": "samovar", "app.kubernetes.io/instance": on_nodes.launch.name}


def _probes(role: str) -> Object:
    """Return a pod's probes. The operator's own, where there are none, run wget, which the image has not.

    A worker is ready while its HTTP proxy takes connections: not before it has a replica, nor while it is
    drained. The head is when Ray is: the operator itself looks after its proxy.
    """
    ray_here: Object = {"path": "/api/healthz", "port": AGENT_PORT}
    proxy: Object = {"path": "/-/healthz", "port": "serve"}
    timing = {"periodSeconds": PROBE_S, "timeoutSeconds": PROBE_S}
    return {
        "livenessProbe": {"httpGet": ray_here, **timing, "failureThreshold": PROBE_FAILURES},
        "readinessProbe": {
            "httpGet": proxy if role == "worker" else ray_here,
            **timing,
            "failureThreshold": 1,
        },
    }


def _pre_stop(stop_s: int) -> Object:
    command = ["python", "-m", "samovar.cluster.manifests.prestop", str(stop_s)]
    return {"preStop": {"exec": {"command": command}}}


def _volumes(on_nodes: Settings, store_bytes: int) -> tuple[list[Object], list[Object]]:
    """Return mounts and volumes of a Ray container; the nvme tier's is on the node and ends with the pod."""
    kube, tiers = on_nodes.launch.kube, on_nodes.tiers
    shm = {"medium": "Memory", "sizeLimit": str(store_bytes + SHM_SPARE_BYTES)}
    kv_bytes = tiers.nvme.bytes_max + tiers.nvme.quarantine_bytes_max + BESIDE_TIERS_BYTES
    volumes: list[Object] = [
        {"name": "shm", "emptyDir": shm},
        {"name": "kv", "emptyDir": {"sizeLimit": str(kv_bytes)}},
        {"name": "secrets", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
    ]
    mounts: list[Object] = [
        {"name": "shm", "mountPath": "/dev/shm"},
        {"name": "kv", "mountPath": str(on_nodes.launch.kv_dir)},
        {"name": "secrets", "mountPath": str(SECRETS_FILE.parent), "readOnly": True},
    ]
    if kube.model_claim is not None:
        claim = {"claimName": kube.model_claim, "readOnly": True}
        volumes.append({"name": "models", "persistentVolumeClaim": claim})
        mounts.append({"name": "models", "mountPath": MODELS_MOUNT, "readOnly": True})
    return mounts, volumes


def _secrets_for_owner(image: str) -> Object:
    """Return the container that copies the secrets: with `fsGroup` a Secret is readable by a group."""
    source = f"{SECRETS_MOUNT}/{SECRETS_FILE.name}"
    return {
        "name": "secrets",
        "image": image,
        "command": ["install", "-m", "0600", source, str(SECRETS_FILE)],
        "resources": _resources(0.1, 64 * MIB, 0),
        "securityContext": _container_security(),
        "volumeMounts": [
            {"name": "secret", "mountPath": SECRETS_MOUNT, "readOnly": True},
            {"name": "secrets", "mountPath": str(SECRETS_FILE.parent)},
        ],
    }


def _secret_volume(kube: KubeSettings) -> Object:
    return {"name": "secret", "secret": {"secretName": kube.secret, "defaultMode": 0o440}}


def _container_security() -> Object:
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


class _Dumper(yaml.SafeDumper):
    """Writes the Serve configuration as a block of lines, and shared parts in full."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def kuberay_file(
    config: str | None, secrets: Path | None, env: Mapping[str, str], flags: Sequence[str]
) -> str:
    """Return the RayService. `secrets`: the Secret's file. Raises `ConfigError`, `RenderFailed`."""
    if secrets is None:
        raise RenderFailed(
            "--kuberay needs --secrets FILE (YAML: `auth:`, below it `api_keys:` and `server_secret:`): pods "
            "check that they have those secrets. They are not printed"
        )
    settings = load(config, env, flags, secrets).settings
    try:
        return render_kuberay(settings, read_secrets(secrets), secrets)
    except StartFailed as error:  # the file of secrets
        raise RenderFailed(str(error)) from error
