"""The native step under sanitizers, without Python: memory, undefined behaviour, races of its threads."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.engines.native_steps import compile_program, widest_here

SANITIZERS = ("address,undefined", "thread")


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", ["bf16", "float", "bf16 -DSAMOVAR_WEIGHT=int8_t", "bf16 -DSAMOVAR_WEIGHT=pair"]
)
@pytest.mark.parametrize("sanitizers", SANITIZERS)
def test_nothing_is_found(tmp_path: Path, sanitizers: str, number: str) -> None:
    program = compile_program(
        Path(__file__).with_name("driver.cpp"),
        tmp_path / "driver",
        *(*widest_here().flags, "-g", *f"-DSAMOVAR_NUMBER={number}".split()),
        *(f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"),
    )
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stdout) == (0, "the same\n"), done.stderr
