"""Checkers that cannot live in our own environment, in one of their own below the cache: checkov, parliament.

checkov pins an old boto3 and brings a module that shadows python-hcl2. Both work offline once installed.
"""

from __future__ import annotations

import fcntl
import subprocess
import sys
import venv
from pathlib import Path

from tests.infra.awsschema.package import CACHE

REQUIREMENTS = ("checkov==3.3.30", "parliament==1.6.4", "setuptools<81")
"""parliament still imports pkg_resources, which newer setuptools do not have."""

INSTALL_TIMEOUT_S = 570


class LintMissing(Exception):
    """The checkers could not be installed: PyPI does not answer."""


def lint_python(cache: Path = CACHE) -> Path:
    """The interpreter that has them; made on first use (a minute, 350 MB). Raises `LintMissing`."""
    folder = cache / "lint"
    python = folder / "bin" / "python"
    done = folder / "installed"
    wanted = "\n".join([sys.version, *REQUIREMENTS])
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lint.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if done.exists() and done.read_text() == wanted:
            return python
        venv.create(folder, clear=True, with_pip=True)
        command = [str(python), "-m", "pip", "install", "--quiet", *REQUIREMENTS]
        made = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False)
        if made.returncode:
            last = made.stderr.strip().splitlines()[-1:] or ["no output"]
            raise LintMissing(f"pip install {' '.join(REQUIREMENTS)}: {last[0]}")
        done.write_text(wanted)
    return python
