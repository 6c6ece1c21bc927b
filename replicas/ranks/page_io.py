"""Blocks of all ranks in one piece: each rank copies its run of every block, to or from staging memory.

The groups of a rank are consecutive, so its part of a block is one run of bytes, and the runs of all ranks in
their order are the block as one GPU would hold it: records do not depend on `engine.tensor_parallel`. In the
staging memory the runs of one rank follow each other, so that each rank moves whole blocks of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from samovar.cache_tiers.blocks import Bytes
from samovar.replicas.kv import DONE, CopyEvent, KvGeometry, PageIo, Ticket
from samovar.replicas.ranks.channel import Orders
from samovar.replicas.ranks.orders import Order, words_of


def copy_runs(
    io: PageIo, pages: Sequence[int], staging: Bytes, rank: int, mark: CopyEvent, *, is_out: bool
) -> None:
    """Copy one rank's runs of some blocks between its pages and its part of the staging memory.

    `io`, `mark`: of its own pool; `mark` is behind what the copy must follow. Returns when it is over.
    """
    size = len(pages) * io.geometry.block_bytes
    runs = staging[rank * size : (rank + 1) * size]
    ticket = io.begin_out(pages, runs, mark) if is_out else io.begin_in(runs, pages, mark)
    ticket.wait()


class SharedPageIo(PageIo):
    """Moves whole blocks of a pool that all ranks hold in parts; for rank 0.

    A move is over when `begin_out` or `begin_in` returns. One at a time: the staging memory is one.

    `own`: of rank 0's part; `moves`, `steps`: to the other ranks. `fail` is told why the ranks cannot go on:
    after a move that has failed, a rank may still copy what it was told. Raises `RankLost` if one has died.
    """

    def __init__(
        self,
        geometry: KvGeometry,
        own: PageIo,
        moves: Orders,
        steps: Orders,
        staging: Bytes,
        ranks: int,
        fail: Callable[[str], None],
    ) -> None:
        self.geometry = geometry
        self._own = own
        self._moves = moves
        self._steps = steps
        self._staging = staging
        self._ranks = ranks
        self._fail = fail
        self._blocks = max(1, len(staging) // geometry.block_bytes)
        self._lock = threading.Lock()

    def mark(self) -> Any:
        """Return the last order that the ranks' steps were told, and rank 0's own mark."""
        return self._steps.told, self._own.mark()

    def empty(self, nbytes: int) -> Bytes:
        return self._own.empty(nbytes)

    def begin_out(self, pages: Sequence[int], out: Bytes, written: Any) -> Ticket:
        blocks = out.reshape(self._shape_of(pages))
        for first, some in self._portions(pages):
            with self._together():
                self._copy(Order.OUT, some, written)
                np.copyto(blocks[first : first + len(some)], self._staged(some))
        return Ticket(DONE, out)

    def begin_in(self, payload: Bytes, pages: Sequence[int], read: Any) -> Ticket:
        blocks = payload.reshape(self._shape_of(pages))
        for first, some in self._portions(pages):
            with self._together():
                np.copyto(self._staged(some), blocks[first : first + len(some)])
                self._copy(Order.IN, some, read)
        return Ticket(DONE, payload)

    def close(self) -> None:
        self._own.close()

    def _copy(self, order: Order, pages: Sequence[int], mark: tuple[int, CopyEvent]) -> None:
        """Let every rank copy its runs of some blocks, after its step that `mark` names."""
        told, own = mark
        number = self._moves.tell(order, words_of([told, *pages]))
        copy_runs(self._own, pages, self._staging, 0, own, is_out=order == Order.OUT)
        self._moves.await_done(number)

    def _portions(self, pages: Sequence[int]) -> Iterator[tuple[int, Sequence[int]]]:
        """Split pages into parts that fit in the staging memory; yields the number of the first with each."""
        for first in range(0, len(pages), self._blocks):
            yield first, pages[first : first + self._blocks]

    def _staged(self, pages: Sequence[int]) -> Bytes:
        """Return the staging memory of some blocks in the order of their bytes, `[blocks, ranks, bytes]`."""
        blocks, ranks, run_bytes = self._shape_of(pages)
        runs = self._staging[: blocks * self.geometry.block_bytes].reshape(ranks, blocks, run_bytes)
        return runs.transpose(1, 0, 2)

    def _shape_of(self, pages: Sequence[int]) -> tuple[int, int, int]:
        return len(pages), self._ranks, self.geometry.block_bytes // self._ranks

    @contextmanager
    def _together(self) -> Iterator[None]:
        with self._lock:
            try:
                yield
            except Exception as error:
                self._fail(f"blocks could not be moved: {error}")
                raise
