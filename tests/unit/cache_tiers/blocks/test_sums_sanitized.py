"""The compiled checksums under sanitizers, without Python: memory, undefined behaviour, races of threads."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from samovar.configs.compiled import SUMS, NotCompiled, find_compiler


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("-DSAMOVAR_PLAIN",)], ids=["vectors", "plain"])
@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_nothing_is_found(tmp_path: Path, sanitizers: str, flags: tuple[str, ...]) -> None:
    try:
        compiler = find_compiler(os.environ, wait_s=60)
    except NotCompiled as why:
        pytest.skip(str(why))
    program, driver = tmp_path / "driver", Path(__file__).with_name("sums_driver.cpp")
    of_all = [flag for flag in SUMS.flags if flag != "-shared"]
    sanitized = (f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", "-g", "-O1")
    command = [*compiler.command, *of_all, *sanitized, *flags, str(SUMS.files[0]), str(driver)]
    subprocess.run([*command, "-o", str(program)], check=True, timeout=600)
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stdout) == (0, "the same\n"), done.stderr
