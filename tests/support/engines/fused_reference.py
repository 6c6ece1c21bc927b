"""What the fused step's kernels compute, by torch: in the same places, rounded in the same places."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from samovar.replicas.kv.kv_pool import LayerKv


def normed(rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = rows.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(rows.dtype)


def rotated(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """`cos`, `sin`: `[rows, head_dim / 2]`."""
    cos, sin = (torch.cat((half, half), dim=-1)[:, None] for half in (cos, sin))
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-second, first), dim=-1) * sin


def add_norm(
    summed: torch.Tensor,
    out: torch.Tensor,
    rows: torch.Tensor,
    more: torch.Tensor,
    weight: torch.Tensor,
    multiplier: float,
    eps: float,
    *,
    ADDS: bool,
    **_: Any,
) -> None:
    if ADDS:
        rows = summed.copy_(rows + more * multiplier)
    out.copy_(normed(rows, weight, eps))


def rotate_write(
    query: torch.Tensor,
    key: torch.Tensor,
    qkv: torch.Tensor,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    key_scales: torch.Tensor,
    value_scales: torch.Tensor,
    eps: float,
    *_: int,
    GROUP: int,
    KV_HEADS: int,
    BLOCK_TOKENS: int,
    NORM: bool,
    ROTATE: bool,
    INT8: bool,
    **__: Any,
) -> None:
    q, k, value = qkv.split([GROUP * KV_HEADS, KV_HEADS, KV_HEADS], dim=1)
    if NORM:
        q, k = normed(q, q_norm, eps), normed(k, k_norm, eps)
    if ROTATE:
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
    query.copy_(q)
    key.copy_(k)
    scales = [one.view(torch.bfloat16) if INT8 else None for one in (key_scales, value_scales)]
    places = slots.long()
    LayerKv(keys, values, *scales).write(
        (places // BLOCK_TOKENS, places % BLOCK_TOKENS), k.contiguous(), value.contiguous()
    )


def silu_times(out: torch.Tensor, gate_up: torch.Tensor, **_: Any) -> None:
    gate, up = gate_up.chunk(2, dim=-1)
    out.copy_(F.silu(gate) * up)


class _OnAnyGrid:
    def __init__(self, compute: Callable[..., None]) -> None:
        self._compute = compute

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._compute


class FusedReference:
    """Stands where the module of the kernels is."""

    add_norm = _OnAnyGrid(add_norm)
    rotate_write = _OnAnyGrid(rotate_write)
    silu_times = _OnAnyGrid(silu_times)
