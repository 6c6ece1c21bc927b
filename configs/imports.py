"""How a process imports what is large: with the garbage collector paused, and its bytecode kept."""

from __future__ import annotations

import gc
import hashlib
import importlib.util
import os
import re
import shutil
import stat
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress
from pathlib import Path

SAMPLES = ("configs", "ray", "torch", "transformers")
"""Packages whose bytecode tells whether all have theirs: our own, and the largest."""
PREFIX, DONT_WRITE = "PYTHONPYCACHEPREFIX", "PYTHONDONTWRITEBYTECODE"
FOLDER = re.compile(r"[\w.-]+-[0-9a-f]{16}")
"""The name of an installation's folder; nothing else is deleted."""
FOLDERS_MAX = 3
"""Installations whose bytecode is kept in one place; each takes some 40 MB."""


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause Python's collector of cycles inside the block, in all threads.

    Imports make a million objects that stay, and the collector looks through them again and again: without
    it a replica's imports take 2.9 CPU-seconds instead of 5.0, those of `samovar serve` 1.4 instead of 1.8.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def keep_bytecode(home: Path, environment: MutableMapping[str, str]) -> Path | None:
    """Let this process and those that inherit `environment` keep bytecode below `home`; return where.

    None, and nothing is changed: Python keeps it beside the sources as usual, or `environment` says where, or
    others may write to `home` or put something else in its place. Images often forbid it
    (`PYTHONDONTWRITEBYTECODE`) or leave no right to write to the sources' folders: each of nine processes
    then compiles all that it imports, half of a start.
    """
    if environment.get(PREFIX) or sys.pycache_prefix or all(map(_is_kept, SAMPLES)):
        return None
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _is_foreign(home) or not _is_out_of_reach(home := home.resolve()):
            return None
        folder = home / _installation()
        folder.mkdir(mode=0o700, exist_ok=True)
        if _is_foreign(folder):
            return None
        folder.touch()
        _forget_old(home)
    except OSError:
        return None
    environment[PREFIX] = sys.pycache_prefix = str(folder)
    environment.pop(DONT_WRITE, None)
    sys.dont_write_bytecode = False
    return folder


def _is_kept(package: str) -> bool:
    """Return whether the package has bytecode, or gets some when it is imported, or is not installed."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return True
    if spec is None or spec.cached is None:
        return True
    cached = Path(spec.cached)
    if cached.exists():
        return True
    folder = cached.parent if cached.parent.exists() else cached.parent.parent
    return not sys.dont_write_bytecode and os.access(folder, os.W_OK)


def _installation() -> str:
    """Return a name for the versions of all packages that are installed.

    Python compares a source's time and size with its bytecode's. Images may give all files one time, so that
    this alone would not tell two versions of a file.
    """
    digest = hashlib.sha256(sys.version.encode())
    for place in dict.fromkeys(sys.path):
        folder = Path(place or ".")
        for path in sorted(folder.glob("*.dist-info")) if folder.is_dir() else ():
            digest.update(f"\0{path.name}".encode())
            if path.name.startswith("samovar-"):
                with suppress(OSError):
                    digest.update((path / "RECORD").read_bytes())
    return f"{sys.implementation.cache_tag}-{digest.hexdigest()[:16]}"


def _is_foreign(folder: Path) -> bool:
    """Return whether others could have written there: bytecode is run. A link is another's word, too."""
    found = folder.lstat()
    return not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or bool(found.st_mode & 0o022)


def _is_out_of_reach(home: Path) -> bool:
    """Return whether other users cannot rename `home`, or a folder above it, and put another in its place.

    `home` has no links in it.
    """
    for above in home.parents:
        found = above.stat()
        if found.st_uid not in (0, os.geteuid()):
            return False
        # In a folder with the sticky bit others rename and delete only what is their own.
        if found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX:
            return False
    return True


def _forget_old(home: Path) -> None:
    ours = (path for path in home.iterdir() if FOLDER.fullmatch(path.name))
    by_age = sorted(ours, key=lambda path: path.stat().st_mtime_ns)
    for path in by_age[:-FOLDERS_MAX]:
        shutil.rmtree(path, ignore_errors=True)
