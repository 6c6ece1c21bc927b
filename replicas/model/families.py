"""The model types that are served, and which tensors each must have.

A type is in the table only if the laws hold for it (`tests/laws/test_l14_families.py`): its own transformers
code, with our attention, gives the same logits as without; cached is the same as uncached.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


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
