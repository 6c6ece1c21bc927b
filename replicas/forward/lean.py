"""A forward pass of few torch operations over a `PlainModel`, for CPU.

What transformers' modules compute, with projections that have one input fused and, where torch can, weights
packed for the CPU once instead of at every step. Each row's bits depend on the rows beside it as little as
with those modules: GEMMs get the same padding, and everything else is computed row by row.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from samovar.replicas.forward.attention import EXACT_ROWS, AttentionBackend, AttentionForm
from samovar.replicas.forward.inputs import StepInputs
from samovar.replicas.forward.plain import PlainLayer, PlainModel
from samovar.replicas.kv import KvPool

logger = logging.getLogger(__name__)

Matmul = Callable[[torch.Tensor], torch.Tensor]
"""Multiplies rows `[rows, inputs]` by a matrix that it holds: `[rows, outputs]`."""

PACKED_DTYPES: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float32)
"""What is packed. Plain float32 matrices go to MKL, whose bits depend on the number of rows on more CPUs."""


class _Packed:
    """A matrix in the layout that oneDNN multiplies by, made once, as a frozen graph of torch has it."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, None)  # for any number of rows
        self._bias = bias
        self._multiply = torch.ops.mkldnn._linear_pointwise

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._multiply(rows, self._weight, self._bias, "none", [], "")
        return out


class _Unpacked:
    """A matrix as it is."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return F.linear(rows, self._weight, self._bias)


def can_pack(dtype: torch.dtype) -> bool:
    """Return whether torch has packed matrices of this dtype here, tried on a small one."""
    if dtype not in PACKED_DTYPES or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    weight = torch.arange(32 * 64, dtype=torch.float32).remainder_(7).view(32, 64).to(dtype)
    rows = weight[:EXACT_ROWS]
    try:
        packed = _Packed(weight, None)(rows)
    except (AttributeError, RuntimeError) as error:  # not in this build of torch, or not on this CPU
        logger.info("weights are not packed: %s", error)
        return False
    return torch.equal(packed, F.linear(rows, weight))  # small whole numbers: no rounding


@dataclass(frozen=True, slots=True)
class _LeanLayer:
    input_norm: torch.Tensor
    qkv: Matmul
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    out: Matmul
    mlp_norm: torch.Tensor
    gate_up: Matmul
    down: Matmul
    uses_rope: bool
    form: AttentionForm


class LeanModel:
    """The weights of a `PlainModel` as the lean step multiplies by them, and its numbers.

    Takes the plain model over: a matrix that is packed loses its own memory at once, also for the modules
    that it was read from. What is tied to the embedding is not packed: it would be there twice. `is_packed`:
    whether the layers' matrices are packed. `numbers`: the plain model without its layers.
    """

    def __init__(self, plain: PlainModel, *, packs: bool = True) -> None:
        self.is_packed = packs and can_pack(plain.dtype)
        self._scale = plain.attention_scale
        self.layers = tuple(self._layer(layer) for layer in plain.layers)
        self.head: Matmul = _Unpacked(plain.head, None) if plain.is_tied else self._matmul(plain.head, None)
        self.numbers = replace(plain, layers=(), head=plain.embedding)

    def _layer(self, layer: PlainLayer) -> _LeanLayer:
        return _LeanLayer(
            input_norm=layer.input_norm,
            qkv=self._matmul(layer.qkv, layer.qkv_bias),
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            out=self._matmul(layer.out, layer.out_bias),
            mlp_norm=layer.mlp_norm,
            gate_up=self._matmul(layer.gate_up, None),
            down=self._matmul(layer.down, None),
            uses_rope=layer.uses_rope,
            form=AttentionForm(self._scale, layer.window),
        )

    def _matmul(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Matmul:
        if not self.is_packed:
            return _Unpacked(weight, bias)
        try:
            packed = _Packed(weight, bias)
        except RuntimeError as error:  # of this shape it cannot
            logger.info("a matrix %s is not packed: %s", tuple(weight.shape), error)
            return _Unpacked(weight, bias)
        storage = weight.untyped_storage()
        if storage.resizable() and storage.nbytes() == weight.nbytes:  # it holds nothing else
            storage.resize_(0)  # of the modules' views, too
        return packed


class LeanForward:
    """Computes steps by a `LeanModel` on one pool. `exact`: rows are padded so that each keeps its bits."""

    name = "lean"

    def __init__(self, model: LeanModel, pool: KvPool, backend: AttentionBackend, *, exact: bool) -> None:
        self.rows_multiple = EXACT_ROWS if exact else 1
        self._model = model
        self._plain = model.numbers
        self._pool = pool
        self._backend = backend

    def hidden(self, inputs: StepInputs, wanted: torch.Tensor | None = None) -> torch.Tensor:
        """Return the last hidden state `[1, rows, hidden]`, before its norm; write the step's K and V."""
        plain, meta = self._plain, self._backend.prepare(inputs)
        rows = plain.embedded(inputs.token_ids)
        rotation = self._rotation(inputs.positions)
        for number, layer in enumerate(self._model.layers):
            attended = self._attended(layer, self._norm(rows, layer.input_norm), rotation, meta, number)
            rows = self._added(rows, layer.out(attended))
            gate, up = layer.gate_up(self._norm(rows, layer.mlp_norm)).chunk(2, dim=-1)
            rows = self._added(rows, layer.down(F.silu(gate).mul_(up)))
        return rows[None]

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor, count: int) -> torch.Tensor:
        """Return float32 logits `[count, vocab]` of rows of the last hidden state."""
        last = self._norm(hidden[0].index_select(0, rows), self._plain.final_norm)
        logits = self._model.head(last)
        if self._plain.logits_divisor != 1.0:
            logits = logits / self._plain.logits_divisor
        return logits[:count].float()

    def _attended(
        self,
        layer: _LeanLayer,
        rows: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        meta: object,
        number: int,
    ) -> torch.Tensor:
        """Return what the heads attend to, `[rows, q_heads * head_dim]`."""
        plain, layer_kv = self._plain, self._pool.layer(number)
        heads = layer.qkv(rows).view(len(rows), -1, plain.head_dim)
        value = heads[:, plain.q_heads + plain.kv_heads :]
        if layer.q_norm is not None and layer.k_norm is not None:
            query = self._norm(heads[:, : plain.q_heads], layer.q_norm)
            key = self._norm(heads[:, plain.q_heads : plain.q_heads + plain.kv_heads], layer.k_norm)
            heads = torch.cat((query, key), dim=1)
        if layer.uses_rope:
            heads = _rotated(heads[:, : plain.q_heads + plain.kv_heads], *rotation)
        query, key = heads[:, : plain.q_heads], heads[:, plain.q_heads : plain.q_heads + plain.kv_heads]
        self._backend.write(layer_kv, key, value, meta)
        out = self._backend.attend(query, key, value, layer_kv, meta, layer.form)
        return out.view(len(rows), -1)

    def _rotation(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin `[rows, 1, head_dim]`, the first half of sin negated: see `_rotated`."""
        plain = self._plain
        angles = positions[:, None].float() * plain.inverse_frequencies
        angles = torch.cat((angles, angles), dim=-1)  # before cos: whole vectors of it, as transformers has
        cos, sin = angles.cos() * plain.rope_scale, angles.sin() * plain.rope_scale
        sin[:, : plain.head_dim // 2].neg_()
        return cos.to(plain.dtype)[:, None], sin.to(plain.dtype)[:, None]

    def _norm(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = rows.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._plain.norm_eps)
        return (wide * scale).to(rows.dtype) * weight

    def _added(self, rows: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
        if self._plain.residual_multiplier != 1.0:
            more = more * self._plain.residual_multiplier
        return rows + more


def _rotated(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate `[rows, heads, head_dim]`: one rounding each for the products and for their sum."""
    swapped = heads.roll(heads.shape[-1] // 2, dims=-1)  # its two halves
    return (heads * cos).add_(swapped.mul_(sin))
