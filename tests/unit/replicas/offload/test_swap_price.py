"""Swap or compute again: decided by what copying takes here. Seconds pass by the bytes that are copied."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from samovar.cache_tiers.blocks.extent import Bytes
from samovar.cache_tiers.pricing.meters import PrefillPrice
from samovar.replicas.engine.audit import bare_sequence
from samovar.replicas.kv.block_io import PageIo, Ticket
from samovar.replicas.kv.copy_device import CopyEvent, HostDevice
from samovar.replicas.kv.kv_pool import KvPool
from samovar.replicas.scheduling.queues import Preemption
from samovar.replicas.scheduling.step import StepPlan
from samovar.replicas.start import measure as measuring
from tests.support.clock import Clock
from tests.support.engines.engines import prompt_of
from tests.support.engines.tier_engines import Tiered, prove, tiered

BLOCKS, BLOCK_BYTES = 128, 8192  # 2048 tokens of the tiny model, 1 MiB


class OnMachine(PageIo):
    clock: Clock
    bytes_per_s: float

    def begin_out(self, pages: Sequence[int], out: Bytes, written: CopyEvent) -> Ticket:
        self.clock.now_s += 1e-5 + out.nbytes / self.bytes_per_s
        return super().begin_out(pages, out, written)

    def begin_in(self, payload: Bytes, pages: Sequence[int], read: CopyEvent) -> Ticket:
        self.clock.now_s += 1e-5 + payload.nbytes / self.bytes_per_s
        return super().begin_in(payload, pages, read)


def on(
    monkeypatch: pytest.MonkeyPatch, model: Path, folder: Path, bytes_per_s: float, prefill_s: float
) -> Tiered:
    """A machine that copies so fast, and computes 2048 tokens in `prefill_s`."""
    clock = OnMachine.clock = Clock()
    OnMachine.bytes_per_s = bytes_per_s

    def page_io(pool: KvPool, *_: object) -> PageIo:
        return OnMachine(HostDevice(pool.page_bytes.numpy()), pool.geometry)

    monkeypatch.setattr("samovar.replicas.start.build.page_io", page_io)
    monkeypatch.setattr(
        "samovar.replicas.start.build.measure_copy", partial(measuring.measure_copy, clock=clock)
    )
    prefill = PrefillPrice(0.0, prefill_s / 2048, 0.0)
    return tiered(model, folder, prefill=prefill, clock=clock, pool_tokens=4096, measures_anew=True)


@pytest.mark.parametrize(
    ("bytes_per_s", "prefill_s", "expected"),
    [(50e9, 0.001, "swap"), (50e6, 0.02, "drop"), (2e9, 2.0, "swap")],
    ids=["a GPU", "a slow bus", "a CPU"],
)
def test_swapping_is_decided_by_what_copying_takes_here(
    monkeypatch: pytest.MonkeyPatch,
    tiny_llama: Path,
    tmp_path: Path,
    bytes_per_s: float,
    prefill_s: float,
    expected: str,
) -> None:
    engine = on(monkeypatch, tiny_llama, tmp_path, bytes_per_s, prefill_s).built.engine
    sequence = bare_sequence(prompt_of(2048), [])
    sequence.computed = 2048
    assert engine.scheduler.queues.policy.choose([sequence]).how == "swap"  # no swap has proved the price yet
    assert engine.offload is not None
    prove(engine.offload.swap.meter)
    assert engine.scheduler.queues.policy.choose([sequence]).how == expected


def test_the_price_is_learned_from_swaps(
    monkeypatch: pytest.MonkeyPatch, tiny_llama: Path, tmp_path: Path
) -> None:
    """The bus is ten times as slow as the start has found it."""
    engine = on(monkeypatch, tiny_llama, tmp_path, 2e9, 2.0)
    offload, scheduler = engine.built.engine.offload, engine.built.engine.scheduler
    assert offload is not None
    found = offload.swap.price().seconds(BLOCKS * BLOCK_BYTES)
    slower = OnMachine.bytes_per_s = 2e8
    for seed in range(12):
        key = engine.submit(prompt_of(2048, seed=seed), max_tokens=4)
        while not (running := scheduler.running) or running[0].computed < 2048:
            engine.driver.step()
        plan = StepPlan()
        scheduler.queues.preempt(Preemption(running[0], "swap"), plan)
        engine.built.engine.offload.close(plan.preempted[0], keep_swapped=True)
        engine.drain()
        assert len(engine.driver.answers[key].ids) == 4
    price = offload.swap.price()
    assert price.is_proved
    assert price.seconds(BLOCKS * BLOCK_BYTES) > 3 * found
    assert price.seconds(BLOCKS * BLOCK_BYTES) < 2 * BLOCKS * BLOCK_BYTES / slower


@pytest.mark.parametrize("bytes_per_s", [50e6, 2e9, 50e9])
def test_the_price_is_right(
    monkeypatch: pytest.MonkeyPatch, tiny_llama: Path, tmp_path: Path, bytes_per_s: float
) -> None:
    offload = on(monkeypatch, tiny_llama, tmp_path, bytes_per_s, 1.0).built.engine.offload
    assert offload is not None
    copy = offload.swap.price()
    for blocks in (1, 16, 128):
        truth = 1e-5 + blocks * BLOCK_BYTES / bytes_per_s
        assert truth / 2 < copy.seconds(blocks * BLOCK_BYTES) < truth * 2


def test_measuring_leaves_the_pages_as_they_are(tiny_llama: Path, tmp_path: Path) -> None:
    engine = tiered(tiny_llama, tmp_path).built.engine
    pool, offload = engine.runner.pool, engine.offload
    assert offload is not None
    pool.data.uniform_()
    before = pool.data.clone()
    io, shape = offload.moves.io, offload.restores.shape
    price = measuring.measure_copy(io, shape, pages=pool.pages, bytes_max=1 << 20)
    assert price is not None
    assert price.is_up
    assert pool.data.equal(before)
    assert measuring.measure_copy(io, shape, pages=pool.pages, bytes_max=100) is None
