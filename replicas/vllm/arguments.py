"""How vLLM is told the settings: arguments of its engine, and variables of its processes. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from samovar.configs.settings import Settings

CONNECTOR = "samovar.cache_tiers.vllm.connector"
LOGPROBS_MAX = 100
"""More than the front lets through: it is the one that refuses."""
BACKEND = "guidance"
"""What keeps answers to their grammar: llguidance, as in Samovar's own engine: grammars are the same."""


def engine_arguments(
    settings: Settings, model_dir: Path, dtype: str, pool_bytes: int | None, connector: Mapping[str, Any]
) -> dict[str, Any]:
    """Return arguments of vLLM's `AsyncEngineArgs`.

    `pool_bytes`: None: vLLM takes its share of a GPU. `connector`: its `kv_connector_extra_config`; empty: no
    tiers. What `engine.vllm.options` says comes last.
    """
    engine = settings.engine
    given: dict[str, Any] = {
        "model": str(model_dir),
        "served_model_name": [settings.model.served_name or model_dir.name],
        "dtype": dtype,
        "max_model_len": settings.model.context_tokens_max,
        "block_size": engine.block_tokens,
        "max_num_seqs": engine.sequences_max,
        "max_num_batched_tokens": max(engine.step_tokens_max, engine.sequences_max),
        "enable_chunked_prefill": True,
        "enable_prefix_caching": engine.prefix_reuse,
        "tensor_parallel_size": engine.tensor_parallel,
        # Not Ray's: a replica has its GPUs, and vLLM would ask for others.
        "distributed_executor_backend": "mp" if engine.tensor_parallel > 1 else "uni",
        "max_logprobs": LOGPROBS_MAX,
        "structured_outputs_config": {"backend": BACKEND},
        "limit_mm_per_prompt": {"image": 0, "video": 0, "audio": 0},
    }
    if pool_bytes is not None:
        given["kv_cache_memory_bytes"] = pool_bytes
    if connector:
        given["kv_transfer_config"] = {
            "kv_connector": "SamovarConnector",
            "kv_connector_module_path": CONNECTOR,
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": dict(connector),
        }
    return given | {name: _parsed(value) for name, value in engine.vllm.options.items()}


def _parsed(value: bool | int | float | str) -> Any:
    """Return a structure that is written as JSON."""
    return json.loads(value) if isinstance(value, str) and value[:1] in ("{", "[") else value


def process_environment(threads: int | None) -> dict[str, str]:
    """Return variables of vLLM's processes. `threads`: of a CPU; None on a GPU."""
    own = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    if threads is None:
        return own
    # Unbound: replicas that share a machine would all be bound to its first cores.
    return own | {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(threads)}
