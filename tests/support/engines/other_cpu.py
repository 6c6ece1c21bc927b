"""Another CPU, played on this one: a matrix product whose last bits depend on its number of rows.

So it is where the math library adds in another order for a few rows: float32 on Xeons with AVX-512, for
instance. `TESTS_OTHER_CPU=float32,bfloat16` names the dtypes that it is to befall; `tests/conftest.py` reads
it, and nothing else does. Only the tests' own process is another CPU then, not a service that it starts.
"""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F

VARIABLE = "TESTS_OTHER_CPU"
_EXACT_ROWS = 4  # below that, the engine's own padding would hide it


def dtypes_of(value: str) -> frozenset[torch.dtype]:
    """What the variable names. Raises ValueError for what is no dtype: a typo must not test nothing."""
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    names = [name for name in value.split(",") if name]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"{VARIABLE}: {', '.join(unknown)}: give {' or '.join(known)}, or both with a comma")
    return frozenset(known[name] for name in names)


def is_played() -> bool:
    """Whether the variable is set."""
    return bool(os.environ.get(VARIABLE))


def play(dtypes: frozenset[torch.dtype]) -> None:
    """From now on, `F.linear` of these dtypes adds in two halves at every other multiple of four rows."""
    from samovar.replicas.forward import lean
    from samovar.replicas.start import (
        step_choice,  # here: it imports transformers, which who plays nothing need not
    )

    for kind in (step_choice.NATIVE_BF16, step_choice.NATIVE):  # they do without F.linear
        step_choice.FORMS.pop(kind, None)
    linear = F.linear
    # Packed matrices are multiplied elsewhere, by oneDNN.
    lean.PACKED_DTYPES = tuple(dtype for dtype in lean.PACKED_DTYPES if dtype not in dtypes)

    def by_rows(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        rows = input.numel() // max(1, input.shape[-1])
        if input.dtype not in dtypes or rows // _EXACT_ROWS % 2 == 0:
            return linear(input, weight, bias)
        half = input.shape[-1] // 2
        first = linear(input[..., :half], weight[:, :half])
        return first + linear(input[..., half:], weight[:, half:], bias)

    F.linear = by_rows  # type: ignore[assignment]
