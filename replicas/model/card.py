"""Describes a model by its files, whichever engine computes it: what the front and the tiers know of it.

Reads config.json, the tokenizer, the chat template and the bytes of the weights. Which models an engine takes
is decided elsewhere: `spec.py` for ours, `served.py` for vLLM. Loads no model; see `store.py` for where the
directory comes from.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
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
from samovar.replicas.model.weights import WeightsFile, weights_digest

logger = logging.getLogger(__name__)

GENERATION_FILE = "generation_config.json"
PROVENANCE_FILE = "samovar.json"  # written by our converter: the model's name and source
FINGERPRINT_VERSION = b"samovar model fingerprint 1"
TEXT_CONFIGS = ("text_config", "thinker_config", "llm_config", "language_config")
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
QUANTIZATION_FILES = ("hf_quant_config.json", "quant_config.json", "quantize_config.json")
"""Where checkpoints say how they are quantised, if not in config.json."""
NO_TEXT = re.compile(
    r"(For\w*Classification|ForMaskedLM|ForPreTraining|ForQuestionAnswering|ForMultipleChoice|ForRanking|"
    r"ForRetrieval|ForCTC|Reward\w*|Embedding\w*|Encoder)$"
)
"""Ends of the names of architectures that embed, rank or classify."""
WRITES_TEXT = re.compile(r"(LMHead|Chat|GLM|Ultravox|MiDashengLM|Qwen2_5Omni)Model$")
"""Of those that are called a model and nothing else, the ones that generate."""
COPY_AGAIN = "copy or download the model directory again"
T = TypeVar("T")
_TURN: TypeAdapter[tuple[int | None, str]] = TypeAdapter(tuple[int | None, str])


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """What the ingress and a start need to know of a model before it is loaded, whichever engine computes.

    `fingerprint` is a sha256 over config, tokenizer and weights: KV of models with different fingerprints is
    never interchangeable. `weights_bytes` is the size of the tensors as stored. `quantization`: the method
    that the checkpoint names; empty: its weights are plain floats.
    """

    path: Path
    name: str
    model_type: str
    vocab: int
    context_tokens_max: int
    eos_token_ids: tuple[int, ...]
    has_chat_template: bool
    weights_bytes: int
    fingerprint: bytes
    quantization: str = ""
    commit: str | None = None  # of the hub, if the directory is in its cache
    generation: Mapping[str, float] = field(default_factory=dict)  # the defaults of a request's fields

    def context_tokens(self, limit: int | None) -> int:
        """Return the longest prompt + answer. `limit`: the setting `model.context_tokens_max`."""
        return self.context_tokens_max if limit is None else min(self.context_tokens_max, limit)

    def parts(self) -> dict[str, Any]:
        """Return what every card has, by name."""
        return {one.name: getattr(self, one.name) for one in fields(ModelCard)}


def read_card(
    path: Path,
    raw: Mapping[str, Any],
    files: tuple[WeightsFile, ...],
    *,
    vocab: int,
    context_tokens_max: int,
    keep: Path | None,
    begin: Callable[[str], object],
) -> ModelCard:
    """Describe the model in `path`, of whose config.json is `raw`, and `files` the weights.

    `vocab`, `context_tokens_max`: as the config says, however it has to be read. `keep`, `begin`: see
    `inspect_model`. Raises `ModelRefused` if the tokenizer is missing, or is another model's.
    """
    text = {**text_config(raw), **raw}
    tokenizer = _read_tokenizer(path, vocab)
    has_chat_template = _has_chat_template(path)
    ends = _stated_ends(path, text, tokenizer)
    if has_chat_template:
        ends = _with_end_of_turn(path, ends, keep)
    return ModelCard(
        path=path,
        name=_name(path),
        model_type=raw["model_type"],
        vocab=vocab,
        context_tokens_max=context_tokens_max,
        eos_token_ids=ends,
        has_chat_template=has_chat_template,
        weights_bytes=sum(tensor.end - tensor.begin for file in files for tensor in file.tensors),
        fingerprint=_fingerprint(path, raw, weights_digest(files, keep, begin)),
        quantization=quantization_of(path, text)[0],
        commit=_commit(path),
        generation=generation_defaults(read_json_if_there(path / GENERATION_FILE)),
    )


def generates(architecture: str) -> bool:
    """Whether models of an architecture write text, as far as its name tells."""
    if NO_TEXT.search(architecture):
        return False
    return not architecture.endswith("Model") or WRITES_TEXT.search(architecture) is not None


def text_config(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a config.json that describes the language model: of one with images it is nested."""
    for name in TEXT_CONFIGS:
        if isinstance(part := raw.get(name), dict):
            return text_config(part)
    return raw


def quantization_of(path: Path, text: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return the method by which a checkpoint is quantised, and what is stated of it; empty: it is not."""
    stated = text.get("quantization_config") or text.get("compression_config")
    if stated:
        found = stated if isinstance(stated, dict) else {"quant_method": stated}
        return str(found.get("quant_method", "unknown")), found
    for name in QUANTIZATION_FILES:
        if found := read_json_if_there(path / name):
            inner = found.get("quantization")
            found = inner if isinstance(inner, dict) else found
            return str(found.get("quant_algo") or found.get("quant_method") or "unknown"), found
    return "", {}


def read_config(path: Path) -> dict[str, Any]:
    """Return a model's config.json. Raises `ModelRefused` if there is none, or none with a type."""
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


def read_json_if_there(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty: there is no file. Raises `ModelRefused` if it is none."""
    return _read_json(path) if path.is_file() else {}


def transformers_config(path: Path) -> Any:
    """Return what transformers reads from a config.json. Raises `ModelRefused` if it does not accept it."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (ValueError, TypeError, KeyError, AttributeError, OSError, StrictDataclassError) as error:
        raise ModelRefused(
            f"transformers does not accept {path / 'config.json'}: {' '.join(str(error).split())}", COPY_AGAIN
        ) from error


def kept_name(raw: Mapping[str, Any], what: str) -> str:
    """Return the name under which `what` of a config is kept, by what it depends on: transformers, too."""
    parts = (version("transformers"), what, json.dumps(raw, sort_keys=True))
    return f"{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:32]}.json"


def answer_kept(keep: Path | None, name: str, kind: TypeAdapter[T], ask: Callable[[], T]) -> T:
    """Return what `ask` answered before, if `name` is kept in the folder `keep`; else ask, and keep it."""
    kept = None if keep is None else _read_kept(keep / name, kind)
    if kept is None:
        kept = ask()
        if keep is not None:
            _write_kept(keep / name, kind, kept)
    return kept


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


def _stated_ends(path: Path, text: Mapping[str, Any], tokenizer: dict[str, int]) -> tuple[int, ...]:
    """Return the ids that the files say end an answer: generation config (else the config) and tokenizer."""
    ids: list[int] = []
    generation = read_json_if_there(path / GENERATION_FILE)
    stated = generation.get("eos_token_id", text.get("eos_token_id"))
    for value in stated if isinstance(stated, list) else [stated]:
        if isinstance(value, int) and not isinstance(value, bool):
            ids.append(value)
    eos = read_json_if_there(path / "tokenizer_config.json").get("eos_token")
    token = eos.get("content") if isinstance(eos, dict) else eos
    if isinstance(token, str) and token in tokenizer:
        ids.append(tokenizer[token])
    return tuple(dict.fromkeys(ids))


def _with_end_of_turn(path: Path, stated: tuple[int, ...], keep: Path | None) -> tuple[int, ...]:
    """Return the ids that end an answer: those stated, and what the chat template ends a turn with."""
    ids = ",".join(map(str, stated))

    def ask() -> tuple[int | None, str]:
        told = run_apart("turn", str(path.absolute()), ids) if runs_apart() else turn_text(path, ids)
        return _TURN.validate_json(told)

    added, doubt = answer_kept(keep, f"{_turn_digest(path, stated)}.turn.json", _TURN, ask)
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
    return bool(read_json_if_there(path / "tokenizer_config.json").get("chat_template"))


def _name(path: Path) -> str:
    name = read_json_if_there(path / PROVENANCE_FILE).get("name")
    if isinstance(name, str) and name:
        return name
    directory = path.resolve()
    of_hub = snapshot_of(directory)
    return directory.name if of_hub is None else of_hub.id


def _commit(path: Path) -> str | None:
    of_hub = snapshot_of(path.resolve())
    return None if of_hub is None else of_hub.revision


def _fingerprint(path: Path, raw: Mapping[str, Any], weights: bytes) -> bytes:
    digest = hashlib.sha256(FINGERPRINT_VERSION)
    config = {key: value for key, value in raw.items() if key not in CONFIG_NOISE}
    parts = [("config.json", json.dumps(config, sort_keys=True, separators=(",", ":")).encode())]
    files = (*TOKENIZER_FILES, *QUANTIZATION_FILES)
    parts += [(name, (path / name).read_bytes()) for name in files if (path / name).is_file()]
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
