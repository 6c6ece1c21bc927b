"""What the infrastructure tests need beyond Python. What is missing fails them, and names how to get it.

They run where they are asked for by name (`make test-ray-up` and the like set TESTS_INFRA=1): a skip there
would look as if all had been shown. Use: `pytestmark = needs_infra`, then `need("terraform", "npm")` in a
fixture or at the head of a test. It knows no test: only how to look for each thing.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import pytest

needs_infra = pytest.mark.skipif(
    os.environ.get("TESTS_INFRA") != "1",
    reason="infrastructure tests run by `make test-terraform`, `test-ray-up`, `test-multinode`, "
    "`test-oidc`, `test-dashboards`, `test-chart` and `test-image` (they set TESTS_INFRA=1)",
)


@dataclass(frozen=True, slots=True)
class Need:
    """`what` as people call it; `how`: to get it, where it is no Debian package `apt` or Python one `pip`."""

    what: str
    is_there: Callable[[], bool]
    apt: str = ""
    pip: str = ""
    how: str = ""


def _program(name: str, *, apt: str = "", how: str = "", sbin: bool = False) -> Need:
    def is_there() -> bool:
        return bool(shutil.which(name)) or (sbin and Path("/usr/sbin", name).exists())

    return Need(f"program `{name}`", is_there, apt=apt, how=how)


def _module(name: str, pip: str) -> Need:
    return Need(f"Python module `{name}`", lambda: bool(importlib.util.find_spec(name)), pip=pip)


NEEDS: dict[str, Need] = {
    "root": Need(
        "root: namespaces and mounts cannot be made without it",
        lambda: os.geteuid() == 0,
        how="run it as root (sudo -E make ...)",
    ),
    "sshd": _program("sshd", apt="openssh-server", sbin=True),
    "terraform": _program(
        "terraform", how="terraform 1.11 or newer: developer.hashicorp.com/terraform/install"
    ),
    "npm": _program("npm", apt="npm"),
    "node": _program("node", apt="nodejs"),
    "ip": _program("ip", apt="iproute2", sbin=True),
    "unshare": _program("unshare", apt="util-linux"),
    "setpriv": _program("setpriv", apt="util-linux"),
    "nsenter": _program("nsenter", apt="util-linux"),
    "mkfs.ext4": _program("mkfs.ext4", apt="e2fsprogs", sbin=True),
    "rsync": _program("rsync", apt="rsync"),
    "ssh": _program("ssh", apt="openssh-client"),
    "buildah": _program("buildah", apt="buildah"),
    "debootstrap": _program("debootstrap", apt="debootstrap", sbin=True),
    "promtool": _program("promtool", apt="prometheus"),
    "prometheus": _program("prometheus", apt="prometheus"),
    "grafana sdk": _module("grafana_foundation_sdk", pip="grafana-foundation-sdk"),
    "moto": _module("moto", pip="-e .[dev]"),
}
LAB = ("root", "ip", "unshare", "setpriv", "nsenter", "mkfs.ext4")
"""What a lab of hosts takes."""


def lacking(*names: str) -> str:
    """What is missing of `names` (keys of NEEDS), and the lines that install it; empty if nothing is.

    Raises KeyError on others.
    """
    missing = [need for name in names if not (need := NEEDS[name]).is_there()]
    if not missing:
        return ""
    debs = list(dict.fromkeys(need.apt for need in missing if need.apt))
    wheels = list(dict.fromkeys(need.pip for need in missing if need.pip))
    hows = [need.how for need in missing if need.how]
    hows += [f"apt-get install {' '.join(debs)}"] if debs else []
    hows += [f"pip install {' '.join(wheels)}"] if wheels else []
    return f"missing: {', '.join(need.what for need in missing)}. To get it: {'; '.join(hows)}"


def need(*names: str) -> None:
    """Fails the running test (or fixture's users) if any of `names` is missing, and says how to get it."""
    if reasons := lacking(*names):
        cannot_run(reasons)


def cannot_run(reason: str) -> NoReturn:
    """Something that was asked for by name cannot be shown here: that is a failure, not a skip."""
    pytest.fail(reason, pytrace=False)
