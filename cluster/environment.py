"""Variables that Ray's processes must be started with, on one machine or on every node of a cluster.

A worker inherits them from its raylet, Serve's HTTP proxies too: whoever starts Ray sets them. Knows no
secrets: others on a machine may see what a process was started with.
"""

from __future__ import annotations

from configs.settings import Settings
from router.proxy_guard import proxy_environment

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
