"""A load goes as quickly as the machine: on a virtual clock, at the rates of the GPU that was measured.

PCIe 55 GB/s each way, a thread verifies 10 GB/s, 16 threads; steps of streams alone, and beside 4,096 tokens
of a prompt. What may not cost time here are waits: of a piece for the engine's thread, for other pieces, for
the other direction.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from samovar.cache_tiers.blocks.extent import Placement
from samovar.cache_tiers.media.memory import HeapTier
from samovar.configs.sections import TierSettings
from samovar.replicas.kv.block_io import PageIo
from samovar.replicas.kv.kv_pool import KvPool
from samovar.replicas.offload.tier_client import WorkerPools
from samovar.replicas.scheduling import Restore
from tests.support.engines.engines import prompt_of
from tests.support.engines.tier_engines import MIB, InlineExecutor, Tiered, receipt_of, tiered
from tests.support.engines.virtual_road import VirtualDevice, VirtualStream, VirtualTime, VirtualWorkers

PCIE, VERIFY, FETCH_S, THREADS = 55e9, 10e9, 2e-4, 16
PLAYED_BYTES = 4.3e9  # 32k tokens of an 8B model
TOKENS, EXTENT_BLOCKS, BT = 3968, 4, 16
STEPS_S = (0.010, 0.121)
STORING_S = 0.08
TAKE_IN_S = 5e-5
"""Of the engine's thread, for each result."""


@dataclass
class Machine:
    engine: Tiered
    time: VirtualTime
    device: VirtualDevice
    step_s: float
    steps_s: list[float]

    def step(self) -> None:
        """Run a step; what comes meanwhile is for the next."""
        arrivals = self.engine.built.engine.offload.arrivals  # type: ignore[union-attr]
        took_s = self.step_s + len(arrivals) * TAKE_IN_S
        self.engine.driver.step()
        self.device.computes_until_s = self.time.now_s + took_s
        self.time.pass_to(self.time.now_s + took_s)
        self.steps_s.append(took_s)


@cache
def returning() -> list[int]:
    return prompt_of(TOKENS, seed=1)


@cache
def truth(model: Path) -> list[int]:
    return (
        tiered(model, model, tiers={}, prefix_reuse=False, step_tokens_max=4096, pool_tokens=4096)
        .run([*returning(), *prompt_of(9, seed=2)])
        .ids
    )


def machine(model: Path, folder: Path, step_s: float) -> Machine:
    """An engine whose pool has lost a long conversation that its tier holds, and that answers another."""
    time, devices = VirtualTime(), list[VirtualDevice]()

    def virtual(pool: KvPool, *_: object) -> PageIo:
        devices.append(VirtualDevice(pool.page_bytes.numpy(), time, float("inf")))
        return PageIo(devices[0], pool.geometry)

    fetches, moves = VirtualWorkers(time, THREADS, 0.0), VirtualWorkers(time, THREADS, 0.0)
    inline = [InlineExecutor() for _ in range(5)]
    lanes = WorkerPools(inline[0], fetches, *inline[1:], moves=moves)
    with mock.patch("samovar.replicas.start.build.page_io", virtual):
        engine = tiered(
            model,
            folder,
            tiers={"cpu": HeapTier(64 * MIB)},
            settings=TierSettings(audit_share=0.0, fetch_max=32),
            clock=time,
            lanes=lanes,
            pool_tokens=3 * 4096,
            step_tokens_max=4096,
        )
    engine.placement = Placement("cpu", (), "cpu")
    offload = engine.built.engine.offload
    assert offload is not None
    offload.turns._blocks_max = EXTENT_BLOCKS
    engine.run(returning(), max_tokens=1)
    engine.forget_pool()
    scale = PLAYED_BYTES / (TOKENS // BT * engine.built.engine.runner.pool.geometry.block_bytes)
    devices[0].bytes_per_s = PCIE / scale
    fetches.seconds = FETCH_S + PLAYED_BYTES / (TOKENS // BT / EXTENT_BLOCKS) / VERIFY
    return Machine(engine, time, devices[0], step_s, [])


def keep_storing(of: Machine, until_s: float) -> VirtualStream:
    """Copy blocks out of pages of nobody, without a pause; return the stream that does."""
    offload, pool = of.engine.built.engine.offload, of.engine.built.engine.scheduler.pool
    assert offload is not None
    io = offload.moves.io
    of.engine.driver.check = False  # these pages have no owner
    pages, written = [pool.allocate() for _ in range(EXTENT_BLOCKS)], io.mark()
    out = np.empty(len(pages) * io.geometry.block_bytes, dtype=np.uint8)

    def store(failure: BaseException | None = None) -> None:
        if of.time.now_s < until_s:
            io.begin_out(pages, out, written).then(store)
        else:
            pool.release(pages)

    store()
    assert isinstance(io._out, VirtualStream)
    return io._out


@pytest.mark.parametrize("step_s", STEPS_S)
@pytest.mark.parametrize("is_storing", [False, True])
def test_a_long_conversation_is_back_in_its_pages_as_quickly_as_it_can_be_copied(
    tiny_llama: Path, tmp_path: Path, is_storing: bool, step_s: float
) -> None:
    of = machine(tiny_llama, tmp_path, step_s)
    engine = of.engine
    streaming = engine.submit(prompt_of(20, seed=5), max_tokens=60)
    of.step()
    of.step()
    of.steps_s.clear()
    began_s = of.time.now_s
    out = keep_storing(of, began_s + STORING_S) if is_storing else None
    key = engine.submit([*returning(), *prompt_of(9, seed=2)])
    restore: Restore | None = None
    while restore is None or not restore.is_over:
        of.step()
        restore = engine.built.engine.scheduler.running[-1].restore
    there_s = max(piece.landed_s for piece in restore.pieces) - began_s
    assert len(restore.pieces) == TOKENS // BT // EXTENT_BLOCKS
    assert there_s <= 0.130
    assert restore.placed_s - began_s <= there_s + max(of.steps_s), "the next step computes with it"
    assert max(of.steps_s) <= 1.15 * step_s
    if out is not None:
        assert out.busy_s >= 0.9 * STORING_S, "the other direction is as quick as it was alone"
    while engine.built.engine.requests.open_keys():
        of.step()
    assert receipt_of(engine.driver.answers[key]).tokens["cpu"] >= TOKENS - 1
    assert engine.driver.answers[key].ids == truth(tiny_llama)
    assert engine.driver.answers[streaming].failed is None
