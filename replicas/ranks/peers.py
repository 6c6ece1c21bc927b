"""The sum over the ranks of a replica, which stands behind every row-wise layer.

By torch.distributed's process groups: NCCL on CUDA, gloo on CPU. As an object, not as torch's default group:
that is one for the process, and there may be several engines in one.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from samovar.replicas.ranks.split import ROWWISE, RankSplit


class Peers:
    """All ranks of one replica, as one of them sees them.

    `store`: a file, not yet there, by which they find each other. `timeout_s`: how long one waits for the
    others. `is_apart`: sums are left out: what is computed is nonsense, and waits for no other rank.
    """

    def __init__(self, store: Path, rank: int, ranks: int, device: torch.device, timeout_s: float) -> None:
        self.rank = rank
        self.ranks = ranks
        self.device = device
        self.is_apart = False
        self._group = _group(str(store), rank, ranks, device, timedelta(seconds=timeout_s))
        self.least(0)  # NCCL connects at the first call: now, not inside a step

    def add_up(self, tensor: torch.Tensor) -> None:
        """Replace a tensor, in place, by its sum over all ranks: the same bits on each.

        Raises `RuntimeError` if a rank has died; on CUDA the wait is for the stream, not here.
        """
        if not self.is_apart:
            self._reduce(tensor, dist.ReduceOp.SUM)

    def least(self, number: int) -> int:
        """Return the smallest of all ranks' numbers."""
        numbers = torch.tensor([number], dtype=torch.int64, device=self.device)
        self._reduce(numbers, dist.ReduceOp.MIN)
        return int(numbers.item())

    def _reduce(self, tensor: torch.Tensor, operation: Any) -> None:
        options = dist.AllreduceOptions()
        options.reduceOp = operation
        options.asyncOp = False  # NCCL then runs on the current stream
        work = self._group.allreduce([tensor], options)
        if work is not None:
            work.wait()

    def close(self) -> None:
        """Leave the group; the others' calls then fail."""
        if self.device.type == "cuda":
            self._group.abort()  # its `shutdown` waits for sums that a dead rank will never end
        else:
            self._group.shutdown()


def _group(store: str, rank: int, ranks: int, device: torch.device, timeout: timedelta) -> Any:
    groups: Any = dist  # torch's types leave out what is used here
    file = groups.FileStore(store, ranks)
    if device.type == "cuda":  # never run: no GPU was at hand
        options = groups.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return groups.ProcessGroupNCCL(file, rank, ranks, options)
    options = groups.ProcessGroupGloo._Options()
    options._timeout = timeout
    # All ranks are on this node; gloo's choice is what the host's name resolves to, which may be nothing.
    options._devices = [groups.ProcessGroupGloo.create_device(interface="lo")]
    return groups.ProcessGroupGloo(file, rank, ranks, options)


def sum_rowwise(model: torch.nn.Module, split: RankSplit, add_up: Callable[[torch.Tensor], None]) -> int:
    """Put the sum over the ranks behind every row-wise layer; return their number."""
    rowwise = [module for name, module in model.named_modules() if name and split.style_of(name) == ROWWISE]

    def sum_over_ranks(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        add_up(output)
        return output

    for module in rowwise:
        module.register_forward_hook(sum_over_ranks)
    return len(rowwise)
