"""What becomes of our settings where vLLM computes (`engine.kind: vllm`): docs/engines.md. Pure.

Refused is only what differs from its default: a setting that vLLM has no equal for would change nothing, and
the answer to it is an error, not silence. What merely tunes our own engine is ignored, with a warning.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import BaseModel

from samovar.configs.settings import Settings
from samovar.replicas.messages import ModelRefused


@dataclass(frozen=True, slots=True)
class NoEqual:
    """Why a setting is refused, and what to do instead; `fine`: values that vLLM does anyway."""

    why: str
    fix: str
    fine: tuple[object, ...] = ()


MAPPED = {
    "kind": "",
    "vllm": "",
    "device": "the build of vLLM",
    "threads": "OMP_NUM_THREADS",
    "native_build_s_max": "",  # the tiers' checksums are compiled there, too
    "block_tokens": "block_size",
    "pool_memory_fraction": "kv_cache_memory_bytes",  # on a CPU; of a GPU vLLM takes its own share
    "pool_bytes_max": "kv_cache_memory_bytes",
    "step_tokens_max": "max_num_batched_tokens",
    "sequences_max": "max_num_seqs",
    "queue_max": "",
    "tensor_parallel": "tensor_parallel_size",
    "prefix_reuse": "enable_prefix_caching",
    "stuck_step_s": "",
}
"""Of the section `engine`: settings that hold, and the argument of vLLM that each becomes; empty: none."""

IGNORED = {
    "step_s_target": "vLLM bounds a step by tokens alone",
    "step_stretch": "vLLM bounds a step by tokens alone",
    "passed_tokens_max": "vLLM takes requests by priority and arrival",
    "logit_rows_max": "vLLM sizes its own sampler",
    "graph_rows_max": "vLLM chooses what it records as CUDA graphs",
    "measurements_ttl_s": "vLLM measures at each start",
    "fast_start": "there is no probe, and prices are learned while serving",
    "rank_wait_s": "vLLM's ranks are its own processes",
    "rank_staging_bytes": "vLLM's ranks are its own processes",
}
"""Of the section `engine`: settings that tune our own engine, and why they change nothing."""

OURS = "leave it out, or serve with our own engine (--engine samovar)"
REFUSED = {
    "engine.step": NoEqual("vLLM has its own kernels", OURS),
    "engine.kv_dtype": NoEqual(
        "vLLM has another int8 cache",
        "leave it out; what vLLM has is engine.vllm.options.kv_cache_dtype, without tiers",
    ),
    "engine.kv_groups": NoEqual(
        "vLLM's ranks store records of their own", "leave it out: engine.tensor_parallel alone is enough"
    ),
    "engine.draft_tokens_max": NoEqual(
        "vLLM guesses by other means", "leave it out; what vLLM has is engine.vllm.options.spec_method", (0,)
    ),
    "engine.exact": NoEqual("vLLM promises no equal bits for other batches", OURS, (False,)),
    "engine.preemption": NoEqual("vLLM recomputes what it preempts", "set it to drop", ("drop",)),
    "model.weights": NoEqual(
        "these int8 weights are the native step's", "leave it out, and serve a quantised checkpoint"
    ),
    "tiers.audit_share": NoEqual("nothing restored can be computed beside vLLM's steps", OURS, (0.0,)),
    "tiers.swap_bytes_max": NoEqual("vLLM recomputes what it preempts", OURS, (0,)),
    "telemetry.kv_events": NoEqual(
        "vLLM tells its blocks and the tiers' itself, by other hashes",
        "leave it out; what vLLM has is engine.vllm.options.kv_events_config",
    ),
}
"""Settings that our engine has and vLLM has no equal for."""

OPTIONS = {
    "model": "model.path",
    "model_weights": "model.path",
    "tokenizer": "model.path",
    "revision": "model.path (NAME@REVISION)",
    "tokenizer_revision": "model.path (NAME@REVISION)",
    "code_revision": "model.path (NAME@REVISION)",
    "download_dir": "model.cache_dir",
    "served_model_name": "model.served_name",
    "dtype": "model.dtype",
    "max_model_len": "model.context_tokens_max",
    "generation_config": "model.generation_config",
    "reasoning_parser": "model.reasoning_parser",
    "block_size": "engine.block_tokens",
    "max_num_seqs": "engine.sequences_max",
    "max_num_queued_reqs": "engine.queue_max",
    "max_num_batched_tokens": "engine.step_tokens_max",
    "tensor_parallel_size": "engine.tensor_parallel",
    "kv_cache_memory_bytes": "engine.pool_bytes_max",
    "enable_prefix_caching": "engine.prefix_reuse",
    "kv_transfer_config": "tiers.enabled",
    "kv_offloading_size": "tiers.cpu.bytes_max",
    "kv_offloading_backend": "tiers.enabled",
    "data_parallel_size": "cluster.replicas",
    "enable_lora": "engine.vllm.adapters",
}
"""Arguments of vLLM's engine that a setting stands for."""

UNFIT_OPTIONS = {
    "runner": "the front serves text alone",
    "convert": "the front serves text alone",
    "skip_tokenizer_init": "the front has the tokenizer",
    "disable_log_stats": "load and prices are read from vLLM's figures",
    "nnodes": "a replica and its ranks are on one machine",
    "node_rank": "a replica and its ranks are on one machine",
    "master_addr": "a replica and its ranks are on one machine",
    "tokens_only": "the front reads vLLM's answers as ids already",
}
"""Arguments that the front or the deployment rules out, and why."""

UNTIERED_OPTIONS = ("prefill_context_parallel_size", "decode_context_parallel_size")
"""Those that the connector of the tiers refuses, but for the value 1."""
WITHOUT_TIERS = "leave it out, or serve without the cache tiers (--tiers.enabled false)"


def refuse_for_vllm(settings: Settings) -> None:
    """Raise `ModelRefused` naming all settings that vLLM cannot do, with their values and what to do."""
    problems = [
        (f"{key}={value}: {row.why}", row.fix)
        for key, row in REFUSED.items()
        for value in _given(settings, key)
        if value not in row.fine
    ]
    names = {settings.model.served_name, *settings.model.aliases}
    problems += [
        (f"engine.vllm.adapters: {name} is a name of the model", "give the adapter another name")
        for name in settings.engine.vllm.adapters
        if name in names
    ]
    for given, option in settings.engine.vllm.options.items():
        problems += _refused_option(settings, given.replace("-", "_"), option)
    if problems:
        reasons, fixes = (list(dict.fromkeys(part)) for part in zip(*problems, strict=True))
        raise ModelRefused(f"engine.kind=vllm: {'; '.join(reasons)}", "; ".join(fixes))


def unused_settings(settings: Settings) -> list[str]:
    """Return a sentence for each setting that is given, and changes nothing with this engine."""
    engine = settings.engine
    if engine.kind == "samovar":
        return [
            f"engine.vllm.{name} changes nothing: engine.kind is samovar, not vllm (--engine vllm)"
            for name in type(engine.vllm).model_fields
            if _given(settings, f"engine.vllm.{name}")
        ]
    return [
        f"engine.{name}={value} changes nothing with engine.kind=vllm: {why}"
        for name, why in IGNORED.items()
        for value in _given(settings, f"engine.{name}")
    ]


def _refused_option(settings: Settings, name: str, value: object) -> list[tuple[str, str]]:
    key = f"engine.vllm.options.{name}"
    if name in OPTIONS:
        return [(f"{key}={value}: {OPTIONS[name]} stands for it", f"set {OPTIONS[name]}")]
    if name in UNFIT_OPTIONS and value is not False:
        return [(f"{key}={value}: {UNFIT_OPTIONS[name]}", f"leave {name} out")]
    if not settings.tiers.enabled:
        return []
    if name in UNTIERED_OPTIONS and value != 1:
        return [(f"{key}={value}: a rank would have a part of each block's tokens", WITHOUT_TIERS)]
    if name == "kv_cache_dtype":
        from samovar.cache_tiers.vllm.refusals import CACHE_DTYPES  # with numpy

        if value not in CACHE_DTYPES:
            return [(f"{key}={value}: its scales or tables lie outside of the pages", WITHOUT_TIERS)]
    return []


def _given(settings: Settings, key: str) -> list[object]:
    """Return the value of a setting if it is not the default."""
    *sections, name = key.split(".")
    section: BaseModel = settings
    for one in sections:
        section = getattr(section, one)
    value: object = getattr(section, name)
    default = type(section).model_fields[name].get_default(call_default_factory=True)
    return [] if value == default else [value]
