"""The kernels as a GPU gets them, by Triton's own ptxas: it says what the interpreter cannot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SMALL_SHARED_MAX = 99 * 1024
"""Of the smaller GPUs of a generation; the largest have 163 KiB (8.0)."""
SHARED_MAX = {80: SMALL_SHARED_MAX, 90: 227 * 1024}
"""By capability, of a program of the attention."""
SPILLED_MAX = {80: 0, 90: 96}
"""Bytes: prefill with 128 keys at a time spills some registers, and is quicker than without (H200)."""


def compiled(capability: int, what: str, tmp_path: Path) -> list[dict[str, Any]]:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}  # it compiles, whatever is kept at home
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compiled", str(capability), what],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("capability", [80, 90])
def test_the_checksums_spill_nothing_multiply_32_bits_by_32_and_read_16_bytes_at_a_time(
    capability: int, tmp_path: Path
) -> None:
    """Two products of each of a thread's 16 words; what folds a piece is more."""
    for kernel in compiled(capability, "checksums", tmp_path):
        assert (kernel["stack"], kernel["local"]) == (0, 0), f"registers are spilled: {kernel}"
        assert kernel["reg"] <= 128, kernel
        assert kernel["shared"] <= SMALL_SHARED_MAX, kernel
        assert kernel["wide_products"] >= 2 * 16, kernel
        if "4104" not in kernel["case"]:  # or a layer begins anywhere
            assert kernel["wide_loads"] >= 16 // 2, kernel


@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile_spill_nothing_and_fit(capability: int, tmp_path: Path) -> None:
    kernels = compiled(capability, "attention", tmp_path)
    for kernel in kernels:
        spilled_max = SPILLED_MAX[capability] if kernel["kernel"] == "attend, prefill" else 0
        assert kernel["stack"] <= spilled_max, f"registers are spilled: {kernel}"
        assert kernel["local"] == 0, kernel
        assert kernel["shared"] <= SHARED_MAX[capability], kernel
        # In float32 there is no tensor core that is exact.
        wants_wgmma = capability >= 90 and "prefill" in kernel["kernel"] and "float32" not in kernel["case"]
        assert kernel["wgmma"] == wants_wgmma, kernel
    found = {kernel["kernel"] for kernel in kernels}
    assert found >= {"attend, decode", "attend, prefill", "merge_splits", "write_rows"}
