"""A transformers causal LM, loaded to run on the paged pool."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM

from configs.settings import EngineSettings, ModelSettings
from replicas.attention import ATTENTION_NAME, register
from replicas.model_refused import ModelRefused
from replicas.model_spec import ModelSpec

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def choose_device(settings: EngineSettings) -> torch.device:
    """Raises `ModelRefused` when CUDA is asked for and not there."""
    if settings.device == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if settings.device == "cuda":
        raise ModelRefused(
            reason="engine.device is cuda and torch sees no CUDA device",
            fix="set engine.device to auto or cpu, or install a CUDA build of torch on a machine with a GPU",
        )
    return torch.device("cpu")


def choose_dtype(settings: ModelSettings, device: torch.device) -> torch.dtype:
    """auto: bfloat16 where the hardware multiplies it, else float32 (emulated, bfloat16 is slower)."""
    if settings.dtype != "auto":
        return _DTYPES[settings.dtype]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if native else torch.float32


def load_model(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> torch.nn.Module:
    """The model in inference form, its attention replaced by the paged one."""
    register()
    model = AutoModelForCausalLM.from_pretrained(
        spec.path, dtype=dtype, attn_implementation=ATTENTION_NAME, local_files_only=True
    )
    model.eval().requires_grad_(False)
    if device.type == "cpu":
        # Weights come memory-mapped from the file; decoding reads them about 10 % faster from
        # anonymous memory (ENGINE.md section 1). Tied weights stay tied: one tensor, two names.
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
    loaded: torch.nn.Module = model.to(device)
    return loaded
