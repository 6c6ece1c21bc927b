"""How many pages a replica's pool gets: from the memory that is there, never from a guess.

`plan_pages` is pure; `free_memory_bytes` is the only part that looks at the machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from configs.section import MIB

_CGROUPS = (  # directory, limit, usage, name of the reclaimable page cache in memory.stat; v2 and v1
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current", "inactive_file"),
    (
        Path("/sys/fs/cgroup/memory"),
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
)


class PoolTooSmall(Exception):
    """The memory does not hold one useful sequence; the text says what to change."""


@dataclass(frozen=True, slots=True)
class PagePlan:
    """`pages` includes the trash page; `context_tokens_max` is what one sequence may use of it."""

    pages: int
    pool_bytes: int
    context_tokens_max: int


def plan_pages(
    *,
    free_bytes: int,
    fraction: float,
    replicas: int,
    bytes_max: int | None,
    block_bytes: int,
    block_tokens: int,
    context_tokens_max: int,
) -> PagePlan:
    """Pages that fit into this replica's share of `free_bytes * fraction`.

    A pool smaller than the model's context shortens the context; one that does not hold two
    blocks raises `PoolTooSmall`.
    """
    share_bytes = int(free_bytes * fraction / replicas)
    if bytes_max is not None:
        share_bytes = min(share_bytes, bytes_max)
    pages = share_bytes // block_bytes
    if pages < 3:
        raise PoolTooSmall(
            f"{share_bytes / MIB:.0f} MiB of KV memory per replica hold fewer than 2 blocks of "
            f"{block_bytes / MIB:.1f} MiB. Raise engine.pool_memory_fraction ({fraction}) or "
            f"engine.pool_bytes_max ({bytes_max}), or run fewer replicas ({replicas})"
        )
    usable_tokens = (pages - 1) * block_tokens
    return PagePlan(pages, pages * block_bytes, min(context_tokens_max, usable_tokens))


def free_memory_bytes(device: torch.device) -> int:
    """Memory that may still be taken: of the GPU, or of the machine and its container."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    free = psutil.virtual_memory().available
    for group, limit_name, usage_name, cache_name in _CGROUPS:
        if (group / limit_name).exists():
            limit = (group / limit_name).read_text().strip()
            if limit.isdigit():  # "max" = no limit
                stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                used = int((group / usage_name).read_text()) - int(stat.get(cache_name, 0))
                free = min(free, max(0, int(limit) - used))
    return int(free)
