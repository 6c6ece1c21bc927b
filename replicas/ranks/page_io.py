"""Blocks of all ranks in one piece: each rank copies its run of every block, to or from staging memory.

The groups of a rank are consecutive, so its part of a block is one run of bytes, and the runs of all ranks in
their order are the block as one GPU would hold it: records do not depend on `engine.tensor_parallel`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from cache_tiers.blocks import Bytes
from replicas.kv import KvGeometry, PageIo
from replicas.ranks.channel import Orders
from replicas.ranks.orders import Order, words_of


def copy_run(
    io: PageIo, pages: Sequence[int], staging: Bytes, rank: int, ranks: int, *, is_out: bool, mark: Any = None
) -> None:
    """Copy one rank's run of some blocks between its pages and the staging memory. `io`: of its own pool.

    `mark`: of `io`, before the copy; None: everything before this call.
    """
    run_bytes = io.geometry.block_bytes
    runs = staging[: len(pages) * ranks * run_bytes].reshape(len(pages), ranks, run_bytes)[:, rank]
    if is_out:
        io.copy_out(pages, runs, io.mark() if mark is None else mark)
    else:
        io.copy_in(runs, pages)


class SharedPageIo(PageIo):
    """Copies whole blocks of a pool that all ranks hold in parts; for rank 0.

    `own`: of rank 0's part; `moves`, `steps`: to the other ranks. One move at a time: the staging memory is
    one. Raises `RankLost` if a rank has died.
    """

    def __init__(
        self, geometry: KvGeometry, own: PageIo, moves: Orders, steps: Orders, staging: Bytes, ranks: int
    ) -> None:
        self.geometry = geometry
        self._own = own
        self._moves = moves
        self._steps = steps
        self._staging = staging
        self._ranks = ranks
        self._blocks = max(1, len(staging) // geometry.block_bytes)
        self._lock = threading.Lock()

    def mark(self) -> tuple[int, Any]:
        """Return the last step that the ranks were told, and rank 0's own mark."""
        return self._steps.told, self._own.mark()

    def copy_out(self, pages: Sequence[int], out: Bytes, mark: tuple[int, Any]) -> None:
        blocks = out.reshape(len(pages), -1)
        for first in range(0, len(pages), self._blocks):
            some = pages[first : first + self._blocks]
            with self._lock:
                number = self._moves.tell(Order.OUT, words_of([mark[0], *some]))
                copy_run(self._own, some, self._staging, 0, self._ranks, is_out=True, mark=mark[1])
                self._moves.await_done(number)
                np.copyto(blocks[first : first + len(some)], self._staged(len(some)))

    def copy_in(self, payload: Bytes, pages: Sequence[int]) -> None:
        blocks = payload.reshape(len(pages), -1)
        for first in range(0, len(pages), self._blocks):
            some = pages[first : first + self._blocks]
            with self._lock:
                np.copyto(self._staged(len(some)), blocks[first : first + len(some)])
                # After the last step: it may still read what the pages held before.
                number = self._moves.tell(Order.IN, words_of([self._steps.told, *some]))
                copy_run(self._own, some, self._staging, 0, self._ranks, is_out=False)
                self._moves.await_done(number)

    def _staged(self, blocks: int) -> Bytes:
        return self._staging[: blocks * self.geometry.block_bytes].reshape(blocks, -1)
