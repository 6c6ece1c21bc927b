"""Sizes Ray's object store for the cpu tier, and names the environment variables of Ray's processes. Pure.

Ray spills objects to disk in its own order once its store is 80 % full, and puts the store itself on disk if
the in-memory file system is too small. Either would silently turn the cpu tier into a slow disk, so the tier
gets 60 % and must fit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from samovar.configs.sections import GIB, MIB, UNMEASURED_BYTES
from samovar.configs.settings import Settings
from samovar.configs.tls import tls_in

TIER_SHARE = 0.6


BESIDE_BYTES = 256 * MIB
"""For what else Ray stores there: messages, results, extents in transfer."""


MEMORY_SHARE = 0.8
"""Share of the free space in /dev/shm that we use: other processes need some, too."""


TIER_BYTES_MIN = 16 * MIB
"""A cpu tier that would have to be smaller is switched off."""


SPARE_SHARE = 0.5
"""Share of the memory that nothing else here has planned for which the cpu tier may grow into."""


class StoreTooSmall(Exception):
    """The configured store cannot hold the configured tier."""


@dataclass(frozen=True, slots=True)
class StorePlan:
    """The size of Ray's store, of which the cpu tier may take `tier_bytes`; `warning` may be empty."""

    store_bytes: int
    tier_bytes: int
    warning: str = ""


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """What the main memory of this machine has free now, and what the weights of a replica take of it.

    `has_gpu`: weights and pools are in a GPU's memory. `cores`: of this machine.
    """

    free_bytes: int
    weights_bytes: int
    has_gpu: bool
    cores: int


def spare_bytes(settings: Settings, memory: FreeMemory) -> int:
    """Return what the cpu tier may grow into: a share of what weights, pools, staging and swap leave."""
    engine, tiers = settings.engine, settings.tiers
    replicas = settings.cluster.sharing_node(memory.cores)
    left_bytes = memory.free_bytes
    if not memory.has_gpu:
        left_bytes = max(0, left_bytes - replicas * memory.weights_bytes)
        pools_bytes = int(left_bytes * engine.pool_memory_fraction)
        if engine.pool_bytes_max is not None:
            pools_bytes = min(pools_bytes, replicas * engine.pool_bytes_max)
        left_bytes -= pools_bytes
    left_bytes -= replicas * (tiers.staged_bytes_max + tiers.swap_bytes_max)
    return max(0, int(left_bytes * SPARE_SHARE))


def measured_tier_bytes(store_bytes: int | None, free_bytes: int | None, spare: int) -> int:
    """Return the size of a cpu tier that was not set: `spare`, as far as Ray's store can hold it.

    `store_bytes`, `free_bytes`: as in `plan_store`. Where /dev/shm holds no tier worth having, it is what
    would be usual: then `plan_store` says what is missing.
    """
    if store_bytes is not None:
        return min(spare, int(store_bytes * TIER_SHARE))
    if free_bytes is None:
        return spare
    fits_bytes = _tier_in(int(free_bytes * MEMORY_SHARE))
    return min(spare, fits_bytes or UNMEASURED_BYTES)


def plan_store(store_bytes: int | None, tier_bytes: int, free_bytes: int | None) -> StorePlan:
    """Choose the sizes of Ray's store and the cpu tier.

    `store_bytes`: as configured; None: what the tier needs. `free_bytes`: of /dev/shm; None: there is none.
    A tier that does not fit into memory is made smaller, with a warning. Raises `StoreTooSmall` if both
    sizes are configured and contradict each other.
    """
    limit_bytes = None if free_bytes is None else int(free_bytes * MEMORY_SHARE)
    if store_bytes is not None:
        fits_bytes = int(store_bytes * TIER_SHARE)
        if tier_bytes > fits_bytes:
            raise StoreTooSmall(
                f"cluster.object_store_bytes={store_bytes} leaves {fits_bytes} bytes for the cpu tier, "
                f"but tiers.cpu.bytes_max={tier_bytes}. Lower the second, or leave the first empty"
            )
        if limit_bytes is not None and store_bytes > limit_bytes:
            warning = _too_little(free_bytes, store_bytes, "Ray may use the disk instead")
            return StorePlan(store_bytes, tier_bytes, warning)
        return StorePlan(store_bytes, tier_bytes)
    wanted_bytes = _store_for(tier_bytes)
    if limit_bytes is None or wanted_bytes <= limit_bytes:
        return StorePlan(wanted_bytes, tier_bytes)
    left_bytes = _tier_in(limit_bytes)
    instead = f"the cpu tier gets {_mib(left_bytes)} instead of {_mib(tier_bytes)}"
    warning = _too_little(free_bytes, wanted_bytes, instead) if left_bytes < tier_bytes else ""
    return StorePlan(_store_for(left_bytes), min(left_bytes, tier_bytes), warning)


def _tier_in(store_bytes: int) -> int:
    """Return the largest tier that a store of this size can hold; 0: none worth having."""
    tier_bytes = int(max(0, store_bytes - BESIDE_BYTES) * TIER_SHARE)
    return tier_bytes if tier_bytes >= TIER_BYTES_MIN else 0


def _store_for(tier_bytes: int) -> int:
    return int(tier_bytes / TIER_SHARE) + BESIDE_BYTES


def _too_little(free_bytes: int | None, store_bytes: int, instead: str) -> str:
    """Return the warning; `store_bytes`: what Ray's store would take as configured."""
    enough_gib = math.ceil(store_bytes / MEMORY_SHARE / GIB)
    return (
        f"/dev/shm has {_mib(free_bytes or 0)} free, so {instead}. Give it {enough_gib} GiB "
        f"(docker run --shm-size={enough_gib}g), or lower tiers.cpu.bytes_max"
    )


def _mib(nbytes: int) -> str:
    return f"{nbytes / MIB:,.0f} MiB"


PROCESS_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",  # no telemetry without consent
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",  # with Ray's 15 a busy neighbour starves tiers and replicas for seconds
    "TRANSFORMERS_VERBOSITY": "error",
    # oneDNN caches compiled kernels by shape, and every number of rows in a step is a shape: with its
    # default of 1024 a replica's memory grows for minutes (measured: docs/benchmarks).
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",
}


PRIVATE_ENVIRONMENT = {
    "RAY_enable_metrics_collection": "0",  # Ray's own: their port is random
    "RAY_task_events_report_interval_ms": "0",  # for a dashboard that is not there
    # How often Ray looks for work, as clusters of hundreds of nodes need it: 8 % of a core without a request
    # (docs/benchmarks). None of these is in the way of a request.
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "1",  # 0.1; three calls of GCS each
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "10000",  # 100
    "RAY_event_stats": "0",
    "RAY_io_context_event_loop_lag_collection_interval_ms": "0",  # 250; a metric
    "RAY_raylet_check_gc_period_milliseconds": "1000",  # 100
    "RAY_kill_idle_workers_interval_ms": "1000",  # 200
    "RAY_local_fs_monitor_interval_ms": "1000",  # 100
    "RAY_debug_dump_period_milliseconds": "60000",  # 10,000
    "RAY_raylet_report_resources_period_milliseconds": "500",  # 100; how soon freed resources are known
    "RAY_memory_monitor_refresh_ms": "1000",  # 250; how soon Ray ends a process when memory is short
    "RAY_object_manager_timer_freq_ms": "1000",  # 100; of objects pulled from other nodes: there are none
    "RAY_gcs_pull_resource_loads_period_milliseconds": "10000",  # 1,000; for an autoscaler of nodes
}
"""Beside `PROCESS_ENVIRONMENT`, of a Ray cluster that `samovar serve` starts for itself."""


TOKEN_MODE = {"RAY_AUTH_MODE": "token"}
"""Makes Ray require its token from every client."""


OFFLINE = {"HF_HUB_OFFLINE": "1"}


def ray_environment(settings: Settings) -> dict[str, str]:
    """Return all variables, as `ray start` needs them."""
    return PROCESS_ENVIRONMENT | required_environment(settings) | tls_environment(settings.cluster.tls_dir)


def required_environment(settings: Settings) -> dict[str, str]:
    """Return the variables that Samovar depends on; they override what the user has set."""
    from samovar.router.proxy import proxy_environment  # it takes a second, and sizes are checked before that

    return proxy_environment(settings) | TOKEN_MODE | OFFLINE


def tls_environment(folder: Path | None) -> dict[str, str]:
    """Return the variables of TLS between nodes, with the files of `cluster.tls_dir`; none without it."""
    return {} if folder is None else tls_in(folder).environment()


def application_environment() -> dict[str, str]:
    """Return the variables that applications on a running cluster are sent.

    None of the proxies': those have what Ray was started with, and ingresses must not take proxies for
    guarded that are not (`router/proxy`).
    """
    return PROCESS_ENVIRONMENT | TOKEN_MODE | OFFLINE
