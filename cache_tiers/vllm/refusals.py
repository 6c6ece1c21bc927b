"""What the connector refuses at the start, with the fix. Pure: vLLM's objects are what they look like."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from samovar.cache_tiers.vllm.messages import PageLayout

logger = logging.getLogger("vllm.samovar")

SERVED, READ = "served", "read"
TESTED = {"0.29": READ, "0.32": SERVED, "0.33": READ}
"""Minors of vLLM, and how each was tried: the connector's contract moves from one to the next.

Served: `make test-vllm`, on a CPU. Read: `tests/vllm/test_contract.py` on its source, and the connector run
with its classes.
"""
UNFIT = {"0.22": "it does not say which tokens are still being computed (`num_in_flight_tokens`)"}
"""Minors whose contract cannot be met, and why."""

CACHE_DTYPES = {"auto", "float16", "bfloat16"}
"""Of which a page has all that there is. What a checkpoint chooses, its tensors show (`layout_of`)."""
SPECS = {"FullAttentionSpec", "MLAAttentionSpec"}
"""vLLM's kinds of KV layers whose pages keep every token, each in its own place."""


def check_version(version: str) -> None:
    """Raise `ValueError` for a minor that is not tested, naming those that are; warn if it was only read."""
    minor = ".".join(version.split(".")[:2])
    if minor not in TESTED:
        why = f": {UNFIT[minor]}" if minor in UNFIT else ""
        known = ", ".join(TESTED)
        raise ValueError(
            f"SamovarConnector is tested with vLLM {known}, not {version}{why}. Install one of these"
        )
    if TESTED[minor] == READ:
        logger.warning(
            "samovar: of vLLM %s the contract was read, it was not served with; %s was",
            minor,
            ", ".join(one for one, how in TESTED.items() if how == SERVED),
        )


def check_cache_dtype(dtype: str) -> None:
    """Raise `ValueError` for a quantised KV cache, with the fix."""
    if dtype not in CACHE_DTYPES:
        raise ValueError(
            f"kv_cache_dtype {dtype}: its scales or tables lie outside of the pages; use 'auto', "
            "or leave the connector out"
        )


COUNTED_MEDIA = (
    "with --mm-processor-cache-gb 0 and --no-enable-prefix-caching vLLM counts images instead of naming them "
    "by content; leave one of the two out"
)


def counts_media(vllm_config: Any) -> bool:
    """Return whether vLLM makes no digests of images and their like."""
    media = getattr(vllm_config.model_config, "multimodal_config", None)
    if media is None:
        return False
    return not media.mm_processor_cache_gb and not vllm_config.cache_config.enable_prefix_caching


def check_media_names(vllm_config: Any) -> None:
    """Raise `ValueError` if vLLM's own keys do not name images by content, with the fix."""
    if counts_media(vllm_config):
        raise ValueError(f"vLLM's keys do not name images: {COUNTED_MEDIA}")


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
    check_cache_dtype(cache.cache_dtype)
    for name in ("prefill_context_parallel_size", "decode_context_parallel_size", "nnodes"):
        size = getattr(parallel, name, 1)
        if size != 1:
            raise ValueError(
                f"{name} is {size}: set it to 1. Ranks run on the machine of the tiers, and each "
                "has all tokens of a block"
            )
    groups = len(kv_cache_config.kv_cache_groups)
    if groups != 1:
        raise ValueError(
            f"{groups} groups of KV layers: SamovarConnector stores models with one kind of layer. Leave "
            "--no-disable-hybrid-kv-cache-manager out; what needs several (Mamba) is not stored"
        )
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    for one in getattr(spec, "kv_cache_specs", {"": spec}).values():
        # By name: what is derived of these has other pages.
        if type(one).__name__ not in SPECS or one.tokens_per_state != 1:
            raise ValueError(
                f"KV layers of kind {type(one).__name__}: SamovarConnector stores full attention alone "
                f"({', '.join(sorted(SPECS))}), whose pages have all of a block and nothing else"
            )


def check_ranks(told: Mapping[tuple[int, int], Any], tp: int, pp: int, machine: str) -> list[PageLayout]:
    """Return the layouts of the ranks' pages, in order. `told`: by each (PP, TP) rank's worker.

    Raises `ValueError` if one is missing, is counted otherwise, or runs on another machine.
    """
    if set(told) != {(one, other) for one in range(pp) for other in range(tp)}:
        raise ValueError(f"pages of ranks {sorted(told)}, which are not {pp} by {tp}")
    layouts = []
    for rank, ((one, other), said) in enumerate(sorted(told.items())):
        if said.rank != rank:
            raise ValueError(f"the worker of rank {one}, {other} takes itself for number {said.rank}")
        if said.machine != machine:
            raise ValueError(
                f"rank {one}, {other} runs on another machine: SamovarConnector serves engines on one"
            )
        layouts.append(said.layout)
    return layouts
