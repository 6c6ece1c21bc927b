"""What the infrastructure tests need beyond Python, and a visible skip that names what is missing.

Use: `pytestmark = needs_infra`, then `need("terraform", "npm")` in a fixture or at the head of a test.
It knows no test: only how to look for each thing.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

needs_infra = pytest.mark.skipif(
    os.environ.get("SAMOVAR_INFRA") != "1",
    reason="infrastructure tests run by `make test-terraform`, `test-ray-up` and `test-multinode` "
    "(they set SAMOVAR_INFRA=1)",
)


def _program(name: str, hint: str) -> Callable[[], str]:
    def missing() -> str:
        return "" if shutil.which(name) else f"program `{name}` is not in PATH ({hint})"

    return missing


def _module(name: str, hint: str) -> Callable[[], str]:
    def missing() -> str:
        return "" if importlib.util.find_spec(name) else f"Python module `{name}` is missing ({hint})"

    return missing


def _root() -> str:
    return "" if os.geteuid() == 0 else "not root: namespaces and mounts cannot be made"


def _sshd() -> str:
    found = shutil.which("sshd") or Path("/usr/sbin/sshd").exists()
    return "" if found else "program `sshd` is missing (Debian: apt install openssh-server)"


NEEDS: dict[str, Callable[[], str]] = {
    "root": _root,
    "sshd": _sshd,
    "terraform": _program("terraform", "1.11 or newer, from developer.hashicorp.com"),
    "npm": _program("npm", "Debian: apt install npm"),
    "ip": _program("ip", "Debian: apt install iproute2"),
    "unshare": _program("unshare", "Debian: apt install util-linux"),
    "nsenter": _program("nsenter", "Debian: apt install util-linux"),
    "rsync": _program("rsync", "Debian: apt install rsync"),
    "ssh": _program("ssh", "Debian: apt install openssh-client"),
    "moto": _module("moto", "pip install -e .[dev]"),
}


def lacking(*names: str) -> list[str]:
    """What is missing of `names` (keys of NEEDS), each with how to get it. Raises KeyError on others."""
    return [reason for name in names if (reason := NEEDS[name]())]


def need(*names: str) -> None:
    """Skips the running test (or fixture's users) if any of `names` is missing, and says which."""
    if reasons := lacking(*names):
        pytest.skip("; ".join(reasons))
