"""The tensor of the paged KV pool, and its size in pages.

Shape `[pages, groups, layers, 2, block_tokens, heads_per_group, head_dim]`, block-major: a block (all layers,
K and V) is one contiguous run of bytes, so moving it to another tier is one copy, and
each layer is a strided view. The KV heads of a group are one run of every block, too: what one GPU of several
holds. In int8 a group's scales follow its codes, in the same order: `[layers, 2, block_tokens,
heads_per_group]`. What the bytes of a block mean is known here and nowhere else; who owns a page says
`page_pool.py`.

In int8 a vector of one token and KV head is stored as `head_dim` codes, and a scale that all of them share.
The bytes are the same wherever they are computed: float32, true division, halves to even, and the scale is
rounded to bfloat16 before anything is divided by it. One scale for each token and head, not for each channel:
a token is written at once, without knowing the others of its block (docs/adr/012-int8-kv.md).
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import torch

from samovar.cache_tiers.blocks import BlockShape, Bytes
from samovar.configs.sections import MIB
from samovar.replicas.model import free_host_bytes

LAYOUT_VERSION = "block-major-1"
"""Part of every namespace: a different layout never finds this KV."""

ALIGN = 16
"""Bytes: a group's codes and its scales begin at a multiple, so that a kernel may read this many at once."""

CODE_MAX = 127
SCALE_DTYPE = torch.bfloat16
SCALE_MIN = 2.0**-126
"""The smallest normal number: of zeros, too, a scale is one that can be divided by on every device."""


def quantise(vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round vectors `[..., head_dim]` to int8 codes of the same shape and bfloat16 scales `[...]`.

    A vector with an Inf or a NaN gets a scale that is none either, so that it is read as no number, too.
    """
    values = vectors.float()
    largest = values.abs().amax(dim=-1)
    # By a tensor: CUDA divides by a Python number as a multiplication by its reciprocal.
    scales = (largest / torch.full_like(largest, CODE_MAX)).clamp_min_(SCALE_MIN).to(SCALE_DTYPE)
    codes = (values / scales.float().unsqueeze(-1)).round_().clamp_(-CODE_MAX, CODE_MAX)
    return codes.to(torch.int8), scales


def dequantise(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return what codes `[..., head_dim]` with scales `[...]` stand for, rounded once to `dtype`."""
    # Codes and scales are whole in float32 and bfloat16; a scale may be too small for float16.
    wide = torch.float32 if dtype == torch.float16 else dtype
    return codes.to(wide).mul_(scales.to(wide).unsqueeze(-1)).to(dtype)


@dataclass(frozen=True, slots=True)
class KvGeometry:
    """Shape and dtype of one block, and what its bytes are.

    `dtype`: the model's, in which K and V are computed and attended to. `groups`: a block's KV heads lie in
    so many runs of `heads_per_group`. `is_int8`: K and V are stored as int8, with a scale of each vector.
    Raises `ValueError` if the groups do not divide `kv_heads`, or if the parts in int8 would not be aligned.
    """

    layers: int
    block_tokens: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    groups: int = 1
    is_int8: bool = False

    def __post_init__(self) -> None:
        if self.groups < 1 or self.kv_heads % self.groups:
            raise ValueError(f"{self.kv_heads} KV heads in {self.groups} groups")
        if self.is_int8 and (self.number_bytes % ALIGN or self.scale_bytes % ALIGN):
            raise ValueError(f"{self.number_bytes} and {self.scale_bytes} bytes are no multiples of {ALIGN}")

    @property
    def stored_dtype(self) -> torch.dtype:
        """What the numbers of K and V are stored as."""
        return torch.int8 if self.is_int8 else self.dtype

    @property
    def stored_name(self) -> str:
        return str(self.stored_dtype).removeprefix("torch.")

    @property
    def heads_per_group(self) -> int:
        return self.kv_heads // self.groups

    @property
    def page_shape(self) -> tuple[int, ...]:
        """The shape of a block's numbers in the pool."""
        return (self.groups, self.layers, 2, self.block_tokens, self.heads_per_group, self.head_dim)

    @property
    def vectors_per_group(self) -> int:
        """How many vectors of `head_dim` numbers a group has."""
        return self.layers * 2 * self.block_tokens * self.heads_per_group

    @property
    def number_bytes(self) -> int:
        """How many bytes of a group's run are the numbers of K and V; its scales follow."""
        return self.vectors_per_group * self.head_dim * self.stored_dtype.itemsize

    @property
    def scale_bytes(self) -> int:
        """How many bytes of a group's run are scales."""
        return self.vectors_per_group * SCALE_DTYPE.itemsize if self.is_int8 else 0

    @property
    def layout(self) -> str:
        """The name of what a block's bytes mean, besides shape and dtype; part of the namespace."""
        groups = "" if self.groups == 1 else f" groups {self.groups}"
        return f"{LAYOUT_VERSION}{groups}{' int8' if self.is_int8 else ''}"

    @property
    def record_shape(self) -> BlockShape:
        """The layout that records use: a run of each layer in each group, K, then V, of all its slots.

        In int8 a group's run is divided into as many equal runs, which are no layers.
        """
        runs = self.groups * self.layers
        return BlockShape(runs, self.block_bytes // runs, self.block_tokens)

    def blank_behind(self, block: Bytes, tokens: int) -> None:
        """Zero the slots of one block's payload, u8 `[block_bytes]`, behind its first `tokens`."""
        for group in block.reshape(self.groups, -1):
            for part in (group[: self.number_bytes], group[self.number_bytes :]):
                if part.size:
                    slots = part.reshape(self.layers * 2, self.block_tokens, -1)
                    slots[:, tokens:] = 0

    @property
    def bytes_per_token(self) -> int:
        return self.block_bytes // self.block_tokens

    @property
    def block_bytes(self) -> int:
        return self.groups * (self.number_bytes + self.scale_bytes)


@dataclass(frozen=True, slots=True)
class LayerKv:
    """K and V of one layer in all pages: strided views of the pool's tensor, no copies.

    `keys`, `values`: `[pages, block_tokens, groups, heads_per_group, head_dim]`; KV head `h` is head
    `h % heads_per_group` of group `h // heads_per_group`. The last dimension is contiguous. `key_scales`,
    `value_scales`: bfloat16 `[pages, block_tokens, groups, heads_per_group]` where `keys` and `values` are
    int8 codes, else None. `dtype`: of what is read, and attended to.
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None
    dtype: torch.dtype = torch.float32

    def write(
        self, slots: tuple[torch.Tensor, torch.Tensor], keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Write `[rows, kv_heads, head_dim]` to the rows' slots: (pages, offsets in them), int64 `[rows]`."""
        shape = (keys.shape[0], *self.keys.shape[2:])
        if self.key_scales is not None and self.value_scales is not None:
            (keys, values), (key_scales, value_scales) = quantise(torch.stack((keys, values)))
            self.key_scales.index_put_(slots, key_scales.view(shape[:-1]))
            self.value_scales.index_put_(slots, value_scales.view(shape[:-1]))
        self.keys.index_put_(slots, keys.view(shape))
        self.values.index_put_(slots, values.view(shape))

    def as_stored(self, vectors: torch.Tensor) -> torch.Tensor:
        """Return K or V `[rows, kv_heads, head_dim]` as it is read once it has been written.

        Attention takes nothing else: what a token sees would depend on how its prompt was cut into chunks.
        """
        return vectors if self.key_scales is None else dequantise(*quantise(vectors), self.dtype)

    def read(self, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy K and V of all slots of a page table, int64 `[blocks]`: `[slots, kv_heads, head_dim]` each."""
        return (
            self._read(self.keys, self.key_scales, table),
            self._read(self.values, self.value_scales, table),
        )

    def _read(self, numbers: torch.Tensor, scales: torch.Tensor | None, table: torch.Tensor) -> torch.Tensor:
        shape = (-1, numbers.shape[2] * numbers.shape[3], numbers.shape[4])
        copied = numbers.index_select(0, table).view(shape)
        if scales is None:
            return copied
        return dequantise(copied, scales.index_select(0, table).view(shape[:-1]), self.dtype)


def _lazy_zeros(nbytes: int) -> mmap.mmap:
    """Return zeros of which the system hands out a page when it is first touched.

    `torch.zeros` touches all at once: a second for each GiB, and a pool that is not in use yet fills memory.
    """
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class KvPool:
    """Holds the pool's tensor, which is never allocated again.

    `page_bytes`: all, as u8 `[pages, block_bytes]`. Starts as zeros, not as uninitialised memory: masked
    slots are multiplied by a probability of 0, which would turn any Inf or NaN there into NaN. `data`: the
    numbers, a view `[pages, groups, layers, 2, block_tokens, heads_per_group, head_dim]` of the model's dtype
    or int8. `scales`: of int8, a view of the same shape without the last dimension; else None.
    """

    def __init__(self, geometry: KvGeometry, pages: int, device: torch.device) -> None:
        self.geometry = geometry
        self.pages = pages
        nbytes = pages * geometry.block_bytes
        self._host_memory = _lazy_zeros(nbytes) if device.type == "cpu" else None
        if self._host_memory is None:
            whole = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        else:
            whole = torch.frombuffer(self._host_memory, dtype=torch.uint8)
        self.page_bytes = whole.view(pages, geometry.block_bytes)
        groups = self.page_bytes.view(pages, geometry.groups, -1)
        numbers = groups[..., : geometry.number_bytes].view(geometry.stored_dtype)
        self.data = numbers.view(pages, *geometry.page_shape)
        self.scales: torch.Tensor | None = None
        if geometry.is_int8:
            scales = groups[..., geometry.number_bytes :].view(SCALE_DTYPE)
            self.scales = scales.view(pages, *geometry.page_shape[:-1])
        self._layers = [self._layer(layer) for layer in range(geometry.layers)]

    def _layer(self, index: int) -> LayerKv:
        keys, values = (self.data[:, :, index, which].transpose(1, 2) for which in (0, 1))
        if self.scales is None:
            return LayerKv(keys, values, dtype=self.geometry.dtype)
        key_scales, value_scales = (self.scales[:, :, index, which].transpose(1, 2) for which in (0, 1))
        return LayerKv(keys, values, key_scales, value_scales, self.geometry.dtype)

    def layer(self, index: int) -> LayerKv:
        return self._layers[index]

    def return_memory(self) -> None:
        """Give the memory of all pages back to the system; they hold no blocks, and are zeros from now on.

        On CPU, where it is handed out again when a page is touched; a GPU's memory stays as it is.
        """
        if self._host_memory is not None:
            self._host_memory.madvise(mmap.MADV_DONTNEED)

    def copy_page(self, source: int, target: int) -> None:
        self.page_bytes[target].copy_(self.page_bytes[source])

    def gather_layer(self, layer: int, pages: list[int], start: int, end: int) -> torch.Tensor:
        """Copy `[2, end - start, kv_heads, head_dim]` of the slots `[start, end)` in one layer."""
        both = self.layer(layer).read(torch.tensor(pages, device=self.data.device))
        return torch.stack([part[start:end] for part in both])

    def gather(self, pages: list[int], tokens: int) -> torch.Tensor:
        """Copy `[layers, 2, tokens, kv_heads, head_dim]` of the first `tokens` slots of a page table."""
        layers = range(self.geometry.layers)
        return torch.stack([self.gather_layer(layer, pages, 0, tokens) for layer in layers])


class PoolTooSmall(Exception):
    """The memory does not hold one useful sequence; the text says what to change."""


@dataclass(frozen=True, slots=True)
class PagePlan:
    """Size of a pool. `pages` includes the trash page; `context_tokens_max`: what one sequence may use."""

    pages: int
    pool_bytes: int
    context_tokens_max: int


def plan_pages(
    *,
    free_bytes: int,
    fraction: float,
    replicas: int,
    bytes_max: int | None,
    block_bytes: int,
    block_tokens: int,
    context_tokens_max: int,
) -> PagePlan:
    """Return the plan of a pool that fits this replica's share of `free_bytes * fraction`. Pure.

    A pool smaller than the model's context shortens the context. Raises `PoolTooSmall` if it does not hold
    two blocks.
    """
    share_bytes = int(free_bytes * fraction / replicas)
    if bytes_max is not None:
        share_bytes = min(share_bytes, bytes_max)
    pages = share_bytes // block_bytes
    if pages < 3:
        raise PoolTooSmall(
            f"{share_bytes / MIB:.0f} MiB of KV memory per replica hold fewer than 2 blocks of "
            f"{block_bytes / MIB:.1f} MiB. Raise engine.pool_memory_fraction ({fraction}) or "
            f"engine.pool_bytes_max ({bytes_max}), or run fewer replicas ({replicas})"
        )
    usable_tokens = (pages - 1) * block_tokens
    return PagePlan(pages, pages * block_bytes, min(context_tokens_max, usable_tokens))


def free_memory_bytes(device: torch.device) -> int:
    """Return the memory that is still available: of the GPU, or of the machine and its container."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return free_host_bytes()
