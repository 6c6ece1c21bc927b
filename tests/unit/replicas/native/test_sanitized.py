"""The native step under sanitizers, without Python: memory, undefined behaviour, races of its threads."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from replicas import native
from replicas.native.build import FLAGS, find_compiler, variant_here

SANITIZERS = ("address,undefined", "thread")


@pytest.mark.slow
@pytest.mark.parametrize("number", ["bf16", "float", "bf16 -DSAMOVAR_WEIGHT=int8_t"])
@pytest.mark.parametrize("sanitizers", SANITIZERS)
def test_nothing_is_found(tmp_path: Path, sanitizers: str, number: str) -> None:
    command = find_compiler(os.environ, wait_s=60).command
    flags = [flag for flag in FLAGS if flag not in ("-O3", "-shared", "-fvisibility=hidden")]
    here, program = Path(__file__).parent, tmp_path / "driver"
    subprocess.run(
        [
            *(*command, *flags, *variant_here().flags, "-O1", "-g", *f"-DSAMOVAR_NUMBER={number}".split()),
            *(f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"),
            *(f"-I{Path(native.__file__).parent}", str(here / "driver.cpp"), "-o", str(program)),
        ],
        check=True,
        timeout=600,
    )
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stdout) == (0, "the same\n"), done.stderr
