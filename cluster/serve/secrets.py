"""Keeps the server's secret if none is configured: drawn once, then stored in a file beside the models.

Blocks on disk and in S3 belong to a namespace derived with the secret, so a new secret at every start would
make all of them unusable. A reader of the secret can find out which content tenants share; so only the
owner may read it.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from pathlib import Path

from samovar.configs.atomic_file import atomic_write

OWNER_ONLY = 0o600
DIR_OWNER_ONLY = 0o700


def write_private(path: Path, text: str) -> None:
    """Write a file atomically, readable by its owner only, replacing any other.

    Creates the directory if needed, also for the owner only. Raises `OSError`.
    """
    path.parent.mkdir(mode=DIR_OWNER_ONLY, parents=True, exist_ok=True)
    atomic_write(path, text.encode(), durable=False)


def make_private(path: Path, text: str) -> None:
    """Create a file atomically, for its owner only; keep an existing one: of several writers one wins.

    Raises `OSError`.
    """
    atomic_write(path, text.encode(), replace=False, durable=False)


FILE_NAME = "server-secret"
SECRET = re.compile(r"[0-9a-f]{64}\n?")
READ_BYTES_MAX = 128
ANSWER = "or configure auth.server_secret"


class SecretRefused(Exception):
    """The secret's file must not be used; the message says why and what to do."""


def kept_secret(cache_dir: Path) -> str:
    """Return the 64 hex digits in the secret's file, which is created if there is none.

    Of several processes that create it at once one wins, and all return the winner's. Raises `SecretRefused`
    if the file is not ours alone or holds something else, `OSError` if it can be neither read nor created.
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
        # O_NONBLOCK: opening a pipe would block for ever.
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise SecretRefused(f"{path} cannot be read: {error.strerror}. Make it readable, {ANSWER}") from error
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            raise SecretRefused(f"{path} is not a file. Move it away, {ANSWER}")
        if found.st_uid != os.geteuid():
            owner, us = found.st_uid, os.geteuid()
            raise SecretRefused(
                f"{path} belongs to user {owner}, not to this user ({us}). Move it away, {ANSWER}"
            )
        if found.st_mode & 0o077:
            mode = stat.S_IMODE(found.st_mode)
            raise SecretRefused(
                f"{path} is readable by other users (mode {mode:04o}), so it may have leaked. "
                f"Delete it for a new one, chmod 600 it if you are sure, {ANSWER}"
            )
        text = os.read(file, READ_BYTES_MAX).decode("latin-1")
    finally:
        os.close(file)
    if SECRET.fullmatch(text) is None:
        raise SecretRefused(f"{path} does not hold a secret of this service. Move it away, {ANSWER}")
    return text.rstrip("\n")


def _make(path: Path) -> None:
    make_private(path, secrets.token_hex(32) + "\n")
