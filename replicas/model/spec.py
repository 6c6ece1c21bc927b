"""Decides whether our own engine can serve the model in a directory, and describes it for that.

Refuses, with a reason and a fix, what the engine could not serve correctly. Loads no model; see `card.py` for
what is read of any model, `store.py` for where the directory comes from.

What transformers makes of a config.json is kept, if the caller names a folder: merely importing the class of
a config takes it four seconds (5.23: it imports torch's compiler).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from samovar.replicas.messages import ModelRefused
from samovar.replicas.model.apart import run_apart, runs_apart
from samovar.replicas.model.card import (
    COPY_AGAIN,
    ModelCard,
    answer_kept,
    generates,
    kept_name,
    read_card,
    read_config,
    transformers_config,
)
from samovar.replicas.model.weights import WeightsFile, read_weights


@dataclass(frozen=True, slots=True)
class Family:
    """A model type. `weights` and `biases`: what every layer has, without `.weight` and `.bias`.

    `optional_biases`: what has a bias where the config says `attention_bias`. Experts are not named: their
    layout differs between files of one type, and loading refuses a model that lacks some.
    """

    weights: tuple[str, ...]
    biases: tuple[str, ...] = ()
    optional_biases: tuple[str, ...] = ()
    has_experts: bool = False

    def tensors(self, *, layers: int, attention_bias: bool, tied: bool) -> list[str]:
        """Return the names of all tensors that the model cannot do without, first the few of the model."""
        biases = self.biases + (self.optional_biases if attention_bias else ())
        per_layer = [f"{name}.weight" for name in self.weights] + [f"{name}.bias" for name in biases]
        needed = ["model.embed_tokens.weight", "model.norm.weight"]
        needed += [f"model.layers.{i}.{name}" for i in range(layers) for name in per_layer]
        return needed if tied else [*needed, "lm_head.weight"]


_QKV = tuple(f"self_attn.{name}_proj" for name in "qkv")
_QKVO = (*_QKV, "self_attn.o_proj")
_MLP = tuple(f"mlp.{name}_proj" for name in ("gate", "up", "down"))
_NORMS = ("input_layernorm", "post_attention_layernorm")
_QK_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
_FEEDFORWARD_NORMS = ("pre_feedforward_layernorm", "post_feedforward_layernorm")

_LLAMA = Family((*_QKVO, *_MLP, *_NORMS), optional_biases=_QKVO)
_MIXTURE = Family((*_QKVO, *_NORMS), optional_biases=_QKVO, has_experts=True)

# A type is in the table only if the laws hold for it (`tests/laws/test_l14_families.py`): its own
# transformers code, with our attention, gives the same logits as without; cached is the same as uncached.
FAMILIES = {
    "llama": _LLAMA,
    "mistral": replace(_LLAMA, optional_biases=()),
    "qwen2": replace(_LLAMA, biases=_QKV, optional_biases=()),
    "qwen3": replace(_LLAMA, weights=(*_LLAMA.weights, *_QK_NORMS)),
    "smollm3": _LLAMA,
    "granite": _LLAMA,
    "olmo2": Family(
        (*_QKVO, *_MLP, *_QK_NORMS, "post_attention_layernorm", "post_feedforward_layernorm"),
        optional_biases=_QKVO,
    ),
    "phi3": Family(("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj", *_NORMS)),
    "gemma2": replace(_LLAMA, weights=(*_LLAMA.weights, *_FEEDFORWARD_NORMS)),
    "gemma3_text": replace(_LLAMA, weights=(*_LLAMA.weights, *_FEEDFORWARD_NORMS, *_QK_NORMS)),
    "mixtral": replace(_MIXTURE, optional_biases=()),
    "qwen2_moe": replace(_MIXTURE, optional_biases=()),
    "qwen3_moe": replace(_MIXTURE, weights=(*_MIXTURE.weights, *_QK_NORMS)),
    "gpt_oss": _MIXTURE,
}
SERVED_TYPES = tuple(FAMILIES)

SERVED_LAYERS = frozenset({"full_attention", "sliding_attention"})
"""Kinds of layers whose K and V of a token depend on the tokens before it alone, and stay as they are."""

UNSERVED_TYPES = {
    "gemma3": "it takes images; its text-only sizes are of the type gemma3_text",
    "mistral3": "it takes images",
    "llama4": "it takes images, and its layers attend in chunks",
    "qwen2_vl": "it takes images",
    "qwen2_5_vl": "it takes images",
    "qwen3_vl": "it takes images",
    "gemma3n": "its layers share K and V, and it takes images and sound",
    "deepseek_v2": "it keeps K and V compressed (MLA), which the paged pool has no layout for",
    "deepseek_v3": "it keeps K and V compressed (MLA), which the paged pool has no layout for",
    "qwen3_next": "some of its layers keep a state instead of K and V",
    "lfm2": "some of its layers keep a state instead of K and V",
    "mamba": "its layers keep a state instead of K and V",
    "mamba2": "its layers keep a state instead of K and V",
    "jamba": "some of its layers keep a state instead of K and V",
    "falcon_h1": "some of its layers keep a state instead of K and V",
    "bamba": "some of its layers keep a state instead of K and V",
}
"""Known types that are not served, and why."""

_NEEDS_ACCELERATE = "transformers reads it with the package accelerate, which is no part of Samovar"
UNSERVED_QUANTIZATION = {
    "awq": "its kernels are packages for CUDA",
    "bitnet": _NEEDS_ACCELERATE,
    "bitsandbytes": "its kernels are the package bitsandbytes, for CUDA",
    "compressed-tensors": "transformers reads it with the package compressed-tensors, no part of Samovar",
    "fbgemm_fp8": "its kernels need a GPU",
    "fp8": _NEEDS_ACCELERATE,
    "gptq": "its kernels are packages for CUDA",
    "mxfp4": _NEEDS_ACCELERATE,
    "mxfp8": _NEEDS_ACCELERATE,
    "nvfp4": "its kernels need a GPU",
    "quanto": _NEEDS_ACCELERATE,
    "torchao": "transformers reads it with the package torchao, which is no part of Samovar",
}
"""Methods of quantization_config, and why none of them is served (docs/limits.md)."""


__all__ = ["SERVED_TYPES", "ModelRefused", "ModelSpec", "inspect_model"]

# Rotations that depend on a token's position alone. `dynamic` and `longrope` change with the length of the
# whole sequence: a cached K would be wrong as soon as its conversation grew.
SERVED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")

CONFIG_SIZES = (
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_size",
    "vocab_size",
    "max_position_embeddings",
)
OR_VLLM = ", or have vLLM compute it (--engine vllm)"
ANOTHER_MODEL = f"point --model at a causal model of a served type: {', '.join(SERVED_TYPES)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec(ModelCard):
    """What our engine needs to know besides. `rope` is the canonical JSON of the rotary parameters."""

    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    rope: str

    @property
    def has_experts(self) -> bool:
        return FAMILIES[self.model_type].has_experts

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Return the bytes of K and V of one token in all layers, for elements of `itemsize` bytes."""
        return self.layers * 2 * self.kv_heads * self.head_dim * itemsize


@dataclass(frozen=True, slots=True)
class _Config:
    """The fields of transformers' config that count here, as transformers reads them."""

    model_type: str
    num_hidden_layers: Any
    num_attention_heads: Any
    num_key_value_heads: Any
    hidden_size: Any
    vocab_size: Any
    max_position_embeddings: Any
    head_dim: int | None = None
    attention_bias: bool = False
    tie_word_embeddings: bool = False
    use_bidirectional_attention: Any = None
    layer_types: list[str] | None = None
    rope_parameters: dict[str, Any] | None = None


_CONFIG = TypeAdapter(_Config)


def inspect_model(
    path: Path, keep: Path | None = None, begin: Callable[[str], object] = lambda stage: None
) -> ModelSpec:
    """Describe the model in the directory `path`, without loading it.

    `keep`: folder of what transformers made of each config.json and chat template, and of the digests of
    large weights; None: all is done each time. `begin`: is told the stage of the start in which large weights
    are hashed. Raises `ModelRefused` if the engine could not serve the model, or not correctly.
    """
    path = path.expanduser()
    raw = read_config(path)
    refuse_by_config(path, raw)
    config = _normalised_config(path, raw, keep)
    _refuse_by_attention(path, config)
    rope = _served_rope(path, config)
    files = read_weights(path)
    _refuse_missing_tensors(path, config, files)
    vocab, context = config.vocab_size, config.max_position_embeddings
    card = read_card(path, raw, files, vocab=vocab, context_tokens_max=context, keep=keep, begin=begin)
    return ModelSpec(
        **card.parts(),
        layers=config.num_hidden_layers,
        q_heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=_head_dim(config),
        hidden=config.hidden_size,
        rope=rope,
    )


def check_heads(spec: ModelSpec, ranks: int) -> None:
    """Raise `ModelRefused` if the model's KV heads cannot be shared by `ranks` GPUs."""
    if spec.kv_heads % ranks:
        fitting = [str(count) for count in (1, 2, 4, 8) if spec.kv_heads % count == 0]
        raise ModelRefused(
            f"engine.tensor_parallel={ranks}: {spec.path} has {spec.kv_heads} KV heads, which "
            f"{ranks} GPUs cannot "
            "share evenly",
            f"set engine.tensor_parallel to {' or '.join(fitting)}",
        )


def refuse_by_config(path: Path, raw: dict[str, Any]) -> None:
    """Raise `ModelRefused` for what config.json rules out by itself; the most specific reason comes first."""
    model_type = raw["model_type"]
    if raw.get("is_encoder_decoder"):
        raise ModelRefused(f"{path} is an encoder-decoder model ({model_type})", ANOTHER_MODEL)
    if model_type in UNSERVED_TYPES:
        raise ModelRefused(
            f"{path} has the architecture {model_type!r}, which is not served: {UNSERVED_TYPES[model_type]}",
            f"{ANOTHER_MODEL}{OR_VLLM}",
        )
    architectures = [str(name) for name in raw.get("architectures") or []]
    if architectures and not any(name.endswith("ForCausalLM") for name in architectures):
        writes = any(map(generates, architectures))
        why = "our engine does not serve it" if writes else "it does not generate text"
        raise ModelRefused(
            f"{path} is {' / '.join(architectures)}, not a causal language model: {why}",
            f"{ANOTHER_MODEL}{OR_VLLM * writes}",
        )
    if raw.get("is_causal") is False:
        raise ModelRefused(
            f"{path} has is_causal=false: its attention looks ahead, it is an encoder", ANOTHER_MODEL
        )
    if model_type not in SERVED_TYPES:
        raise ModelRefused(
            f"{path} has the architecture {model_type!r}, which our engine does not serve",
            f"{ANOTHER_MODEL}{OR_VLLM}",
        )
    if raw.get("quantization_config"):
        method = raw["quantization_config"]
        method = method.get("quant_method", "unknown") if isinstance(method, dict) else method
        why = UNSERVED_QUANTIZATION.get(str(method), "it is not known here")
        raise ModelRefused(
            f"{path} is a quantized checkpoint (quantization_config, method {method}), which is not served: "
            f"{why}",
            f"use the bfloat16, float16 or float32 weights of this model{OR_VLLM}",
        )


def _normalised_config(path: Path, raw: dict[str, Any], keep: Path | None) -> _Config:
    """Return the config as transformers reads it: old field names, defaults, rope in one dict."""
    name = kept_name(raw, ",".join(_Config.__dataclass_fields__))
    config = answer_kept(keep, name, _CONFIG, lambda: _ask_transformers(path))
    for key in CONFIG_SIZES:
        value = getattr(config, key)
        if not isinstance(value, int) or value < 1:
            raise ModelRefused(
                f"{path / 'config.json'} has {key}={value!r}, which must be 1 or more", COPY_AGAIN
            )
    if config.num_attention_heads % config.num_key_value_heads:
        raise ModelRefused(
            f"{path / 'config.json'} has num_attention_heads={config.num_attention_heads}, no multiple of "
            f"num_key_value_heads={config.num_key_value_heads}",
            COPY_AGAIN,
        )
    if raw["model_type"] != config.model_type:
        raise ModelRefused(
            f"{path} says model_type={raw['model_type']!r} but transformers reads {config.model_type!r}",
            ANOTHER_MODEL,
        )
    return config


def config_text(path: Path) -> str:
    """Return as JSON what transformers makes of a model's config; `apart.py` asks for it."""
    return _CONFIG.dump_json(_asked_here(path)).decode()


def _ask_transformers(path: Path) -> _Config:
    if runs_apart():
        return _CONFIG.validate_json(run_apart("config", str(path.absolute())))
    return _asked_here(path)


def _asked_here(path: Path) -> _Config:
    config = transformers_config(path)
    names = _Config.__dataclass_fields__
    return _Config(**{name: getattr(config, name) for name in names if hasattr(config, name)})


def _refuse_by_attention(path: Path, config: _Config) -> None:
    if config.use_bidirectional_attention:
        raise ModelRefused(
            f"{path} has use_bidirectional_attention: its attention looks ahead, it is an encoder",
            ANOTHER_MODEL,
        )
    others = sorted({str(kind) for kind in config.layer_types or []} - SERVED_LAYERS)
    if others:
        raise ModelRefused(
            f"{path} has layers with {', '.join(others)} (layer_types): only "
            f"{' and '.join(sorted(SERVED_LAYERS))} are served",
            f"use a model whose layers keep K and V of every token{OR_VLLM}",
        )


def _served_rope(path: Path, config: _Config) -> str:
    rope = config.rope_parameters or {}
    by_layer_type = [part for kind in SERVED_LAYERS if isinstance(part := rope.get(kind), dict)]
    for part in by_layer_type or [rope]:
        rope_type = part.get("rope_type", "default")
        if rope_type not in SERVED_ROPE_TYPES:
            raise ModelRefused(
                f"{path} has rope_type={rope_type!r}: its rotation is not known to depend on the position "
                "alone, so cached keys could be wrong",
                f"use a variant with rope_type {', '.join(SERVED_ROPE_TYPES)}{OR_VLLM}",
            )
    return json.dumps(rope, sort_keys=True, separators=(",", ":"))


def _head_dim(config: _Config) -> int:
    return int(config.head_dim or config.hidden_size // config.num_attention_heads)


def _refuse_missing_tensors(path: Path, config: _Config, files: tuple[WeightsFile, ...]) -> None:
    """Refuse incomplete weights: transformers would fill missing tensors with random numbers."""
    needed = FAMILIES[config.model_type].tensors(
        layers=config.num_hidden_layers,
        attention_bias=bool(config.attention_bias),
        tied=config.tie_word_embeddings,
    )
    present = {tensor.name for file in files for tensor in file.tensors}
    missing = [name for name in needed if name not in present]
    if missing:
        raise ModelRefused(
            f"the weights in {path} lack {len(missing)} of the {len(needed)} tensors of its config.json, "
            f"the first is {missing[0]}",
            "copy all weights, and the config.json that belongs to them",
        )
