"""Describes the model in a directory and decides whether it can be served.

Reads config.json, the tokenizer files and the headers of the weights, and refuses, with a reason and a fix,
what the engine could not serve correctly. Loads no model; see `store.py` for where the directory comes from.

What transformers makes of a config.json is kept, if the caller names a folder: merely importing the class of
a config takes it four seconds (5.23: it imports torch's compiler).
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from samovar.configs.atomic_file import atomic_write
from samovar.configs.json_text import parse_json
from samovar.configs.model_reference import snapshot_of
from samovar.replicas.messages import ModelRefused
from samovar.replicas.model.apart import run_apart, runs_apart
from samovar.replicas.model.tokenizer import load_tokenizer
from samovar.replicas.model.weights import WeightsFile, read_weights, weights_digest

logger = logging.getLogger(__name__)


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


__all__ = ["PROVENANCE_FILE", "SERVED_TYPES", "ModelRefused", "ModelSpec", "inspect_model"]

# Rotations that depend on a token's position alone. `dynamic` and `longrope` change with the length of the
# whole sequence: a cached K would be wrong as soon as its conversation grew.
SERVED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")

GENERATION_FILE = "generation_config.json"
PROVENANCE_FILE = "samovar.json"  # written by our converter: the model's name and source
FINGERPRINT_VERSION = b"samovar model fingerprint 1"
# Fields of config.json that do not affect what the model computes.
CONFIG_NOISE = frozenset({"_name_or_path", "_commit_hash", "transformers_version", "use_cache"})
TOKENIZER_FILES = (
    "added_tokens.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
TEMPLATES_DIR = "additional_chat_templates"
CONFIG_SIZES = (
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_size",
    "vocab_size",
    "max_position_embeddings",
)
T = TypeVar("T")

ANOTHER_MODEL = f"point --model at a causal model of a served type: {', '.join(SERVED_TYPES)}"
COPY_AGAIN = "copy or download the model directory again"


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What the engine and the ingress need to know of a model before it is loaded.

    `rope` is the canonical JSON of the rotary parameters; `fingerprint` is a sha256 over config, tokenizer
    and weights: KV of models with different fingerprints is never interchangeable. `weights_bytes` is the
    size of the tensors as stored.
    """

    path: Path
    name: str
    model_type: str
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocab: int
    context_tokens_max: int
    eos_token_ids: tuple[int, ...]
    rope: str
    has_chat_template: bool
    weights_bytes: int
    fingerprint: bytes
    commit: str | None = None  # of the hub, if the directory is in its cache
    generation: Mapping[str, float] = field(default_factory=dict)  # the defaults of a request's fields

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
_TURN: TypeAdapter[tuple[int | None, str]] = TypeAdapter(tuple[int | None, str])


def inspect_model(
    path: Path, keep: Path | None = None, begin: Callable[[str], object] = lambda stage: None
) -> ModelSpec:
    """Describe the model in the directory `path`, without loading it.

    `keep`: folder of what transformers made of each config.json and chat template, and of the digests of
    large weights; None: all is done each time. `begin`: is told the stage of the start in which large weights
    are hashed. Raises `ModelRefused` if the engine could not serve the model, or not correctly.
    """
    path = path.expanduser()
    raw = _read_config(path)
    _refuse_by_config(path, raw)
    config = _normalised_config(path, raw, keep)
    _refuse_by_attention(path, config)
    rope = _served_rope(path, config)
    tokenizer = _read_tokenizer(path, vocab=config.vocab_size)
    has_chat_template = _has_chat_template(path)
    ends = _stated_ends(path, raw, tokenizer)
    if has_chat_template:
        ends = _with_end_of_turn(path, ends, keep)
    files = read_weights(path)
    _refuse_missing_tensors(path, config, files)
    return ModelSpec(
        path=path,
        name=_name(path),
        model_type=config.model_type,
        layers=config.num_hidden_layers,
        q_heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=_head_dim(config),
        hidden=config.hidden_size,
        vocab=config.vocab_size,
        context_tokens_max=config.max_position_embeddings,
        eos_token_ids=ends,
        rope=rope,
        has_chat_template=has_chat_template,
        weights_bytes=sum(tensor.end - tensor.begin for file in files for tensor in file.tensors),
        fingerprint=_fingerprint(path, raw, weights_digest(files, keep, begin)),
        commit=_commit(path),
        generation=generation_defaults(_read_json_if_there(path / GENERATION_FILE)),
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


def refuse_early(path: Path) -> None:
    """Refuse a model directory by its config.json alone, in milliseconds. Raises `ModelRefused`.

    What passes may still be refused by `inspect_model`, which also reads the weights and asks transformers.
    """
    path = path.expanduser()
    _refuse_by_config(path, _read_config(path))


def _read_config(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise ModelRefused(
            f"model directory {path} does not exist",
            "check the path of --model; a model of the hub is named organisation/name; without --model the "
            "default model is served",
        )
    if not path.is_dir():
        raise ModelRefused(
            f"{path} is a file, not a model directory",
            "point --model at the directory with config.json and *.safetensors",
        )
    if not (path / "config.json").is_file():
        raise ModelRefused(
            f"{path} has no config.json",
            "point --model at a directory that transformers' save_pretrained wrote",
        )
    config = _read_json(path / "config.json")
    if not isinstance(config.get("model_type"), str):
        raise ModelRefused(f"{path / 'config.json'} has no model_type", COPY_AGAIN)
    return config


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = parse_json(path.read_bytes())
    except ValueError as error:
        raise ModelRefused(f"{path} is not valid JSON ({error})", COPY_AGAIN) from error
    if not isinstance(value, dict):
        raise ModelRefused(f"{path} holds a JSON {type(value).__name__}, not an object", COPY_AGAIN)
    return value


def _read_json_if_there(path: Path) -> dict[str, Any]:
    return _read_json(path) if path.is_file() else {}


def _refuse_by_config(path: Path, raw: dict[str, Any]) -> None:
    """Refuse what config.json rules out by itself; the most specific reason comes first."""
    model_type = raw["model_type"]
    if raw.get("is_encoder_decoder"):
        raise ModelRefused(f"{path} is an encoder-decoder model ({model_type})", ANOTHER_MODEL)
    if model_type in UNSERVED_TYPES:
        raise ModelRefused(
            f"{path} has the architecture {model_type!r}, which is not served: {UNSERVED_TYPES[model_type]}",
            ANOTHER_MODEL,
        )
    architectures = [str(name) for name in raw.get("architectures") or []]
    if architectures and not any(name.endswith("ForCausalLM") for name in architectures):
        raise ModelRefused(
            f"{path} is {' / '.join(architectures)}, not a causal language model: it does not generate text",
            ANOTHER_MODEL,
        )
    if raw.get("is_causal") is False:
        raise ModelRefused(
            f"{path} has is_causal=false: its attention looks ahead, it is an encoder", ANOTHER_MODEL
        )
    if model_type not in SERVED_TYPES:
        raise ModelRefused(
            f"{path} has the architecture {model_type!r}, which Samovar does not serve", ANOTHER_MODEL
        )
    if raw.get("quantization_config"):
        method = raw["quantization_config"]
        method = method.get("quant_method", "unknown") if isinstance(method, dict) else method
        why = UNSERVED_QUANTIZATION.get(str(method), "it is not known here")
        raise ModelRefused(
            f"{path} is a quantized checkpoint (quantization_config, method {method}), which is not served: "
            f"{why}",
            "use the bfloat16, float16 or float32 weights of this model",
        )


def _normalised_config(path: Path, raw: dict[str, Any], keep: Path | None) -> _Config:
    """Return the config as transformers reads it: old field names, defaults, rope in one dict."""
    kept = None if keep is None else keep / f"{_config_digest(raw)}.json"
    config = None if kept is None else _read_kept(kept, _CONFIG)
    if config is None:
        config = _ask_transformers(path)
        if kept is not None:
            _write_kept(kept, _CONFIG, config)
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
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (ValueError, TypeError, KeyError, AttributeError, OSError, StrictDataclassError) as error:
        raise ModelRefused(
            f"transformers does not accept {path / 'config.json'}: {' '.join(str(error).split())}", COPY_AGAIN
        ) from error
    names = _Config.__dataclass_fields__
    return _Config(**{name: getattr(config, name) for name in names if hasattr(config, name)})


def _config_digest(raw: dict[str, Any]) -> str:
    """Return the name under which a config is kept: what it depends on, transformers' version included."""
    parts = (version("transformers"), ",".join(_Config.__dataclass_fields__), json.dumps(raw, sort_keys=True))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _read_kept(path: Path, kind: TypeAdapter[T]) -> T | None:
    try:
        return kind.validate_python(parse_json(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, ValidationError) as error:
        logger.warning("%s cannot be read, and is written again: %s", path, error)
        return None


def _write_kept(path: Path, kind: TypeAdapter[T], value: T) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, kind.dump_json(value), durable=False)
    except (OSError, ValueError) as error:
        logger.warning("%s could not be written: %s", path, error)


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
            "use a model whose layers keep K and V of every token",
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
                f"use a variant with rope_type {', '.join(SERVED_ROPE_TYPES)}",
            )
    return json.dumps(rope, sort_keys=True, separators=(",", ":"))


def _head_dim(config: _Config) -> int:
    return int(config.head_dim or config.hidden_size // config.num_attention_heads)


def _read_tokenizer(path: Path, vocab: int) -> dict[str, int]:
    """Return the ids of all tokens in the vocabulary, added (special) tokens included."""
    if not (path / "tokenizer.json").is_file():
        found = [
            name for name in TOKENIZER_FILES if (path / name).is_file() and name.endswith((".model", ".txt"))
        ]
        has = f"only {', '.join(found)}, no" if found else "no"
        raise ModelRefused(
            f"{path} has {has} tokenizer.json",
            "copy it beside the weights, or write it with AutoTokenizer.from_pretrained(...).save_pretrained",
        )
    tokenizer = _read_json(path / "tokenizer.json")
    try:
        added = {str(token["content"]): int(token["id"]) for token in tokenizer.get("added_tokens") or []}
        pieces = tokenizer["model"]["vocab"]
        ids = (
            dict(pieces)
            if isinstance(pieces, dict)
            else {piece[0]: index for index, piece in enumerate(pieces)}
        )
        ids.update(added)
        last_token, last_id = max(ids.items(), key=lambda item: item[1])
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise ModelRefused(
            f"{path / 'tokenizer.json'} is not a tokenizer of the tokenizers library ({error!r})", COPY_AGAIN
        ) from error
    if last_id >= vocab:
        raise ModelRefused(
            f"the tokenizer of {path} gives token {last_token!r} the id {last_id}, but the model has only "
            f"{vocab} embeddings (vocab_size): that token would crash it",
            "use the tokenizer that belongs to these weights, or grow them with resize_token_embeddings",
        )
    return ids


def _stated_ends(path: Path, raw: dict[str, Any], tokenizer: dict[str, int]) -> tuple[int, ...]:
    """Return the ids that the files say end an answer: generation config (else the config) and tokenizer."""
    ids: list[int] = []
    generation = _read_json_if_there(path / GENERATION_FILE)
    stated = generation.get("eos_token_id", raw.get("eos_token_id"))
    for value in stated if isinstance(stated, list) else [stated]:
        if isinstance(value, int) and not isinstance(value, bool):
            ids.append(value)
    eos = _read_json_if_there(path / "tokenizer_config.json").get("eos_token")
    token = eos.get("content") if isinstance(eos, dict) else eos
    if isinstance(token, str) and token in tokenizer:
        ids.append(tokenizer[token])
    return tuple(dict.fromkeys(ids))


def _with_end_of_turn(path: Path, stated: tuple[int, ...], keep: Path | None) -> tuple[int, ...]:
    """Return the ids that end an answer: those stated, and what the chat template ends a turn with."""
    kept = None if keep is None else keep / f"{_turn_digest(path, stated)}.turn.json"
    turn = None if kept is None else _read_kept(kept, _TURN)
    if turn is None:
        ids = ",".join(map(str, stated))
        text = run_apart("turn", str(path.absolute()), ids) if runs_apart() else turn_text(path, ids)
        turn = _TURN.validate_json(text)
        if kept is not None:
            _write_kept(kept, _TURN, turn)
    added, doubt = turn
    if doubt:
        logger.warning("%s: %s", path, doubt)
    return stated if added is None else (*stated, added)


def turn_text(path: Path, stated: str) -> str:
    """Return as JSON how a model's chat template ends a turn; `stated`: known ids, with commas."""
    from samovar.replicas.templates import end_of_turn  # jinja2, and a tokenizer: most starts have it kept

    known = [int(one) for one in stated.split(",") if one]
    tokenizer = load_tokenizer(path)
    return _TURN.dump_json(end_of_turn(tokenizer, tokenizer.added_tokens_decoder, known)).decode()


def _turn_digest(path: Path, stated: tuple[int, ...]) -> str:
    """Return the name under which the end of a turn is kept: all files that a template may come from."""
    digest = hashlib.sha256(repr((version("transformers"), "turn 1", stated)).encode())
    files = [path / name for name in ("config.json", *TOKENIZER_FILES, *TEMPLATE_FILES)]
    for file in (*files, *sorted((path / TEMPLATES_DIR).glob("*.jinja"))):
        if file.is_file():
            digest.update(f"{file.name} {file.stat().st_size} ".encode() + file.read_bytes())
    return digest.hexdigest()[:32]


def _has_chat_template(path: Path) -> bool:
    if any((path / name).is_file() for name in TEMPLATE_FILES):
        return True
    return bool(_read_json_if_there(path / "tokenizer_config.json").get("chat_template"))


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


def _name(path: Path) -> str:
    name = _read_json_if_there(path / PROVENANCE_FILE).get("name")
    if isinstance(name, str) and name:
        return name
    directory = path.resolve()
    of_hub = snapshot_of(directory)
    return directory.name if of_hub is None else of_hub.id


def _commit(path: Path) -> str | None:
    of_hub = snapshot_of(path.resolve())
    return None if of_hub is None else of_hub.revision


def _fingerprint(path: Path, raw: dict[str, Any], weights: bytes) -> bytes:
    digest = hashlib.sha256(FINGERPRINT_VERSION)
    config = {key: value for key, value in raw.items() if key not in CONFIG_NOISE}
    parts = [("config.json", json.dumps(config, sort_keys=True, separators=(",", ":")).encode())]
    parts += [(name, (path / name).read_bytes()) for name in TOKENIZER_FILES if (path / name).is_file()]
    parts.append(("weights", weights))
    for name, content in parts:  # lengths keep adjacent parts unambiguous
        digest.update(len(name).to_bytes(8, "little") + name.encode())
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.digest()


# A request's field, its name in the file, and what a request may ask for (`router/openai/schema.py`): above
# the first number or, where that is allowed itself, from it on, up to the second.
_FIELDS: tuple[tuple[str, str, float, bool, float], ...] = (
    ("temperature", "temperature", 0, True, 2),
    ("top_p", "top_p", 0, False, 1),
    ("top_k", "top_k", 0, True, 2**31 - 1),
    ("min_p", "min_p", 0, True, 1),
    ("repetition_penalty", "repetition_penalty", 0, False, 10),
    ("max_tokens", "max_new_tokens", 0, False, 2**31 - 1),
)
_COUNTS = frozenset({"top_k", "max_tokens"})


def generation_defaults(config: Mapping[str, Any]) -> dict[str, float]:
    """Return what a generation_config.json states, by the names of a request's fields, as vLLM reads it.

    What no request may ask for is left out, and logged. `do_sample` is not read: files state temperatures
    beside `do_sample: false`. The ids that end an answer are not here: they hold for every request.
    """
    found: dict[str, float] = {}
    for name, in_file, least, takes_least, most in _FIELDS:
        stated = config.get(in_file)
        if stated is None:
            continue
        is_number = isinstance(stated, (int, float)) and not isinstance(stated, bool)
        if is_number and (least < stated <= most or (takes_least and stated == least)):
            found[name] = int(stated) if name in _COUNTS else float(stated)
        else:
            logger.warning("generation_config.json: %s=%r is no value for a request", in_file, stated)
    return found
