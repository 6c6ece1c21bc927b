"""Describes a model for the engine that is to compute it, `engine.kind`, and decides what vLLM is given.

With vLLM no limit of our engine holds: families, kinds of attention, rotations and quantised weights are its
affair. Refused is what cannot be served through our front: what does not generate text, has no tokenizer.json
or no known context, and, beside cache tiers, what keeps no K and V that they store.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from samovar.configs.settings import Settings
from samovar.replicas.messages import ModelRefused
from samovar.replicas.model.apart import run_apart, runs_apart
from samovar.replicas.model.card import (
    COPY_AGAIN,
    ModelCard,
    answer_kept,
    generates,
    kept_name,
    quantization_of,
    read_card,
    read_config,
    read_json_if_there,
    text_config,
    transformers_config,
)
from samovar.replicas.model.spec import check_heads, inspect_model, refuse_by_config
from samovar.replicas.model.tokenizer import TOKENIZER_CONFIG
from samovar.replicas.model.vllm_settings import refuse_for_vllm
from samovar.replicas.model.weights import read_weights

GENERATES = "point --model at a model that generates text: vLLM's documentation lists those that it serves"
WITHOUT_TIERS = "serve it without them (--tiers.enabled false)"

POOLING_FILE = "modules.json"
"""Of sentence-transformers: vLLM takes a model with it for one that embeds."""

CONTEXT_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
"""What configs call the longest context; the smallest that is stated holds, as in vLLM."""
VOCAB_KEYS = ("vocab_size", "padded_vocab_size", "n_vocab")

STATE_KINDS = frozenset({"conv", "hybrid", "linear_attention", "mamba", "mamba2", "moe_mamba", "recurrent"})
STATE_KEYS = re.compile(
    r"(mamba_|ssm_|state_size$|linear_attn_config$|linear_num_|full_attention_interval$|attn_type_list$|"
    r"hybrid_override_pattern$|attn_layer_period$|conv_L_cache$)"
)
"""Kinds of layers that keep a recurrent state, and fields that say so where no field names all kinds."""

_SIZES: TypeAdapter[dict[str, int]] = TypeAdapter(dict[str, int])


def describe_model(
    settings: Settings, path: Path, begin: Callable[[str], object] = lambda stage: None
) -> ModelCard:
    """Describe the model in the directory `path` for the engine of `settings`, without loading it.

    `begin`: see `inspect_model`. Raises `ModelRefused` if that engine could not serve the model, or could not
    do what the settings ask for.
    """
    if settings.engine.kind == "vllm":
        return describe_for_vllm(settings, path, begin)
    spec = inspect_model(path, settings.inspected_dir, begin)
    check_heads(spec, settings.engine.tensor_parallel)
    return spec


def refuse_early(settings: Settings, path: Path | None) -> None:
    """Refuse settings, and a model by its config.json alone, in milliseconds. Raises `ModelRefused`.

    `path`: None: the model is not on this disk yet. What passes may still be refused by `describe_model`,
    which also reads the weights and asks transformers.
    """
    is_for_vllm = settings.engine.kind == "vllm"
    if is_for_vllm:
        refuse_for_vllm(settings)
    if path is None:
        return
    path = path.expanduser()
    raw = read_config(path)
    if is_for_vllm:
        _refuse_what_vllm_cannot(settings, path, raw)
    else:
        refuse_by_config(path, raw)


def describe_for_vllm(
    settings: Settings, path: Path, begin: Callable[[str], object] = lambda stage: None
) -> ModelCard:
    """See `describe_model`, for vLLM."""
    refuse_for_vllm(settings)
    path, keep = path.expanduser(), settings.inspected_dir
    raw = read_config(path)
    _refuse_what_vllm_cannot(settings, path, raw)
    vocab, context = _sizes(settings, path, raw)
    files = read_weights(path, dtypes=None)
    return read_card(path, raw, files, vocab=vocab, context_tokens_max=context, keep=keep, begin=begin)


def _refuse_what_vllm_cannot(settings: Settings, path: Path, raw: Mapping[str, Any]) -> None:
    text = text_config(raw)
    if raw.get("is_encoder_decoder") or text.get("is_encoder_decoder"):
        raise ModelRefused(f"{path} is an encoder-decoder model ({raw['model_type']})", GENERATES)
    names = [str(name) for name in raw.get("architectures") or []]
    if not names:
        raise ModelRefused(
            f"{path / 'config.json'} names no architectures, by which vLLM chooses its code", COPY_AGAIN
        )
    if not any(generates(name) for name in names) or raw.get("is_causal") is False:
        raise ModelRefused(f"{path} is {' / '.join(names)}, which does not generate text", GENERATES)
    if _pools(path):
        raise ModelRefused(
            f"{path} has a {POOLING_FILE} with a pooling: it is a model for embeddings", GENERATES
        )
    if not settings.tiers.enabled:
        return
    if (why := _keeps_states(text)) is not None:
        raise ModelRefused(
            f"{path} has layers that keep a state instead of K and V ({why}), which no cache tier stores",
            WITHOUT_TIERS,
        )
    _, stated = quantization_of(path, {**text, **raw})
    scheme = stated.get("kv_cache_scheme") or stated.get("kv_cache_quant_algo")
    if scheme and settings.engine.vllm.options.get("kv_cache_dtype", "auto") == "auto":
        raise ModelRefused(
            f"{path} quantises its KV cache, whose scales lie outside of the pages: no cache tier stores it",
            f"{WITHOUT_TIERS}, or have it in 16 bits (engine.vllm.options.kv_cache_dtype bfloat16)",
        )


def _pools(path: Path) -> bool:
    try:
        return '.Pooling"' in (path / POOLING_FILE).read_text(encoding="utf-8")
    except (FileNotFoundError, UnicodeDecodeError):
        return False


def _keeps_states(text: Mapping[str, Any]) -> str | None:
    """Return what in a config says that layers keep recurrent states; None: nothing does."""
    for key in ("layer_types", "layers_block_type", "block_types"):
        if isinstance(kinds := text.get(key), list) and kinds:
            found = sorted(STATE_KINDS & {str(kind) for kind in kinds})
            return f"{key} has {found[0]}" if found else None
    return next((key for key in sorted(text) if STATE_KEYS.match(key) and text[key]), None)


def _sizes(settings: Settings, path: Path, raw: Mapping[str, Any]) -> tuple[int, int]:
    """Return vocabulary and context as config.json states them; transformers says what it leaves out."""
    found, refused = _stated_sizes(raw) | _stated_sizes(text_config(raw)), ""
    if not found.keys() >= {"vocab", "context"}:
        try:
            asked = answer_kept(
                settings.inspected_dir, kept_name(raw, "sizes 1"), _SIZES, lambda: _ask_transformers(path)
            )
            found = asked | found
        except ModelRefused as error:
            refused = f" ({error.reason})"
    of_tokenizer = read_json_if_there(path / TOKENIZER_CONFIG).get("model_max_length")
    limit = settings.model.context_tokens_max
    if isinstance(of_tokenizer, int) and not isinstance(of_tokenizer, bool) and 0 < of_tokenizer < 1 << 31:
        found["context"] = min(of_tokenizer, found.get("context", of_tokenizer))
    if "context" not in found and limit is not None:
        found["context"] = limit
    for name, keys, fix in (
        ("vocab", VOCAB_KEYS, COPY_AGAIN),
        ("context", CONTEXT_KEYS, "say how long it may be: --model.context-tokens-max N"),
    ):
        if name not in found:
            raise ModelRefused(
                f"{path / 'config.json'} has no {keys[0]}, and transformers knows none for the type "
                f"{raw['model_type']!r}{refused}",
                fix,
            )
    return found["vocab"], found["context"]


def _stated_sizes(config: Mapping[str, Any]) -> dict[str, int]:
    found = {}
    for name, keys in (("vocab", VOCAB_KEYS), ("context", CONTEXT_KEYS)):
        sizes = [
            value
            for key in keys
            if isinstance(value := config.get(key), int) and not isinstance(value, bool) and value > 0
        ]
        if sizes:
            found[name] = sizes[0] if name == "vocab" else min(sizes)
    return found


def _ask_transformers(path: Path) -> dict[str, int]:
    told = run_apart("sizes", str(path.absolute())) if runs_apart() else sizes_text(path)
    return _SIZES.validate_json(told)


def sizes_text(path: Path) -> str:
    """Return as JSON the sizes of a model that transformers knows by its type; `apart.py` asks for it."""
    config = transformers_config(path).get_text_config()
    stated = {key: getattr(config, key, None) for key in (*VOCAB_KEYS, *CONTEXT_KEYS)}
    return json.dumps(_stated_sizes(stated))
