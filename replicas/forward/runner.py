"""Loads a transformers causal LM and runs it on the paged pool."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Listing
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from replicas.forward.attention import (
    ATTENTION_NAME,
    EXACT_ROWS,
    AttentionBackend,
    PackedBatch,
    PagedStep,
    Segment,
)
from replicas.forward.attention import register as register_attention
from replicas.forward.experts import EXPERTS_NAME
from replicas.forward.experts import register as register_experts
from replicas.kv import TRASH_PAGE, KvPool
from replicas.messages import ModelRefused
from replicas.model import ModelSpec
from replicas.scheduling import Chunk

Read = Callable[..., tuple[torch.nn.Module, Mapping[str, Any]]]
"""Makes a model with options of transformers' `from_pretrained`; returns what that says of loading, too."""


def load_model(
    spec: ModelSpec, dtype: torch.dtype, device: torch.device, read: Read | None = None
) -> torch.nn.Module:
    """Load the model for inference, its attention replaced by the paged one.

    `read`: makes it of other weights than all of `spec`'s.
    """
    register_attention()
    register_experts()
    experts = {"experts_implementation": EXPERTS_NAME} if spec.has_experts else {}
    read = read or partial(AutoModelForCausalLM.from_pretrained, spec.path, local_files_only=True)
    model, loading = read(
        dtype=dtype, attn_implementation=ATTENTION_NAME, output_loading_info=True, **experts
    )
    _refuse_incomplete(spec, loading)
    model.eval().requires_grad_(False)
    if device.type == "cpu":
        # Weights are memory-mapped from the file; decoding reads them about 10 % faster from anonymous memory
        # (ENGINE.md section 1). Tied weights stay tied: one tensor, two names.
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
    loaded: torch.nn.Module = model.to(device)
    return loaded


def _refuse_incomplete(spec: ModelSpec, loading: Mapping[str, Any]) -> None:
    """Refuse weights that are no whole model: transformers has filled what is missing with random numbers."""
    missing = sorted(loading["missing_keys"]) + sorted(str(key) for key in loading["mismatched_keys"])
    if missing:
        raise ModelRefused(
            f"the weights in {spec.path} lack {len(missing)} tensors that the model has, or have them in "
            f"another shape; the first is {missing[0]}",
            "copy all weights, and the config.json that belongs to them",
        )


Score = Callable[[Chunk, int, torch.Tensor], None]
"""Takes a chunk, a slot of it, and the float32 logits `[slots, vocab]` of it and the slots behind it."""


Same = Callable[["Runner", list[int], list[int], int, int], bool]
"""Compares slots of two page tables in the pool of a runner."""


class Runner:
    """Runs one forward pass over a step's chunks, on the paged pool.

    Packs the tokens of all chunks into one row dimension `[1, rows]`, copies pages that a sibling is about to
    write (copy-on-write), and returns the logits of the rows that sample.

    `model`: a transformers causal LM loaded with `ATTENTION_NAME`. `logit_rows_max`: rows of logits that
    exist at a time besides those that sample.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        pool: KvPool,
        backend: AttentionBackend,
        *,
        exact: bool,
        logit_rows_max: int = 64,
    ) -> None:
        self.model = model
        self.pool = pool
        self.backend = backend
        self.exact = exact
        self.logit_rows_max = logit_rows_max
        self.device = pool.data.device
        config = model.config
        self._divisor: float | None = getattr(config, "logits_scaling", None)
        self._softcap: float | None = getattr(config, "final_logit_softcapping", None)

    @torch.inference_mode()
    def run(
        self, chunks: Listing[Chunk], copies: Listing[tuple[int, int]] = (), score: Score | None = None
    ) -> torch.Tensor:
        """Return float32 logits `[chunks that sample, vocab]`, in chunk order, on the pool's device.

        `score` gets those of the slots that chunks have to score, some at a time, in their order.
        """
        hidden, batch = self.forward(chunks, copies)
        sampling_rows = [
            segment.row + segment.count - 1
            for segment, chunk in zip(batch.segments, chunks, strict=True)
            if chunk.samples
        ]
        if score is not None:
            for segment, chunk in zip(batch.segments, chunks, strict=True):
                wanted, first_row = chunk.scored, segment.row - chunk.start
                for start in range(wanted.start, wanted.stop, self.logit_rows_max):
                    end = min(start + self.logit_rows_max, wanted.stop)
                    score(chunk, start, self._logits(hidden, list(range(first_row + start, first_row + end))))
        return self._logits(hidden, sampling_rows)

    def agrees(self, same: Same, ours: list[int], fresh: list[int], start: int, end: int) -> bool:
        """Return whether slots `[start, end)` of two page tables are the `same`, wherever the pool lies."""
        return same(self, ours, fresh, start, end)

    def check(self) -> None:
        """Raise `RuntimeError` if no further step can be computed. Returns at once; for any thread."""

    def close(self) -> None:
        """Give back what lies outside of this process. Call when no step runs any more."""

    @torch.inference_mode()
    def forward(
        self, chunks: Listing[Chunk], copies: Listing[tuple[int, int]]
    ) -> tuple[torch.Tensor, PackedBatch]:
        """Compute a step up to the last hidden state, `[1, rows, hidden]`; return also how it was packed."""
        for source, target in copies:
            self.pool.copy_page(source, target)
        token_ids, positions, batch = self._pack(chunks)
        meta = self.backend.prepare(batch, self.pool.geometry.block_tokens, self.device)
        # The served types put a linear layer behind the last hidden state, and what `_finished` does.
        hidden: torch.Tensor = self.model.base_model(  # type: ignore[operator]
            input_ids=torch.tensor([token_ids], device=self.device),
            position_ids=torch.tensor([positions], device=self.device),
            use_cache=False,
            step=PagedStep(batch, self.backend, meta, self.pool),
        ).last_hidden_state
        return hidden, batch

    def _logits(self, hidden: torch.Tensor, rows: list[int]) -> torch.Tensor:
        """Return float32 logits `[rows, vocab]` of these rows of the last hidden state `[1, all, hidden]`."""
        kept = torch.tensor(self._pad(rows, rows[-1]) if rows else [], device=self.device, dtype=torch.long)
        head = self.model.get_output_embeddings()  # type: ignore[operator]
        # Padding rows too: elementwise functions treat the last numbers of all differently.
        return self._finished(head(hidden[:, kept]))[0, : len(rows)].float()

    def _finished(self, logits: torch.Tensor) -> torch.Tensor:
        """Do what some families do with logits besides the linear layer, in the order and dtype of theirs."""
        if self._divisor is not None:
            logits = logits / self._divisor
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits

    def _pad(self, items: list[int], filler: int) -> list[int]:
        """Pad rows in exact mode: GEMMs with rows not a multiple of 4 take another path in the library."""
        return items + [filler] * (-len(items) % EXACT_ROWS) if self.exact else items

    def _pack(self, chunks: Listing[Chunk]) -> tuple[list[int], list[int], PackedBatch]:
        block_tokens = self.pool.geometry.block_tokens
        token_ids: list[int] = []
        positions: list[int] = []
        slot_pages: list[int] = []
        slot_offsets: list[int] = []
        segments = []
        for chunk in chunks:
            sequence, end = chunk.sequence, chunk.start + chunk.count
            segments.append(Segment(len(token_ids), chunk.count, chunk.start, sequence.pages))
            token_ids.extend(sequence.tokens[chunk.start : end])
            positions.extend(range(chunk.start, end))
            for position in range(chunk.start, end):
                slot_pages.append(sequence.pages[position // block_tokens])
                slot_offsets.append(position % block_tokens)
        token_ids = self._pad(token_ids, 0)
        rows = len(token_ids)
        positions += [0] * (rows - len(positions))
        slot_offsets += list(range(rows - len(slot_offsets)))  # one trash slot per padding row
        slot_pages += [TRASH_PAGE] * (rows - len(slot_pages))
        return (
            token_ids,
            positions,
            PackedBatch(
                tuple(segments),
                torch.tensor(slot_pages, device=self.device),
                torch.tensor(slot_offsets, device=self.device),
            ),
        )
