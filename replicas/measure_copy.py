"""What setting a sequence's blocks aside takes on this machine, measured at start by doing it."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

from cache_tiers.codec import record_bytes
from cache_tiers.extent import BlockShape
from cache_tiers.keys import KEY_BYTES
from cache_tiers.messages import TierPrice
from configs.section import MIB
from replicas.chain_cuts import StoreRun
from replicas.page_io import PageIo
from replicas.page_pool import TRASH_PAGE
from replicas.probe import bare_sequence
from replicas.swap_space import SwapSpace

SAMPLE_BYTES = 32 * MIB
REPEATS = 3

NO_COPY = TierPrice(0.0, 1.0, is_up=False)
"""Of a swap space that takes nothing."""


def measure_copy(
    io: PageIo,
    shape: BlockShape,
    *,
    pages: int,
    bytes_max: int,
    device: torch.device,
    clock: Callable[[], float] = time.perf_counter,
) -> TierPrice:
    """One direction between the pool's `pages` and this process's memory, checksums and all.

    Runs on pages that nobody has blocks in, and leaves them as they are. `bytes_max`: of the swap space.
    """
    block_bytes = shape.block_bytes
    room = min(bytes_max, SAMPLE_BYTES) - record_bytes(1, shape)
    blocks = min(pages - 1 - TRASH_PAGE, 1 + room // block_bytes)
    swap = SwapSpace(bytes_max, shape, io)
    if blocks < 1 or not swap.room_for(blocks):
        return NO_COPY
    sequence = bare_sequence([], [])

    def both_ways_s(blocks: int) -> float | None:
        keys = tuple((1 + number).to_bytes(KEY_BYTES, "big") for number in range(blocks))
        run = StoreRun(0, keys, (shape.block_tokens,) * blocks)
        some = range(TRASH_PAGE + 1, TRASH_PAGE + 1 + blocks)
        started_s = clock()
        if not swap.put(sequence, run, some, io.mark()):
            return None
        saved = swap.take(sequence, 0)
        if saved is None or saved.loaded.bad is not None:
            return None
        io.copy_in(saved.loaded.payload, some)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # else it is only launched
        return clock() - started_s

    small, whole = (
        [took_s for _ in range(REPEATS) if (took_s := both_ways_s(some)) is not None] for some in (1, blocks)
    )
    if not small or not whole:
        return NO_COPY
    small_s, whole_s = median(small), median(whole)
    # On a fast machine the difference drowns in noise; a tenth of the whole bounds what that may claim.
    moving_s = max(whole_s - small_s, whole_s / 10, 1e-9)
    return TierPrice(small_s / 2, 2 * max(1, blocks - 1) * block_bytes / moving_s)
