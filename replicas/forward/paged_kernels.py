"""Triton kernels on the paged pool: attention for prefill, chunks and decode, and the writing of K and V.

The pool's layer is addressed by strides alone: `keys` and `values` are views `[pages, block_tokens, groups,
heads_per_group, head_dim]` of the same strides, contiguous in the last dimension only. Their scales are the
same without the last one, and come as the bits of bfloat16 (int16: Triton's interpreter has no bfloat16).
Offsets of pages are int64: a pool has more than 2^31 elements. Every bound of a loop is read from a tensor or
comes from the grid, so that a CUDA graph can hold it.

The softmax is carried from one run of keys to the next (Milakov and Gimelshein, arXiv 1805.02867), in powers
of two. Few tiles and a long context are split over the grid's last axis and merged (Flash-Decoding).

Imported where triton is: `attention_triton.py` says what of it is used when.
"""

# What is known when a kernel is compiled and what is not stand in two conditions, and in statements:
# ruff: noqa: SIM102, SIM108

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
SCALE_MIN = tl.constexpr(2.0**-126)
_VARY = ("tiles", "items", "spans", "tables", "slots")
"""Parts of one buffer, of other sizes in each step: where they begin must not compile a kernel again."""


@triton.jit
def _load_rows(
    base,
    places,
    dims,
    is_there,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Load `[BLOCK_N, BLOCK_D]`; zeros where no key or no dimension is: old pages may hold NaN."""
    pointers = base + places[:, None] + dims[None, :]
    if HEAD_DIM == BLOCK_D:
        if MASKED:
            rows = tl.load(pointers, mask=is_there[:, None], other=0)
        else:
            rows = tl.load(pointers)
    else:
        is_dim = dims[None, :] < HEAD_DIM
        if MASKED:
            is_dim = is_dim & is_there[:, None]
        rows = tl.load(pointers, mask=is_dim, other=0)
    return rows


@triton.jit
def _load_scales(base, places, is_there, MASKED: tl.constexpr):
    """Load float32 `[BLOCK_N]` from the bits of bfloat16."""
    if MASKED:
        bits = tl.load(base + places, mask=is_there, other=0)
    else:
        bits = tl.load(base + places)
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _fold_keys(
    total,
    weight,
    top,
    query,
    positions,
    first,
    end,
    keys_end,
    table,
    keys,
    values,
    key_scales,
    value_scales,
    scale,
    softcap,
    window,
    page_stride,
    token_stride,
    scale_page_stride,
    scale_token_stride,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    INT8: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Fold the keys `[first, end)` into the softmax that is carried along: `total`, `weight`, `top`.

    Not MASKED: all rows of the tile see all of these keys.
    """
    dims = tl.arange(0, BLOCK_D)
    for start in tl.range(first, end, BLOCK_N):
        numbers = start + tl.arange(0, BLOCK_N)
        is_there = numbers < keys_end
        if MASKED:
            pages = tl.load(table + numbers // BLOCK_TOKENS, mask=is_there, other=0).to(tl.int64)
        else:
            pages = tl.load(table + numbers // BLOCK_TOKENS).to(tl.int64)
        places = pages * page_stride + (numbers % BLOCK_TOKENS) * token_stride
        key = _load_rows(keys, places, dims, is_there, HEAD_DIM, BLOCK_D, MASKED)
        scores = tl.dot(query, tl.trans(key.to(query.dtype)), input_precision="ieee")
        if INT8:
            scale_places = pages * scale_page_stride + (numbers % BLOCK_TOKENS) * scale_token_stride
            scores *= _load_scales(key_scales, scale_places, is_there, MASKED)[None, :]
        scores *= scale
        if SOFTCAP:  # tanh(x) = 1 - 2 / (1 + e^2x); what that takes in powers of two is in the numbers given
            scores = softcap * (1.0 - 2.0 / (1.0 + tl.exp2(scores)))
        if MASKED:
            is_seen = numbers[None, :] <= positions[:, None]
            if WINDOW:
                is_seen = is_seen & (numbers[None, :] > positions[:, None] - window)
            scores = tl.where(is_seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        base = higher
        if MASKED:  # nothing seen yet: -inf less -inf is NaN
            base = tl.where(higher == float("-inf"), 0.0, higher)
        shrunk = tl.exp2(top - base)
        shares = tl.exp2(scores - base[:, None])
        weight = weight * shrunk + tl.sum(shares, 1)
        value = _load_rows(values, places, dims, is_there, HEAD_DIM, BLOCK_D, MASKED)
        if INT8:  # as it is stored: shares times scales would leave the range of float16
            value = value.to(tl.float32) * _load_scales(value_scales, scale_places, is_there, MASKED)[:, None]
        total = tl.dot(
            shares.to(query.dtype),
            value.to(query.dtype),
            total * shrunk[:, None],
            input_precision="ieee",
        )
        top = higher
    return total, weight, top


@triton.jit
def _rows_of(tiles, spans, tile, ROWS: tl.constexpr):
    """Return a tile's segment, and its rows: the first one, and the one behind the last."""
    segment, in_segment = tl.load(tiles + 4 * tile), tl.load(tiles + 4 * tile + 1)
    first, rows = tl.load(spans + 4 * segment), tl.load(spans + 4 * segment + 1)
    return segment, first + in_segment, first + tl.minimum(in_segment + ROWS, rows)


@triton.jit(do_not_specialize=("window",), do_not_specialize_on_alignment=_VARY)
def attend_tiles(
    out,
    partial,
    partial_tops,
    query,
    keys,
    values,
    key_scales,
    value_scales,
    sinks,
    tiles,
    items,
    spans,
    tables,
    scale,
    softcap,
    window,
    out_row_stride,
    out_head_stride,
    query_row_stride,
    query_head_stride,
    page_stride,
    token_stride,
    group_stride,
    head_stride,
    scale_page_stride,
    scale_token_stride,
    scale_group_stride,
    scale_head_stride,
    GROUP: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    INT8: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Attend from one tile of rows to one run of one KV head's keys; grid `(items, kv_heads)`.

    `tiles`, `items`: those of a `TileWork`; `spans`, `tables`: those of `StepInputs`. A tile is up to
    `BLOCK_M // GROUP` rows of one segment, each with all query heads of the KV head. Writes `out`; SPLIT: of
    a tile in several runs, `partial` `[runs, kv_heads, BLOCK_M, BLOCK_D]` and the logarithm of its weight,
    for `merge_splits`.
    """
    # The last tiles of a prompt have the most keys: they begin first.
    item = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head, kv_heads = tl.program_id(1), tl.num_programs(1)
    tile, split = tl.load(items + 2 * item), tl.load(items + 2 * item + 1)
    splits = tl.load(tiles + 4 * tile + 3)
    if split >= splits:  # padding
        return
    segment, first_row, rows_end = _rows_of(tiles, spans, tile, BLOCK_M // GROUP)
    tokens = tl.load(spans + 4 * segment + 2)
    table = tables + tl.load(spans + 4 * segment + 3)
    segment_end = tl.load(spans + 4 * segment) + tl.load(spans + 4 * segment + 1)
    before = tokens - segment_end  # plus a row: its position

    packed = tl.arange(0, BLOCK_M)
    rows = first_row + packed // GROUP
    heads = kv_head * GROUP + packed % GROUP
    is_row = (rows < rows_end) & (packed < BLOCK_M // GROUP * GROUP)
    positions = before + rows
    keys_end = before + rows_end
    first_key = tl.zeros_like(keys_end)
    seen_by_all = before + first_row + 1
    if WINDOW:
        first_key = tl.maximum(seen_by_all - window, 0) // BLOCK_N * BLOCK_N
        seen_by_all = first_key  # to all rows that do not look back: none are, cheaply enough
    first, end = first_key, keys_end
    place = (tl.load(tiles + 4 * tile + 2) + split) * kv_heads + kv_head
    if SPLIT:
        run = tl.cdiv(tl.cdiv(keys_end - first_key, BLOCK_N), splits) * BLOCK_N
        first = first_key + split * run
        end = tl.minimum(keys_end, first + run)
        if first >= end:  # not of a tile in one run
            tl.store(partial_tops + place * BLOCK_M + packed, tl.full([BLOCK_M], float("-inf"), tl.float32))
            return
    unmasked_end = tl.minimum(tl.maximum(seen_by_all // BLOCK_N * BLOCK_N, first), end)

    dims = tl.arange(0, BLOCK_D)
    is_query = is_row[:, None] & (dims[None, :] < HEAD_DIM)
    wide_rows, wide_heads = rows.to(tl.int64)[:, None], heads.to(tl.int64)[:, None]
    query_places = wide_rows * query_row_stride + wide_heads * query_head_stride
    tile_query = tl.load(query + query_places + dims[None, :], mask=is_query, other=0.0)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    if SINKS:
        if split == 0:
            top = tl.load(sinks + heads, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
            weight = tl.full([BLOCK_M], 1.0, tl.float32)
    total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    group, head = kv_head // HEADS_PER_GROUP, kv_head % HEADS_PER_GROUP
    place_of_head = group.to(tl.int64) * group_stride + head * head_stride
    head_keys, head_values = keys + place_of_head, values + place_of_head
    head_key_scales, head_value_scales = key_scales, value_scales
    if INT8:
        place_of_scale = group.to(tl.int64) * scale_group_stride + head * scale_head_stride
        head_key_scales, head_value_scales = key_scales + place_of_scale, value_scales + place_of_scale
    if not WINDOW:
        total, weight, top = _fold_keys(
            total, weight, top, tile_query, positions, first, unmasked_end, keys_end,
            table, head_keys, head_values, head_key_scales, head_value_scales,
            scale, softcap, window, page_stride, token_stride, scale_page_stride, scale_token_stride,
            HEAD_DIM, BLOCK_D, BLOCK_N, BLOCK_TOKENS, INT8, SOFTCAP, WINDOW, MASKED=False,
        )  # fmt: skip
    total, weight, top = _fold_keys(
        total, weight, top, tile_query, positions, unmasked_end, end, keys_end,
        table, head_keys, head_values, head_key_scales, head_value_scales,
        scale, softcap, window, page_stride, token_stride, scale_page_stride, scale_token_stride,
        HEAD_DIM, BLOCK_D, BLOCK_N, BLOCK_TOKENS, INT8, SOFTCAP, WINDOW, MASKED=True,
    )  # fmt: skip

    is_empty = weight == 0.0
    weight = tl.where(is_empty, 1.0, weight)
    result = total / weight[:, None]
    is_part = False
    if SPLIT:
        is_part = splits > 1
    if is_part:
        partial_places = (place * BLOCK_M + packed)[:, None] * BLOCK_D + dims[None, :]
        tl.store(partial + partial_places, result, mask=is_query)
        tops = tl.where(is_empty, float("-inf"), top + tl.log2(weight))
        tl.store(partial_tops + place * BLOCK_M + packed, tops)
    else:
        out_places = wide_rows * out_row_stride + wide_heads * out_head_stride
        tl.store(out + out_places + dims[None, :], result.to(out.dtype.element_ty), mask=is_query)


@triton.jit(do_not_specialize_on_alignment=_VARY)
def merge_splits(
    out,
    partial,
    partial_tops,
    tiles,
    spans,
    out_row_stride,
    out_head_stride,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SPLITS_MAX: tl.constexpr,
):
    """Merge what `attend_tiles` has found in each run; grid `(tiles * (BLOCK_M // GROUP), q_heads)`."""
    tile, head = tl.program_id(0) // (BLOCK_M // GROUP), tl.program_id(1)
    first, splits = tl.load(tiles + 4 * tile + 2), tl.load(tiles + 4 * tile + 3)
    if splits < 2:  # padding, or written by the one run
        return
    in_tile = tl.program_id(0) % (BLOCK_M // GROUP)
    _, first_row, rows_end = _rows_of(tiles, spans, tile, BLOCK_M // GROUP)
    row = first_row + in_tile
    if row >= rows_end:
        return
    kv_heads = tl.num_programs(1) // GROUP
    numbers = tl.arange(0, SPLITS_MAX)
    places = (first + numbers) * kv_heads + head // GROUP
    places = places * BLOCK_M + in_tile * GROUP + head % GROUP
    tops = tl.load(partial_tops + places, mask=numbers < splits, other=float("-inf"))
    highest = tl.max(tops, 0)
    shares = tl.exp2(tops - tl.where(highest == float("-inf"), 0.0, highest))
    dims = tl.arange(0, BLOCK_D)
    is_part = (tops > float("-inf"))[:, None] & (dims[None, :] < HEAD_DIM)  # else it was not written
    parts = tl.load(partial + places[:, None] * BLOCK_D + dims[None, :], mask=is_part, other=0.0)
    weight = tl.sum(shares, 0)
    result = tl.sum(parts * shares[:, None], 0) / tl.where(weight == 0.0, 1.0, weight)
    out_places = row.to(tl.int64) * out_row_stride + head * out_head_stride + dims
    tl.store(out + out_places, result.to(out.dtype.element_ty), mask=dims < HEAD_DIM)


@triton.jit
def write_vectors(
    codes,
    scales,
    place,
    scale_place,
    vectors,
    heads,
    dims,
    is_there,
    HEADS: tl.constexpr,
    INT8: tl.constexpr,
):
    """Write `vectors` `[BLOCK_H, BLOCK_D]`; INT8: rounded to the bytes of `replicas/kv/kv_pool.py`."""
    if INT8:
        numbers = vectors.to(tl.float32)
        largest = tl.max(tl.abs(numbers), 1)
        most = tl.full(largest.shape, 127.0, tl.float32)
        scale = tl.maximum(tl.div_rn(largest, most), SCALE_MIN)
        bits = scale.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # to bfloat16, halves to even
        has_none = tl.max((numbers != numbers).to(tl.int32), 1) > 0
        bits = tl.where(has_none, 0x7FC0, bits)  # not a number, as the vector that it is of
        scale = (bits << 16).to(tl.float32, bitcast=True)
        tl.store(scales + scale_place, bits.to(tl.int16), mask=heads < HEADS)
        shares = tl.div_rn(numbers, tl.broadcast_to(scale[:, None], numbers.shape))
        whole = (shares + 12582912.0) - 12582912.0  # 1.5 * 2^23: rounds halves to even
        vectors = tl.minimum(tl.maximum(whole, -127.0), 127.0)
    tl.store(codes + place[:, None] + dims[None, :], vectors.to(codes.dtype.element_ty), mask=is_there)


@triton.jit(do_not_specialize_on_alignment=_VARY)
def write_rows(
    keys,
    values,
    key_scales,
    value_scales,
    new_keys,
    new_values,
    slots,
    page_stride,
    token_stride,
    group_stride,
    head_stride,
    scale_page_stride,
    scale_token_stride,
    scale_group_stride,
    scale_head_stride,
    key_row_stride,
    key_head_stride,
    value_row_stride,
    value_head_stride,
    BLOCK_TOKENS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    INT8: tl.constexpr,
):
    """Write one row's K and V of all KV heads to its slot, one of `StepInputs.slots`; grid `(rows,)`."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    page, token = (slot // BLOCK_TOKENS).to(tl.int64), slot % BLOCK_TOKENS
    heads, dims = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    is_there = (heads < KV_HEADS)[:, None] & (dims < HEAD_DIM)[None, :]
    group, head = heads // HEADS_PER_GROUP, heads % HEADS_PER_GROUP
    place = page * page_stride + token * token_stride + group.to(tl.int64) * group_stride + head * head_stride
    scale_place = place
    if INT8:
        scale_place = page * scale_page_stride + token * scale_token_stride
        scale_place += group.to(tl.int64) * scale_group_stride + head * scale_head_stride
    key_places = row * key_row_stride + heads[:, None] * key_head_stride + dims[None, :]
    value_places = row * value_row_stride + heads[:, None] * value_head_stride + dims[None, :]
    new_key = tl.load(new_keys + key_places, mask=is_there, other=0.0)
    new_value = tl.load(new_values + value_places, mask=is_there, other=0.0)
    write_vectors(keys, key_scales, place, scale_place, new_key, heads, dims, is_there, KV_HEADS, INT8)
    write_vectors(values, value_scales, place, scale_place, new_value, heads, dims, is_there, KV_HEADS, INT8)
