"""Computes a model's bytes of KV per token from its config.json, whether or not we serve the model.

Multi-head, grouped and multi-query attention, windows, layers without KV, DeepSeek's latent attention. A
config that does not state these in a known way is refused (`ModelRefused`): a wrong size is worse than none.
Reads no weights. Not by transformers' `AutoConfig`: it knows only its own model types, and fills in defaults
where a config states nothing, which must be refused here.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samovar.configs.json_text import parse_json
from samovar.replicas.messages import ModelRefused

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
HEAD_DIM = ("head_dim", "kv_channels", "attention_head_dim")
# Model types whose config, without a number of KV heads, means as many as query heads.
MULTI_HEAD = frozenset(
    {
        *("llama", "gpt2", "gpt_neox", "gptj", "gpt_neo", "opt", "bloom", "codegen", "phi", "olmo", "qwen"),
        *("stablelm", "pythia", "persimmon", "internlm"),
    }
)
WINDOWED_BY_DEFAULT = frozenset({"mistral", "mixtral", "starcoder2", "phi3", "phimoe"})
PATTERNS = {"gemma2": 2, "gemma3_text": 6, "gemma3": 6, "cohere2": 4}  # every n-th layer has full attention
FULL = frozenset({"full_attention", "attention", "global", "full", "hybrid", "*"})
WINDOWED = frozenset({"sliding_attention", "chunked_attention", "local", "local_attention", "sliding"})
WITHOUT_KV = frozenset(
    {"linear_attention", "mamba", "mamba2", "conv", "recurrent", "ssm", "mlp", "moe", "M", "-", "E"}
)
# Features that keep more or less than K and V of each layer, in a way that is not counted here.
UNCOUNTED = ("block_configs", "use_cla", "cla_share_factor", "index_head_dim", "index_topk")
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
QUANTIZED = ("quantization_config", "compression_config")
HYBRID = ("mamba_", "ssm_", "linear_num", "linear_key", "linear_attn", "rwkv", "conv_kernel", "conv_L_cache")
FIX = "give the shape by hand from the model's paper, or use a model whose config.json states it"

Config = dict[str, Any]


@dataclass(frozen=True, slots=True)
class KvFormat:
    """How K and V are stored. `scale_bytes`: of the scale of each vector, beside its elements."""

    name: str
    itemsize: int
    scale_bytes: int = 0


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of equal KV size. `elements`: per token and layer, in `vectors` vectors (K and V of each head).

    `window`: tokens that attention reads; None: all.
    """

    layers: int
    elements: int
    vectors: int
    window: int | None

    def token_bytes(self, stored: KvFormat) -> int:
        """Return the bytes of one token while all these layers keep it."""
        return self.layers * (self.elements * stored.itemsize + self.vectors * stored.scale_bytes)


@dataclass(frozen=True, slots=True)
class KvShape:
    """The size of a model's KV. `layers`: all of them; `other_layers`: those without KV.

    `attention_width`: query heads x head dim. `itemsize`: bytes of an element of KV, and of a weight unless
    the model `is_quantized`.
    """

    kind: str
    groups: tuple[LayerGroup, ...]
    layers: int
    other_layers: int
    attention_width: int
    itemsize: int
    is_moe: bool
    is_quantized: bool = False
    notes: tuple[str, ...] = ()

    def token_bytes(self, stored: KvFormat | None = None) -> int:
        """Return the bytes of one token while all layers keep it; `stored`: None: as the model's dtype."""
        stored = stored or KvFormat("", self.itemsize)
        return sum(group.token_bytes(stored) for group in self.groups)

    def context_bytes(self, tokens: int, stored: KvFormat | None = None) -> int:
        """Return the bytes of one sequence of `tokens` tokens; the engine keeps them in all layers."""
        return tokens * self.token_bytes(stored)


def read_shape(path: Path) -> KvShape:
    """Return the shape of the model in the directory (or the config.json) `path`. Raises `ModelRefused`."""
    file = path / "config.json" if path.is_dir() else path
    try:
        value = parse_json(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelRefused(
            f"{file} cannot be read ({error})", "point --model at a model's directory"
        ) from error
    if not isinstance(value, dict):
        raise ModelRefused(f"{file} holds no JSON object", "point --model at a model's directory")
    try:
        return shape_of(value)
    except ModelRefused as error:
        raise ModelRefused(f"{file}: {error.reason}", error.fix) from None


def shape_of(config: Config) -> KvShape:
    """Return the shape of a parsed config.json. Raises `ModelRefused` if it is not known for certain."""
    is_quantized = any(config.get(key) for key in QUANTIZED)
    if isinstance(config.get("text_config"), dict):  # a multimodal model
        config = {"torch_dtype": config.get("torch_dtype", config.get("dtype")), **config["text_config"]}
    if config.get("is_encoder_decoder"):
        raise ModelRefused("an encoder-decoder model: its KV depends on the encoder's input as well", FIX)
    if uncounted := [key for key in UNCOUNTED if config.get(key)]:
        raise ModelRefused(
            f"{uncounted[0]} changes the size of the KV in a way that is not supported here", FIX
        )
    layers = _size(config, LAYERS)
    if layers is None:
        raise ModelRefused(f"the number of layers is not given ({', '.join(LAYERS)})", FIX)
    heads = _size(config, HEADS)
    if heads is None:
        raise ModelRefused(f"the number of heads is not given ({', '.join(HEADS)})", FIX)
    windows, notes = _windows(config, layers)
    kind, sizes, width = _attention(config, heads, layers)
    counts = Counter(
        (size, windows[layer]) for layer, size in enumerate(sizes) if windows[layer] != 0 and size[0]
    )
    groups = tuple(
        LayerGroup(count, elements, vectors, window)
        for ((elements, vectors), window), count in counts.items()
    )
    if not groups:
        raise ModelRefused("no layer keeps KV: there is nothing to size", "use a model with attention")
    other = layers - sum(group.layers for group in groups)
    if other:
        notes = (*notes, f"{other} of {layers} layers keep no KV of tokens; their state is not counted")
    itemsize, dtype_note = _itemsize(config)
    is_moe = any((config.get(key) or 0) > 1 for key in EXPERTS)
    is_quantized = is_quantized or any(config.get(key) for key in QUANTIZED)
    notes = (*notes, *dtype_note)
    return KvShape(kind, groups, layers, other, width, itemsize, is_moe, is_quantized, notes)


def _attention(config: Config, heads: int, layers: int) -> tuple[str, list[tuple[int, int]], int]:
    """Return the kind, the elements and vectors that each layer keeps per token, the width of the queries."""
    latent = _size(config, ("kv_lora_rank",))
    if latent is not None:
        rope = _size(config, ("qk_rope_head_dim",))
        if rope is None:
            raise ModelRefused("kv_lora_rank without qk_rope_head_dim: the KV size is not given", FIX)
        values = _size(config, ("v_head_dim",)) or rope
        queries = (_size(config, ("qk_nope_head_dim",)) or values) + rope
        return "MLA", [(latent + rope, 1)] * layers, heads * (queries + values) // 2
    keys = _head_dim(config, heads)
    values = _size(config, ("v_head_dim",)) or keys
    kv_heads = _kv_heads(config, heads, layers)
    most = max(kv_heads)
    kind = "MHA" if most == heads else "MQA" if most == 1 else "GQA"
    return kind, [(count * (keys + values), 2 * count) for count in kv_heads], heads * (keys + values) // 2


def _kv_heads(config: Config, heads: int, layers: int) -> list[int]:
    """Return the number of KV heads of each layer."""
    for key in KV_HEADS:
        value = config.get(key)
        if isinstance(value, list):
            if len(value) != layers or any(type(one) is not int or one < 0 for one in value):
                raise ModelRefused(f"{key} is no list of {layers} numbers of heads", FIX)
            return value
    if config.get("multi_query_attention") is False:  # ChatGLM's: the groups then mean nothing
        return [heads] * layers
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return [1] * layers
    attention = config.get("attn_config")
    found = _size(config, KV_HEADS) or (
        _size(attention, ("kv_n_heads",)) if isinstance(attention, dict) else None
    )
    if found is None and (config.get("model_type") in MULTI_HEAD or config.get("multi_query") is False):
        found = heads
    if found is None:
        raise ModelRefused(
            f"the number of KV heads is not given ({', '.join(KV_HEADS)}), and for model_type "
            f"{config.get('model_type')!r} its meaning is not known",
            FIX,
        )
    if heads % found:
        raise ModelRefused(f"{heads} heads are no multiple of {found} KV heads", FIX)
    return [found] * layers


def _head_dim(config: Config, heads: int) -> int:
    found = _size(config, HEAD_DIM)
    if found is not None:
        return found
    hidden = _size(config, HIDDEN)
    if hidden is None or hidden % heads:
        raise ModelRefused(
            f"head_dim is not given, and hidden_size {hidden} is no multiple of {heads} heads", FIX
        )
    return hidden // heads


def _windows(config: Config, layers: int) -> tuple[list[int | None], tuple[str, ...]]:
    """Return the tokens that each layer reads (None: all; 0: it has no KV), and notes for the user."""
    kinds = _layer_kinds(config, layers)
    window = _size(config, ("sliding_window", "attention_window_size", "window_size"))
    chunk = _size(config, ("attention_chunk_size",))
    if config.get("use_sliding_window") is False and "layer_types" not in config:
        window = None
    found: list[int | None] = []
    for kind in kinds:
        if kind in WITHOUT_KV:
            found.append(0)
        elif kind in FULL:
            found.append(None)
        elif kind in WINDOWED:
            size = chunk if kind == "chunked_attention" else window
            if size is None:
                raise ModelRefused(f"layers with {kind}, but the size of the window is not given", FIX)
            found.append(size)
        else:
            raise ModelRefused(f"layers of the unknown kind {kind!r}", FIX)
    if shared := _size(config, ("num_kv_shared_layers",)):
        found[layers - min(shared, layers) :] = [0] * min(shared, layers)
    windowed = sum(map(bool, found))
    note = f"{windowed} of {layers} layers have a window; the engine keeps whole conversations in them, too"
    return found, (note,) if windowed else ()


def _layer_kinds(config: Config, layers: int) -> list[str]:
    """Return each layer's kind, as in `FULL`, `WINDOWED`, `WITHOUT_KV`; the most explicit key wins."""
    for key in ("layer_types", "layers_block_type", "hybrid_override_pattern"):
        stated = config.get(key)
        if stated:
            kinds = [str(kind) for kind in stated]
            if len(kinds) != layers:
                raise ModelRefused(f"{key} names {len(kinds)} layers, not {layers}", FIX)
            return kinds
    if isinstance(blocks := config.get("block_types"), list) and blocks:
        window = "sliding_attention" if config.get("attention_window_size") else "attention"
        return [(window if (k := str(blocks[i % len(blocks)])) == "attention" else k) for i in range(layers)]
    if isinstance(of := config.get("attn_layer_indices", config.get("full_attn_idxs")), list):
        return ["attention" if layer in of else "mamba" for layer in range(layers)]
    if period := _size(config, ("attn_layer_period",)):
        offset = config.get("attn_layer_offset", 0)
        return ["attention" if layer % period == offset else "mamba" for layer in range(layers)]
    if every := _size(config, ("full_attention_interval",)):
        return ["attention" if (layer + 1) % every == 0 else "linear_attention" for layer in range(layers)]
    hybrid = sorted(key for key in config if key.startswith(HYBRID))
    if hybrid and config.get("model_type") != "falcon_h1":  # which has both in each layer
        raise ModelRefused(
            f"{hybrid[0]}: some layers may keep no KV, but config.json does not say which", FIX
        )
    return _windowed_kinds(config, layers)


def _windowed_kinds(config: Config, layers: int) -> list[str]:
    """Return each layer's kind if only the window's size is given: the model's type says which have it."""
    model_type = config.get("model_type")
    full, windowed = "full_attention", "sliding_attention"
    if _size(config, ("attention_chunk_size",)):
        raise ModelRefused("attention_chunk_size is given, but not which layers have it", FIX)
    if _size(config, ("sliding_window",)) is None or config.get("use_sliding_window") is False:
        return [full] * layers
    every = _size(config, ("sliding_window_pattern",)) or PATTERNS.get(str(model_type))
    if every:
        return [full if (layer + 1) % every == 0 else windowed for layer in range(layers)]
    if config.get("use_sliding_window"):
        first = config.get("max_window_layers", 0)
        return [windowed if layer >= first else full for layer in range(layers)]
    if model_type in WINDOWED_BY_DEFAULT:
        return [windowed] * layers
    raise ModelRefused(f"sliding_window is given, but not which layers of {model_type!r} have it", FIX)


def _itemsize(config: Config) -> tuple[int, tuple[str, ...]]:
    stated = config.get("torch_dtype", config.get("dtype"))
    sizes = {"float16": 2, "bfloat16": 2, "float32": 4}
    if stated in sizes:
        return sizes[stated], ()
    return 2, ("2 bytes per element (fp16 or bf16) are assumed",)


def _size(config: Config, keys: tuple[str, ...]) -> int | None:
    """Return the first of `keys` that is set. Raises `ModelRefused` if it is no positive integer."""
    for key in keys:
        value = config.get(key)
        if value is None or value is False:
            continue
        if type(value) is not int or not 0 < value < 1 << 31:
            raise ModelRefused(f"{key} is {value!r:.60}, not a number of 1 or more", FIX)
        return value
    return None
