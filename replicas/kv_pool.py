"""The bytes of the paged KV pool: one tensor, block-major.

Shape `[pages, layers, 2, block_tokens, kv_heads, head_dim]`: a block (all layers, K and V) is one
contiguous run of bytes, so moving it to another tier is one copy (ENGINE.md section 3), and each
layer is a strided view. Knows nothing of who owns a page (`page_pool.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class KvGeometry:
    """What one block looks like."""

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
    """`data`: `[pages, layers, 2, block_tokens, kv_heads, head_dim]` of the model's dtype.

    Starts as zeros, not as uninitialised memory: masked slots are multiplied by a probability
    of 0, which would make NaN of whatever Inf or NaN stood there.
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
        """View `[pages, 2, block_tokens, kv_heads, head_dim]` of one layer."""
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
