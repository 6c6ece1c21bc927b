"""The shell around CUDA's calls, with those calls replaced: which are made, and with which memory.

No machine of these tests has a GPU; `tests/laws/test_cuda.py` and `bench.gpu` are for one that has.
"""

from __future__ import annotations

import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from samovar.configs.sections import MIB
from samovar.replicas.kv.block_io import PageIo
from samovar.replicas.kv.cuda_device import CudaDevice
from samovar.replicas.kv.kv_pool import KvGeometry, KvPool
from samovar.replicas.ranks.meeting import mapped, shared_memory

GEOMETRY = KvGeometry(layers=2, block_tokens=16, kv_heads=2, head_dim=8, dtype=torch.float32)
NOW = "the compute stream"


class FakeEvent:
    def __init__(self, blocking: bool = False) -> None:
        assert blocking, "else a thread that waits spins"

    def record(self, stream: object) -> None:
        self.stream = stream

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class FakeStream:
    def __init__(self, device: torch.device) -> None:
        self.waited: list[Any] = []

    def wait_event(self, event: FakeEvent) -> None:
        self.waited.append(event.stream)


class Cuda:
    """CUDA's calls, in this order: the sizes registered, the streams made."""

    def __init__(self, patch: pytest.MonkeyPatch, *, refuses: bool = False) -> None:
        self.registered: dict[int, int] = {}
        self.streams: list[FakeStream] = []
        self.refuses = refuses

        def make(device: torch.device) -> FakeStream:
            self.streams.append(FakeStream(device))
            return self.streams[-1]

        def register(start: int, nbytes: int, flags: int) -> int:
            assert nbytes > 0
            assert start % 4096 == 0
            self.registered[start] = nbytes
            return 1 if self.refuses else 0

        def unregister(start: int) -> int:
            del self.registered[start]
            return 0

        patch.setattr(torch.cuda, "Event", FakeEvent)
        patch.setattr(torch.cuda, "Stream", make)
        patch.setattr(torch.cuda, "stream", lambda _: nullcontext())
        patch.setattr(torch.cuda, "current_stream", lambda _: NOW)
        calls = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)
        patch.setattr(torch.cuda, "cudart", lambda: calls)


def filled_pool() -> KvPool:
    pool = KvPool(GEOMETRY, 9, torch.device("cpu"))
    pool.data[:] = torch.arange(9, dtype=torch.float32).view(9, 1, 1, 1, 1, 1, 1)
    return pool


@pytest.mark.parametrize("memory", ["arena", "staging", "read-only"])
def test_blocks_leave_and_come_back_by_streams_that_wait_for_computing(
    memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda, pool = Cuda(monkeypatch), filled_pool()
    device = CudaDevice(pool.page_bytes, 100 * MIB)
    monkeypatch.setattr(device, "staging", lambda nbytes: np.empty(nbytes, np.uint8))
    io = PageIo(device, GEOMETRY, 2 * GEOMETRY.block_bytes)
    assert sorted(cuda.registered.values()) == [36 * MIB, 64 * MIB]
    pages = [1, 2, 3, 7, 5]
    nbytes = len(pages) * GEOMETRY.block_bytes
    record = device.empty(nbytes) if memory == "arena" else np.empty(nbytes, np.uint8)
    assert device.reaches(record) == (memory == "arena")
    out = io.begin_out(pages, record, io.mark())
    out.wait()
    assert (record.view(np.float32).reshape(5, -1) == np.array(pages)[:, None]).all()
    record.flags.writeable = memory != "read-only"
    told = threading.Event()
    ticket = io.begin_in(record, [8, 1, 2, 4, 6], io.mark())
    ticket.then(lambda failure: told.set() if failure is None else None)
    assert told.wait(10)
    assert ticket.done()
    assert pool.data[[8, 1, 2, 4, 6], 0, 0, 0, 0, 0, 0].tolist() == pages
    assert [stream.waited for stream in cuda.streams] == [[NOW], [NOW]]
    io.close()
    assert not cuda.registered


def test_without_registered_memory_records_are_ordinary_and_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    Cuda(monkeypatch, refuses=True)
    device = CudaDevice(filled_pool().page_bytes, MIB)
    record = device.empty(5000)
    assert record.nbytes == 5000
    assert not device.reaches(record)


def test_what_the_watcher_meets_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    Cuda(monkeypatch)
    device = CudaDevice(filled_pool().page_bytes, 0)
    broken, told = RuntimeError("an illegal memory access"), threading.Event()
    failures: list[BaseException | None] = []

    def synchronize(_: FakeEvent) -> None:
        raise broken

    monkeypatch.setattr(FakeEvent, "synchronize", synchronize)

    def tell(failure: BaseException | None) -> None:
        failures.append(failure)
        told.set()

    device.mark().then(tell)
    assert told.wait(10)
    assert failures == [broken]


def test_memory_that_stays_is_registered_whole_and_copied_from_directly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As that of the ranks, which has no name: through it each block went by way of two halves."""
    cuda = Cuda(monkeypatch)
    io = PageIo(CudaDevice(filled_pool().page_bytes, 0), GEOMETRY)
    memory = mapped(shared_memory(3 * MIB, "test"))
    host = np.frombuffer(memory, dtype=np.uint8)
    assert io.adopt(host)
    assert cuda.registered == {host.ctypes.data: 3 * MIB}
    assert io._device.reaches(host[MIB:])
    io.close()
    assert not cuda.registered


def test_a_load_is_not_told_behind_a_store_that_is_not_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread waited for both directions in turn."""
    Cuda(monkeypatch)
    device, stores = CudaDevice(filled_pool().page_bytes, 0), threading.Event()
    told, over = threading.Event(), threading.Event()
    out, into = device.stream(), device.stream()
    monkeypatch.setattr(
        FakeEvent,
        "synchronize",
        lambda event: event.stream is out._stream and stores.wait(10),  # type: ignore[attr-defined]
    )
    out.mark().then(lambda failure: over.set())
    into.mark().then(lambda failure: told.set())
    assert told.wait(5)
    stores.set()
    assert over.wait(5), "its thread runs into the next test"
