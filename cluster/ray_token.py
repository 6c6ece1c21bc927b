"""Ray's token: whoever has it runs code on the cluster. It is asked for, and its file is ours alone.

Ray itself would write the file for all to read, and ask for no token where somebody's shell says so. Knows
nothing of clusters: whether one asks is `open_cluster.py`'s.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

import ray

from cluster.before_start import StartFailed
from cluster.environment import TOKEN_MODE
from cluster.private_file import DIR_OWNER_ONLY, OWNER_ONLY, make_private

TOKEN_VARIABLE = "RAY_AUTH_TOKEN"
PATH_VARIABLE = "RAY_AUTH_TOKEN_PATH"
TOKEN_FILE = Path("~/.ray/auth_token")
TOKEN_BYTES = 32

OTHERS = 0o077
OTHERS_WRITE = 0o022
ROOT = 0


def require_token() -> None:
    """In this process, and in those that it starts: it wins over what a shell or Ray's default says."""
    os.environ.update(TOKEN_MODE)
    ray._config.initialize("")  # Ray has read the variable when it was imported


def close_token(environ: Mapping[str, str], *, make: bool) -> str:
    """The token's file is closed to others before Ray reads it; `make`: and made where there is none.

    A warning for people if it was open, else nothing. Raises `StartFailed` where it must not be used.
    """
    if environ.get(TOKEN_VARIABLE):
        return ""
    named = environ.get(PATH_VARIABLE)
    path = (Path(named) if named else TOKEN_FILE).expanduser()
    try:
        if make and not named and not _has_token(path):
            path.parent.mkdir(mode=DIR_OWNER_ONLY, parents=True, exist_ok=True)
            make_private(path, secrets.token_hex(TOKEN_BYTES))
        return _closed(path)
    except FileNotFoundError:
        raise StartFailed(
            f"there is no token of Ray's in {path}. Put the cluster's there (chmod 600), or name its file "
            f"with {PATH_VARIABLE}"
        ) from None
    except OSError as error:
        raise StartFailed(f"Ray's token in {path} cannot be closed to others: {error.strerror}") from error


def _has_token(path: Path) -> bool:
    try:
        if path.read_text().strip():
            return True
        path.unlink()  # Ray takes an empty one for none
    except FileNotFoundError:
        return False
    return False


def _closed(path: Path) -> str:
    """A warning if it was open."""
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe would wait for its other end
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            raise StartFailed(f"{path} is no file. Move it away, or name Ray's token with {PATH_VARIABLE}")
        mode = stat.S_IMODE(found.st_mode)
        if found.st_uid != os.geteuid():
            # Root's, as a secret that is mounted, may be read by our group.
            if found.st_uid == ROOT and not mode & (OTHERS_WRITE | stat.S_IROTH):
                return ""
            raise StartFailed(
                f"{path} belongs to user {found.st_uid} (mode {mode:04o}), so others have Ray's token: "
                "whoever has it runs code here. Copy it to a file of yours with mode 0600 and name that with "
                f"{PATH_VARIABLE}"
            )
        _keep_others_from_replacing(path)
        if not mode & OTHERS:
            return ""
        os.fchmod(file, OWNER_ONLY)
    finally:
        os.close(file)
    return (
        f"{path} was open to others (mode {mode:04o}) and is 0600 now. Whoever has read it runs code in "
        "clusters with this token: if somebody else uses this machine, end them and delete it for a new one"
    )


def _keep_others_from_replacing(path: Path) -> None:
    found = path.parent.stat()
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid == os.geteuid() and mode & OTHERS_WRITE and not mode & stat.S_ISVTX:
        path.parent.chmod(mode & ~OTHERS_WRITE)
