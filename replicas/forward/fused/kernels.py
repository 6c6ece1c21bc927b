"""Triton kernels of the fused step: all that stands between a layer's matrix products and its attention.

Each computes in float32 and rounds to the model's dtype where transformers' modules do: behind a sum, a norm
and its weight, each product of a rotation, an activation. What one launch reads and what it writes never
overlap. Every bound comes from the grid or from the model's shape, so that a CUDA graph can hold it; the pool
is addressed as in `paged_kernels.py`.

Imported where triton is: `fused.py` says what of it is launched.
"""

from __future__ import annotations

import triton
import triton.language as tl

from samovar.replicas.forward.paged_kernels import write_vectors


@triton.jit
def _product(numbers, factors, DTYPE: tl.constexpr):
    """Return the product, rounded to the dtype, as float32."""
    return (numbers.to(tl.float32) * factors.to(tl.float32)).to(DTYPE).to(tl.float32)


@triton.jit
def add_norm(
    summed,
    normed,
    rows,
    more,
    weight,
    multiplier,
    eps,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    ADDS: tl.constexpr,
):
    """Write a row plus `multiplier` times that of `more` to `summed`, its norm to `normed`; grid `(rows,)`.

    All `[rows, HIDDEN]`, contiguous. Not ADDS: the norm of the row as it is.
    """
    DTYPE: tl.constexpr = rows.dtype.element_ty
    numbers = tl.arange(0, BLOCK)
    is_there = numbers < HIDDEN
    places = tl.program_id(0).to(tl.int64) * HIDDEN + numbers
    row = tl.load(rows + places, mask=is_there, other=0.0).to(tl.float32)
    if ADDS:
        added = tl.load(more + places, mask=is_there, other=0.0).to(tl.float32) * multiplier
        row = (row + added.to(DTYPE).to(tl.float32)).to(DTYPE)
        tl.store(summed + places, row, mask=is_there)
        row = row.to(tl.float32)
    scale = tl.rsqrt(tl.sum(row * row, 0) / HIDDEN + eps)
    weights = tl.load(weight + numbers, mask=is_there, other=0.0)
    tl.store(normed + places, _product(_product(row, scale, DTYPE), weights, DTYPE).to(DTYPE), mask=is_there)


@triton.jit
def _turned(
    heads,
    weight,
    cos,
    sin,
    eps,
    is_head,
    dims,
    HEAD_DIM: tl.constexpr,
    NORM: tl.constexpr,
    ROTATE: tl.constexpr,
):
    """Return the vectors at `heads`, pointers `[heads, 1]`, normed and rotated: `[heads, BLOCK_D]`.

    `cos`, `sin`: `[BLOCK_D]`, as number `d` of a head is multiplied by them.
    """
    DTYPE: tl.constexpr = heads.dtype.element_ty
    is_there = is_head & (dims < HEAD_DIM)[None, :]
    vectors = tl.load(heads + dims[None, :], mask=is_there, other=0.0)
    if NORM:
        wide = vectors.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, 1) / HEAD_DIM + eps)[:, None]
        weights = tl.load(weight + dims, mask=dims < HEAD_DIM, other=0.0)
        vectors = _product(_product(vectors, scale, DTYPE), weights[None, :], DTYPE).to(DTYPE)
    if ROTATE:
        across = (dims + HEAD_DIM // 2) % HEAD_DIM
        others = tl.load(heads + across[None, :], mask=is_there, other=0.0)
        if NORM:
            weights = tl.load(weight + across, mask=dims < HEAD_DIM, other=0.0)
            others = _product(_product(others, scale, DTYPE), weights[None, :], DTYPE)
        vectors = _product(vectors, cos[None, :], DTYPE) + _product(others, sin[None, :], DTYPE)
        vectors = vectors.to(DTYPE)
    return vectors


@triton.jit(do_not_specialize_on_alignment=("slots",))
def rotate_write(
    query,
    key,
    qkv,
    q_norm,
    k_norm,
    cos,
    sin,
    slots,
    keys,
    values,
    key_scales,
    value_scales,
    eps,
    page_stride,
    token_stride,
    group_stride,
    head_stride,
    scale_page_stride,
    scale_token_stride,
    scale_group_stride,
    scale_head_stride,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    NORM: tl.constexpr,
    ROTATE: tl.constexpr,
    INT8: tl.constexpr,
):
    """Norm and rotate a row's heads and write K and V to its slot; grid `(rows, KV_HEADS)`.

    `qkv`: `[rows, (GROUP + 2) * KV_HEADS, HEAD_DIM]`, contiguous; `cos`, `sin`: `[rows, HEAD_DIM / 2]`.
    `query` `[rows, GROUP * KV_HEADS, HEAD_DIM]` and `key` `[rows, KV_HEADS, HEAD_DIM]` get what is attended
    by; `keys`, `values` and their scales what `write_rows` would write of it. A program has one KV head and
    the query heads of it.
    """
    Q_HEADS: tl.constexpr = GROUP * KV_HEADS
    row, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dims = tl.arange(0, BLOCK_D)
    is_dim = dims < HEAD_DIM
    cosines = tl.zeros([BLOCK_D], tl.float32)
    sines = cosines
    if ROTATE:
        places = row * (HEAD_DIM // 2) + dims % (HEAD_DIM // 2)
        cosines = tl.load(cos + places, mask=is_dim, other=0.0).to(tl.float32)
        sines = tl.load(sin + places, mask=is_dim, other=0.0).to(tl.float32)
        sines = tl.where(dims < HEAD_DIM // 2, -sines, sines)
    heads = row * (Q_HEADS + 2 * KV_HEADS) * HEAD_DIM

    in_group = tl.arange(0, BLOCK_G)
    is_query = (in_group < GROUP)[:, None]
    numbers = (kv_head * GROUP + in_group)[:, None] * HEAD_DIM
    turned = _turned(
        qkv + heads + numbers, q_norm, cosines, sines, eps, is_query, dims, HEAD_DIM, NORM, ROTATE
    )
    query_places = row * Q_HEADS * HEAD_DIM + numbers + dims[None, :]
    tl.store(query + query_places, turned, mask=is_query & is_dim[None, :])

    one = kv_head + tl.arange(0, 1)  # a tile of one, as `write_vectors` takes tiles
    is_one = (one < KV_HEADS)[:, None]
    numbers = one[:, None] * HEAD_DIM
    of_keys = qkv + heads + Q_HEADS * HEAD_DIM + numbers
    turned = _turned(of_keys, k_norm, cosines, sines, eps, is_one, dims, HEAD_DIM, NORM, ROTATE)
    is_there = is_one & is_dim[None, :]
    tl.store(key + row * KV_HEADS * HEAD_DIM + numbers + dims[None, :], turned, mask=is_there)
    value = tl.load(of_keys + KV_HEADS * HEAD_DIM + dims[None, :], mask=is_there, other=0.0)

    slot = tl.load(slots + row)
    page, token = (slot // BLOCK_TOKENS).to(tl.int64), slot % BLOCK_TOKENS
    group, head = (one // HEADS_PER_GROUP).to(tl.int64), one % HEADS_PER_GROUP
    place = page * page_stride + token * token_stride + group * group_stride + head * head_stride
    scale_place = place
    if INT8:
        scale_place = page * scale_page_stride + token * scale_token_stride
        scale_place += group * scale_group_stride + head * scale_head_stride
    write_vectors(keys, key_scales, place, scale_place, turned, one, dims, is_there, KV_HEADS, INT8)
    write_vectors(values, value_scales, place, scale_place, value, one, dims, is_there, KV_HEADS, INT8)


@triton.jit
def silu_times(out, gate_up, INNER: tl.constexpr, BLOCK: tl.constexpr):
    """Write `silu(gate) * up`, `[rows, INNER]`, of `[rows, 2 * INNER]`; grid `(rows, INNER / BLOCK)`."""
    DTYPE: tl.constexpr = gate_up.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    numbers = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = numbers < INNER
    places = row * (2 * INNER) + numbers
    gate = tl.load(gate_up + places, mask=is_there, other=0.0).to(tl.float32)
    up = tl.load(gate_up + places + INNER, mask=is_there, other=0.0)
    active = (gate / (1.0 + tl.exp(-gate))).to(DTYPE)
    tl.store(out + row * INNER + numbers, _product(active, up, DTYPE).to(DTYPE), mask=is_there)
