"""A file that only its owner reads, written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from pathlib import Path

OWNER_ONLY = 0o600
DIR_OWNER_ONLY = 0o700


def write_private(path: Path, text: str) -> None:
    """Replaces what is there. Makes the directory, if need be, for the owner only. Raises OSError."""
    path.parent.mkdir(mode=DIR_OWNER_ONLY, parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")  # mkstemp makes it 0600
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def make_private(path: Path, text: str) -> None:
    """Leaves the one that another has put there meanwhile: of several at once, one wins. Raises OSError."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, OWNER_ONLY)
    try:
        with os.fdopen(file, "w") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)  # unlike rename, it does not replace what is there
    finally:
        draft.unlink()
