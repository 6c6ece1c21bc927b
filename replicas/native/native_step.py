"""Calls the compiled step: a whole forward pass of a Llama-like model in one call, without Python's lock."""

from __future__ import annotations

import ctypes
import hashlib
import struct
import weakref
from ctypes import POINTER, Structure, byref, c_char_p, c_float, c_int32, c_int64, c_void_p
from pathlib import Path

import torch

from samovar.configs.compiled import NotCompiled, load_library
from samovar.replicas.forward import PlainModel, StepInputs
from samovar.replicas.kv import KvPool

BITS_VERSION = 1
"""Part of the namespace of exact KV: another number for sources that compute other bits."""
PAIR_BITS_VERSION = 1
"""The same of products in bfloat16."""


class NotNative(Exception):
    """What the native step does not serve: a model, a pool, a machine; the message is a sentence why."""


_LAYER_WEIGHTS = (
    *("input_norm", "qkv", "qkv_bias", "q_norm", "k_norm", "out", "out_bias", "mlp_norm"),
    *("gate_up", "down"),
)
"""Of `PlainLayer`, in the order of `weights.h`."""
_MODEL_SIZES = ("q_heads", "kv_heads", "head_dim")
_MODEL_FACTORS = (
    *("norm_eps", "attention_scale", "rope_scale"),
    *("embedding_multiplier", "residual_multiplier", "logits_divisor"),
)
_MODEL_NUMBERS = (*_MODEL_SIZES, *_MODEL_FACTORS)
"""Of `PlainModel`, too."""
WORD_BYTES = 4
"""Of `StepInputs.words`."""


class _Layer(Structure):
    """Of `weights.h`: `samovar_layer`."""

    _fields_ = [*((name, c_void_p) for name in _LAYER_WEIGHTS), ("uses_rope", c_int64), ("window", c_int64)]


class _Model(Structure):
    """Of `weights.h`: `samovar_model`."""

    _fields_ = [
        *((name, c_int64) for name in ("layer_count", "hidden", "inner", "vocab", *_MODEL_SIZES)),
        *((name, c_float) for name in _MODEL_FACTORS),
        ("layers", POINTER(_Layer)),
        *((name, c_void_p) for name in ("embedding", "final_norm", "head", "inverse_frequencies")),
    ]


class _Step(Structure):
    """Of `weights.h`: `samovar_step`."""

    _fields_ = [
        *((name, c_int64) for name in ("rows", "segments", "table_words", "wanted_rows")),
        *((name, c_void_p) for name in ("token_ids", "positions", "slots", "spans", "tables", "wanted")),
        ("pool", c_void_p),
        *((name, c_int64) for name in ("layers", "pages", "block_tokens", "heads_per_group", "page_step")),
        *((name, c_int64) for name in ("group_step", "layer_step", "value_step", "slot_step", "head_step")),
        ("hidden", c_void_p),
    ]


_OF_EACH_STEP = struct.Struct("@10q")
"""The fields of `_Step` before `pool`, written in one call."""


def _library(path: Path) -> ctypes.CDLL:
    try:
        library = load_library(path)
    except NotCompiled as why:
        raise NotNative(str(why)) from why
    library.samovar_open.argtypes = [POINTER(_Model), c_int32, POINTER(c_void_p)]
    library.samovar_close.argtypes = [c_void_p]
    library.samovar_run.argtypes = [c_void_p, POINTER(_Step)]
    library.samovar_logits.argtypes = [c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_void_p]
    library.samovar_reads_embedding.argtypes = [c_void_p]
    library.samovar_close.restype = None
    for name in ("open", "run", "logits"):
        getattr(library, f"samovar_{name}").restype = c_char_p
    return library


def _raise_if(sentence: bytes | None) -> None:
    if sentence is not None:
        raise RuntimeError(f"the native step failed: {sentence.decode()}")


def why_not_native(plain: PlainModel, pool_dtype: torch.dtype) -> str | None:
    """Return why the native step does not compute this model on a pool that stores `pool_dtype`, or None."""
    if plain.embedding.device.type != "cpu":
        return f"it computes on CPU, and the model is on {plain.embedding.device.type}"
    if plain.dtype not in (torch.bfloat16, torch.float32):
        return f"it computes bfloat16 and float32, and the weights are {_named(plain.dtype)}"
    if pool_dtype != plain.dtype:
        return f"it stores K and V as the weights are ({_named(plain.dtype)}), not as {_named(pool_dtype)}"
    return None


def packed_bytes(plain: PlainModel, *, is_int8: bool) -> int:
    """Return about what the step's own copy of the weights takes."""
    tensors = [plain.head, *(getattr(layer, name) for layer in plain.layers for name in _LAYER_WEIGHTS)]
    itemsize = 1 if is_int8 else plain.embedding.element_size()
    return int(sum(one.numel() for one in tensors if one is not None)) * itemsize


def numbers_digest(plain: PlainModel) -> str:
    """Return a digest of what bits depend on besides weights: numbers that torch and transformers made."""
    digest = hashlib.sha256(plain.inverse_frequencies.float().contiguous().numpy().tobytes())
    digest.update(repr([getattr(plain, name) for name in _MODEL_FACTORS]).encode())
    return digest.hexdigest()[:8]


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class NativeStep:
    """A model as the compiled step has it: its weights packed, its threads started, for any number of pools.

    `library`: of `build_library`, for the model's dtype. Holds its own copy of all weights, but for an
    embedding that is not the head's, too, or of which the copy is rounded. `name`: of its kind.
    For one thread at a time. Raises `NotNative`.
    """

    def __init__(self, plain: PlainModel, library: Path, threads: int, name: str = "native") -> None:
        why = why_not_native(plain, plain.dtype)
        if why is not None:
            raise NotNative(why)
        self.name = name
        self.hidden, self.vocab, self.dtype = plain.hidden, plain.vocab, plain.dtype
        self.layers, self.kv_heads, self.head_dim = len(plain.layers), plain.kv_heads, plain.head_dim
        self._embedding: torch.Tensor | None = plain.embedding.detach()
        self._library = _library(library)
        self._handle = c_void_p()
        frequencies = plain.inverse_frequencies.float().contiguous()
        layers = (_Layer * len(plain.layers))()
        for place, layer in zip(layers, plain.layers, strict=True):
            for name in _LAYER_WEIGHTS:
                setattr(place, name, _address(getattr(layer, name)))
            place.uses_rope, place.window = int(layer.uses_rope), layer.window or 0
        model = _Model(
            layer_count=len(plain.layers),
            hidden=plain.hidden,
            inner=plain.intermediate,
            vocab=plain.vocab,
            layers=layers,
            embedding=_address(self._embedding),
            inverse_frequencies=_address(frequencies),
            **{name: getattr(plain, name) for name in _MODEL_NUMBERS},
            **{name: _address(getattr(plain, name)) for name in ("final_norm", "head")},
        )
        failed = self._library.samovar_open(byref(model), threads, byref(self._handle))
        if failed is not None:
            raise NotNative(f"it does not start: {failed.decode()}")
        if not self._library.samovar_reads_embedding(self._handle):
            self._embedding = None
        closing = weakref.finalize(self, self._library.samovar_close, self._handle)
        closing.atexit = False  # another thread may be in the midst of a step

    def on(self, pool: KvPool, layers: int | None = None) -> NativeForward:
        """Return what computes this model's steps on a pool. Raises `NotNative`.

        `layers`: the first ones alone, for a probe, whose pool has no others.
        """
        return NativeForward(self, pool, self.layers if layers is None else layers)

    def run(self, step: _Step) -> None:
        """Compute a step. Raises `RuntimeError` if its numbers are out of bounds."""
        _raise_if(self._library.samovar_run(self._handle, byref(step)))

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor, count: int | None = None) -> torch.Tensor:
        """Return float32 logits `[count, vocab]` of the first `count` rows, all of them by default.

        `rows`: of `hidden`, which is float32 `[..., hidden]`, contiguous.
        """
        rows = _indices(rows)
        if count is None or count > len(rows):
            count = len(rows)
        out = torch.empty((count, self.vocab), dtype=torch.float32)
        if count:
            _raise_if(
                self._library.samovar_logits(
                    self._handle, hidden.data_ptr(), hidden.shape[-2], rows.data_ptr(), count, out.data_ptr()
                )
            )
        return out


class NativeForward:
    """The native step on one pool: a `Forward`. Rows have the same bits in any batch, so none are padded."""

    rows_multiple = 1

    def __init__(self, step: NativeStep, pool: KvPool, layers: int) -> None:
        geometry, data = pool.geometry, pool.data
        if geometry.stored_dtype != step.dtype:
            raise NotNative(f"it stores K and V as {_named(step.dtype)}, not as {geometry.stored_name}")
        if (geometry.layers, geometry.kv_heads, geometry.head_dim) != (layers, step.kv_heads, step.head_dim):
            raise ValueError(f"a pool of {geometry} for {layers} layers of {step.layers}")
        self.name = step.name
        self._step = step
        self._pool = data
        strides = data.stride()
        # One for all steps: Python's part of a step runs on a cold cache, so the less of it the better.
        self._next = _Step(
            pool=data.data_ptr(),
            layers=layers,
            pages=data.shape[0],
            block_tokens=geometry.block_tokens,
            heads_per_group=geometry.heads_per_group,
            **dict(
                zip(
                    ("page_step", "group_step", "layer_step", "value_step", "slot_step", "head_step"),
                    strides,
                    strict=False,
                )
            ),
        )

    def hidden(self, inputs: StepInputs, wanted: torch.Tensor | None = None) -> torch.Tensor:
        """Return the last hidden state, float32 `[1, rows, hidden]`; rows that are not wanted are NaN."""
        shape, words, step = inputs.shape, inputs.words, self._next
        looked_at = None if wanted is None else _indices(wanted)
        hidden = torch.empty((1, shape.rows, self._step.hidden), dtype=torch.float32)
        token_ids, positions, slots, spans, *_, tables = shape.places()
        first = words.data_ptr()
        _OF_EACH_STEP.pack_into(
            step,
            0,
            shape.rows,
            shape.segments,
            len(words) - tables,
            -1 if looked_at is None else len(looked_at),
            first + token_ids * WORD_BYTES,
            first + positions * WORD_BYTES,
            first + slots * WORD_BYTES,
            first + spans * WORD_BYTES,
            first + tables * WORD_BYTES,
            0 if looked_at is None else looked_at.data_ptr(),
        )
        step.hidden = hidden.data_ptr()
        self._step.run(step)
        return hidden

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor, count: int) -> torch.Tensor:
        """Return float32 logits `[count, vocab]` of rows of the last hidden state."""
        return self._step.logits(hidden, rows, count)


def _indices(rows: torch.Tensor) -> torch.Tensor:
    """Return numbers of rows as the library reads them, which most are."""
    if rows.dtype is not torch.int32:
        rows = rows.to(torch.int32)
    return rows if rows.is_contiguous() else rows.contiguous()


def _address(tensor: torch.Tensor | None) -> int | None:
    """Return where the numbers lie, None for none. Raises `NotNative` if they are not one run."""
    if tensor is None:
        return None
    if not tensor.is_contiguous():
        raise NotNative("a weight is not contiguous")
    return tensor.data_ptr()
