"""A forward pass of few launches over a `PlainModel`, for GPUs: a kernel between each two matrix products.

Of a layer: residual and norm; q, k and v by one product; norms of heads, rotation and the writing of K and
V; attention; the output product; residual and norm; gate and up by one product; the activation; the down
product. The kernels are in `kernels.py`, which is imported when one is launched.
"""

from __future__ import annotations

from types import ModuleType

import torch
import torch.nn.functional as F

from samovar.replicas.forward.attention import AttentionBackend, AttentionForm
from samovar.replicas.forward.attention_triton import kernel_scales, kernel_strides
from samovar.replicas.forward.inputs import StepInputs
from samovar.replicas.forward.plain import PlainLayer, PlainModel
from samovar.replicas.kv import KvPool, LayerKv

THREAD_NUMBERS = 8
"""Of a row, at a time: 16 bytes of two-byte numbers are one load."""
WARPS_MAX = 16
INNER_BLOCK = 1024
"""Numbers of one program of the activation: enough programs for a single row, and 16 bytes a thread."""
ROTATE_WARPS = 2
"""Of a program that has a KV head and its query heads: of 8 heads of 128 numbers 16 a thread."""


class FusedForward:
    """Computes steps by the weights of `plain` on one pool. `backend` attends; it need not write.

    A row's numbers depend on the rows beside it by the matrix products only: never exact, so no padding.
    """

    name = "fused"
    rows_multiple = 1

    def __init__(self, plain: PlainModel, pool: KvPool, backend: AttentionBackend) -> None:
        self.plain = plain
        self._pool = pool
        self._backend = backend
        self._forms = [AttentionForm(plain.attention_scale, layer.window) for layer in plain.layers]

    def hidden(self, inputs: StepInputs, wanted: torch.Tensor | None = None) -> torch.Tensor:
        """Return the last hidden state `[1, rows, hidden]`, behind its norm; write the step's K and V."""
        plain, meta = self.plain, self._backend.prepare(inputs)
        rows = plain.embedded(inputs.token_ids)
        rotation = plain.cos_sin(inputs.positions)
        following = [*(layer.input_norm for layer in plain.layers[1:]), plain.final_norm]
        normed = norm(rows, plain.layers[0].input_norm, plain.norm_eps)
        for number, (layer, after) in enumerate(zip(plain.layers, following, strict=True)):
            attended = self._attended(number, normed, rotation, inputs, meta)
            out = F.linear(attended, layer.out, layer.out_bias)
            rows, normed = self._added(rows, out, layer.mlp_norm)
            inner = silu_times(F.linear(normed, layer.gate_up))
            rows, normed = self._added(rows, F.linear(inner, layer.down), after)
        return normed[None]

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor, count: int) -> torch.Tensor:
        """Return float32 logits `[count, vocab]` of rows of the last hidden state."""
        logits = F.linear(hidden[0].index_select(0, rows[:count]), self.plain.head)
        if self.plain.logits_divisor != 1.0:
            logits = logits / self.plain.logits_divisor
        return logits.float()

    def _attended(
        self,
        number: int,
        normed: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        inputs: StepInputs,
        meta: object,
    ) -> torch.Tensor:
        """Return what the heads attend to, `[rows, q_heads * head_dim]`."""
        plain, layer, kv = self.plain, self.plain.layers[number], self._pool.layer(number)
        heads = F.linear(normed, layer.qkv, layer.qkv_bias).view(len(normed), -1, plain.head_dim)
        query, key = rotate_write(plain, layer, heads, rotation, inputs.slots, kv)
        value = heads[:, plain.q_heads + plain.kv_heads :]
        out = self._backend.attend(query, key, value, kv, meta, self._forms[number])
        return out.view(len(normed), -1)

    def _added(
        self, rows: torch.Tensor, more: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return add_norm(rows, more, self.plain.residual_multiplier, weight, self.plain.norm_eps)


def norm(rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the norms of `[rows, hidden]`, contiguous, in one launch."""
    return _add_norm(rows, None, 1.0, weight, eps)[1]


def add_norm(
    rows: torch.Tensor, more: torch.Tensor, multiplier: float, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `rows + multiplier * more` and the norms of that, `[rows, hidden]` each, in one launch."""
    return _add_norm(rows, more, multiplier, weight, eps)


def _add_norm(
    rows: torch.Tensor, more: torch.Tensor | None, multiplier: float, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    count, hidden = rows.shape
    summed = rows if more is None else _empty(rows, count, hidden)
    normed = _empty(rows, count, hidden)
    block = _power_of_two(hidden)
    _kernels().add_norm[(count,)](
        summed,
        normed,
        rows,
        rows if more is None else more,
        weight,
        multiplier,
        eps,
        HIDDEN=hidden,
        BLOCK=block,
        ADDS=more is not None,
        num_warps=min(WARPS_MAX, max(1, block // (32 * THREAD_NUMBERS))),
    )
    return summed, normed


def rotate_write(
    plain: PlainModel,
    layer: PlainLayer,
    heads: torch.Tensor,
    rotation: tuple[torch.Tensor, torch.Tensor],
    slots: torch.Tensor,
    kv: LayerKv,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a layer's query and key heads, normed and rotated, and write K and V to `slots`, in one launch.

    `heads`: `[rows, q_heads + 2 * kv_heads, head_dim]`, contiguous.
    """
    rows, _, head_dim = heads.shape
    query, key = (_empty(heads, rows, count, head_dim) for count in (plain.q_heads, plain.kv_heads))
    group = plain.q_heads // plain.kv_heads
    has_norms = layer.q_norm is not None and layer.k_norm is not None
    _kernels().rotate_write[(rows, plain.kv_heads)](
        query,
        key,
        heads,
        layer.q_norm if has_norms else heads,  # not looked at
        layer.k_norm if has_norms else heads,
        *rotation,
        slots,
        kv.keys,
        kv.values,
        *kernel_scales(kv),
        plain.norm_eps,
        *kernel_strides(kv),
        GROUP=group,
        KV_HEADS=plain.kv_heads,
        HEADS_PER_GROUP=kv.keys.shape[3],
        HEAD_DIM=head_dim,
        BLOCK_G=_power_of_two(group),
        BLOCK_D=max(16, _power_of_two(head_dim)),
        BLOCK_TOKENS=kv.keys.shape[1],
        NORM=has_norms,
        ROTATE=layer.uses_rope,
        INT8=kv.key_scales is not None,
        num_warps=ROTATE_WARPS,
    )
    return query, key


def silu_times(gate_up: torch.Tensor) -> torch.Tensor:
    """Return `silu(gate) * up` `[rows, inner]` of `[rows, 2 * inner]`, contiguous, in one launch."""
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = _empty(gate_up, rows, inner)
    block = min(INNER_BLOCK, _power_of_two(inner))
    _kernels().silu_times[(rows, -(-inner // block))](
        out,
        gate_up,
        INNER=inner,
        BLOCK=block,
        num_warps=max(1, block // (32 * THREAD_NUMBERS)),
    )
    return out


def _kernels() -> ModuleType:
    """Import the kernels. Raises `ImportError` where triton is not installed."""
    from samovar.replicas.forward.fused import kernels

    return kernels


def _empty(like: torch.Tensor, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=like.dtype, device=like.device)


def _power_of_two(count: int) -> int:
    """Return the smallest power of two that is no smaller."""
    return 1 << (count - 1).bit_length()
