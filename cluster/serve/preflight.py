"""Checks this machine before `samovar serve` starts anything, and completes the settings.

Without these checks each failure would be an endless wait, or a message from Ray that names no fix.
"""

from __future__ import annotations

import shutil
import socket

import torch
from pydantic import SecretStr

from cluster.serve.environment import StoreTooSmall, plan_store
from cluster.serve.secrets import SecretRefused, kept_secret
from configs.extras import ExtraMissing, require_tiers
from configs.settings import Settings
from replicas.model import choose_device


class StartFailed(Exception):
    """The service did not become ready; the message says why and where to look."""


def with_server_secret(settings: Settings) -> Settings:
    """Return the settings with the stored server secret if none is configured.

    All ingresses must use the same salt, across restarts too. Raises `StartFailed` if the secret cannot be
    stored or its file must not be trusted.
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
    """Return the settings with consistent sizes of Ray's store and the cpu tier, and a warning if reduced.

    `free_bytes`: of /dev/shm; None: there is none. Raises `StartFailed` if the configured sizes conflict.
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


def check_extras(settings: Settings) -> None:
    """Raise `StartFailed` if a package is missing that is needed by a tier the user asked for."""
    try:
        require_tiers(settings.tiers)
    except ExtraMissing as error:
        raise StartFailed(str(error)) from error


def check_gpus(settings: Settings) -> None:
    """Raise `StartFailed` if there are fewer GPUs than replicas; Serve would wait for ever for one."""
    if not uses_gpu(settings):
        return
    choose_device(settings.engine)
    gpus = torch.cuda.device_count()
    wanted = settings.cluster.replicas_first
    if gpus < wanted:
        raise StartFailed(
            f"cluster.replicas={wanted} needs as many GPUs, but this machine has {gpus}. "
            "Lower --replicas, or compute on the CPU with --engine.device cpu"
        )


def check_port(host: str, port: int) -> None:
    """Raise `StartFailed` if the port is taken; Serve would start without its proxy and only log that."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise StartFailed(
                f"cannot listen on {host}:{port} ({error.strerror}). Stop the program that listens there, "
                "or choose another port with --port N"
            ) from error


def shm_free_bytes() -> int | None:
    """Return the free bytes of /dev/shm, where Ray keeps its objects; None if there is none."""
    try:
        return shutil.disk_usage("/dev/shm").free
    except OSError:
        return None  # not Linux: Ray's store is elsewhere


def uses_gpu(settings: Settings) -> bool:
    """Whether each replica takes a GPU."""
    if settings.engine.device == "cpu":
        return False
    return settings.engine.device == "cuda" or torch.cuda.is_available()
