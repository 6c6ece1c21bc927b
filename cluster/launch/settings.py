"""Computes the settings of a cluster's nodes: those given, completed from the cluster. Pure."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from samovar.cluster.launch.terraform import CloudOutputs
from samovar.configs.cluster import ClusterSettings, KubeSettings
from samovar.configs.fields import Tree, merged, public_tree
from samovar.configs.sections import Section
from samovar.configs.settings import Settings

EVERY_ADDRESS = "0.0.0.0"
NODE_HOME = "~/samovar"
"""Our directory on every node."""

CONFIG_FILE = "config.yaml"
SECRETS_FILE = "secrets.yaml"
TOKEN_FILE = "ray-token"
AUTHORITY_FILE = "authority.pem"
MADE_TLS_DIR = Path("~/samovar-tls")
"""The `cluster.tls_dir` that nodes of a rack fill themselves, by the authority of `samovar up`.

Not in our directory, which Ray copies from the head to the others: keys stay where they are made."""
NVME_SCRIPT = "kv-nvme.sh"


S = TypeVar("S", bound=Section)


class RenderFailed(Exception):
    """No cluster can be made with these settings; the message names the key and the fix."""


def node_settings(settings: Settings, outputs: CloudOutputs | None, pod_gpus: int | None = None) -> Settings:
    """Return the nodes' settings. Raises `RenderFailed` if replicas would land on wrong nodes or none.

    `outputs`: Terraform's, None for a rack; `pod_gpus`: of a worker pod, None where nodes are no pods.
    Not revalidated: on AWS the API keys that an open address needs are known to the nodes only.
    """
    if settings.models:
        raise RenderFailed(
            f"models has {', '.join(settings.models)}: a cluster of `samovar up` serves one model. Leave "
            "them out, or serve several by `samovar serve` with cluster.ray_address=auto on its head"
        )
    launch, tiers, server = settings.launch, settings.tiers, settings.server
    if server.tls is not None and (outputs is not None or pod_gpus is not None):
        who = "AWS's load balancer" if pod_gpus is None else "Kubernetes (KubeRay's probes)"
        raise RenderFailed(
            f"server.tls_certificate: {who} asks the nodes over HTTP, and can serve HTTPS itself. Leave "
            "server.tls_certificate, tls_key and tls_client_ca out here"
        )
    _check_tls(settings, is_rack=outputs is None and pod_gpus is None, is_pod=pod_gpus is not None)
    nvme, s3 = tiers.nvme, tiers.s3
    if nvme.dir is None:
        nvme = _with(nvme, dir=Path(launch.kv_dir) / "blocks")
    if s3.bucket is None and outputs is not None:
        kv = outputs.kv
        s3 = _with(s3, bucket=kv.bucket, prefix=kv.prefix.strip("/"), region=kv.region)
    if server.is_loopback:
        server = _with(server, host=EVERY_ADDRESS)
    name = launch.name if outputs is None else outputs.cluster_name
    return _with(
        settings,
        server=server,
        tiers=_with(tiers, nvme=nvme, s3=s3),
        launch=_with(launch, name=name),
        **_placement(settings, outputs, pod_gpus),
    )


def _check_tls(settings: Settings, *, is_rack: bool, is_pod: bool) -> None:
    """Raise `RenderFailed` where the nodes would not have the files of `cluster.tls_dir`."""
    folder = settings.cluster.tls_dir
    if folder is None or is_rack:
        return
    if is_pod:
        raise RenderFailed(
            f"cluster.tls_dir={folder}: pods get certificates of their addresses from Kubernetes. Leave it "
            "out, and set RAY_USE_TLS and its three files in the pods, as KubeRay documents: our own "
            "connections follow"
        )
    if folder == MADE_TLS_DIR:
        raise RenderFailed(
            f"cluster.tls_dir={folder}: `samovar up` makes certificates on a rack alone. Name another "
            "directory, and have launch.setup_commands put ca.crt, tls.crt and tls.key there on every node"
        )


def _placement(settings: Settings, outputs: CloudOutputs | None, pod_gpus: int | None) -> dict[str, Section]:
    """Return explicit `engine` and `cluster`: a head without a GPU cannot detect the nodes' devices."""
    engine, cluster, launch = settings.engine, settings.cluster, settings.launch
    if pod_gpus is not None:
        gpus, none = pod_gpus, "launch.kube.worker_gpus is 0"
    elif outputs is not None:
        gpus, none = max(pool.gpus for pool in outputs.pools.values()), "no pool in Terraform has any"
    else:
        gpus, none = launch.rack.gpus, "launch.rack.gpus is 0"
    device = engine.device
    if device == "auto":
        device = "cuda" if gpus else "cpu"
    if device == "cuda" and not gpus:
        raise RenderFailed(
            f"engine.device=cuda needs GPUs, and {none}. Correct that, or set engine.device=cpu"
        )
    ranks = engine.tensor_parallel
    if device == "cuda" and gpus < ranks:
        raise RenderFailed(
            f"engine.tensor_parallel={ranks} needs as many GPUs in one node, and the largest has {gpus}. "
            "Lower it, or take nodes with more GPUs"
        )
    if pod_gpus is not None:
        _check_fits_a_pod(cluster, launch.kube, ranks if device == "cpu" and engine.kind != "vllm" else 1)
    on_head = outputs is None and pod_gpus is None and launch.rack.spare_cpus_head
    if device == "cpu" and cluster.replica_cpus == 0 and not on_head:
        raise RenderFailed(
            "cluster.replica_cpus=0: replicas that reserve no CPU would run on the head, and Ray would never "
            "add a node for them. Set it to the number of cores that one replica should have"
        )
    per_node = cluster.replicas_per_node_max
    if per_node is None and device == "cuda":
        per_node = gpus // ranks
    elif per_node is not None and ranks > 1 and (device == "cpu" or per_node < gpus // ranks):
        raise RenderFailed(
            f"cluster.replicas_per_node_max={per_node} cannot be kept with engine.tensor_parallel={ranks}: "
            "Ray refuses a limit beside placement groups. Leave it out"
        )
    dashboard = f"http://127.0.0.1:{launch.dashboard_port}"
    cluster = _with(cluster, ray_address="auto", dashboard=dashboard, replicas_per_node_max=per_node)
    return {"engine": _with(engine, device=device), "cluster": cluster}


ACCELERATOR = ("accelerator_type:",)


def _check_fits_a_pod(cluster: ClusterSettings, kube: KubeSettings, ranks: int) -> None:
    """Raise `RenderFailed` for replicas that no worker pod would ever have room for.

    `ranks`: those that reserve CPUs.
    """
    cpus = math.ceil(kube.worker_cpus)  # as the operator tells Ray
    if cluster.replica_cpus * ranks > cpus:
        each = f", for each of engine.tensor_parallel={ranks}," if ranks > 1 else ""
        raise RenderFailed(
            f"cluster.replica_cpus={cluster.replica_cpus:g}{each} is more than a worker pod has "
            f"(launch.kube.worker_cpus={kube.worker_cpus:g}). Raise the second or lower the first"
        )
    # Ray gives each node with GPUs the one of their kind.
    own = ACCELERATOR if kube.worker_gpus else ()
    if missing := [name for name in cluster.replica_resources if not name.startswith(own)]:
        raise RenderFailed(
            f"cluster.replica_resources has {', '.join(missing)}, which no worker pod has. Leave it out"
        )


def check_complete(on_nodes: Settings, secrets: Tree) -> None:
    """Raise `RenderFailed` if the nodes would refuse these settings together with these `secrets`."""
    try:
        merged(public_tree(on_nodes), secrets)
    except ValidationError as error:
        # The message of a rule over several values names keys only; of a single one it may quote a secret.
        texts = [
            one["msg"].removeprefix("Value error, ")
            if one["type"] == "value_error" and not one["loc"]
            else f"{'.'.join(map(str, one['loc']))} is refused"
            for one in error.errors(include_url=False)
        ]
        raise RenderFailed("the nodes would refuse these settings: " + "; ".join(texts)) from None


def _with(section: S, **update: Any) -> S:
    return section.model_copy(update=update)
