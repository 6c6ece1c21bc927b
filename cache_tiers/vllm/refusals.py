"""What the connector refuses at the start, with the fix. Pure: vLLM's objects are what they look like."""

from __future__ import annotations

from typing import Any

TESTED = ("0.32",)
"""Minors of vLLM: the connector's contract moves from one to the next."""


def check_version(version: str) -> None:
    """Raise `ValueError` for a minor that is not tested, naming those that are."""
    minor = ".".join(version.split(".")[:2])
    if minor not in TESTED:
        known = ", ".join(TESTED)
        raise ValueError(f"SamovarConnector is tested with vLLM {known}, not {version}: install one of these")


def check_config(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raise `ValueError` naming what cannot be stored, and the fix."""
    transfer, cache, parallel = (
        vllm_config.kv_transfer_config,
        vllm_config.cache_config,
        vllm_config.parallel_config,
    )
    policy = transfer.kv_load_failure_policy
    if policy != "recompute":
        raise ValueError(
            f"kv_load_failure_policy is {policy!r}: set it to 'recompute', or a block that cannot be loaded "
            "fails its request"
        )
    if transfer.kv_role != "kv_both":
        raise ValueError(f"kv_role is {transfer.kv_role!r}: SamovarConnector needs 'kv_both'")
    if "fp8" in str(cache.cache_dtype):
        raise ValueError(
            f"kv_cache_dtype {cache.cache_dtype}: its scales lie outside of the pages; use 'auto', or leave "
            "the connector out"
        )
    ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    if ranks != 1:
        raise ValueError(f"{ranks} ranks: SamovarConnector serves engines of one rank so far")
    groups = len(kv_cache_config.kv_cache_groups)
    if groups != 1:
        raise ValueError(
            f"{groups} groups of KV layers: SamovarConnector stores models with one kind of layer"
        )
