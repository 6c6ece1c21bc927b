"""Counts what a GPU would be given to do, on a CPU: kernels, and reads of numbers that the host waits for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITS = {
    *("item", "_local_scalar_dense", "is_nonzero", "equal", "nonzero", "nonzero_numpy", "masked_select"),
    *("_unique", "_unique2", "unique_dim", "unique_consecutive", "bincount"),
}
"""Operators whose result, or its size, has to come back before the next one is launched."""
NOTHING = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "lift_fresh"}
"""Operators that give memory and launch nothing."""


class Launches(TorchDispatchMode):
    """Counts the operators of a `with` block: `kernels` one for each that is no view, `waits` by name,
    `bytes_max` of the largest result.

    Whether one is a view is seen by the memory that it gives: `to` and `reshape` may copy or not.

    Some operators are several kernels on a GPU: sorts and scans two or three, products with split sums two.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kernels = 0
        self.bytes_max = 0
        self.waits: Counter[str] = Counter()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in WAITS or (name.startswith("index") and _has_mask(args)):
            self.waits[name] += 1
        result = func(*args, **(kwargs or {}))
        if name not in NOTHING and (name.endswith("_") or not _memories(result) <= _memories((args, kwargs))):
            self.kernels += 1
            self.bytes_max = max([self.bytes_max, *(one.nbytes for one in _tensors(result))])
            self.names[name] += 1
        return result


def _memories(of: Any) -> set[int]:
    return {one.untyped_storage().data_ptr() for one in _tensors(of)}


def _tensors(of: Any) -> list[torch.Tensor]:
    return [one for one in tree_leaves(of) if isinstance(one, torch.Tensor)]


def _has_mask(args: tuple[Any, ...]) -> bool:
    """Whether rows are chosen by bools: how many they are is asked first."""
    listed = args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else ()
    return any(isinstance(one, torch.Tensor) and one.dtype in (torch.bool, torch.uint8) for one in listed)
