"""Chooses the instructions of the native step for this machine, and has it compiled for them."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from collections.abc import Sequence as Listing
from pathlib import Path

import torch

from samovar.configs.compiled import (
    AVX2,
    AVX512,
    AVX512_BF16,
    NEON,
    NUMBERS,
    NotCompiled,
    Variant,
    compiled_library,
    step_source,
)
from samovar.replicas.native.native_step import NotNative


def variant_here() -> Variant:
    """Return the widest variant that this CPU has and torch uses. Raises `NotNative`."""
    return variant_of(torch.backends.cpu.get_cpu_capability(), platform.machine())


def pair_variant_here() -> Variant:
    """Return the variant that multiplies pairs as fast as this CPU can. Raises `NotNative`."""
    if variant_here() != AVX512 or not torch.cpu.get_capabilities().get("avx512_bf16"):
        raise NotNative("this CPU has no dot products in bfloat16 (AVX512-BF16)")
    return AVX512_BF16


def variant_of(capability: str, machine: str) -> Variant:
    """Return the variant of torch's name for what a CPU can do. Raises `NotNative`."""
    if capability in ("AVX512", "AVX2"):
        return AVX512 if capability == "AVX512" else AVX2
    if machine in ("aarch64", "arm64"):
        return NEON
    raise NotNative(f"it needs AVX2, AVX-512 or NEON, and this CPU ({machine}) is {capability}")


def build_library(
    folder: Path,
    variant: Variant,
    dtype: torch.dtype,
    *,
    wait_s: float,
    environment: Mapping[str, str] = os.environ,
    more_flags: Listing[str] = (),
) -> Path:
    """Return the compiled step, from the folder if it is there: see `compiled_library`. Raises `NotNative`.

    `dtype`: of the weights, and of K and V.
    """
    number = str(dtype).removeprefix("torch.")
    if number not in NUMBERS:
        raise NotNative(f"it computes bfloat16 and float32, and the weights are {dtype}")
    source = step_source(variant, number, more_flags)
    try:
        return compiled_library(source, folder, wait_s=wait_s, environment=environment)
    except NotCompiled as why:
        raise NotNative(str(why)) from why
