"""The tensor of the paged KV pool, and its size in pages.

Shape `[pages, layers, 2, block_tokens, kv_heads, head_dim]`, block-major: a block (all layers, K and V) is
one contiguous run of bytes, so moving it to another tier is one copy (ENGINE.md section 3), and each layer is
a strided view. Page ownership is in `page_pool.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from configs.sections import MIB


@dataclass(frozen=True, slots=True)
class KvGeometry:
    """Shape and dtype of one block."""

    layers: int
    block_tokens: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        return self.layers * 2 * self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        return self.bytes_per_token * self.block_tokens


class KvPool:
    """Holds the pool's tensor.

    `data`: `[pages, layers, 2, block_tokens, kv_heads, head_dim]` of the model's dtype. Starts as zeros, not
    as uninitialised memory: masked slots are multiplied by a probability of 0, which would turn any Inf or
    NaN there into NaN.
    """

    def __init__(self, geometry: KvGeometry, pages: int, device: torch.device) -> None:
        self.geometry = geometry
        self.pages = pages
        self.data = torch.zeros(
            (pages, geometry.layers, 2, geometry.block_tokens, geometry.kv_heads, geometry.head_dim),
            dtype=geometry.dtype,
            device=device,
        )

    def layer(self, index: int) -> torch.Tensor:
        """Return the view `[pages, 2, block_tokens, kv_heads, head_dim]` of one layer."""
        return self.data[:, index]

    def copy_page(self, source: int, target: int) -> None:
        self.data[target].copy_(self.data[source])

    def gather_layer(self, layer: int, pages: list[int], start: int, end: int) -> torch.Tensor:
        """Copy `[2, end - start, kv_heads, head_dim]` of the slots `[start, end)` in one layer."""
        table = torch.tensor(pages, device=self.data.device)
        joined = self.layer(layer).index_select(0, table).transpose(0, 1).flatten(1, 2)
        return joined[:, start:end]

    def gather(self, pages: list[int], tokens: int) -> torch.Tensor:
        """Copy `[layers, 2, tokens, kv_heads, head_dim]` of the first `tokens` slots of a page table."""
        table = torch.tensor(pages, device=self.data.device)
        blocks = self.data.index_select(0, table)  # [blocks, layers, 2, block_tokens, kv_heads, head_dim]
        joined = blocks.permute(1, 2, 0, 3, 4, 5).flatten(2, 3)
        return joined[:, :, :tokens].clone()


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
