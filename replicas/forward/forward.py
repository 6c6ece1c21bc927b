"""The seam between a runner and what computes a step: today's transformers modules, or another step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from samovar.replicas.forward.attention import EXACT_ROWS, AttentionBackend, PagedStep
from samovar.replicas.forward.inputs import StepInputs
from samovar.replicas.kv import KvPool


class Forward(Protocol):
    """Computes a step's numbers on one pool. For one thread at a time.

    `name`: which kind of step it is, in one word. `rows_multiple`: what rows and samples are padded to a
    multiple of, see `StepPacker`.
    """

    name: str
    rows_multiple: int

    def hidden(self, inputs: StepInputs, wanted: torch.Tensor | None = None) -> torch.Tensor:
        """Return the last hidden state `[1, rows, hidden]`, and write the step's K and V to their slots.

        `wanted`: the only rows that will be looked at, ascending, int32; None: all. Others may be anything:
        K and V are all that a step needs of them.
        """
        ...

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor, count: int) -> torch.Tensor:
        """Return float32 logits `[count, vocab]` of rows of the last hidden state `[1, all, hidden]`.

        `rows`: `[count and padding]`, int32 or int64.
        """
        ...


MakeForward = Callable[[KvPool], Forward]
"""Makes what computes steps on a pool."""


class TransformersForward:
    """The modules of transformers, their attention replaced by a backend's.

    `model`: a transformers causal LM loaded with `ATTENTION_NAME`. `exact`: rows are padded so that each has
    the same bits in any batch.
    """

    name = "transformers"

    def __init__(
        self, model: torch.nn.Module, pool: KvPool, backend: AttentionBackend, *, exact: bool
    ) -> None:
        self._model = model
        self._pool = pool
        self._backend = backend
        # GEMMs with rows not a multiple of 4 take another path in the library.
        self.rows_multiple = EXACT_ROWS if exact else 1
        self._divisor: float | None = getattr(model.config, "logits_scaling", None)
        self._softcap: float | None = getattr(model.config, "final_logit_softcapping", None)

    def hidden(self, inputs: StepInputs, wanted: torch.Tensor | None = None) -> torch.Tensor:
        """Return the last hidden state `[1, rows, hidden]`, of all rows.

        The served types put a linear layer behind it, and what `_finished` does.
        """
        meta = self._backend.prepare(inputs)
        hidden: torch.Tensor = self._model.base_model(  # type: ignore[operator]
            input_ids=inputs.token_ids[None],
            position_ids=inputs.positions[None],
            use_cache=False,
            step=PagedStep(self._backend, meta, self._pool),
        ).last_hidden_state
        return hidden

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor, count: int) -> torch.Tensor:
        """Return float32 logits `[count, vocab]` of rows of the last hidden state."""
        head = self._model.get_output_embeddings()  # type: ignore[operator]
        # Padding rows too: elementwise functions treat the last numbers of all differently.
        return self._finished(head(hidden.index_select(1, rows)))[0, :count].float()

    def _finished(self, logits: torch.Tensor) -> torch.Tensor:
        """Do what some families do with logits besides the linear layer, in the order and dtype of theirs."""
        if self._divisor is not None:
            logits = logits / self._divisor
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits
