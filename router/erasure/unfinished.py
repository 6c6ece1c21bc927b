"""A file of what is still to be deleted, which a full disk does not keep from being written."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from samovar.configs.atomic_file import sync_dir
from samovar.configs.json_text import parse_json

logger = logging.getLogger(__name__)

HALF_BYTES = 1 << 19
"""Of a state; each file has room for two, and is as large from the beginning."""
FILES_MAX = 1024
DIGEST_BYTES = hashlib.sha256().digest_size
NUMBER_BYTES = 8
HEAD_BYTES = DIGEST_BYTES + 2 * NUMBER_BYTES


class UnfinishedFile:
    """One process's list, in the first file of a folder that no other process has. Not thread-safe.

    A state is written over the older one of two, with a number and a digest: a crash leaves the other. What
    processes that are gone have left is taken over by the next that opens the folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._fd: int | None = None
        self._full: list[int] = []  # files of others whose content ours has no room for
        self._number = 0

    def open(self) -> list[Any]:
        """Take a file, and return what it and the files of others that are gone hold. Raises `OSError`."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for number in range(FILES_MAX):
            fd = self._locked(self._folder / f"{number}.unfinished")
            if fd is None:
                continue
            number_of, items = _newest(fd)
            os.posix_fallocate(fd, 0, 2 * HALF_BYTES)
            os.fsync(fd)
            sync_dir(os, str(self._folder))
            self._fd, self._number = fd, number_of
            return [*items, *self.take_over(items)]
        return []

    def take_over(self, items: list[Any]) -> list[Any]:
        """Return what others that are gone have left, once it is in our file beside `items`, our own.

        What has no room there is returned as well, and left where it is: locked, until this process ends.
        Raises `OSError`.
        """
        found: list[Any] = []
        for path in sorted(self._folder.glob("*.unfinished")) if self._fd is not None else ():
            fd = self._locked(path)
            if fd is None:
                continue
            found += _newest(fd)[1]
            if self.save([*items, *found]):
                path.unlink()
                os.close(fd)
            else:
                self._full.append(fd)
        return found

    def _locked(self, path: Path) -> int | None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.stat(path).st_ino == os.fstat(fd).st_ino:  # else another has just taken it over
                return fd
        except (BlockingIOError, FileNotFoundError):
            pass
        os.close(fd)
        return None

    def save(self, items: list[Any]) -> bool:
        """Write a state; False if it has no room, or the disk fails."""
        data = json.dumps(items).encode()
        if self._fd is None or len(data) > HALF_BYTES - HEAD_BYTES:
            return False
        number = self._number + 1
        numbers = number.to_bytes(NUMBER_BYTES) + len(data).to_bytes(NUMBER_BYTES)
        state = hashlib.sha256(numbers + data).digest() + numbers + data
        try:
            os.pwrite(self._fd, state, number % 2 * HALF_BYTES)
            os.fdatasync(self._fd)
        except OSError as error:
            logger.warning("what is still to be deleted could not be written down: %s", error)
            return False
        self._number = number
        return True

    def close(self) -> None:
        """Leave the file to another process."""
        for fd in (*self._full, *(() if self._fd is None else (self._fd,))):
            with suppress(OSError):
                os.close(fd)
        self._full, self._fd = [], None


def _newest(fd: int) -> tuple[int, list[Any]]:
    """Return the newest whole state of a file and its number; nothing if there is none."""
    states: list[tuple[int, list[Any]]] = [(0, [])]
    for half in range(2):
        raw = os.pread(fd, HALF_BYTES, half * HALF_BYTES)
        digest, head = raw[:DIGEST_BYTES], raw[DIGEST_BYTES:HEAD_BYTES]
        number, size = int.from_bytes(head[:NUMBER_BYTES]), int.from_bytes(head[NUMBER_BYTES:])
        body = raw[HEAD_BYTES : HEAD_BYTES + size]
        if hashlib.sha256(head + body).digest() != digest:
            continue
        items = parse_json(body.decode())
        states.append((number, items if isinstance(items, list) else []))
    return max(states, key=lambda state: state[0])
