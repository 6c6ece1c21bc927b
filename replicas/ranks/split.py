"""Which part of each weight a rank holds, by the plan that the model's own config states. Pure.

A column-wise weight `[out, in]` is cut by its rows, a row-wise one by its columns; the sum of the row-wise
layers' outputs over all ranks is the whole layer's (Shoeybi et al., Megatron-LM, arXiv 1909.08053). All else
is whole on every rank.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from samovar.replicas.messages import ModelRefused
from samovar.replicas.model import ModelSpec, check_heads

COLWISE, ROWWISE, WHOLE = "colwise", "rowwise", "replicated_with_grad_allreduce"
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_WIDTHS = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
ONE_GPU = "set engine.tensor_parallel to 1"


@dataclass(frozen=True, slots=True)
class RankSplit:
    """What rank `rank` of `ranks` holds. `plan`: module -> how it is cut, layer numbers as `*`."""

    rank: int
    ranks: int
    plan: Mapping[str, str]

    def style_of(self, module: str) -> str:
        """Return how a module is cut; `module`: its name, such as `model.layers.0.mlp.up_proj`."""
        return self.plan.get(_NUMBER.sub("*", module.removeprefix("model.")), WHOLE)

    def cut_of(self, tensor: str) -> int | None:
        """Return the dimension along which a tensor is cut; None: it is whole.

        A row-wise layer's bias is whole on rank 0, and `is_zero` on the others: it must be added once.
        """
        module, _, kind = tensor.rpartition(".")
        style = self.style_of(module)
        if style == COLWISE:
            return 0
        return 1 if style == ROWWISE and kind == "weight" else None

    def is_zero(self, tensor: str) -> bool:
        """Whether this rank holds zeros in place of a tensor."""
        module, _, kind = tensor.rpartition(".")
        return self.rank > 0 and kind == "bias" and self.style_of(module) == ROWWISE

    def span(self, size: int) -> slice:
        """Return this rank's part of a dimension. Raises `ValueError` if it cannot be cut evenly."""
        if size % self.ranks:
            raise ValueError(f"{size} cannot be cut into {self.ranks} equal parts")
        part = size // self.ranks
        return slice(self.rank * part, (self.rank + 1) * part)


def narrow(config: Any, spec: ModelSpec, rank: int, ranks: int) -> RankSplit:
    """Make a model's config that of one rank's part, and return the split.

    Raises `ModelRefused` if the model's plan asks for more than cutting linear layers, or a size is odd.
    """
    check_heads(spec, ranks)
    plan = dict(getattr(config, "base_model_tp_plan", None) or {})
    others = sorted(set(plan.values()) - {COLWISE, ROWWISE, WHOLE})
    if others or not plan:
        why = (
            f"its plan for several GPUs has {', '.join(others)}"
            if others
            else "it has no plan for several GPUs"
        )
        raise ModelRefused(
            f"engine.tensor_parallel={ranks}: a model of the type {spec.model_type!r} is not cut: {why}",
            ONE_GPU,
        )
    config.head_dim = spec.head_dim  # some families would derive it from the number of heads
    for name in _WIDTHS:
        size = getattr(config, name)
        if size % ranks:
            raise ModelRefused(
                f"engine.tensor_parallel={ranks}: {spec.path} has {name}={size}, which {ranks} GPUs "
                f"cannot share "
                "evenly",
                ONE_GPU,
            )
        setattr(config, name, size // ranks)
    return RankSplit(rank, ranks, plan)
