"""Pages of a device whose streams run in any legal order: what is stored was computed, what is loaded is."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from samovar.cache_tiers.blocks import Bytes
from samovar.cache_tiers.vllm.pages.staged import PageEvent, PageStream, StagedPages
from tests.support.engines.simulated_device import SimulatedDevice, SimulatedStream
from tests.support.fake_vllm import (
    BLOCK_TOKENS,
    LAYER_BYTES,
    LAYERS,
    LAYOUT,
    FakePages,
    FakeVllm,
    prompt,
)
from tests.unit.cache_tiers.vllm.test_connector_laws import Node, engines, node, until_held

__all__ = ["Node", "engines", "node"]
BLOCK_BYTES = LAYERS * LAYER_BYTES


class Stream:
    """The copies of pages on a stream of the simulated device."""

    def __init__(self, stream: SimulatedStream) -> None:
        self._stream = stream

    def read(self, pages: Sequence[int], host: Bytes) -> None:
        for at, page in enumerate(pages):
            self._stream.copy_out(page, host[at].reshape(1, -1))

    def write(self, host: Bytes, pages: Sequence[int]) -> None:
        for at, page in enumerate(pages):
            self._stream.copy_in(host[at].reshape(1, -1), page)

    def mark(self) -> PageEvent:
        return self._stream.mark()


class Device:
    def __init__(self, simulated: SimulatedDevice) -> None:
        self.simulated = simulated

    def mark(self) -> PageEvent:
        return self.simulated.mark()

    def stream(self) -> PageStream:
        return Stream(self.simulated.stream())

    def staging(self, nbytes: int) -> Bytes:
        return self.simulated.staging(nbytes)


def simulated(pages: int, seed: int, staged_blocks: int = 4) -> tuple[SimulatedDevice, StagedPages]:
    rng = np.random.default_rng(seed)
    memory = rng.integers(0, 256, (pages, BLOCK_BYTES), dtype=np.uint8)
    device = SimulatedDevice(memory, random.Random(seed))
    return device, StagedPages(LAYOUT, Device(device), staged_blocks * BLOCK_BYTES)


@pytest.mark.parametrize("seed", range(20))
def test_pages_go_out_and_come_in_whole(seed: int) -> None:
    rng = random.Random(seed)
    device, pages = simulated(40, seed, staged_blocks=rng.choice([2, 4, 10, 100]))
    out = np.zeros((40, LAYERS, LAYER_BYTES), dtype=np.uint8)
    for _ in range(12):
        chosen = rng.sample(range(40), rng.randrange(1, 20))
        if rng.random() < 0.5:
            pages.gather(chosen, out[: len(chosen)])
            assert (out[: len(chosen)].reshape(-1, BLOCK_BYTES) == device.pages[chosen]).all()
        else:
            want = device.pages.copy()
            blocks = np.random.default_rng(rng.randrange(99)).integers(
                0, 256, (len(chosen), LAYERS, LAYER_BYTES), dtype=np.uint8
            )
            want[chosen] = blocks.reshape(-1, BLOCK_BYTES)
            given = blocks.copy()
            pages.scatter(chosen, given)
            given[:] = 0  # the record may go
            assert (device.pages == want).all()  # at once: vLLM is told that they are there


@pytest.mark.parametrize("seed", range(10))
def test_a_mark_waits_for_what_was_computed(seed: int) -> None:
    device, pages = simulated(8, seed)
    block, out = np.full(BLOCK_BYTES, 7, dtype=np.uint8), np.zeros((1, LAYERS, LAYER_BYTES), dtype=np.uint8)
    device.computing.submit(lambda: device.pages.__setitem__(3, block))
    until = pages.mark()
    device.computing.submit(lambda: None)
    until()
    pages.gather([3], out)
    assert (out == 7).all()


class DevicePages(FakePages):
    """The pages of the fake engine on a simulated device, whose steps write them some time later."""

    seed = 0

    def __init__(self, pages: int) -> None:
        super().__init__(pages)
        rows = self.memory.reshape(pages, -1)
        DevicePages.seed += 1
        self._device = SimulatedDevice(rows, random.Random(DevicePages.seed))
        self._staged = StagedPages(LAYOUT, Device(self._device), 4 * BLOCK_BYTES)
        self._lock = threading.RLock()  # the simulation is for one thread

    def gather(self, pages: Sequence[int], out: Bytes) -> None:
        with self._lock:
            self._staged.gather(pages, out)

    def scatter(self, pages: Sequence[int], blocks: Bytes) -> None:
        with self._lock:
            self._staged.scatter(pages, blocks)

    def compute(self, page: int, block: Bytes | int) -> None:
        with self._lock:
            self._device.computing.submit(lambda: self.memory.__setitem__(page, block))

    def mark(self) -> Callable[[], None]:
        with self._lock:
            until = self._staged.mark()

        def wait() -> None:
            with self._lock:
                until()

        return wait

    def settle(self) -> None:
        with self._lock:
            while self._device.run_one():
                pass


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_engine_on_a_device(engines: Any, ranks: int) -> None:
    """Every byte that is loaded is what was computed: `FakeVllm.run` looks at each."""
    engine: FakeVllm = engines(pages=512, make_pages=DevicePages, ranks=ranks)
    for seed in range(4):
        until_held(engine, prompt(seed, 10))
        engine.run(engine.request(prompt(seed, 10) + prompt(seed + 50, 7)))
    engine.settle()
    assert engine.counts["stores", "read too early"] == 0
    assert engine.loaded_tokens >= 4 * 10 * BLOCK_TOKENS


class Hasty(DevicePages):
    def mark(self) -> Callable[[], None]:
        return lambda: None


def test_a_store_that_does_not_wait_for_its_step_is_seen(engines: Any) -> None:
    """By its second reading, which comes later, or by who loads it."""
    engine: FakeVllm = engines(pages=512, make_pages=Hasty)
    seen = ""
    for seed in range(20):
        try:
            engine.run(engine.request(prompt(seed, 12)))
            engine.settle()
            engine.run(engine.request(prompt(seed, 12)))
        except AssertionError as error:
            seen = str(error)
            break
    assert "not its own" in seen or engine.counts["stores", "read too early"] > 0
