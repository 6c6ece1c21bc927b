"""Chooses the device and the dtype that a model is computed with.

torch is imported by the functions: what looks at settings and files only must not wait seconds for it. A
process that computes nothing never imports it (`gpus_seen`): that would be 190 MB for as long as it runs.
"""

from __future__ import annotations

import ctypes
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from samovar.configs.settings import EngineSettings, ModelSettings
from samovar.replicas.messages import ModelRefused

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

CUDA_DRIVER = "libcuda.so.1"
COUNT_GPUS = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"


def torch_version() -> str:
    """Return the version of the installed torch, with what it was built for where it says so."""
    return metadata.version("torch")


def why_no_gpu(version: str, open_library: Callable[[str], object] = ctypes.CDLL) -> str | None:
    """Return why torch of this version sees no GPU, as far as that is known without it; else None."""
    if version.endswith("+cpu"):
        return f"torch {version} is a build without CUDA"
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return "CUDA_VISIBLE_DEVICES hides every GPU"
    if "rocm" in version:  # its GPUs need no driver of NVIDIA's
        return None
    try:
        open_library(CUDA_DRIVER)
    except OSError:
        return f"this machine has no NVIDIA driver ({CUDA_DRIVER} is missing)"
    return None


def gpus_seen(python: Path | None = None) -> int:
    """Return how many GPUs torch sees here; torch is not imported for it.

    Where there may be one, a process is asked that ends: torch's own word decides, and neither its memory
    nor a CUDA context stays. `python`: whose torch is asked; None: ours.
    """
    if python is not None:
        return 0 if why_no_gpu("") else _count_gpus(str(python))
    torch = sys.modules.get("torch")
    if torch is not None:
        return int(torch.cuda.device_count()) if torch.cuda.is_available() else 0
    return 0 if why_no_gpu(torch_version()) else _count_gpus(sys.executable)


@cache
def _count_gpus(python: str) -> int:
    command = [python, "-P", "-c", COUNT_GPUS]  # -P: no modules of the working directory
    counted = subprocess.run(command, check=False, capture_output=True, text=True)
    if counted.returncode:
        logger.warning("torch cannot say how many GPUs there are: %s", counted.stderr.strip()[-300:])
        return 0
    return int(counted.stdout.split()[-1])


_CGROUPS = (  # directory, limit, usage, name of the reclaimable page cache in memory.stat; v2 and v1
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current", "inactive_file"),
    (
        Path("/sys/fs/cgroup/memory"),
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
)


def free_host_bytes() -> int:
    """Return the main memory that is still available, of the machine and its container."""
    free = psutil.virtual_memory().available
    for group, limit_name, usage_name, cache_name in _CGROUPS:
        if (group / limit_name).exists():
            limit = (group / limit_name).read_text().strip()
            if limit.isdigit():  # "max" = no limit
                stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                used = int((group / usage_name).read_text()) - int(stat.get(cache_name, 0))
                free = min(free, max(0, int(limit) - used))
    return int(free)


def choose_device(settings: EngineSettings) -> torch.device:
    """Return the device of the settings. Raises `ModelRefused` if CUDA is requested and not available."""
    import torch

    if settings.device == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        # torch prefers cuDNN's SDPA on Hopper, which makes a plan for each length of keys (42 to 70 ms each;
        # pytorch #191576): in decoding, for every token of every sequence. Off for the whole process, once.
        torch.backends.cuda.enable_cudnn_sdp(False)
        return torch.device("cuda", torch.cuda.current_device())
    if settings.device == "cuda":
        raise ModelRefused(
            reason="engine.device is cuda and torch sees no CUDA device",
            fix="set engine.device to auto or cpu, or install a CUDA build of torch on a machine with a GPU",
        )
    return torch.device("cpu")


@dataclass(frozen=True, slots=True)
class GemmSeconds:
    """The CPU seconds that one matrix product of a prefill's shape took in each dtype."""

    bfloat16: float
    float32: float


@dataclass(frozen=True, slots=True)
class ChosenDtype:
    """The dtype a model is computed with. `sentence`: which and why."""

    dtype: torch.dtype
    sentence: str


FLOAT32_FASTER_MIN = 2.5
"""float32 must be so much faster to be chosen: it takes twice the bytes of KV and of weights, so tiers hold
half as much, and a decoded token, which waits for memory, is no faster. A CPU that has bfloat16 products at
all stays below (2.0 at most was seen), one that emulates them is far above."""


def choose_dtype(
    settings: ModelSettings,
    device: torch.device,
    measured: Callable[[], GemmSeconds] | None = None,
    *,
    widens_weights: bool = False,
) -> ChosenDtype:
    """Return the dtype of the settings; `auto`: what is fastest on the device, at equal speed bfloat16.

    `measured`: asked on CPU, where `auto` depends on it; None: measures now. `widens_weights`: what will
    compute the steps takes weights in bfloat16 and computes in float32, whatever the CPU multiplies.
    """
    import torch

    if settings.dtype != "auto":
        named = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
        return ChosenDtype(named[settings.dtype], f"{settings.dtype} (model.dtype)")
    if device.type == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return ChosenDtype(torch.bfloat16, "bfloat16: the GPU multiplies it")
        return ChosenDtype(torch.float16, "float16: the GPU has no bfloat16")
    if widens_weights:
        return ChosenDtype(torch.bfloat16, "bfloat16: half the bytes, computed in float32 in any case")
    seconds = (measured or measure_gemm)()
    times = seconds.bfloat16 / seconds.float32
    if times >= FLOAT32_FASTER_MIN:
        return ChosenDtype(
            torch.float32, f"float32: matrix products are {times:.1f} times as fast as in bfloat16"
        )
    faster = f"{1 / times:.1f} times as fast as in float32" if times < 1 else "fast enough for half the bytes"
    return ChosenDtype(torch.bfloat16, f"bfloat16: matrix products are {faster}")


GEMM_ROWS, GEMM_WIDTH = 128, 768
GEMM_S = 0.04
"""Of each dtype, besides a first product that includes one-time costs."""


def measure_gemm(clock: Callable[[], float] = time.thread_time) -> GemmSeconds:
    """Time a matrix product of a prefill's shape in bfloat16 and float32, in about 0.1 s.

    `clock`: by default CPU time of this thread, so that what else the machine does counts for neither.
    """
    import torch

    def least_s(dtype: torch.dtype) -> float:
        rows = torch.ones((GEMM_ROWS, GEMM_WIDTH), dtype=dtype)
        weight = torch.ones((GEMM_WIDTH, GEMM_WIDTH), dtype=dtype)
        torch.nn.functional.linear(rows, weight)
        least, started_s = float("inf"), clock()
        while True:
            began_s = clock()
            torch.nn.functional.linear(rows, weight)
            ended_s = clock()
            least = min(least, max(ended_s - began_s, 1e-9))
            if ended_s - started_s >= GEMM_S:
                return least

    with torch.inference_mode():
        return GemmSeconds(bfloat16=least_s(torch.bfloat16), float32=least_s(torch.float32))
