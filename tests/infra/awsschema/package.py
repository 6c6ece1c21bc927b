"""The npm package whose generated bindings hold the AWS provider's schema: fetched once, checked, kept.

It knows no schema. The package is read where it lies and never installed, so none of its code runs.
"""

from __future__ import annotations

import base64
import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

CACHE = Path(os.environ.get("TESTS_INFRA_CACHE", "~/.cache/samovar-infra")).expanduser()
PACKAGE = "@cdktn/provider-aws@25.7.0"
PROVIDER_VERSION = "6.66.0"
"""Of hashicorp/aws, from which the package was generated."""

INTEGRITY = "sha512-E/nhu0yVZE4mXMgIPuI8tEFt1BExLkA7ARjihdG+/HmfDfzLr+OEF3dkFRvI6glRt30lrrBWQLwXqCJBxcmyUg=="
FETCH_TIMEOUT_S = 240


class PackageMissing(Exception):
    """The package could not be fetched: no npm, or its registry does not answer."""


class PackageChanged(Exception):
    """What was fetched is not the file this bench was written for."""


def package_file(cache: Path = CACHE, integrity: str = INTEGRITY) -> Path:
    """The .tgz (46 MB), from the cache if it is there. Raises `PackageMissing`, `PackageChanged`."""
    kept = cache / "cdktn-provider-aws-25.7.0.tgz"
    if kept.exists() and integrity_of(kept) == integrity:
        return kept
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix="npm-") as folder:
        found = _fetch(Path(folder))
        if (got := integrity_of(found)) != integrity:
            raise PackageChanged(f"{PACKAGE} has integrity {got}, expected {integrity}")
        os.replace(found, kept)
    return kept


def integrity_of(file: Path) -> str:
    """As npm writes it: sha512 in base64."""
    with file.open("rb") as source:
        digest = hashlib.file_digest(source, "sha512").digest()
    return "sha512-" + base64.b64encode(digest).decode()


def _fetch(folder: Path) -> Path:
    command = ["npm", "pack", PACKAGE, "--loglevel=error", "--pack-destination", str(folder)]
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=FETCH_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as problem:
        raise PackageMissing(f"npm pack {PACKAGE}: {problem}") from problem
    found = list(folder.glob("*.tgz"))
    if done.returncode or len(found) != 1:
        lines = [one for one in done.stderr.splitlines() if one.startswith("npm error")] or ["no output"]
        raise PackageMissing(f"npm pack {PACKAGE} failed (exit {done.returncode}): {lines[0]}")
    return found[0]
