"""Samovar's wheel, built from a copy of the checkout with what is installed: nothing is downloaded."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.house import PACKAGES, ROOT

BESIDE = ("pyproject.toml", "setup.py", "README.md", "LICENSE")
BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"


def copy_of_checkout(target: Path) -> Path:
    """What a build reads, copied to `target`: setuptools writes beside its sources."""
    target.mkdir(exist_ok=True)
    for name in (*PACKAGES, "samovar"):
        shutil.copytree(
            ROOT / name, target / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in BESIDE:
        shutil.copy(ROOT / name, target / name)
    return target


def build_wheel(
    checkout: Path, target: Path, unix_s: int = 1_700_000_000, has_libraries: bool = False
) -> Path:
    """The wheel of a checkout, as `pip wheel --no-deps .` makes it. `unix_s`: the time of all files in it.

    `has_libraries`: with our C++ compiled.
    """
    target.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(target)],
        cwd=checkout,
        env={
            **os.environ,
            "SOURCE_DATE_EPOCH": str(unix_s),
            "SAMOVAR_WHEEL_LIBRARIES": str(int(has_libraries)),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return target / done.stdout.splitlines()[-1]
