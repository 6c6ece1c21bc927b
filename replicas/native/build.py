"""Chooses the instructions of the native step for this machine, and has it compiled for them."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from collections.abc import Sequence as Listing
from dataclasses import dataclass
from pathlib import Path

import torch

from samovar.configs.compiled import LibrarySource, NotCompiled, compiled_library
from samovar.replicas.native.native_step import NotNative

SOURCES = ("step.cpp", "attention.h", "weights.h", "crew.h", "exponential.h", "kernels.h")
NUMBERS = {torch.bfloat16: "bf16", torch.float32: "float"}
FLAGS = (
    *("-std=c++20", "-O3", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden"),
    # No multiplication is fused with an addition unless the source says so: bits must not depend on how a
    # loop was compiled.
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
)
INT8_FLAGS = ("-DSAMOVAR_WEIGHT=int8_t",)
"""For a library whose weights are rounded to int8."""
PAIR_FLAGS = ("-DSAMOVAR_WEIGHT=pair",)
"""For a library that multiplies in bfloat16, pairs of weights with pairs of activations."""


@dataclass(frozen=True, slots=True)
class Variant:
    """Instructions that a library may use. `name`: as the start table says it."""

    name: str
    flags: tuple[str, ...]


AVX512 = Variant(
    "AVX-512",
    ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mprefer-vector-width=512"),
)
AVX512_BF16 = Variant("AVX512-BF16", (*AVX512.flags, "-mavx512bf16"))
"""With the CPU's dot products, for libraries of `PAIR_FLAGS`; other variants compute the same, slowly."""
AVX2 = Variant("AVX2", ("-mavx2", "-mfma"))
NEON = Variant("NEON", ())
PLAIN = Variant("plain C++", ())
"""Without vectors, for comparison: the same bits, slowly."""


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
    if dtype not in NUMBERS:
        raise NotNative(f"it computes bfloat16 and float32, and the weights are {dtype}")
    flags = (*FLAGS, *variant.flags, f"-DSAMOVAR_NUMBER={NUMBERS[dtype]}", *more_flags)
    files = tuple(Path(__file__).parent / name for name in SOURCES)
    try:
        return compiled_library(
            LibrarySource("step", files, flags), folder, wait_s=wait_s, environment=environment
        )
    except NotCompiled as why:
        raise NotNative(str(why)) from why
