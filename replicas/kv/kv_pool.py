"""The tensor of the paged KV pool, and its size in pages.

Shape `[pages, groups, layers, 2, block_tokens, heads_per_group, head_dim]`, block-major: a block (all layers,
K and V) is one contiguous run of bytes, so moving it to another tier is one copy (ENGINE.md section 3), and
each layer is a strided view. The KV heads of a group are one run of every block, too: what one GPU of several
holds. What the bytes of a block mean is known here and nowhere else. Page ownership is in `page_pool.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from cache_tiers.blocks import BlockShape, Bytes
from configs.sections import MIB

LAYOUT_VERSION = "block-major-1"
"""Part of every namespace: a different layout never finds this KV."""


@dataclass(frozen=True, slots=True)
class KvGeometry:
    """Shape and dtype of one block, and what its bytes are.

    `groups`: a block's KV heads lie in so many runs of `heads_per_group`. Raises `ValueError` if they do not
    divide `kv_heads`.
    """

    layers: int
    block_tokens: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    groups: int = 1

    def __post_init__(self) -> None:
        if self.groups < 1 or self.kv_heads % self.groups:
            raise ValueError(f"{self.kv_heads} KV heads in {self.groups} groups")

    @property
    def heads_per_group(self) -> int:
        return self.kv_heads // self.groups

    @property
    def page_shape(self) -> tuple[int, ...]:
        """The shape of a block in the pool."""
        return (self.groups, self.layers, 2, self.block_tokens, self.heads_per_group, self.head_dim)

    @property
    def layout(self) -> str:
        """The name of what a block's bytes mean, besides shape and dtype; part of the namespace."""
        return LAYOUT_VERSION if self.groups == 1 else f"{LAYOUT_VERSION} groups {self.groups}"

    @property
    def record_shape(self) -> BlockShape:
        """The layout that records use: a run of each layer in each group, K, then V, of all its slots."""
        runs = self.groups * self.layers
        return BlockShape(runs, self.block_bytes // runs, self.block_tokens)

    def blank_behind(self, block: Bytes, tokens: int) -> None:
        """Zero the slots of one block's payload, u8 `[block_bytes]`, behind its first `tokens`."""
        slots = block.reshape(self.groups * self.layers * 2, self.block_tokens, -1)
        slots[:, tokens:] = 0

    @property
    def bytes_per_token(self) -> int:
        return self.layers * 2 * self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        return self.bytes_per_token * self.block_tokens


@dataclass(frozen=True, slots=True)
class LayerKv:
    """K and V of one layer in all pages: strided views of the pool's tensor, no copies.

    `keys`, `values`: `[pages, block_tokens, groups, heads_per_group, head_dim]`; KV head `h` is head
    `h % heads_per_group` of group `h // heads_per_group`. The last dimension is contiguous.
    """

    keys: torch.Tensor
    values: torch.Tensor

    def write(
        self, slots: tuple[torch.Tensor, torch.Tensor], keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Write `[rows, kv_heads, head_dim]` to the rows' slots: (pages, offsets in them), int64 `[rows]`."""
        shape = (keys.shape[0], *self.keys.shape[2:])
        self.keys.index_put_(slots, keys.view(shape))
        self.values.index_put_(slots, values.view(shape))

    def read(self, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy K and V of all slots of a page table, int64 `[blocks]`: `[slots, kv_heads, head_dim]` each."""
        shape = (-1, self.keys.shape[2] * self.keys.shape[3], self.keys.shape[4])
        return (
            self.keys.index_select(0, table).view(shape),
            self.values.index_select(0, table).view(shape),
        )


class KvPool:
    """Holds the pool's tensor, which is never allocated again.

    `data`: `[pages, groups, layers, 2, block_tokens, heads_per_group, head_dim]` of the model's dtype. Starts
    as zeros, not as uninitialised memory: masked slots are multiplied by a probability of 0, which would turn
    any Inf or NaN there into NaN. `page_bytes`: the same memory as u8 `[pages, block_bytes]`.
    """

    def __init__(self, geometry: KvGeometry, pages: int, device: torch.device) -> None:
        self.geometry = geometry
        self.pages = pages
        self.data = torch.zeros((pages, *geometry.page_shape), dtype=geometry.dtype, device=device)
        self.page_bytes = self.data.view(pages, -1).view(torch.uint8)
        self._layers = [
            LayerKv(*(self.data[:, :, layer, which].transpose(1, 2) for which in (0, 1)))
            for layer in range(geometry.layers)
        ]

    def layer(self, index: int) -> LayerKv:
        return self._layers[index]

    def copy_page(self, source: int, target: int) -> None:
        self.data[target].copy_(self.data[source])

    def gather_layer(self, layer: int, pages: list[int], start: int, end: int) -> torch.Tensor:
        """Copy `[2, end - start, kv_heads, head_dim]` of the slots `[start, end)` in one layer."""
        both = self.layer(layer).read(torch.tensor(pages, device=self.data.device))
        return torch.stack([part[start:end] for part in both])

    def gather(self, pages: list[int], tokens: int) -> torch.Tensor:
        """Copy `[layers, 2, tokens, kv_heads, head_dim]` of the first `tokens` slots of a page table."""
        layers = range(self.geometry.layers)
        return torch.stack([self.gather_layer(layer, pages, 0, tokens) for layer in layers])


_CGROUPS = (  # directory, limit, usage, name of the reclaimable page cache in memory.stat; v2 and v1
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current", "inactive_file"),
    (
        Path("/sys/fs/cgroup/memory"),
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
)


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
    free = psutil.virtual_memory().available
    for group, limit_name, usage_name, cache_name in _CGROUPS:
        if (group / limit_name).exists():
            limit = (group / limit_name).read_text().strip()
            if limit.isdigit():  # "max" = no limit
                stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                used = int((group / usage_name).read_text()) - int(stat.get(cache_name, 0))
                free = min(free, max(0, int(limit) - used))
    return int(free)
