"""Checks this machine before `samovar serve` starts anything, and completes the settings.

Without these checks each failure would be an endless wait, or a message from Ray that names no fix. Imports
neither torch nor Ray, which take seconds: wrong input is told before (`first_look`).
"""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
from collections.abc import Callable, Mapping

from pydantic import SecretStr

from samovar.cache_tiers.blocks import TierError
from samovar.cluster.engines.interpreter import chosen_python, find_python
from samovar.cluster.errors import StartFailed
from samovar.cluster.serve.environment import (
    FreeMemory,
    StoreTooSmall,
    measured_tier_bytes,
    plan_store,
    spare_bytes,
)
from samovar.cluster.serve.secrets import SecretRefused, kept_secret
from samovar.configs.cluster import ClusterSettings
from samovar.configs.extras import ExtraMissing, require, require_telemetry, require_tiers
from samovar.configs.sections import GIB
from samovar.configs.settings import ServerSettings, Settings
from samovar.configs.tls import CertificateRefused
from samovar.replicas.messages import ModelRefused
from samovar.replicas.model import (
    find_early,
    free_host_bytes,
    gpus_seen,
    refuse_early,
    torch_version,
    unused_settings,
    why_no_gpu,
)

LOOPBACK = "127.0.0.1"
CUDA_FIX = "set engine.device to auto or cpu, or install a CUDA build of torch on a machine with a GPU"


def first_look(
    settings: Settings,
    *,
    with_s3_demo: bool = False,
    torch_version: Callable[[], str] = torch_version,
    open_library: Callable[[str], object] = ctypes.CDLL,
) -> list[str]:
    """Check what can be known without torch and Ray, and return warnings for the user.

    `torch_version`, `open_library`: for tests. Raises `StartFailed` or `ModelRefused`.
    """
    refuse_two_buckets(settings, with_s3_demo=with_s3_demo)
    check_extras(settings)
    unused: list[str] = []
    for name, own in settings.of_models().items():
        try:
            refuse_early(own, find_early(own.model))
            if own.engine.kind == "vllm":
                find_python(own)
            version = "" if own.engine.kind == "vllm" else torch_version()  # it has a torch of its own
            if own.engine.device == "cuda" and (why_not := why_no_gpu(version, open_library)):
                raise ModelRefused(f"engine.device is cuda and {why_not}", CUDA_FIX)  # `check_gpus`: the rest
        except ModelRefused as refused:
            raise named(refused, name) from refused
        unused += [f"models.{name}: {one}" if name else one for one in unused_settings(own)]
    with_object_store(settings, shm_free_bytes())
    check_certificate(settings.server)
    check_node_tls(settings.cluster)
    check_port(settings.server.host, settings.server.port)
    return unused + disk_warnings(settings)


def named(refused: ModelRefused, further: str) -> ModelRefused:
    """Return a refusal that names the model by its key in `models`; that of the first as it is."""
    return ModelRefused(f"models.{further}: {refused.reason}", refused.fix) if further else refused


def refuse_two_buckets(settings: Settings, *, with_s3_demo: bool) -> None:
    """Raise `StartFailed` if the S3 server of `--with-s3-demo` and a configured bucket are both wanted."""
    if with_s3_demo and settings.tiers.s3.bucket is not None:
        raise StartFailed("--with-s3-demo and tiers.s3.bucket are two S3 tiers. Remove one of them")


def disk_warnings(settings: Settings) -> list[str]:
    """Return a warning if the nvme tier's directory cannot be used, or another process holds it.

    With a cluster that runs already, that process may be the cluster's own.
    """
    is_ours = settings.cluster.ray_address == "local"
    if not (settings.tiers.enabled and settings.tiers.nvme.bytes_max and is_ours):
        return []
    from samovar.cache_tiers.media import lock_owner  # numpy

    where = settings.nvme_dir
    try:
        owner = lock_owner(str(where / "lock"))
    except OSError as error:
        return [f"the disk tier will be off: {where} cannot be used: {error.strerror}. Choose tiers.nvme.dir"]
    if owner is None:
        return []
    return [
        f"the disk tier is off for now: pid {owner} uses {where}. It is taken when it is free; for a second "
        "server, choose another tiers.nvme.dir"
    ]


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


def check_keys_file(settings: Settings) -> None:
    """Raise `StartFailed` if API keys are to be read where none can be: no client could call."""
    if settings.auth.keys_file is None:
        return
    from samovar.router.identities import KeysRefused, open_keys  # who has no such keys needs none of it

    name = str(settings.auth.keys_file)
    try:
        store = open_keys(settings)
        assert store is not None
        name = store.name
        store.read()
    except FileNotFoundError as error:
        raise StartFailed(
            f"there is no {name} (auth.keys_file). Make a first key: samovar keys create <tenant>"
        ) from error
    except OSError as error:
        raise StartFailed(f"cannot read {name} (auth.keys_file): {error.strerror}") from error
    except KeysRefused as error:
        raise StartFailed(str(error)) from error


def check_encryption(settings: Settings) -> None:
    """Raise `StartFailed` if what is written is to be encrypted, and the operator's key cannot be had."""
    if settings.tiers.encryption_key_file is None:
        return
    from samovar.cache_tiers.encryption import KEYS_FILE, open_outer  # who encrypts nothing needs none of it

    try:
        open_outer(settings.tiers.encryption_key_file, settings.nvme_dir / KEYS_FILE).refresh()
    except TierError as error:
        raise StartFailed(str(error)) from error


def with_object_store(
    settings: Settings, free_bytes: int | None, memory: FreeMemory | None = None
) -> tuple[Settings, str]:
    """Return the settings with consistent sizes of Ray's store and the cpu tier, and a warning if reduced.

    `free_bytes`: of /dev/shm; None: there is none. `memory`: by which a tier is sized that has no size; None:
    only what is configured is looked at. Raises `StartFailed` if the configured sizes conflict.
    """
    tiers, cluster = settings.tiers, settings.cluster
    tier_bytes = tiers.cpu.bytes_max
    if tier_bytes is None:
        spare = tiers.cpu.bytes_planned if memory is None else spare_bytes(settings, memory)
        tier_bytes = measured_tier_bytes(cluster.object_store_bytes, free_bytes, spare)
    tier_bytes = tier_bytes if tiers.enabled else 0
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
    """Raise `StartFailed` if a package is missing that is needed by what the user asked for."""
    try:
        require_tiers(settings.tiers)
        require_telemetry(settings.telemetry)
        if settings.auth.oidc.issuer is not None:
            require("joserfc", "auth.oidc.issuer")
        if settings.knowledge.enabled and settings.knowledge.embedder == "wordllama":
            require("wordllama", "knowledge.embedder=wordllama")
        if settings.knowledge.enabled and settings.knowledge.postgres.url is not None:
            require("psycopg", "knowledge.postgres.url")
    except ExtraMissing as error:
        raise StartFailed(str(error)) from error


def check_gpus(settings: Settings) -> None:
    """Raise `StartFailed` if there are fewer GPUs than the replicas take; Serve would wait for ever."""
    models = {name: one for name, one in settings.of_models().items() if uses_gpu(one)}
    if not models:
        return
    gpus = max(_gpus(one) for one in models.values())
    if gpus == 0:
        raise ModelRefused("engine.device is cuda and torch sees no CUDA device", CUDA_FIX)
    if settings.models:
        taken = {key: one.cluster.replicas_first * one.engine.tensor_parallel for key, one in models.items()}
        if gpus < (total := sum(taken.values())):
            said = ", ".join(f"{key or 'the first'} {count}" for key, count in taken.items())
            raise StartFailed(
                f"the models take {total} GPUs ({said}), but this machine has {gpus}. Lower their "
                "cluster.replicas, or compute some on the CPU with engine.device cpu"
            )
        return
    replicas, each = settings.cluster.replicas_first, settings.engine.tensor_parallel
    if gpus < replicas * each:
        needs = "as many GPUs" if each == 1 else f"{replicas * each} GPUs (engine.tensor_parallel={each})"
        raise StartFailed(
            f"cluster.replicas={replicas} needs {needs}, but this machine has {gpus}. "
            "Lower --replicas, or compute on the CPU with --engine.device cpu"
        )


def check_memory(needs: Mapping[str, int], free_bytes: int) -> None:
    """Raise `StartFailed` if the models do not fit into this machine's memory beside each other.

    `needs`: name -> what its replicas take before they serve: weights, and pools that have a size.
    """
    if sum(needs.values()) <= free_bytes:
        return
    said = ", ".join(f"{name} {nbytes / GIB:.1f} GiB" for name, nbytes in needs.items())
    raise StartFailed(
        f"the models need {sum(needs.values()) / GIB:.1f} GiB of memory ({said}), and {free_bytes / GIB:.1f} "
        "GiB are free. Serve fewer of them here, or lower their cluster.replicas or engine.pool_bytes_max"
    )


def memory_needs(settings: Settings, weights_bytes: int) -> int:
    """Return what the first replicas of a model take of main memory before they serve; 0 on GPUs."""
    if uses_gpu(settings):
        return 0
    return settings.cluster.replicas_first * (weights_bytes + (settings.engine.pool_bytes_max or 0))


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


def check_certificate(server: ServerSettings) -> None:
    """Raise `StartFailed` if no connection could be made with the certificate; Serve would only log that."""
    if server.tls is None:
        if server.tls_key or server.tls_client_ca:  # who gives these counts on HTTPS
            raise StartFailed(
                "server.tls_certificate is empty, and server.tls_key or tls_client_ca are given"
            )
        return
    try:
        server.tls.check()
    except CertificateRefused as error:
        raise StartFailed(
            f"server.tls_certificate: {error}. Name PEM files that this user may read: a certificate that is "
            "valid now with its chain below it, and its key without a passphrase in server.tls_key"
        ) from error


def enter_tls(cluster: ClusterSettings) -> None:
    """Have this process, and those it starts, speak TLS to the cluster's, if `cluster.tls_dir` is set.

    Raises `StartFailed`.
    """
    check_node_tls(cluster)
    if cluster.tls is not None:
        os.environ.update(cluster.tls.environment())


def check_node_tls(cluster: ClusterSettings) -> None:
    """Raise `StartFailed` if nodes could not connect with the files of `cluster.tls_dir`; Ray only waits."""
    if cluster.tls is None:
        return
    try:
        cluster.tls.check(LOOPBACK if cluster.ray_address == "local" else "")
    except CertificateRefused as error:
        raise StartFailed(
            f"cluster.tls_dir: {error}. Put PEM files that this user may read there: ca.crt, and tls.crt "
            "with tls.key, a certificate by it that is valid now, for servers and clients, and for the "
            "address that Ray has on this node (127.0.0.1 with cluster.ray_address=local)"
        ) from error


def free_memory(settings: Settings, weights_bytes: int) -> FreeMemory:
    """Return what this machine's memory has free for a service with these settings and weights."""
    return FreeMemory(free_host_bytes(), weights_bytes, uses_gpu(settings), os.cpu_count() or 1)


def shm_free_bytes() -> int | None:
    """Return the free bytes of /dev/shm, where Ray keeps its objects; None if there is none."""
    try:
        return shutil.disk_usage("/dev/shm").free
    except OSError:
        return None  # not Linux: Ray's store is elsewhere


def uses_gpu(settings: Settings) -> bool:
    """Whether each replica takes GPUs: `engine.tensor_parallel` of them."""
    if settings.engine.device == "cpu":
        return False
    if settings.engine.device == "cuda":
        return True
    return _gpus(settings) > 0


def _gpus(settings: Settings) -> int:
    """Return how many GPUs the engine's torch sees here."""
    return gpus_seen(chosen_python(settings)) if settings.engine.kind == "vllm" else gpus_seen()
