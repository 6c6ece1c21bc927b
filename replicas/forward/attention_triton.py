"""The attention backend of GPUs: one Triton kernel for prefill, chunks and decode, in place on the pool.

What is launched for a step is planned here, in plain Python: splits of keys and shapes of tiles. The kernels
are in `paged_kernels.py`, which is imported when one is launched: triton comes with torch's CUDA builds only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import ModuleType

import torch

from samovar.replicas.forward.attention import AttentionForm
from samovar.replicas.forward.inputs import StepInputs
from samovar.replicas.kv import LayerKv

SPLITS_MAX = 64
SPLIT_KEYS_MIN = 256
"""Fewer keys than this are not worth a split: merging takes longer."""
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
    (90, 128, 2): (TileShape(16, 64, 4, 5, 3), TileShape(128, 64, 8, 2, 1)),
    (90, 256, 2): (TileShape(16, 32, 4, 4, 3), TileShape(64, 32, 8, 2, 1)),
    (80, 64, 2): (TileShape(16, 64, 4, 5, 4), TileShape(128, 32, 8, 3, 2)),
    (80, 128, 2): (TileShape(16, 64, 4, 4, 3), TileShape(128, 32, 8, 3, 1)),
    (80, 256, 2): (TileShape(16, 32, 4, 3, 2), TileShape(64, 32, 8, 2, 1)),
    (80, 256, 4): (TileShape(16, 32, 8, 2, 2), TileShape(16, 32, 8, 2, 2)),
}
"""Chosen by what ptxas says of registers, spills and shared memory (`make test-kernels`); never timed.

All fit into the 99 KiB of shared memory that the smaller GPUs of a generation have (8.6, 8.9, 12.0).
"""


def tile_shapes(capability: int, head_dim: int, itemsize: int, group: int) -> tuple[TileShape, TileShape]:
    """Return the shapes of decode and of prefill tiles.

    `capability`: 90 is 9.0; `group`: query heads of a KV head.

    Raises `Unserved` if there are none.
    """
    if capability < CAPABILITY_MIN:
        raise Unserved(f"it needs compute capability 8.0, and this GPU has {capability / 10:.1f}")
    if head_dim > HEAD_DIM_MAX or group > GROUP_MAX:
        raise Unserved(f"it has no tiles for {group} query heads a KV head, of {head_dim} numbers each")
    decode, prefill = next(
        shapes
        for (least, most, size), shapes in _SHAPES.items()
        if capability >= least and head_dim <= most and itemsize == size
    )
    rows = 1 << (group - 1).bit_length()  # a tile holds all heads of at least one token
    return replace(decode, rows=max(decode.rows, rows)), replace(prefill, rows=max(prefill.rows, rows))


@dataclass(frozen=True, slots=True)
class TileLaunch:
    """One launch of the kernel: `tiles` of one shape, int32 `[tiles, 2]`, their keys in so many `splits`."""

    shape: TileShape
    tiles: torch.Tensor
    splits: int


@dataclass(frozen=True, slots=True)
class PagedPlan:
    """What all layers of a step share. `is_covered`: each row of the step is one of a tile."""

    inputs: StepInputs
    launches: tuple[TileLaunch, ...]
    is_covered: bool

    def split_into(self, splits: int) -> PagedPlan:
        """Return the plan with all keys in so many splits."""
        return replace(self, launches=tuple(replace(one, splits=splits) for one in self.launches))


def splits_of(programs: int, keys_max: int, places: int) -> int:
    """Return into how many runs the keys of each tile are split.

    `programs`: tiles times KV heads; `places`: programs that the device runs at a time. Splits never fill it
    more than once: a second wave would wait.
    """
    return max(1, min(places // programs, keys_max // SPLIT_KEYS_MIN, SPLITS_MAX))


class TritonPaged:
    """Attends in place on the paged pool, by the kernel of `paged_kernels.py`.

    `shapes`: of decode and of prefill tiles; `processors`: the GPU's multiprocessors; `group`: query heads of
    a KV head. A step is one launch for the decodes, and one for all other rows.
    """

    name = "triton, paged"

    def __init__(
        self,
        shapes: tuple[TileShape, TileShape],
        *,
        processors: int,
        group: int,
        kv_heads: int,
        context_tokens_max: int,
    ) -> None:
        self._decode, self._prefill = shapes
        self._processors = processors
        self.group = group
        self._kv_heads = kv_heads
        self._context_tokens_max = context_tokens_max
        self.tile_rows = self._prefill.rows // self.group

    def prepare(self, inputs: StepInputs) -> PagedPlan:
        """Plan the launches of a step; nothing is read from the device.

        How decodes are split depends on their number alone, so that a graph of as many is right for any
        contexts: what a short one leaves empty ends at once.
        """
        tiles, segments = inputs.tiles, inputs.segments
        decodes = inputs.decode_tiles
        if decodes == len(segments):
            decodes = tiles.shape[0]  # padding is decodes, too
        launches = []
        if decodes:
            launches.append(self._plan(self._decode, tiles[:decodes], self._context_tokens_max))
        if decodes < tiles.shape[0]:
            keys_max = max(segment.context for segment in segments)
            launches.append(self._plan(self._prefill, tiles[decodes:], keys_max))
        rows = sum(segment.count for segment in segments) + inputs.shape.segments - len(segments)
        return PagedPlan(inputs, tuple(launches), is_covered=rows == inputs.shape.rows)

    def _plan(self, shape: TileShape, tiles: torch.Tensor, keys_max: int) -> TileLaunch:
        places = self._processors * shape.resident
        return TileLaunch(shape, tiles, splits_of(tiles.shape[0] * self._kv_heads, keys_max, places))

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
        new = torch.empty if meta.is_covered else torch.zeros
        out = new(query.shape, dtype=query.dtype, device=query.device)
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
        shape, splits, tiles = launch.shape, launch.splits, launch.tiles.shape[0]
        head_dim = query.shape[2]
        block_d = _block_d(head_dim)
        if query.stride(2) != 1:
            query = query.contiguous()
        partial = tops = out  # not looked at
        if splits > 1:
            places = (tiles, self._kv_heads, splits, shape.rows)
            partial = torch.empty((*places, block_d), dtype=torch.float32, device=out.device)
            tops = torch.empty(places, dtype=torch.float32, device=out.device)
        scale, softcap = form.scale * math.log2(math.e), 0.0
        if form.softcap is not None:  # as the kernel computes tanh
            scale, softcap = 2 * scale / form.softcap, form.softcap * math.log2(math.e)
        kernels.attend_tiles[(tiles, self._kv_heads, splits)](
            out,
            partial,
            tops,
            query,
            kv.keys,
            kv.values,
            *kernel_scales(kv),
            out if form.sinks is None else form.sinks,
            launch.tiles,
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
            SPLIT=splits > 1,
            num_warps=shape.warps,
            num_stages=shape.stages,
        )
        if splits > 1:
            kernels.merge_splits[(tiles * (shape.rows // self.group), query.shape[1])](
                out,
                partial,
                tops,
                launch.tiles,
                plan.inputs.spans,
                splits,
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
