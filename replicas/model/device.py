"""Chooses the device and the dtype that a model is computed with.

torch is imported by the functions: what looks at settings and files only must not wait seconds for it. A
process that computes nothing never imports it (`gpus_seen`): that would be 190 MB for as long as it runs.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from importlib import metadata
from typing import TYPE_CHECKING

from configs.settings import EngineSettings, ModelSettings
from replicas.messages import ModelRefused

if TYPE_CHECKING:
    import torch

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


def gpus_seen() -> int:
    """Return how many GPUs torch sees here; torch is not imported for it.

    Where there may be one, a process is asked that ends: torch's own word decides, and neither its memory
    nor a CUDA context stays.
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        return int(torch.cuda.device_count()) if torch.cuda.is_available() else 0
    return 0 if why_no_gpu(torch_version()) else _count_gpus()


@cache
def _count_gpus() -> int:
    command = [sys.executable, "-c", COUNT_GPUS]
    return int(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()[-1])


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


def choose_dtype(settings: ModelSettings, device: torch.device) -> torch.dtype:
    """Return the dtype of the settings; auto: bfloat16 where the hardware multiplies it, else float32.

    Emulated bfloat16 is slower than float32.
    """
    import torch

    if settings.dtype != "auto":
        named = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
        return named[settings.dtype]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if native else torch.float32
