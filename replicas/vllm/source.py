"""How vLLM is told the settings, what it is asked, and what comes back. Pure: `async_llm.py` makes it vLLM's.

Ids go in and ids come out: text, stop strings and what an answer may look like are Samovar's for both
engines (`replicas/answers`).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from samovar.configs.json_text import parse_json
from samovar.configs.settings import Settings
from samovar.replicas.messages import ModelRefused, Sampled, SamplingParams


@dataclass(frozen=True, slots=True)
class Ask:
    """A prompt for vLLM. `sampling`: arguments of vLLM's `SamplingParams`, `params` its `kv_transfer_params`.

    `salt`: pages are shared with prompts of the same salt alone. `grammar`: in llguidance's form; empty: any.
    `adapter`: its name; empty: none.
    """

    name: str
    token_ids: Sequence[int]
    sampling: dict[str, Any]
    salt: str = ""
    params: dict[str, Any] = field(default_factory=dict)
    grammar: str = ""
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class TokenPiece:
    """New tokens of choice `index`. `cached_tokens`: of the prompt, found in pages or meant to be loaded.

    `ended`: vLLM's reason, once it computes no more of this choice. `prompt_scores`: of the prompt's tokens
    behind the first, with the first piece, where they are asked for.
    """

    index: int
    sampled: tuple[Sampled, ...]
    cached_tokens: int = 0
    ended: str = ""
    prompt_scores: tuple[Sampled, ...] = ()


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """What vLLM's pool is made of. `pages`: one of them is vLLM's own; `bytes_per_token`: on all ranks."""

    dtype: str
    kv_dtype: str
    block_tokens: int
    bytes_per_token: int
    pages: int
    context_tokens_max: int
    device: str


class AskRefused(ValueError):
    """vLLM does not take a request, and says why."""


class SourceLost(RuntimeError):
    """vLLM's engine has ended."""


class TokenSource(Protocol):
    """vLLM. For one event loop."""

    def generate(self, ask: Ask) -> AsyncGenerator[list[TokenPiece], None]:
        """Yield what is computed. Closing it aborts. Raises `AskRefused`, `SourceLost`."""

    @property
    def pool_share(self) -> float:
        """Return the share of the pool's pages in use."""

    def check(self) -> None:
        """Raise `SourceLost` if it computes nothing any more."""

    def close(self) -> None:
        """End it, and its processes. May take seconds."""


def vllm_sampling(
    params: SamplingParams, n: int, ends: Sequence[int], *, spent: int = 0, choice: int = 0
) -> dict[str, Any]:
    """Return arguments of vLLM's `SamplingParams`.

    `ends`: ids that end a turn. `spent`: tokens of answer `choice` that exist already. What ends an answer is
    given as stop tokens, as vLLM knows other ids than the model's template; stop strings are not vLLM's
    matter. vLLM draws choice c of a seed by that seed plus c.
    """
    stops = {*params.stop_token_ids, *(() if params.ignore_eos else ends)}
    given: dict[str, Any] = {
        "n": n,
        "max_tokens": params.max_tokens - spent,
        "min_tokens": max(0, params.min_tokens - spent),
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "repetition_penalty": params.repetition_penalty,
        "seed": None if params.seed is None else (params.seed + choice) % 2**63,
        "ignore_eos": True,
        "stop_token_ids": sorted(stops),
        "logprobs": params.logprobs,
        "prompt_logprobs": params.prompt_logprobs,
        "allowed_token_ids": list(params.allowed_token_ids) or None,
        "logit_bias": dict(params.logit_bias) or None,
        "detokenize": False,
    }
    return given


def is_replayed(params: SamplingParams) -> bool:
    """Whether an answer that was begun elsewhere is computed again from its start, and compared.

    A grammar of vLLM's begins at the end of a prompt, and penalties count what was answered: both would be
    wrong behind tokens that are given as a prompt.
    """
    return params.grammar is not None or params.presence_penalty != 0 or params.frequency_penalty != 0


CPU_BLOCK_TOKENS = 32
"""The least that vLLM's attention takes on a CPU."""
AS_FITS = -1
"""Has vLLM take the model's context, or what its pool holds, if that is less: as our engine does."""
LORAS_MAX = 8
"""Adapters that are on the device at once; of others, vLLM exchanges one."""
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
CONNECTOR = "samovar.cache_tiers.vllm.connector"
LOGPROBS_MAX = 100
"""More than the front lets through: it is the one that refuses."""
BACKEND = "guidance"
"""What keeps answers to their grammar: llguidance, as in Samovar's own engine: grammars are the same."""


def engine_arguments(
    settings: Settings,
    model_dir: Path,
    context_tokens: int,
    dtype: str,
    pool_bytes: int | None,
    connector: Mapping[str, Any],
    *,
    on_cpu: bool,
) -> dict[str, Any]:
    """Return arguments of vLLM's `AsyncEngineArgs`.

    `context_tokens`: the model's, or fewer; it is less where the pool holds less, if the settings do not ask
    for so many. `pool_bytes`: None: vLLM takes its share of a GPU. `connector`: its
    `kv_connector_extra_config`; empty: no tiers. What `engine.vllm.options` says comes last.
    Raises `ModelRefused` for what vLLM would start with and die of.
    """
    engine = settings.engine
    options: dict[str, Any] = {name.replace("-", "_"): value for name, value in engine.vllm.options.items()}
    stages = int(options.get("pipeline_parallel_size", 1))
    if on_cpu and stages > 1 and options.get("enforce_eager"):
        # Its CPU worker makes the tensors that a stage receives while it compiles; without them it dies.
        raise ModelRefused(
            f"engine.vllm.options: vLLM runs {stages} stages of a pipeline on CPUs only as it compiles them",
            'leave enforce_eager out; with "compilation_config": {"mode": 2, "backend": "eager"} it needs '
            "no compiler",
        )
    processes = engine.tensor_parallel * stages
    given: dict[str, Any] = {
        "model": str(model_dir),
        "served_model_name": [settings.model.served_name or model_dir.name],
        "dtype": dtype,
        "max_model_len": AS_FITS if settings.model.context_tokens_max is None else context_tokens,
        "block_size": max(engine.block_tokens, CPU_BLOCK_TOKENS) if on_cpu else engine.block_tokens,
        "max_num_seqs": engine.sequences_max,
        "max_num_batched_tokens": max(engine.step_tokens_max, engine.sequences_max),
        "enable_chunked_prefill": True,
        "enable_prefix_caching": engine.prefix_reuse,
        "tensor_parallel_size": engine.tensor_parallel,
        # Not Ray's: a replica has its GPUs, and vLLM would ask for others.
        "distributed_executor_backend": "mp" if processes > 1 else "uni",
        "max_logprobs": LOGPROBS_MAX,
        "structured_outputs_config": {"backend": BACKEND},
        "limit_mm_per_prompt": {"image": 0, "video": 0, "audio": 0},
    }
    if engine.vllm.adapters:
        ranks = [_rank_of(path) for path in engine.vllm.adapters.values()]
        given |= {
            "enable_lora": True,
            "max_loras": min(len(ranks), LORAS_MAX),
            "max_lora_rank": _up(max(ranks)),
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
    return given | options


def _rank_of(adapter: Path) -> int:
    """Return an adapter's rank. Raises `ModelRefused` if the directory has no adapter."""
    file = adapter.expanduser() / "adapter_config.json"
    try:
        return int(parse_json(file.read_text())["r"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelRefused(
            f"engine.vllm.adapters: {file} does not say the rank of an adapter ({type(error).__name__})",
            "name the directory that has adapter_config.json and adapter_model.safetensors",
        ) from error


def _up(rank: int) -> int:
    """Return the next rank that vLLM has kernels for."""
    return next((fit for fit in LORA_RANKS if fit >= rank), rank)


def process_environment(threads: int | None) -> dict[str, str]:
    """Return variables of vLLM's processes. `threads`: of a CPU; None on a GPU."""
    # Its own configuration of logs would close the files that Serve and we write to.
    own = {"VLLM_NO_USAGE_STATS": "1", "VLLM_CONFIGURE_LOGGING": "0"}
    if threads is None:
        return own
    # Unbound: replicas that share a machine would all be bound to its first cores.
    return own | {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(threads)}
