"""The attention backend of GPUs: one Triton kernel for prefill, chunks and decode, in place on the pool.

What is launched for a step is planned in plain Python: shapes of tiles here, tiles and runs of keys in
`inputs.py`. The kernels are in `paged_kernels.py`, which is imported when one is launched: triton comes with
torch's CUDA builds only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from types import ModuleType

import torch

from samovar.replicas.forward.attention import AttentionForm
from samovar.replicas.forward.inputs import SPLITS_MAX, StepInputs, TileWork, Tiling
from samovar.replicas.kv import LayerKv

GROUP_MAX = 64
HEAD_DIM_MAX = 256
CAPABILITY_MIN = 80


class Unserved(Exception):
    """The kernel does not compute this model's attention on this device; the text says why."""


@dataclass(frozen=True, slots=True)
class TileShape:
    """What one program computes: `rows` (each of one query head) times `keys` at a time.

    `resident`: programs that a multiprocessor holds; more splits than fill all of them gain nothing.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    resident: int


_SHAPES = {
    # (capability from, head_dim up to, bytes of an element): of decode, of prefill
    (90, 64, 2): (TileShape(16, 128, 4, 4, 4), TileShape(128, 64, 8, 2, 2)),
    (90, 128, 2): (TileShape(16, 64, 4, 5, 3), TileShape(128, 128, 8, 3, 1)),
    (90, 256, 2): (TileShape(16, 32, 4, 4, 3), TileShape(64, 32, 8, 2, 1)),
    (80, 64, 2): (TileShape(16, 64, 4, 5, 4), TileShape(128, 32, 8, 3, 2)),
    (80, 128, 2): (TileShape(16, 64, 4, 4, 3), TileShape(128, 32, 8, 3, 1)),
    (80, 256, 2): (TileShape(16, 32, 4, 3, 2), TileShape(64, 32, 8, 2, 1)),
    (80, 256, 4): (TileShape(16, 32, 8, 2, 2), TileShape(16, 32, 8, 2, 2)),
}
"""Chosen by what ptxas says of registers, spills and shared memory (`make test-kernels`).

Timed is one: prefill of 128 at 9.0, the best of 14 on an H200 (426 TFLOP/s of 784 at 32k; with 64 keys 323),
some registers spilled or not. It takes 161 KiB of shared memory. The others fit into the 99 KiB that the
smaller GPUs of a generation have (8.6, 8.9).
"""
SMALL_AGAIN = 120
"""From 12.0 on GPUs have neither the matrix instructions nor the shared memory of 9.0: tiles are 8.0's."""


def tile_shapes(capability: int, head_dim: int, itemsize: int, group: int) -> tuple[TileShape, TileShape]:
    """Return the shapes of decode and of prefill tiles.

    `capability`: 90 is 9.0; `group`: query heads of a KV head.

    Raises `Unserved` if there are none.
    """
    if capability < CAPABILITY_MIN:
        raise Unserved(f"it needs compute capability 8.0, and this GPU has {capability / 10:.1f}")
    if head_dim > HEAD_DIM_MAX or group > GROUP_MAX:
        raise Unserved(f"it has no tiles for {group} query heads a KV head, of {head_dim} numbers each")
    if capability >= SMALL_AGAIN:
        capability = CAPABILITY_MIN
    decode, prefill = next(
        shapes
        for (least, most, size), shapes in _SHAPES.items()
        if capability >= least and head_dim <= most and itemsize == size
    )
    rows = 1 << (group - 1).bit_length()  # a tile holds all heads of at least one token
    return replace(decode, rows=max(decode.rows, rows)), replace(prefill, rows=max(prefill.rows, rows))


@dataclass(frozen=True, slots=True)
class TileLaunch:
    """One launch of the kernel: tiles of one shape. `runs`: places for what their runs of keys find."""

    shape: TileShape
    work: TileWork
    runs: int


@dataclass(frozen=True, slots=True)
class PagedPlan:
    """What all layers of a step share.

    `is_covered`: each row of the step is one of a tile. Others are zero in `zeroed`, which one layer after
    the other writes its result to.
    """

    inputs: StepInputs
    launches: tuple[TileLaunch, ...]
    is_covered: bool
    zeroed: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)

    def split_into(self, splits: int) -> PagedPlan:
        """Return the plan with all keys in so many splits."""
        return replace(self, launches=tuple(_split_into(splits, one) for one in self.launches))


def _split_into(splits: int, launch: TileLaunch) -> TileLaunch:
    tiles, count = launch.work.tiles.clone(), launch.work.tiles.shape[0]
    numbers = torch.arange(count * splits, dtype=tiles.dtype, device=tiles.device)
    tiles[:, 2], tiles[:, 3] = numbers[::splits], splits
    items = torch.stack([numbers // splits, numbers % splits], dim=1)
    return replace(launch, work=TileWork(tiles, items, splits > 1), runs=count * splits)


class TritonPaged:
    """Attends in place on the paged pool, by the kernel of `paged_kernels.py`.

    `shapes`: of decode and of prefill tiles; `processors`: the GPU's multiprocessors; `group`: query heads of
    a KV head. A step is one launch for the decodes, and one for all other rows.
    """

    name = "triton, paged"

    def __init__(
        self, shapes: tuple[TileShape, TileShape], *, processors: int, group: int, kv_heads: int
    ) -> None:
        self._decode, self._prefill = shapes
        self.group = group
        self._kv_heads = kv_heads
        at_a_time = (max(1, processors * shape.resident // kv_heads) for shape in shapes)
        self.tiling = Tiling(self._prefill.rows // group, *at_a_time)

    def prepare(self, inputs: StepInputs) -> PagedPlan:
        """Plan the launches of a step; nothing is read from the device.

        Of a shape that is recorded nothing depends on the step that is packed in it.
        """
        launches = tuple(
            TileLaunch(shape, work, runs if inputs.shape.is_recorded else work.items.shape[0])
            for shape, work, runs in (
                (self._decode, inputs.decodes, self.tiling.decodes),
                (self._prefill, inputs.others, self.tiling.others),
            )
            if work is not None
        )
        rows = sum(segment.count for segment in inputs.segments)
        is_covered = rows == inputs.shape.rows and not inputs.shape.is_recorded
        return PagedPlan(inputs, launches, is_covered)

    def write(self, layer_kv: LayerKv, key: torch.Tensor, value: torch.Tensor, meta: PagedPlan) -> None:
        write_rows(layer_kv, meta.inputs.slots, key, value)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer_kv: LayerKv,
        meta: PagedPlan,
        form: AttentionForm,
    ) -> torch.Tensor:
        out = meta.zeroed.get(query.shape)
        if out is None:
            new = torch.empty if meta.is_covered else torch.zeros
            out = new(query.shape, dtype=query.dtype, device=query.device)
            if not meta.is_covered:
                meta.zeroed[query.shape] = out
        for launch in meta.launches:
            self._launch(out, query, layer_kv, meta, launch, form)
        return out

    def _launch(
        self,
        out: torch.Tensor,
        query: torch.Tensor,
        kv: LayerKv,
        plan: PagedPlan,
        launch: TileLaunch,
        form: AttentionForm,
    ) -> None:
        kernels = _kernels()
        shape, (tiles, items, is_split) = launch.shape, launch.work
        head_dim = query.shape[2]
        block_d = _block_d(head_dim)
        if query.stride(2) != 1:
            query = query.contiguous()
        partial = tops = out  # not looked at
        if is_split:
            places = (launch.runs, self._kv_heads, shape.rows)
            partial = torch.empty((*places, block_d), dtype=torch.float32, device=out.device)
            tops = torch.empty(places, dtype=torch.float32, device=out.device)
        scale, softcap = form.scale * math.log2(math.e), 0.0
        if form.softcap is not None:  # as the kernel computes tanh
            scale, softcap = 2 * scale / form.softcap, form.softcap * math.log2(math.e)
        kernels.attend_tiles[(items.shape[0], self._kv_heads)](
            out,
            partial,
            tops,
            query,
            kv.keys,
            kv.values,
            *kernel_scales(kv),
            out if form.sinks is None else form.sinks,
            tiles,
            items,
            plan.inputs.spans,
            plan.inputs.tables,
            scale,
            softcap,
            form.window or 0,
            *_strides(out),
            *_strides(query),
            *kernel_strides(kv),
            GROUP=self.group,
            HEADS_PER_GROUP=kv.keys.shape[3],
            HEAD_DIM=head_dim,
            BLOCK_D=block_d,
            BLOCK_M=shape.rows,
            BLOCK_N=shape.keys,
            BLOCK_TOKENS=kv.keys.shape[1],
            INT8=kv.key_scales is not None,
            SOFTCAP=form.softcap is not None,
            SINKS=form.sinks is not None,
            WINDOW=form.window is not None,
            SPLIT=is_split,
            num_warps=shape.warps,
            num_stages=shape.stages,
        )
        if is_split:
            kernels.merge_splits[(tiles.shape[0] * (shape.rows // self.group), query.shape[1])](
                out,
                partial,
                tops,
                tiles,
                plan.inputs.spans,
                *_strides(out),
                GROUP=self.group,
                HEAD_DIM=head_dim,
                BLOCK_D=block_d,
                BLOCK_M=shape.rows,
                SPLITS_MAX=SPLITS_MAX,
                num_warps=4,
            )


def write_rows(kv: LayerKv, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Write `[rows, kv_heads, head_dim]` to `StepInputs.slots`, in one launch.

    The bytes are those that `LayerKv.write` writes.
    """
    rows, kv_heads, head_dim = keys.shape
    keys, values = (one if one.stride(2) == 1 else one.contiguous() for one in (keys, values))
    _kernels().write_rows[(rows,)](
        kv.keys,
        kv.values,
        *kernel_scales(kv),
        keys,
        values,
        slots,
        *kernel_strides(kv),
        *_strides(keys),
        *_strides(values),
        BLOCK_TOKENS=kv.keys.shape[1],
        KV_HEADS=kv_heads,
        HEADS_PER_GROUP=kv.keys.shape[3],
        HEAD_DIM=head_dim,
        BLOCK_H=1 << (kv_heads - 1).bit_length(),
        BLOCK_D=_block_d(head_dim),
        INT8=kv.key_scales is not None,
        num_warps=4,
    )


def _kernels() -> ModuleType:
    """Import the kernels. Raises `ImportError` where triton is not installed."""
    from samovar.replicas.forward import paged_kernels

    return paged_kernels


def _block_d(head_dim: int) -> int:
    return max(16, 1 << (head_dim - 1).bit_length())


def _strides(rows: torch.Tensor) -> tuple[int, int]:
    """Return the strides of `[rows, heads, head_dim]`; of one row always the same, whatever torch says."""
    return (rows.stride(0) if rows.shape[0] > 1 else rows.shape[1] * rows.shape[2], rows.stride(1))


def kernel_scales(kv: LayerKv) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales' bits, as int16; without scales something that the kernel does not look at."""
    if kv.key_scales is None or kv.value_scales is None:
        return kv.keys, kv.values
    return kv.key_scales.view(torch.int16), kv.value_scales.view(torch.int16)


def kernel_strides(kv: LayerKv) -> tuple[int, ...]:
    """Return the strides of page, token, group and head: of K and V, then of their scales."""
    scales = (0, 0, 0, 0) if kv.key_scales is None else kv.key_scales.stride()
    return (*kv.keys.stride()[:4], *scales)
