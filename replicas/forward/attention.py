"""Attention over the paged pool: the backend interface, and a backend that is correct on every device.

A backend gets a packed batch (rows of many sequences in one forward pass, prefill chunks and decodes mixed)
and the pool's strided view of a layer. A faster kernel is one more class with the same two methods, here or
in its own file; nothing else changes.

`register()` adds it to transformers, whose models then call `samovar_paged` instead of their own attention
and pass our `step` keyword through.
"""

from __future__ import annotations

from collections.abc import Sequence as Listing
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from replicas.kv import TRASH_PAGE, KvPool

ATTENTION_NAME = "samovar_paged"
EXACT_ROWS = 4
"""On CPU, a row gets the same bits in any batch if the rows of GEMMs and of queries are a multiple of 4."""
EXACT_KEYS = 512
"""CPU SDPA splits the keys into runs of 512; with full runs only, the split is the same for any length."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows `[row, row + count)` of the batch are tokens `[start, start + count)` of one sequence."""

    row: int
    count: int
    start: int
    pages: Listing[int]

    @property
    def context(self) -> int:
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """One forward pass. `slot_pages`, `slot_offsets`: int64 `[rows]`, where each row's K and V are written.

    Rows behind the last segment are padding: they write to the trash page and attend to nothing.
    """

    segments: tuple[Segment, ...]
    slot_pages: torch.Tensor
    slot_offsets: torch.Tensor


class AttentionBackend(Protocol):
    name: str

    def prepare(self, batch: PackedBatch, block_tokens: int, device: torch.device) -> Any:
        """Build what all layers of this step share: page tables, masks."""
        ...

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer_kv: torch.Tensor,
        meta: Any,
        scale: float,
    ) -> torch.Tensor:
        """Return the attention output `[rows, q_heads, head_dim]`, finite in padding rows too.

        `query`: `[rows, q_heads, head_dim]`; `key`, `value`: `[rows, kv_heads, head_dim]`, this step's,
        already in the pool; `layer_kv`: `[pages, 2, block_tokens, kv_heads, head_dim]`.
        """
        ...


@dataclass(frozen=True, slots=True)
class _GatherPlan:
    segment: Segment
    table: torch.Tensor  # int64 [blocks]
    keys: int  # gathered keys, masked ones included
    mask: (
        torch.Tensor | None
    )  # additive, of the model's dtype, [1, 1, query rows, keys]; None: every key is visible


class GatherSdpa:
    """Gathers a sequence's pages and calls torch's SDPA, one sequence at a time.

    `exact=True` makes every row independent of batching and chunking, bit for bit, on CPU (the rule and its
    measurements: ENGINE.md section 7); it costs padding. A loop over sequences is faster than one padded call
    with a mask at every size measured there.
    """

    def __init__(self, exact: bool, dtype: torch.dtype) -> None:
        self.exact = exact
        self.dtype = dtype
        self.name = "gather+sdpa, exact" if exact else "gather+sdpa"

    def prepare(self, batch: PackedBatch, block_tokens: int, device: torch.device) -> list[_GatherPlan]:
        return [self._plan(segment, block_tokens, device) for segment in batch.segments]

    def _plan(self, segment: Segment, block_tokens: int, device: torch.device) -> _GatherPlan:
        keys = segment.context
        if self.exact:
            keys = -(-keys // EXACT_KEYS) * EXACT_KEYS
        blocks = -(-keys // block_tokens)
        pages = list(segment.pages[:blocks])
        pages += [TRASH_PAGE] * (blocks - len(pages))
        table = torch.tensor(pages, device=device)
        return _GatherPlan(segment, table, keys, self._mask(segment, keys, device))

    def _mask(self, segment: Segment, keys: int, device: torch.device) -> torch.Tensor | None:
        if not self.exact and (segment.count == 1 or segment.start == 0):
            return None  # a decode sees all keys; a whole prompt takes the causal path
        columns = torch.arange(keys, device=device)
        last_visible = torch.arange(segment.start, segment.context, device=device)
        if self.exact and segment.count > 1:  # padding rows repeat the last row's view
            padding = -segment.count % EXACT_ROWS
            last_visible = F.pad(last_visible, (0, padding), value=segment.context - 1)
        visible = columns[None, :] <= last_visible[:, None]
        # Additive, not boolean: SDPA would convert a boolean mask to this in every layer.
        return torch.zeros_like(visible, dtype=self.dtype).masked_fill_(~visible, -torch.inf)[None, None]

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer_kv: torch.Tensor,
        meta: list[_GatherPlan],
        scale: float,
    ) -> torch.Tensor:
        out = torch.zeros_like(query) if self._has_padding(query, meta) else torch.empty_like(query)
        for plan in meta:
            rows = slice(plan.segment.row, plan.segment.row + plan.segment.count)
            if plan.segment.count == 1:
                out[rows] = self._decode(query[rows], layer_kv, plan, scale)
            elif plan.mask is None:
                out[rows] = _whole_prompt(query[rows], key[rows], value[rows], scale)
            else:
                out[rows] = self._chunk(query[rows], layer_kv, plan, scale)
        return out

    @staticmethod
    def _has_padding(query: torch.Tensor, meta: list[_GatherPlan]) -> bool:
        return sum(plan.segment.count for plan in meta) < query.shape[0]

    def _decode(
        self, query: torch.Tensor, layer_kv: torch.Tensor, plan: _GatherPlan, scale: float
    ) -> torch.Tensor:
        """Compute one new token `[1, q_heads, head_dim]`.

        Query heads of a KV head become rows, so K is not repeated.
        """
        keys, values = _gather(layer_kv, plan)
        kv_heads, head_dim = keys.shape[1], keys.shape[3]
        rows = query.view(1, kv_heads, -1, head_dim)
        group = rows.shape[2]
        mask = plan.mask
        if self.exact:
            rows = F.pad(rows, (0, 0, 0, -group % EXACT_ROWS))
            assert mask is not None
            mask = mask.expand(1, 1, rows.shape[2], -1)
        out = F.scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=scale)
        return out[:, :, :group].reshape(1, -1, head_dim)

    def _chunk(
        self, query: torch.Tensor, layer_kv: torch.Tensor, plan: _GatherPlan, scale: float
    ) -> torch.Tensor:
        """Compute tokens `[count, q_heads, head_dim]` behind a context."""
        keys, values = _gather(layer_kv, plan)
        assert plan.mask is not None
        rows = F.pad(query, (0, 0, 0, 0, 0, plan.mask.shape[2] - query.shape[0]))
        out = F.scaled_dot_product_attention(
            rows.transpose(0, 1)[None], keys, values, attn_mask=plan.mask, scale=scale, enable_gqa=True
        )
        return out[0].transpose(0, 1)[: query.shape[0]]


def _whole_prompt(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """Compute a sequence's first chunk: no context precedes it, so its own K and V suffice."""
    out = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        key.transpose(0, 1)[None],
        value.transpose(0, 1)[None],
        is_causal=True,
        scale=scale,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1)


def _gather(layer_kv: torch.Tensor, plan: _GatherPlan) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy K and V of the plan's keys, each `[1, kv_heads, keys, head_dim]`."""
    both = [layer_kv[:, which].index_select(0, plan.table).flatten(0, 1)[: plan.keys] for which in (0, 1)]
    for copy in both:
        # Old content of the page is masked, but NaN times 0 is NaN.
        copy[plan.segment.context :].zero_()
    return both[0].transpose(0, 1)[None], both[1].transpose(0, 1)[None]


@dataclass(frozen=True, slots=True)
class PagedStep:
    """Passed through the model's keyword arguments to every layer's attention."""

    batch: PackedBatch
    backend: AttentionBackend
    meta: Any
    pool: KvPool


def _paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    step: PagedStep,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as transformers asks: `[1, q_heads, rows, head_dim]` -> `[1, rows, q_heads, head_dim]`."""
    if attention_mask is not None:
        raise ValueError(
            "this model builds an attention mask of its own, which the paged pool does not support"
        )
    layer_kv = step.pool.layer(int(module.layer_idx))  # type: ignore[arg-type]
    keys, values = key[0].transpose(0, 1), value[0].transpose(0, 1)
    slots = (step.batch.slot_pages, step.batch.slot_offsets)
    layer_kv[:, 0].index_put_(slots, keys)
    layer_kv[:, 1].index_put_(slots, values)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = step.backend.attend(query[0].transpose(0, 1), keys, values, layer_kv, step.meta, scale)
    return out[None], None


def register() -> None:
    """Make `attn_implementation="samovar_paged"` known to transformers. Call before loading a model."""
    AttentionInterface.register(ATTENTION_NAME, _paged_attention)
