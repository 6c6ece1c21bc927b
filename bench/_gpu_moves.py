"""Moves of blocks on the device: that they wait for what they must, move the same bytes, and how quickly."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable

import numpy as np
import torch

from bench._gpu_device import Ceilings, Device, share
from bench._gpu_engine import Sizes, shape_of
from bench._gpu_model import Caller, tokens_of
from bench._gpu_run import Rows, at_least, at_most, must_be
from samovar.cache_tiers.blocks import Bytes
from samovar.configs.sections import MIB
from samovar.replicas.kv import KvGeometry, KvPool, PageIo, page_io

DELAY_CYCLES = 2_000_000
"""About a millisecond: the device is still at it when the host has long submitted what must wait."""
SLOT = 64 * MIB


class MovedPool:
    """A pool of its own, filled with random bytes, and what moves its blocks.

    Pages are in shuffled order, with some neighbours, as a pool in use has them.
    """

    def __init__(self, geometry: KvGeometry, blocks: int, device: Device, seed: int) -> None:
        self.blocks = blocks
        self.pool = KvPool(geometry, 1 + 2 * blocks, device.torch)
        self.bytes = self.pool.page_bytes
        generator = torch.Generator(device.torch).manual_seed(seed)
        self.bytes.random_(0, 256, generator=generator)
        self.io: PageIo = page_io(self.pool, arena_bytes=3 * blocks * geometry.block_bytes + SLOT)
        rng = np.random.default_rng(seed)
        runs = np.array_split(np.arange(1, 1 + 2 * blocks), max(1, blocks // 4))
        self.pages: list[int] = [int(page) for run in rng.permutation(len(runs)) for page in runs[run]]

    def host_memory(self) -> dict[str, Bytes]:
        """Return memory for all blocks, such as the device reaches and such as it does not."""
        nbytes = self.blocks * self.bytes.shape[1]
        return {"registered": self.io.empty(nbytes), "staged": np.empty(nbytes, dtype=np.uint8)}

    def close(self) -> None:
        self.io.close()


def check_moves(rows: Rows, device: Device, geometry: KvGeometry, sizes: Sizes) -> None:
    """Check that moves neither read nor write early, and that what returns is what left."""
    moved = MovedPool(geometry, sizes.moved_blocks, device, seed=21)
    try:
        for kind, memory in moved.host_memory().items():
            shape = f"{sizes.moved_blocks} blocks, {kind}"
            wrong = sum(_is_read_early(moved, device, memory, value) for value in range(sizes.early_reads))
            rows.add("pages copied out before they were written", shape, wrong, "wrong", must_be("<=", 0))
            wrong = sum(_is_written_early(moved, device, memory, value) for value in range(sizes.early_reads))
            rows.add("pages copied in before they were read", shape, wrong, "wrong", must_be("<=", 0))
            rows.add(
                "bytes that changed by moving", shape, _changed(moved, memory), "blocks", must_be("<=", 0)
            )
    finally:
        moved.close()


def _is_read_early(moved: MovedPool, device: Device, memory: Bytes, value: int) -> bool:
    """Return whether a move out got anything but what a delayed kernel wrote."""
    pages = moved.pages[: min(4, moved.blocks)]
    table = torch.tensor(pages, device=device.torch)
    out = memory[: len(pages) * moved.bytes.shape[1]]
    out[:] = 255 - value % 256
    device.synchronize()
    device.delay(DELAY_CYCLES)
    moved.bytes.index_fill_(0, table, value % 256)
    moved.io.begin_out(pages, out, moved.io.mark()).wait()
    return bool((out != value % 256).any())


def _is_written_early(moved: MovedPool, device: Device, memory: Bytes, value: int) -> bool:
    """Return whether a delayed kernel read anything but what was there before a move in."""
    pages = moved.pages[: min(4, moved.blocks)]
    table = torch.tensor(pages, device=device.torch)
    moved.bytes.index_fill_(0, table, value % 256)
    payload = memory[: len(pages) * moved.bytes.shape[1]]
    payload[:] = 255 - value % 256
    device.synchronize()
    device.delay(DELAY_CYCLES)
    was_there = moved.bytes.index_select(0, table)
    moved.io.begin_in(payload, pages, moved.io.mark()).wait()
    is_there = moved.bytes.index_select(0, table)
    return bool((was_there != value % 256).any()) or bool((is_there == value % 256).any())


def _changed(moved: MovedPool, memory: Bytes) -> int:
    """Return how many blocks are others after a way out and back into other pages."""
    moved.bytes.random_(0, 256)
    there, back = moved.pages[: moved.blocks], moved.pages[moved.blocks :]
    memory[:] = 0
    moved.io.begin_out(there, memory, moved.io.mark()).wait()
    moved.io.begin_in(memory, back, moved.io.mark()).wait()
    return sum(
        not torch.equal(moved.bytes[one], moved.bytes[other]) for one, other in zip(there, back, strict=True)
    )


def measure_moves(
    rows: Rows, caller: Caller, device: Device, geometry: KvGeometry, sizes: Sizes, ceilings: Ceilings
) -> None:
    """Measure moves of many blocks each way, and what they cost eight running answers."""
    moved = MovedPool(geometry, sizes.moved_blocks, device, seed=22)
    try:
        nbytes = moved.blocks * moved.bytes.shape[1]
        shape = f"{moved.blocks} x {geometry.block_bytes / MIB:.3g} MiB"
        left, returning = (moved.host_memory()["registered"] for _ in range(2))
        leave, come = moved.pages[: moved.blocks], moved.pages[moved.blocks :]

        def out() -> None:
            moved.io.begin_out(leave, left, moved.io.mark()).wait()

        def back() -> None:
            moved.io.begin_in(returning, come, moved.io.mark()).wait()

        out()  # staging memory is made, and memory registered, at the first use
        back()
        for name, move, most in (("export", out, ceilings.down), ("import", back, ceilings.up)):
            rate = nbytes / device.host_seconds(move, sizes.repeats)
            rows.add(name, shape, rate / 1e9, "GB/s")
            rows.add(name, shape, share(rate, most), "of P", at_least(0.8))
        _measure_slowdown(rows, caller, sizes, out, back)
    finally:
        moved.close()


def _measure_slowdown(
    rows: Rows, caller: Caller, sizes: Sizes, out: Callable[[], None], back: Callable[[], None]
) -> None:
    count = min(8, sizes.batch)
    prompts = [tokens_of(sizes.context, 700 + number, caller.shape) for number in range(count)]
    keys = [caller.ask(prompt, 8 * sizes.steps) for prompt in prompts]
    caller.decode_all(keys)
    for _ in range(sizes.repeats):
        caller.step()
    alone_s = statistics.median(caller.step() for _ in range(sizes.steps))
    stopped = threading.Event()
    failures: list[BaseException] = []

    def run(move: Callable[[], None]) -> None:
        try:
            while not stopped.is_set():
                move()
        except Exception as error:  # noqa: BLE001 - raised below
            failures.append(error)

    threads = [threading.Thread(target=run, args=(move,), daemon=True) for move in (out, back)]
    for thread in threads:
        thread.start()
    beside_s = statistics.median(caller.step() for _ in range(sizes.steps))
    stopped.set()
    for thread in threads:
        thread.join()
    caller.abort(keys)
    if failures:
        raise failures[0]
    shape = shape_of(count, sizes.context)
    rows.add("engine step beside moves both ways, of one alone", shape, beside_s / alone_s, "x", at_most(1.2))
