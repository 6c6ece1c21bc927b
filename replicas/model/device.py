"""Chooses the device and the dtype that a model is computed with.

torch is imported by the functions: what looks at settings and files only must not wait seconds for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from configs.settings import EngineSettings, ModelSettings
from replicas.messages import ModelRefused

if TYPE_CHECKING:
    import torch


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
