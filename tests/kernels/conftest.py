"""Kernels run in Triton's interpreter here, in a process that was started for it."""

from __future__ import annotations

import importlib.util
import os

import pytest

INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None

collect_ignore_glob = [] if INTERPRETS else ["test_paged_*.py", "test_fused_*.py"]
"""triton reads the variable when it is imported: the gate, which has no triton, leaves these files out."""


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make fresh memory as bad as it can be: what a kernel does not write is NaN."""
    import torch

    made = torch.empty

    def empty(*args: object, **kwargs: object) -> torch.Tensor:
        tensor: torch.Tensor = made(*args, **kwargs)  # type: ignore[call-overload]
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", empty)
