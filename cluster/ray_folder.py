"""The directory below which a private Ray cluster has its sockets, logs and spilled objects: ours alone.

Ray makes its own directories writable for everybody; so they lie below one of mode 0700. It is locked for as
long as its owner lives: the next start removes those whose owner died, but for the last one, whose logs
somebody may want to read. (Cleaners of /tmp leave a locked directory alone as well.)
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from cluster.before_start import StartFailed

PREFIX = "samovar-"
NAME = re.compile(rf"{PREFIX}[a-z0-9_]{{8}}")
INNER = "ray"
"""Ray opens to all what it is given."""

BASE_VARIABLE = "RAY_TMPDIR"
SOCKET_BYTES_MAX = 107
SOCKET_BELOW = "/samovar-12345678/ray/session_2026-11-22_12-24-25_775244_4194304/sockets/plasma_store"
DEAD_KEPT = 1

logger = logging.getLogger("samovar.app")


class RayFolder:
    """Made and locked; `path` is what Ray is given."""

    def __init__(self, base: Path) -> None:
        """Raises `StartFailed`."""
        try:
            remove_dead(base)
            self._folder, self._lock = _made(base)
        except OSError as error:
            raise StartFailed(
                f"cannot make a directory for Ray in {base}: {error.strerror}. {BASE_VARIABLE} names "
                "another one"
            ) from error
        self.path = self._folder / INNER

    def close(self, *, keep: bool) -> None:
        """`keep`: until the next start but one. Ray must have ended."""
        if not keep:
            _remove(self._folder)
        os.close(self._lock)


def base_folder(environ: Mapping[str, str]) -> Path:
    """Where Ray would make its own. Raises `StartFailed` where its sockets' names would be too long."""
    longest = SOCKET_BYTES_MAX - len(SOCKET_BELOW)
    if named := environ.get(BASE_VARIABLE):
        if len(os.fsencode(named)) > longest:
            raise StartFailed(
                f"{BASE_VARIABLE}={named} is too long: Ray makes sockets below it, whose names have limits. "
                f"Name a directory of at most {longest} characters"
            )
        return Path(named)
    usual = environ.get("TMPDIR") or "/tmp"
    return Path(usual if len(os.fsencode(usual)) <= longest else "/tmp")


def remove_dead(base: Path) -> None:
    """Those of ours whose owner died, but for the last. Raises OSError."""
    with contextlib.ExitStack() as locks:
        dead = [folder for folder in _ours(base) if locks.enter_context(_locked(folder)) is not None]
        dead.sort(key=lambda folder: folder.stat().st_mtime, reverse=True)
        for folder in dead[DEAD_KEPT:]:
            _remove(folder)


def _ours(base: Path) -> Iterator[Path]:
    for entry in os.scandir(base):
        if NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
            if entry.stat(follow_symlinks=False).st_uid != os.geteuid():
                continue
            with contextlib.suppress(FileNotFoundError):  # gone meanwhile
                if set(os.listdir(entry.path)) <= {INNER}:
                    yield Path(entry.path)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[int | None]:
    """None where somebody else has the lock, or the directory is gone."""
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        yield None
        return
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
        else:
            yield lock if _is_at(folder, lock) else None
    finally:
        os.close(lock)


def _made(base: Path) -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))  # 0700
        with contextlib.suppress(FileNotFoundError):  # another start took it for dead: it was not locked yet
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if _is_at(folder, lock):
                return folder, lock
            os.close(lock)


def _is_at(folder: Path, lock: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.stat(folder), os.fstat(lock))
    return False


def _remove(folder: Path) -> None:
    """What cannot be removed now is dead, and removed by a later start."""
    shutil.rmtree(
        folder, onerror=lambda _function, path, error: logger.info("%s is left: %s", path, error[1])
    )
