"""A model's weights and tokenizer read from their files, as an earlier start has seen transformers do it.

transformers' modelling code takes 3 CPU-seconds and 106 MB to import (5.23). A step of our own needs it to
read weights, and for a few numbers that it makes of a config: rotations, factors, windows. One start asks it,
and compares what the recipe reads with what transformers has loaded; those after it follow the recipe.

Importing what transformers needs to load a tokenizer takes as long as importing torch, and most of what it
loads is in tokenizer.json. One start compares the two; those after it read the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from safetensors import safe_open
from tokenizers import Tokenizer

from samovar.replicas.forward import PlainLayer, PlainModel
from samovar.replicas.measurement_cache import MeasurementCache
from samovar.replicas.model import load_tokenizer, read_weights

NUMBERS = (
    *("model_type", "norm_eps", "q_heads", "kv_heads", "head_dim", "attention_scale", "rope_scale"),
    *("embedding_multiplier", "residual_multiplier", "logits_divisor", "activation"),
)
"""Of `PlainModel`, and of `PlainRecipe`."""

EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
_QKV = tuple(f"self_attn.{name}_proj" for name in "qkv")
OF_LAYER: dict[str, tuple[str, ...]] = {
    "input_norm": ("input_layernorm.weight",),
    "qkv": tuple(f"{name}.weight" for name in _QKV),
    "qkv_bias": tuple(f"{name}.bias" for name in _QKV),
    "q_norm": ("self_attn.q_norm.weight",),
    "k_norm": ("self_attn.k_norm.weight",),
    "out": ("self_attn.o_proj.weight",),
    "out_bias": ("self_attn.o_proj.bias",),
    "mlp_norm": ("post_attention_layernorm.weight",),
    "gate_up": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "down": ("mlp.down_proj.weight",),
}
"""Tensors of `PlainLayer`, and which of a file's they are, one below the other."""


@dataclass(frozen=True, slots=True)
class LayerRecipe:
    """What is said of one layer: the tensors that it has, of `OF_LAYER`, and the numbers of `PlainLayer`."""

    has: tuple[str, ...]
    uses_rope: bool
    window: int | None


@dataclass(frozen=True, slots=True)
class PlainRecipe:
    """How the plain form of one model is made of its files; the numbers are those of `PlainModel`.

    Plain data, and of this model only: who keeps it names the model by its fingerprint.
    """

    model_type: str
    norm_eps: float
    q_heads: int
    kv_heads: int
    head_dim: int
    attention_scale: float
    inverse_frequencies: tuple[float, ...]
    rope_scale: float
    embedding_multiplier: float
    residual_multiplier: float
    logits_divisor: float
    activation: str
    is_tied: bool
    layers: tuple[LayerRecipe, ...]

    def read(self, directory: Path, dtype: torch.dtype) -> PlainModel:
        """Read the model of a directory into main memory, in `dtype`. Nothing is held twice.

        Raises `ModelRefused` if its files are damaged, and `KeyError` if a tensor is missing.
        """
        with _opened(directory, dtype) as read:
            embedding = read(EMBEDDING)
            return PlainModel(
                layers=tuple(_layer(read, one, number) for number, one in enumerate(self.layers)),
                embedding=embedding,
                final_norm=read(FINAL_NORM),
                head=embedding if self.is_tied else read(HEAD),
                inverse_frequencies=torch.tensor(self.inverse_frequencies, dtype=torch.float32),
                **{name: getattr(self, name) for name in NUMBERS},
            )

    def gives(self, plain: PlainModel, directory: Path) -> bool:
        """Return whether `read` would give exactly this model; reads one tensor at a time."""
        if recipe_of(plain) != self or not _is_float32(plain.inverse_frequencies):
            return False
        with _opened(directory, plain.dtype) as read:
            pairs: list[tuple[torch.Tensor, tuple[str, ...]]] = [
                (plain.embedding, (EMBEDDING,)),
                (plain.final_norm, (FINAL_NORM,)),
            ]
            if not self.is_tied:
                pairs.append((plain.head, (HEAD,)))
            for number, (one, layer) in enumerate(zip(self.layers, plain.layers, strict=True)):
                pairs += [(getattr(layer, name), _names(number, name)) for name in one.has]
            try:
                return all(torch.equal(tensor, read(*names)) for tensor, names in pairs)
            except KeyError:  # transformers has it from elsewhere
                return False


def recipe_of(plain: PlainModel) -> PlainRecipe:
    """Return how a model is made of its files, if they hold its tensors under the usual names."""
    return PlainRecipe(
        inverse_frequencies=tuple(plain.inverse_frequencies.tolist()),
        is_tied=plain.is_tied,
        layers=tuple(
            LayerRecipe(
                tuple(name for name in OF_LAYER if getattr(one, name) is not None), one.uses_rope, one.window
            )
            for one in plain.layers
        ),
        **{name: getattr(plain, name) for name in NUMBERS},
    )


def _is_float32(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.device.type == "cpu"


def _names(layer: int, name: str) -> tuple[str, ...]:
    return tuple(f"model.layers.{layer}.{part}" for part in OF_LAYER[name])


def _layer(read: Any, recipe: LayerRecipe, number: int) -> PlainLayer:
    tensors: dict[str, Any] = dict.fromkeys(OF_LAYER)
    tensors |= {name: read(*_names(number, name)) for name in recipe.has}
    return PlainLayer(**tensors, uses_rope=recipe.uses_rope, window=recipe.window)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Have torch copy with this thread alone: others, waiting for the next piece, took 5/6 of the CPU."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _opened(directory: Path, dtype: torch.dtype) -> Iterator[Any]:
    """Yield a function that reads tensors of a directory by name, one below the other, in `dtype`.

    What it returns is memory of its own: decoding reads mapped files a tenth slower.
    """
    with ExitStack() as stack:
        stack.enter_context(_one_thread())
        files: dict[str, Any] = {}
        for file in read_weights(directory):
            opened = stack.enter_context(safe_open(file.path, framework="pt"))
            files |= dict.fromkeys((tensor.name for tensor in file.tensors), opened)

        def read(*names: str) -> torch.Tensor:
            parts = [files[name].get_tensor(name) for name in names]
            rows = [len(part) for part in parts]
            whole = torch.empty((sum(rows), *parts[0].shape[1:]), dtype=dtype)
            for place, part in zip(whole.split(rows), parts, strict=True):  # type: ignore[no-untyped-call]
                place.copy_(part)
            return whole

        yield read


TOKENIZER_FILE = "tokenizer.json"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer as transformers sets it up, and the ids of its special tokens."""

    tokenizer: Tokenizer
    special_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class FileVerdict:
    """Whether transformers' tokenizer is the one in the file, as a start has seen; ids as of `Vocabulary`."""

    is_file: bool
    special_ids: tuple[int, ...]


VERDICT = TypeAdapter(FileVerdict | None)


def load_vocabulary(path: Path, kept: MeasurementCache) -> Vocabulary:
    """Load the tokenizer of the model in `path`, as `load_tokenizer` does. `kept`: of this model."""
    loaded: list[Vocabulary] = []

    def compare() -> FileVerdict:
        loaded.append(_of_transformers(path))
        found = loaded[0]
        is_file = _from_file(path).to_str() == found.tokenizer.to_str()
        return FileVerdict(is_file, tuple(sorted(found.special_ids)))

    verdict = kept.get("tokenizer", VERDICT, compare, None)
    if loaded:
        return loaded[0]
    if verdict is None or not verdict.is_file:
        return _of_transformers(path)
    return Vocabulary(_from_file(path), frozenset(verdict.special_ids))


def _from_file(path: Path) -> Tokenizer:
    return Tokenizer.from_file(str(path / TOKENIZER_FILE))


def _of_transformers(path: Path) -> Vocabulary:
    tokenizer = load_tokenizer(path)
    return Vocabulary(tokenizer.backend_tokenizer, frozenset(tokenizer.all_special_ids))
