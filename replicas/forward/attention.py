"""Attention over the paged pool: the backend interface, and a backend that is correct on every device.

A backend gets a step (`StepInputs`: rows of many sequences, prefill chunks and decodes mixed) and the pool's
strided views of a layer. A faster kernel is one more class with the same methods, in its own file, as the one
of GPUs in `attention_triton.py`; `attention_choice.py` says which one serves.

`register()` adds it to transformers, whose models then call `samovar_paged` instead of their own attention
and pass our `step` keyword through.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from samovar.replicas.forward.inputs import Segment, StepInputs, Tiling
from samovar.replicas.kv import TRASH_PAGE, KvPool, LayerKv

ATTENTION_NAME = "samovar_paged"
EXACT_ROWS = 4
"""On CPU, a row gets the same bits in any batch if the rows of GEMMs and of queries are a multiple of 4."""
EXACT_KEYS = 512
"""CPU SDPA splits the keys into runs of 512; with full runs only, the split is the same for any length."""


_LANES = 32
"""Float32 numbers that torch's vector loops take at once; what is left of them gets another `exp`."""


@dataclass(frozen=True, slots=True)
class AttentionForm:
    """What a layer's attention is besides causal, as its family has it.

    `window`: a token sees itself and the `window - 1` tokens before it; None: all. `softcap`: scores become
    `softcap * tanh(score / softcap)`. `sinks`: `[q_heads]`, a score of each head that takes weight and gives
    no value.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    @property
    def needs_scores(self) -> bool:
        """Whether torch's SDPA cannot compute it."""
        return self.softcap is not None or self.sinks is not None


class AttentionBackend(Protocol):
    """Computes attention. `tiling`: how it cuts a step into tiles, see `TileWork`; None: it needs none."""

    name: str

    @property
    def tiling(self) -> Tiling | None: ...

    def prepare(self, inputs: StepInputs) -> Any:
        """Build what all layers of this step share, if anything: page tables, masks."""
        ...

    def write(self, layer_kv: LayerKv, key: torch.Tensor, value: torch.Tensor, meta: Any) -> None:
        """Write the step's K and V `[rows, kv_heads, head_dim]` to their slots, as `LayerKv.write` does."""
        ...

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer_kv: LayerKv,
        meta: Any,
        form: AttentionForm,
    ) -> torch.Tensor:
        """Return the attention output `[rows, q_heads, head_dim]`, finite in padding rows too.

        `query`: `[rows, q_heads, head_dim]`; `key`, `value`: `[rows, kv_heads, head_dim]`, this step's, as
        computed; `layer_kv`: of all pages, this step's included. What is attended to is what is stored: who
        takes `key` and `value` instead of the pool takes them `layer_kv.as_stored`.
        """
        ...


@dataclass(frozen=True, slots=True)
class _GatherPlan:
    """Which keys of a segment's sequence are gathered: `keys` tokens from token `first` on."""

    segment: Segment
    table: torch.Tensor  # int64 [blocks], from the block of `first` on
    first: int
    keys: int  # gathered keys, masked ones included
    mask: (
        torch.Tensor | None
    )  # additive, of the model's dtype, [1, 1, query rows, keys]; None: every key is visible


class _GatherPlans:
    """The plans of a step's segments, made once for each width of window that the model's layers have.

    `slots`: where the rows' K and V are written, see `StepInputs.slot_index`.
    """

    def __init__(
        self, slots: tuple[torch.Tensor, torch.Tensor], plan: Callable[[int | None], list[_GatherPlan]]
    ) -> None:
        self.slots = slots
        self._plan = plan
        self._made: dict[int | None, list[_GatherPlan]] = {}

    def of(self, window: int | None) -> list[_GatherPlan]:
        if window not in self._made:
            self._made[window] = self._plan(window)
        return self._made[window]


class GatherSdpa:
    """Gathers a sequence's pages and calls torch's SDPA, one sequence at a time.

    `exact=True` makes every row independent of batching and chunking, bit for bit, on CPU; it costs
    padding. A loop over sequences is faster than one padded call
    with a mask at every size measured there. What SDPA has not (soft caps, sinks) is computed in the same
    runs of keys, so that the rule holds for it too. The pages of a window's past stay in the pool.

    `scores_max`: of one head, that may exist at a time: a longer chunk is computed some rows at a time, as
    not every kernel of SDPA gets along without all of its scores. None: any number; never in exact mode.
    """

    tiling = None

    def __init__(self, exact: bool, dtype: torch.dtype, *, scores_max: int | None = None) -> None:
        self.exact = exact
        self.dtype = dtype
        self._scores_max = scores_max
        self.name = "gather+sdpa, exact" if exact else "gather+sdpa"

    def prepare(self, inputs: StepInputs) -> _GatherPlans:
        return _GatherPlans(
            inputs.slot_index(),
            lambda window: [
                self._plan(inputs, piece, window)
                for one in inputs.segments
                for piece in pieces_of(one, inputs.block_tokens, self._scores_max)
            ],
        )

    def write(self, layer_kv: LayerKv, key: torch.Tensor, value: torch.Tensor, meta: _GatherPlans) -> None:
        layer_kv.write(meta.slots, key, value)

    def _plan(self, inputs: StepInputs, segment: Segment, window: int | None) -> _GatherPlan:
        block_tokens = inputs.block_tokens
        run = EXACT_KEYS if self.exact else block_tokens
        # Whole runs that no row sees are left out: in exact mode they would change no bit.
        first = 0 if window is None else max(0, segment.start - window + 1) // run * run
        keys = segment.context - first
        if self.exact:
            keys = -(-keys // EXACT_KEYS) * EXACT_KEYS
        first_block, blocks = first // block_tokens, -(-keys // block_tokens)
        table = inputs.table(segment)[first_block:].long()
        if blocks > len(table):
            table = F.pad(table, (0, blocks - len(table)), value=TRASH_PAGE)
        mask = self._mask(segment, first, keys, inputs.device, window)
        return _GatherPlan(segment, table, first, keys, mask)

    def _mask(
        self, segment: Segment, first: int, keys: int, device: torch.device, window: int | None
    ) -> torch.Tensor | None:
        is_narrow = window is not None and segment.context > window
        if not self.exact and not is_narrow and (segment.count == 1 or segment.start == 0):
            return None  # a decode sees all keys; a whole prompt takes the causal path
        columns = torch.arange(first, first + keys, device=device)
        last_visible = torch.arange(segment.start, segment.context, device=device)
        if self.exact and segment.count > 1:  # padding rows repeat the last row's view
            padding = -segment.count % EXACT_ROWS
            last_visible = F.pad(last_visible, (0, padding), value=segment.context - 1)
        visible = columns[None, :] <= last_visible[:, None]
        if window is not None:
            visible &= columns[None, :] > last_visible[:, None] - window
        # Additive, not boolean: SDPA would convert a boolean mask to this in every layer.
        return torch.zeros_like(visible, dtype=self.dtype).masked_fill_(~visible, -torch.inf)[None, None]

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer_kv: LayerKv,
        meta: _GatherPlans,
        form: AttentionForm,
    ) -> torch.Tensor:
        plans = meta.of(form.window)
        out = torch.zeros_like(query) if self._has_padding(query, plans) else torch.empty_like(query)
        for plan in plans:
            rows = slice(plan.segment.row, plan.segment.row + plan.segment.count)
            if form.needs_scores:
                out[rows] = self._by_scores(query[rows], layer_kv, plan, form)
            elif plan.segment.count == 1:
                out[rows] = self._decode(query[rows], layer_kv, plan, form.scale)
            elif plan.mask is None:
                keys, values = layer_kv.as_stored(key[rows]), layer_kv.as_stored(value[rows])
                out[rows] = _whole_prompt(query[rows], keys, values, form.scale)
            else:
                out[rows] = self._chunk(query[rows], layer_kv, plan, form.scale)
        return out

    @staticmethod
    def _has_padding(query: torch.Tensor, plans: list[_GatherPlan]) -> bool:
        return sum(plan.segment.count for plan in plans) < query.shape[0]

    def _decode(
        self, query: torch.Tensor, layer_kv: LayerKv, plan: _GatherPlan, scale: float
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

    def _chunk(self, query: torch.Tensor, layer_kv: LayerKv, plan: _GatherPlan, scale: float) -> torch.Tensor:
        """Compute tokens `[count, q_heads, head_dim]` behind a context."""
        keys, values = _gather(layer_kv, plan)
        assert plan.mask is not None
        rows = F.pad(query, (0, 0, 0, 0, 0, plan.mask.shape[2] - query.shape[0]))
        out = F.scaled_dot_product_attention(
            rows.transpose(0, 1)[None], keys, values, attn_mask=plan.mask, scale=scale, enable_gqa=True
        )
        return out[0].transpose(0, 1)[: query.shape[0]]

    def _by_scores(
        self, query: torch.Tensor, layer_kv: LayerKv, plan: _GatherPlan, form: AttentionForm
    ) -> torch.Tensor:
        """Compute tokens `[count, q_heads, head_dim]` from their scores, in float32, run by run of keys.

        The softmax is carried from run to run (Milakov and Gimelshein, arXiv 1805.02867): a run in which a
        row sees nothing leaves that row's bits as they are.
        """
        count, q_heads = query.shape[:2]
        keys, values = (part[0].float() for part in _gather(layer_kv, plan))
        kv_heads = keys.shape[0]
        rows = F.pad(query.float(), (0, 0, 0, 0, 0, -count % EXACT_ROWS)).transpose(0, 1)
        mask = plan.mask
        if mask is None:
            mask = self._causal(plan.segment, plan.keys, query.device)
        seen = F.pad(mask[0, 0], (0, 0, 0, rows.shape[1] - mask.shape[2])) == 0
        top = torch.full((q_heads, rows.shape[1], 1), -torch.inf, device=query.device)
        if form.sinks is not None:
            top = form.sinks.float().view(q_heads, 1, 1).expand(-1, rows.shape[1], 1)
        weight = torch.ones_like(top) if form.sinks is not None else torch.zeros_like(top)
        total = torch.zeros_like(rows)
        for start in range(0, plan.keys, EXACT_KEYS):
            end = min(start + EXACT_KEYS, plan.keys)
            scores = _grouped(rows, keys[:, start:end].transpose(1, 2), kv_heads) * form.scale
            if form.softcap is not None:
                scores = torch.tanh(scores / form.softcap) * form.softcap
            scores = scores.masked_fill(~seen[:, start:end], -torch.inf)
            higher = torch.maximum(top, scores.amax(dim=-1, keepdim=True))
            base = higher.masked_fill(higher == -torch.inf, 0.0)  # nothing seen yet: -inf less -inf is NaN
            shrunk = torch.exp((top - base).repeat(1, 1, _LANES))[..., :1]
            shares = torch.exp(scores - base)
            weight = weight * shrunk + shares.sum(dim=-1, keepdim=True)
            total = total * shrunk + _grouped(shares, values[:, start:end], kv_heads)
            top = higher
        return (total / weight).to(query.dtype).transpose(0, 1)[:count]

    @staticmethod
    def _causal(segment: Segment, keys: int, device: torch.device) -> torch.Tensor:
        rows = torch.arange(segment.start, segment.context, device=device)
        hidden = torch.arange(keys, device=device)[None, :] > rows[:, None]
        return torch.zeros_like(hidden, dtype=torch.float32).masked_fill_(hidden, -torch.inf)[None, None]


def pieces_of(segment: Segment, block_tokens: int, scores_max: int | None) -> list[Segment]:
    """Cut a segment into runs of rows that have so many scores in each head; what fits stays whole."""
    if scores_max is None or segment.count * segment.context <= scores_max:
        return [segment]
    rows = max(1, scores_max // segment.context)
    pieces = []
    for first in range(0, segment.count, rows):
        count, start = min(rows, segment.count - first), segment.start + first
        blocks = -(-(start + count) // block_tokens)
        pieces.append(Segment(segment.row + first, count, start, segment.table, blocks))
    return pieces


def _grouped(rows: torch.Tensor, matrices: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Multiply `[q_heads, rows, n]` by the matrix of each head's KV head, of `[kv_heads, n, m]`."""
    q_heads, count, inner = rows.shape
    return (rows.reshape(kv_heads, -1, inner) @ matrices).reshape(q_heads, count, -1)


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


def _gather(layer_kv: LayerKv, plan: _GatherPlan) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy K and V of the plan's keys, each `[1, kv_heads, keys, head_dim]`."""
    both = [copy[: plan.keys] for copy in layer_kv.read(plan.table)]
    for copy in both:
        # Old content of the page is masked, but NaN times 0 is NaN.
        copy[plan.segment.context - plan.first :].zero_()
    return both[0].transpose(0, 1)[None], both[1].transpose(0, 1)[None]


@dataclass(frozen=True, slots=True)
class PagedStep:
    """Passed through the model's keyword arguments to every layer's attention."""

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
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as transformers asks: `[1, q_heads, rows, head_dim]` -> `[1, rows, q_heads, head_dim]`.

    `sliding_window`, `softcap`, `s_aux`: transformers' names of what `AttentionForm` says.
    """
    if attention_mask is not None:
        raise ValueError(
            "this model builds an attention mask of its own, which the paged pool does not support"
        )
    layer_kv = step.pool.layer(int(module.layer_idx))  # type: ignore[arg-type]
    keys, values = key[0].transpose(0, 1), value[0].transpose(0, 1)
    step.backend.write(layer_kv, keys, values, step.meta)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    # Qwen2-MoE's layers do not pass their window: they rely on a mask, which there is none of here.
    window = getattr(module, "sliding_window", None) if sliding_window is None else sliding_window
    form = AttentionForm(scale, window, softcap, s_aux)
    out = step.backend.attend(query[0].transpose(0, 1), keys, values, layer_kv, step.meta, form)
    return out[None], None


def register() -> None:
    """Make `attn_implementation="samovar_paged"` known to transformers. Call before loading a model."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, _paged_attention)
