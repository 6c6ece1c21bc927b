"""The device that `bench.gpu` measures, and what it can do at best.

On CUDA times are those of events around the work, so that the host's launches stay out of them. On a CPU
everything is done at once: only the tests of the bench run there.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from bench._gpu_run import Rows
from samovar.configs.sections import GIB, MIB

WARM_UPS = 2


class Device:
    """A device by its torch name: `cuda` (the current one, with its number: torch asks for that) or `cpu`."""

    def __init__(self, name: str) -> None:
        self.is_cuda = name == "cuda"
        self.torch = torch.device("cuda", torch.cuda.current_device()) if self.is_cuda else torch.device(name)

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.torch)

    def settle(self) -> None:
        """Free what nobody refers to. Raises if the device cannot be used any more."""
        gc.collect()
        self.synchronize()
        if self.is_cuda:
            torch.cuda.empty_cache()

    def seconds(self, work: Callable[[], object], repeats: int) -> float:
        """Return the median time of `work` on the device, after warm-ups."""
        for _ in range(WARM_UPS):
            work()
        self.synchronize()
        if not self.is_cuda:
            return self.host_seconds(work, repeats)
        pairs = []
        for _ in range(repeats):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
            pairs.append((begin, end))
        self.synchronize()
        return statistics.median(begin.elapsed_time(end) / 1e3 for begin, end in pairs)

    def host_seconds(self, work: Callable[[], object], repeats: int) -> float:
        """Return the median time from calling `work` until the device has done all of it."""
        took_s = []
        for _ in range(repeats):
            self.synchronize()
            started_s = time.perf_counter()
            work()
            self.synchronize()
            took_s.append(time.perf_counter() - started_s)
        return statistics.median(took_s)

    def recorded(self, work: Callable[[], object]) -> Callable[[], object]:
        """Return `work` as one launch: captured in a CUDA graph, so that no gaps between kernels count."""
        if not self.is_cuda:
            return work
        stream = torch.cuda.Stream(self.torch)
        stream.wait_stream(torch.cuda.current_stream(self.torch))
        with torch.cuda.stream(stream):  # kernels are compiled, and libraries set up, before the capture
            work()
        torch.cuda.current_stream(self.torch).wait_stream(stream)
        self.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            work()
        return graph.replay

    def delay(self, cycles: int) -> None:
        """Keep the current stream busy for so many clock cycles, so that what follows is late."""
        if self.is_cuda:
            torch.cuda._sleep(cycles)

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Return host memory that the device copies from and to by itself, u8 `[nbytes]`."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.is_cuda)

    def random(self, *shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
        """Return fresh normal numbers: zeros would be computed and moved faster than any real data."""
        generator = torch.Generator(self.torch).manual_seed(seed)
        return torch.randn(shape, dtype=dtype, device=self.torch, generator=generator)


@dataclass(slots=True)
class Ceilings:
    """What the machine reaches at best; 0: not measured.

    `copy`: bytes read and written a second in device memory; `up`, `down`: bytes a second from pinned host
    memory and to it; `gemm`: FLOP a second of a large matrix product.
    """

    copy: float = 0.0
    up: float = 0.0
    down: float = 0.0
    gemm: float = 0.0


def share(rate: float, of: float) -> float | None:
    """Return a rate as a share of a ceiling; None: the ceiling was not measured."""
    return rate / of if of > 0 else None


def measure_ceilings(rows: Rows, device: Device, into: Ceilings, *, tiny: bool, dtype: torch.dtype) -> None:
    """Measure all ceilings, on random data."""
    nbytes, repeats = (MIB, 3) if tiny else (2 * GIB, 10)
    _measure_copies(rows, device, into, nbytes, repeats)
    side = 64 if tiny else 8192
    left, right = (device.random(side, side, dtype=dtype, seed=seed) for seed in (2, 3))
    out = torch.empty_like(left)
    into.gemm = 2 * side**3 / device.seconds(lambda: torch.matmul(left, right, out=out), 2 * repeats)
    rows.add("G: matrix product", f"{side}^3 {dtype_name(dtype)}", into.gemm / 1e12, "TFLOP/s")


def _measure_copies(rows: Rows, device: Device, into: Ceilings, nbytes: int, repeats: int) -> None:
    source = device.random(nbytes // 4, dtype=torch.float32, seed=1).view(torch.uint8)
    target = torch.empty_like(source)
    host = device.pinned(nbytes)
    host.copy_(source)
    size = f"{nbytes // MIB} MiB"
    into.copy = 2 * nbytes / device.seconds(lambda: target.copy_(source), repeats)
    into.up = nbytes / device.seconds(lambda: target.copy_(host, non_blocking=True), repeats)
    into.down = nbytes / device.seconds(lambda: host.copy_(source, non_blocking=True), repeats)
    rows.add("C: copy in device memory, read + write", size, into.copy / 1e9, "GB/s")
    rows.add("P: pinned host memory to device", size, into.up / 1e9, "GB/s")
    rows.add("P: device to pinned host memory", size, into.down / 1e9, "GB/s")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
