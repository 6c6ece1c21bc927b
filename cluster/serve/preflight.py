"""What must hold before `samovar serve` starts anything, and the settings completed with what it found.

Each failure here would otherwise be a wait without an end, or a message of Ray's that names no fix.
Knows this machine; nothing of Ray or of how the service is built.
"""

from __future__ import annotations

import shutil
import socket
from dataclasses import dataclass

import torch
from pydantic import SecretStr

from cluster.serve.secrets import SecretRefused, kept_secret
from configs.sections import MIB
from configs.settings import Settings
from replicas.model import choose_device
from router.http import proxy_environment

# How large Ray's object store must be, so that it holds the cpu tier and never spills. Pure.
#
# Ray writes objects to disk by an order of its own once its store is 80 % full, and a file system in
# memory that is too small sends the store itself to disk. Both would make the cpu tier a slow disk that
# nobody knows to be one, so the tier gets 60 % and must fit.

TIER_SHARE = 0.6
BESIDE_BYTES = 256 * MIB
"""For what else Ray puts there: messages, results, extents on their way."""

MEMORY_SHARE = 0.8
"""Of what is free in /dev/shm: others need some of it, too."""

TIER_BYTES_MIN = 16 * MIB
"""A smaller cpu tier is not worth having."""


class StoreTooSmall(Exception):
    """The configured store cannot hold the configured tier."""


@dataclass(frozen=True, slots=True)
class StorePlan:
    """`store_bytes` of Ray's store, of which the cpu tier may take `tier_bytes`; `warning` may be empty."""

    store_bytes: int
    tier_bytes: int
    warning: str = ""


def plan_store(store_bytes: int | None, tier_bytes: int, free_bytes: int | None) -> StorePlan:
    """`store_bytes`: as configured; None = what the tier needs. `free_bytes`: of /dev/shm, if there is one.

    A tier that does not fit into memory is made smaller, with a warning. Raises `StoreTooSmall` where
    both sizes are configured and contradict each other.
    """
    limit_bytes = None if free_bytes is None else int(free_bytes * MEMORY_SHARE)
    if store_bytes is not None:
        fits_bytes = int(store_bytes * TIER_SHARE)
        if tier_bytes > fits_bytes:
            raise StoreTooSmall(
                f"cluster.object_store_bytes={store_bytes} has room for a cpu tier of {fits_bytes} bytes, "
                f"and tiers.cpu.bytes_max={tier_bytes}. Lower the second, or leave the first empty"
            )
        if limit_bytes is not None and store_bytes > limit_bytes:
            return StorePlan(store_bytes, tier_bytes, _too_little(free_bytes, "Ray may use the disk instead"))
        return StorePlan(store_bytes, tier_bytes)
    wanted_bytes = _store_for(tier_bytes)
    if limit_bytes is None or wanted_bytes <= limit_bytes:
        return StorePlan(wanted_bytes, tier_bytes)
    left_bytes = int(max(0, limit_bytes - BESIDE_BYTES) * TIER_SHARE)
    if left_bytes < TIER_BYTES_MIN:
        left_bytes = 0
    instead = f"the cpu tier gets {_mib(left_bytes)} instead of {_mib(tier_bytes)}"
    warning = _too_little(free_bytes, instead) if left_bytes < tier_bytes else ""
    return StorePlan(_store_for(left_bytes), min(left_bytes, tier_bytes), warning)


def _store_for(tier_bytes: int) -> int:
    return int(tier_bytes / TIER_SHARE) + BESIDE_BYTES


def _too_little(free_bytes: int | None, instead: str) -> str:
    return (
        f"/dev/shm has {_mib(free_bytes or 0)} free, so {instead}. Make it larger "
        "(docker run --shm-size=8g), or lower tiers.cpu.bytes_max"
    )


def _mib(nbytes: int) -> str:
    return f"{nbytes / MIB:,.0f} MiB"


class StartFailed(Exception):
    """The service did not become ready; the text says why and where to look."""


def with_server_secret(settings: Settings) -> Settings:
    """All ingresses must salt alike, today and tomorrow: with the secret that is kept, if none is configured.

    Raises `StartFailed` when it cannot be kept, or the file must not be trusted.
    """
    if settings.auth.server_secret is not None:
        return settings
    try:
        secret = kept_secret(settings.model.cache_dir)
    except SecretRefused as error:
        raise StartFailed(str(error)) from error
    except OSError as error:
        where = settings.model.cache_dir
        raise StartFailed(
            f"cannot keep a secret in {where}: {error.strerror}. Configure auth.server_secret, or another "
            "model.cache_dir"
        ) from error
    auth = settings.auth.model_copy(update={"server_secret": SecretStr(secret)})
    return settings.model_copy(update={"auth": auth})


def with_object_store(settings: Settings, free_bytes: int | None) -> tuple[Settings, str]:
    """Ray's store and the cpu tier with sizes that go together, and a warning when that took anything.

    `free_bytes`: of /dev/shm; None where there is none. Raises `StartFailed`.
    """
    tiers, cluster = settings.tiers, settings.cluster
    tier_bytes = tiers.cpu.bytes_max if tiers.enabled else 0
    try:
        plan = plan_store(cluster.object_store_bytes, tier_bytes, free_bytes)
    except StoreTooSmall as error:
        raise StartFailed(str(error)) from error
    cpu = tiers.cpu.model_copy(update={"bytes_max": plan.tier_bytes})
    update = {
        "cluster": cluster.model_copy(update={"object_store_bytes": plan.store_bytes}),
        "tiers": tiers.model_copy(update={"cpu": cpu}),
    }
    return settings.model_copy(update=update), plan.warning


def check_gpus(settings: Settings) -> None:
    """Serve would wait for ever for a GPU that is not there."""
    if not uses_gpu(settings):
        return
    choose_device(settings.engine)
    gpus = torch.cuda.device_count()
    wanted = settings.cluster.replicas_first
    if gpus < wanted:
        raise StartFailed(
            f"cluster.replicas={wanted} needs as many GPUs, and this machine has {gpus}. "
            "Lower --replicas, or compute on the CPU with --engine.device cpu"
        )


def check_port(host: str, port: int) -> None:
    """Serve would start without its proxy, and say so where nobody looks."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise StartFailed(
                f"cannot listen on {host}:{port} ({error.strerror}). Stop what listens there, "
                "or choose another port with --port N"
            ) from error


def shm_free_bytes() -> int | None:
    """Free in /dev/shm, where Ray keeps its objects; None where there is no such thing."""
    try:
        return shutil.disk_usage("/dev/shm").free
    except OSError:
        return None  # not Linux: Ray keeps its store elsewhere


def uses_gpu(settings: Settings) -> bool:
    """Whether each replica takes a GPU."""
    if settings.engine.device == "cpu":
        return False
    return settings.engine.device == "cuda" or torch.cuda.is_available()


# Variables that Ray's processes must be started with, on one machine or on every node of a cluster.
#
# A worker inherits them from its raylet, Serve's HTTP proxies too: whoever starts Ray sets them. Knows no
# secrets: others on a machine may see what a process was started with.

PROCESS_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing leaves this machine that nobody asked for
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",  # with Ray's 15 a busy neighbour starves tiers and replicas for seconds
    "TRANSFORMERS_VERBOSITY": "error",
    # oneDNN keeps compiled kernels by shape, and every number of rows in a step is a shape: with its
    # default of 1024 a replica grows for minutes (measured: docs/benchmarks).
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",
}

TOKEN_MODE = {"RAY_AUTH_MODE": "token"}
"""Ray asks everybody for its token."""


def ray_environment(settings: Settings) -> dict[str, str]:
    """All of them, as `ray start` needs them."""
    return PROCESS_ENVIRONMENT | required_environment(settings)


def required_environment(settings: Settings) -> dict[str, str]:
    """Those without which Samovar is not itself: they win over what somebody has set."""
    return proxy_environment(settings) | TOKEN_MODE | {"HF_HUB_OFFLINE": "1"}
