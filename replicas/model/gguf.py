"""Converts a GGUF file of a plain Llama, Qwen2 or Qwen3 to a directory that transformers loads.

transformers reads GGUF only with accelerate and refuses to save what it read, so the conversion is our own:
tensors are dequantised and renamed, the rows of Llama's q and k are put back from llama.cpp's interleaved
rotation order, and config, tokenizer and generation config are written. What the model's class cannot express
is refused, never approximated.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from tokenizers import normalizers, pre_tokenizers
from tqdm import tqdm
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from samovar.configs.json_text import parse_json
from samovar.replicas.messages import ModelRefused

ANOTHER_FILE = (
    "use a GGUF of a plain Llama, Qwen2 or Qwen3, or the safetensors of the model, of the hub or a directory"
)

_MODEL_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class _Kind:
    """An architecture of llama.cpp that is converted. `has_pairs`: q and k rotate neighbouring rows."""

    config: type[PreTrainedConfig]
    has_pairs: bool = False
    has_bias: bool = False  # of q, k and v
    has_norms: bool = False  # of q and k


_KINDS = {
    "llama": _Kind(LlamaConfig, has_pairs=True),
    "qwen2": _Kind(Qwen2Config, has_bias=True),
    "qwen3": _Kind(Qwen3Config, has_norms=True),
}
# What is known of a file's metadata: all else is refused by name, as it may change what the model computes.
_OF_MODEL = frozenset(
    {
        *("context_length", "embedding_length", "block_count", "feed_forward_length", "vocab_size"),
        *("attention.head_count", "attention.head_count_kv"),
        *("attention.key_length", "attention.value_length"),
        *("attention.layer_norm_rms_epsilon", "rope.dimension_count", "rope.freq_base"),
        *("rope.scaling.type", "rope.scaling.factor", "rope.scale_linear"),
        # Of these the computation is the same whatever they say.
        *("rope.scaling.original_context_length", "rope.scaling.finetuned", "tensor_data_layout"),
    }
)
"""Keys of an architecture's own that are read, or that change nothing."""
_PLAIN: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "expert_used_count": (0,),
    "attention.sliding_window": (0,),
    "attention.causal": (True,),
    "rope.scaling.attn_factor": (1.0,),
    "use_parallel_residual": (False,),
}
"""Keys of an architecture's own, and the values with which the model is a plain one."""
_OF_TOKENIZER = frozenset(
    {
        *("model", "pre", "tokens", "token_type", "token_type_count", "scores", "merges"),
        *("add_bos_token", "add_eos_token", "add_sep_token", "add_space_prefix", "eog_token_ids"),
        *(f"{name}_token_id" for name in ("bos", "eos", "eot", "eom", "unknown", "seperator", "padding")),
        *(f"{name}_token_id" for name in ("mask", "cls", "prefix", "suffix", "middle")),
        *(f"fim_{name}_token_id" for name in ("pre", "suf", "mid", "pad", "rep", "sep")),
    }
)
_ABOUT = (
    *("GGUF.", "general.", "quantize.", "split.", "mradermacher."),
    *("tokenizer.chat_template", "tokenizer.huggingface.json"),
)
"""Beginnings of keys that say where a file is from, how it was made, or how conversations are written."""

_QKV = ("q_proj", "k_proj", "v_proj")

# llama.cpp names the text splitting before BPE. transformers' GGUF reader knows the names of its table and
# splits as GPT-2 does for all others: SmolLM also makes every digit a piece of its own.
_DIGIT_SPLITTERS = frozenset({"smollm"})
_GPT2_SPLITTERS = frozenset({None, "default", "gpt-2"})
_NORMALISED = frozenset({"qwen2", "deepseek-r1-qwen"})
"""Their text is in Unicode's form NFC before it is split, which no GGUF says."""
_WHOLE_PIECES = frozenset(
    {
        *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
        *("jina-v5-nano", "minicpm5", "youtu", "glm4", "glm5", "tekken", "granite-embed-multi-97m"),
    }
)
"""A piece of text that is a token is that one, whatever the merges make of it: llama.cpp's `ignore_merges`,
which no GGUF says."""


@dataclass(frozen=True, slots=True)
class _Header:
    """The metadata of a GGUF file, by key. Errors name the file and the key.

    `of_model`: the key of a number that the architecture names for itself.
    """

    source: Path
    fields: dict[str, Any]

    @property
    def kind(self) -> _Kind:
        return _KINDS[self.architecture]

    @property
    def architecture(self) -> str:
        return str(self.need("general.architecture"))

    def of_model(self, key: str) -> str:
        return f"{self.architecture}.{key}"

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number of the architecture's own. A list, of a number for each layer, is refused."""
        value = self.need(self.of_model(key)) if default is None else self.get(self.of_model(key), default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ModelRefused(
                f"{self.source} has {self.of_model(key)}={str(value)[:40]}, not one number", ANOTHER_FILE
            )
        return value

    def get(self, key: str, default: Any = None) -> Any:
        field = self.fields.get(key)
        return default if field is None else field.contents()

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ModelRefused(f"{self.source} has no {key} in its metadata", ANOTHER_FILE)
        return value


def convert_gguf(source: Path, target: Path, *, progress: bool = False) -> None:
    """Write the model of the GGUF file `source` into the existing, empty directory `target`.

    Weights are stored as bfloat16. Downloads nothing. With `progress` a bar of tensors goes to stderr. Raises
    `ModelRefused` if the file is damaged or holds something else than a plain model of `_KINDS`, `OSError` if
    `target` cannot be written.
    """
    with tqdm(disable=not progress, unit="tensor", desc="reading GGUF") as bar:
        reader = _open(source)
        header = _Header(source, reader.fields)
        _refuse_what_is_not_plain(header, reader)
        config = _config(header, tied=all(tensor.name != "output.weight" for tensor in reader.tensors))
        # Two more steps than tensors: the tokenizer takes about as long as all of them, so it is named.
        bar.reset(total=len(reader.tensors) + 2)
        bar.set_description("converting weights")
        weights: dict[str, torch.Tensor] = {}
        for tensor in reader.tensors:
            name = _transformers_name(tensor.name, header)
            weights[name] = torch.from_numpy(_values(tensor, name, config, header)).to(torch.bfloat16)
            bar.update()
        _refuse_incomplete(weights, config, header)
        config.save_pretrained(target)
        save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
        bar.update()
        bar.set_description("converting tokenizer")
        _save_tokenizer(header, target)
        _generation_config(config).save_pretrained(target)
        bar.update()


def _open(source: Path) -> gguf.GGUFReader:
    try:
        return gguf.GGUFReader(source)
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, UnicodeDecodeError) as error:
        raise ModelRefused(
            f"{source} is not a complete GGUF file ({error})", "download or install the file again"
        ) from error


def _refuse_what_is_not_plain(header: _Header, reader: gguf.GGUFReader) -> None:
    if header.architecture not in _KINDS:
        raise ModelRefused(
            f"{header.source} has the architecture {header.architecture!r}, not one of {', '.join(_KINDS)}",
            ANOTHER_FILE,
        )
    for key in header.fields:
        name, prefix = key.removeprefix(f"{header.architecture}."), "tokenizer.ggml."
        if key.startswith(_ABOUT) or (key.startswith(prefix) and key.removeprefix(prefix) in _OF_TOKENIZER):
            continue
        is_own = name != key
        value = header.get(key)
        if is_own and (name in _OF_MODEL or value in _PLAIN.get(name, ())):
            continue
        why = (
            "not a plain model" if is_own and name in _PLAIN else "which is not known here, and may change it"
        )
        raise ModelRefused(f"{header.source} has {key}={str(value)[:40]}: {why}", ANOTHER_FILE)
    splitter = header.get("tokenizer.ggml.pre")
    known = _DIGIT_SPLITTERS | _GPT2_SPLITTERS | GGUF_PRE_TOKENIZER_SPLITS.keys()
    if header.get("tokenizer.ggml.model") == "gpt2" and splitter not in known:
        raise ModelRefused(
            f"{header.source} splits text as {splitter!r} (tokenizer.ggml.pre), which is not known here",
            ANOTHER_FILE,
        )
    if any(tensor.name == "rope_freqs.weight" for tensor in reader.tensors):
        raise ModelRefused(f"{header.source} scales its rotary frequencies (rope_freqs.weight)", ANOTHER_FILE)


def _config(header: _Header, *, tied: bool) -> Any:
    """Return the config of the header's kind."""
    hidden = int(header.number("embedding_length"))
    q_heads = int(header.number("attention.head_count"))
    head_dim = int(header.number("attention.key_length", hidden // q_heads))
    rotated = int(header.number("rope.dimension_count", head_dim))
    if rotated != head_dim:
        raise ModelRefused(
            f"{header.source} rotates {rotated} of a head's {head_dim} dimensions (rope.dimension_count)",
            ANOTHER_FILE,
        )
    if header.number("attention.value_length", head_dim) != head_dim:
        raise ModelRefused(f"{header.source} has values of another size than keys", ANOTHER_FILE)
    return header.kind.config(
        architectures=[f"{header.architecture.capitalize()}ForCausalLM"],
        hidden_size=hidden,
        intermediate_size=int(header.number("feed_forward_length")),
        num_hidden_layers=int(header.number("block_count")),
        num_attention_heads=q_heads,
        num_key_value_heads=int(header.number("attention.head_count_kv", q_heads)),
        head_dim=head_dim,
        max_position_embeddings=int(header.number("context_length")),
        rms_norm_eps=_shortest_float(header.number("attention.layer_norm_rms_epsilon")),
        rope_parameters=_rope(header),
        vocab_size=len(header.need("tokenizer.ggml.tokens")),
        tie_word_embeddings=tied,
        bos_token_id=header.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=_eos_ids(header),
        pad_token_id=header.get("tokenizer.ggml.padding_token_id"),
        dtype="bfloat16",
    )


def _rope(header: _Header) -> dict[str, Any]:
    """Return the rotation, which llama.cpp scales linearly where a factor stands without a type.

    Raises `ModelRefused` for another type of scaling.
    """
    rope = {"rope_type": "default", "rope_theta": _shortest_float(header.number("rope.freq_base", 10000.0))}
    kind = header.get(header.of_model("rope.scaling.type"), "linear")
    if kind not in ("none", "linear"):
        key = header.of_model("rope.scaling.type")
        raise ModelRefused(f"{header.source} has {key}={kind}: not a plain model", ANOTHER_FILE)
    factor = header.number("rope.scaling.factor", header.number("rope.scale_linear", 0.0))
    if kind == "none" or factor in (0.0, 1.0):
        return rope
    return rope | {"rope_type": "linear", "factor": _shortest_float(factor)}


def _shortest_float(value: float) -> float:
    """Return the shortest decimal of a float32: GGUF stores 1e-5 as 9.99999975e-06."""
    return float(str(np.float32(value)))


def _eos_ids(header: _Header) -> int | list[int]:
    """Return what the file says ends an answer; what its chat template says, `spec.py` adds."""
    stated = [header.need("tokenizer.ggml.eos_token_id")]
    stated += [header.get(f"tokenizer.ggml.{name}_token_id") for name in ("eot", "eom")]
    stated += header.get("tokenizer.ggml.eog_token_ids", [])
    ids = list(dict.fromkeys(int(one) for one in stated if one is not None))
    return ids if len(ids) > 1 else ids[0]


def _transformers_name(name: str, header: _Header) -> str:
    if name in _MODEL_TENSORS:
        return _MODEL_TENSORS[name]
    match = _LAYER_NAME.fullmatch(name)
    if match is None or match[2] not in _LAYER_TENSORS:
        raise ModelRefused(
            f"{header.source} has a tensor {name} that a plain {header.architecture} has no place for",
            ANOTHER_FILE,
        )
    return f"model.layers.{match[1]}.{_LAYER_TENSORS[match[2]]}.{match[3]}"


def _values(tensor: gguf.ReaderTensor, name: str, config: Any, header: _Header) -> NDArray[np.float32]:
    """Return the tensor as float32 `[out, in]`, rows in transformers' order.

    GGUF lists sizes innermost first.
    """
    try:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        raise ModelRefused(
            f"{header.source} keeps {tensor.name} as {tensor.tensor_type.name}, which cannot be dequantised "
            "here",
            "use a GGUF with Q4_0, Q4_1, Q5, Q6_K, Q8_0, F16, BF16 or F32 tensors",
        ) from error
    values = values.reshape(tuple(int(size) for size in reversed(tensor.shape)))
    if header.kind.has_pairs and name.endswith("q_proj.weight"):
        values = _halves_from_pairs(values, config.num_attention_heads)
    elif header.kind.has_pairs and name.endswith("k_proj.weight"):
        values = _halves_from_pairs(values, config.num_key_value_heads)
    return np.array(values, dtype=np.float32, order="C")  # own copy: the source may be a read-only file map


def _halves_from_pairs(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Undo llama.cpp's row order of a head: it rotates neighbours, transformers the i-th of each half."""
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, rows.shape[1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _refuse_incomplete(weights: dict[str, torch.Tensor], config: Any, header: _Header) -> None:
    """Refuse missing tensors and wrong shapes: transformers would initialise missing ones at random."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_rows = config.num_attention_heads * config.head_dim
    kv_rows = config.num_key_value_heads * config.head_dim
    expected: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        expected["lm_head.weight"] = (config.vocab_size, hidden)
    layer_shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q_rows, hidden),
        "self_attn.k_proj.weight": (kv_rows, hidden),
        "self_attn.v_proj.weight": (kv_rows, hidden),
        "self_attn.o_proj.weight": (hidden, q_rows),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if header.kind.has_bias:
        for name in _QKV:
            layer_shapes[f"self_attn.{name}.bias"] = layer_shapes[f"self_attn.{name}.weight"][:1]
    if header.kind.has_norms:
        layer_shapes |= dict.fromkeys(
            ("self_attn.q_norm.weight", "self_attn.k_norm.weight"), (config.head_dim,)
        )
    for layer in range(config.num_hidden_layers):
        for name, shape in layer_shapes.items():
            expected[f"model.layers.{layer}.{name}"] = shape
    for name in sorted(expected.keys() | weights.keys()):
        found = tuple(weights[name].shape) if name in weights else None
        if found != expected.get(name):
            raise ModelRefused(
                f"{header.source}: {name} has the shape {found}, its metadata asks for {expected.get(name)}",
                ANOTHER_FILE,
            )


def _save_tokenizer(header: _Header, target: Path) -> None:
    source = header.source
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    if header.get("tokenizer.ggml.pre") in _DIGIT_SPLITTERS:
        backend = tokenizer.backend_tokenizer
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    if header.get("tokenizer.ggml.pre") in _NORMALISED:
        tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    if header.get("tokenizer.ggml.pre") in _WHOLE_PIECES:
        tokenizer.backend_tokenizer.model.ignore_merges = True
    tokenizer.save_pretrained(target)
    _forget_loading(target / "tokenizer_config.json")


def _forget_loading(path: Path) -> None:
    """Drop how the tokenizer was loaded here from the saved config: it is no property of the tokenizer."""
    config = parse_json(path.read_text())
    kept = {key: value for key, value in config.items() if key not in ("is_local", "local_files_only")}
    path.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n")


def _generation_config(config: Any) -> GenerationConfig:
    return GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
