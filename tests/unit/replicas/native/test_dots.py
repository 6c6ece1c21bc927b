"""The CPU's dot products of bfloat16 compute what their emulation says, which other instructions run."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from samovar.replicas.native.build import pair_variant_here
from samovar.replicas.native.native_step import NotNative
from tests.support.engines.native_steps import compile_program


def test_the_instruction_and_its_emulation_agree_bit_by_bit(tmp_path: Path) -> None:
    """Of 3 million random products near each other, near the least normal number, of any bits; of a million
    special ones: zeros, denormal numbers, infinities, NaN; and what is rounded up to a normal number."""
    try:
        variant = pair_variant_here()
    except NotNative as why:
        pytest.skip(str(why))
    program = compile_program(Path(__file__).with_name("dots.cpp"), tmp_path / "dots", *variant.flags)
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, "the same\n"), done.stderr
