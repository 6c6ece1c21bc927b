"""The fused step's kernels as a GPU gets them, by Triton's own ptxas."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels.test_paged_compiled import compiled

REGISTERS_MAX = 64
"""With so many a multiprocessor holds 1,024 threads: two programs of the widest norm, 16 of a rotation."""


@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_spill_nothing_use_few_registers_and_read_16_bytes_at_a_time(
    capability: int, tmp_path: Path
) -> None:
    kernels = compiled(capability, "fused", tmp_path)
    for kernel in kernels:
        assert (kernel["stack"], kernel["local"]) == (0, 0), f"registers are spilled: {kernel}"
        assert kernel["reg"] <= REGISTERS_MAX, kernel
        assert kernel["shared"] <= 1024, kernel
        if kernel["case"].startswith("8B"):
            assert kernel["wide_loads"] >= 2, kernel
    assert {kernel["kernel"] for kernel in kernels} == {"add_norm", "rotate_write", "silu_times"}
