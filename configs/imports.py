"""How a process takes up what is large: with its collector paused, bytecode kept, freed memory given back."""

from __future__ import annotations

import ctypes
import gc
import hashlib
import importlib.util
import os
import re
import shutil
import stat
import sys
import time
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress
from pathlib import Path

SAMPLES = ("samovar", "ray", "torch", "transformers")
"""Packages whose bytecode tells whether all have theirs: our own, and the largest."""
PREFIX, DONT_WRITE = "PYTHONPYCACHEPREFIX", "PYTHONDONTWRITEBYTECODE"
FOLDER = re.compile(r"[\w.-]+-[0-9a-f]{16}")
"""The name of an installation's folder; nothing else is deleted."""
FOLDERS_MAX = 3
"""Installations whose bytecode is kept in one place; each takes some 40 MB."""

OWN_PYTHON = "_SAMOVAR_PYTHON"
"""Names Samovar's own Python in a process that runs in another one: what it starts must not inherit that."""


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause Python's collector of cycles inside the block, in all threads.

    Imports make a million objects that stay, and the collector looks through them again and again: without
    it a replica's imports take 2.9 CPU-seconds instead of 5.0, those of `samovar serve` 1.4 instead of 1.8.
    Behind the block it looks at them once and never again: all of a replica's take an eighth of a second, in
    which every answer stands still, and a pool's books or Ray's wish for room have it look every few seconds.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


def keep_collections_short(long_s: float = 0.02) -> None:
    """Have this process's collector never look again at what made one last `long_s`. For all its time.

    All threads stand still meanwhile, and Ray has every process of a node collect each ten seconds while its
    object store is full. The books of a node with 100,000 extents are five million objects, and took half a
    second each time. They are freed as they go, without the collector. Cycles that are alive at a long
    collection, and garbage later, stay: few, and as seldom as what lives has grown by so much.
    """
    began_s = 0.0

    def watch(phase: str, info: dict[str, int]) -> None:
        nonlocal began_s
        if phase == "start":
            began_s = time.perf_counter()
        elif info["generation"] == 2 and time.perf_counter() - began_s >= long_s:
            gc.freeze()

    gc.callbacks.append(watch)


def return_freed_memory() -> None:
    """Give freed memory back to the system, where the C library can.

    glibc keeps what was freed between blocks in use: of the default model's weights, repacked, a fifth more;
    in an ingress, of a tokenizer that was compared with another, 35 MB.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


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
        if not is_private(home):
            return None
        home = home.resolve()
        folder = home / _installation()
        folder.mkdir(mode=0o700, exist_ok=True)
        if not is_private(folder):
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


def is_private(folder: Path) -> bool:
    """Return whether what is in a folder may be run as code: only root and this user can have put it there.

    Others can neither write to it nor rename it, or a folder above it, and put another in its place. A link
    is another's word, too. Raises `OSError`.
    """
    if not stat.S_ISDIR(folder.lstat().st_mode):
        return False
    place = folder.resolve()
    return is_ours(place.stat()) and all(_is_out_of_reach(above.stat()) for above in place.parents)


def is_ours(found: os.stat_result) -> bool:
    """Return whether only root and this user can have written to a file or folder."""
    return found.st_uid in (0, os.geteuid()) and not found.st_mode & 0o022


def _is_out_of_reach(above: os.stat_result) -> bool:
    """Return whether others can rename nothing of ours there; with the sticky bit only what is theirs."""
    return is_ours(above) or (above.st_uid in (0, os.geteuid()) and bool(above.st_mode & stat.S_ISVTX))


def _forget_old(home: Path) -> None:
    ours = (path for path in home.iterdir() if FOLDER.fullmatch(path.name))
    by_age = sorted(ours, key=lambda path: path.stat().st_mtime_ns)
    for path in by_age[:-FOLDERS_MAX]:
        shutil.rmtree(path, ignore_errors=True)
