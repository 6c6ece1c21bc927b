"""The experts of a mixture, computed so that a token's bits do not depend on the tokens beside it.

`register()` adds it to transformers, whose models then call it instead of their own loop over the experts.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from samovar.replicas.forward.attention import EXACT_ROWS

EXPERTS_NAME = "samovar_experts"


def _experts_by_rows(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Return the weighted sum `[tokens, hidden]` of each token's experts.

    How many tokens an expert gets depends on the batch; rows are padded to a multiple of `EXACT_ROWS`, at
    which GEMM libraries give a row the same bits. A token's sum is over its own choices in their order.
    """
    chosen = torch.zeros(
        (*top_k_index.shape, hidden_states.shape[-1]), dtype=torch.float32, device=hidden_states.device
    )
    for expert in torch.unique(top_k_index).tolist():
        tokens, places = torch.nonzero(top_k_index == expert, as_tuple=True)
        rows = hidden_states[F.pad(tokens, (0, -len(tokens) % EXACT_ROWS))]
        inner = _linear(self, "gate_up_proj" if self.has_gate else "up_proj", expert, rows)
        inner = self._apply_gate(inner) if self.has_gate else self.act_fn(inner)
        out = _linear(self, "down_proj", expert, inner)[: len(tokens)]
        chosen[tokens, places] = (out * top_k_weights[tokens, places, None]).float()
    total = chosen[:, 0]
    for place in range(1, chosen.shape[1]):
        total = total + chosen[:, place]
    return total.to(hidden_states.dtype)


def _linear(experts: Any, name: str, expert: int, rows: torch.Tensor) -> torch.Tensor:
    weight = getattr(experts, name)[expert]
    bias = getattr(experts, f"{name}_bias")[expert] if experts.has_bias else None
    return F.linear(rows, weight.T if experts.is_transposed else weight, bias)


def register() -> None:
    """Make `experts_implementation="samovar_experts"` known to transformers. Call before loading a model."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, _experts_by_rows)
