"""The server's secret that nobody configured: drawn once, then kept in a file beside the models.

Blocks on disk and in S3 belong to a namespace that the secret is mixed into, so a new secret at every
start would make all of them strangers. Whoever can read it can find out what tenants have in common;
so only we may. This module does not know what the secret is used for.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
import tempfile
from pathlib import Path

# A file that only its owner reads, written whole or not at all.

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


FILE_NAME = "server-secret"
SECRET = re.compile(r"[0-9a-f]{64}\n?")
READ_BYTES_MAX = 128
ANSWER = "or configure auth.server_secret"


class SecretRefused(Exception):
    """There is a file, and it must not be used; the text says why and what to do."""


def kept_secret(cache_dir: Path) -> str:
    """64 hex digits: those of the file, which is made when there is none.

    Of several who make it at the same time one wins, and all return the winner's. Raises
    `SecretRefused` for a file that is not ours alone or holds something else, `OSError` when it
    can be neither read nor made.
    """
    path = cache_dir.expanduser() / FILE_NAME
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        return _read(path)
    except FileNotFoundError:
        _make(path)
        return _read(path)


def _read(path: Path) -> str:
    try:
        # O_NONBLOCK: opening a pipe would wait for ever for its other end.
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise SecretRefused(f"{path} cannot be read: {error.strerror}. Make it readable, {ANSWER}") from error
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            raise SecretRefused(f"{path} is no file. Move it away, {ANSWER}")
        if found.st_uid != os.geteuid():
            owner, us = found.st_uid, os.geteuid()
            raise SecretRefused(f"{path} belongs to user {owner}, not to us ({us}). Move it away, {ANSWER}")
        if found.st_mode & 0o077:
            mode = stat.S_IMODE(found.st_mode)
            raise SecretRefused(
                f"{path} is open to others (mode {mode:04o}), so it may not be a secret any more. "
                f"Delete it for a new one, chmod 600 it if you are sure, {ANSWER}"
            )
        text = os.read(file, READ_BYTES_MAX).decode("latin-1")
    finally:
        os.close(file)
    if SECRET.fullmatch(text) is None:
        raise SecretRefused(f"{path} does not hold a secret of ours. Move it away, {ANSWER}")
    return text.rstrip("\n")


def _make(path: Path) -> None:
    make_private(path, secrets.token_hex(32) + "\n")
