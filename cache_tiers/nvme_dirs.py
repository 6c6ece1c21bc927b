"""The directories below a tier of files: made when a file needs one, removed when empty, flushed in order.

Three levels below `root`: tenant, namespace, two hex digits; the last ("leaf") holds files. Other names
are passed over. Thread-safe. This module knows nothing of records or of room.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator

from cache_tiers import files
from cache_tiers.extent import TAG_BYTES
from cache_tiers.files import Deadline, Syscalls
from cache_tiers.keys import KEY_BYTES
from cache_tiers.tier import TierError

_LEVELS = tuple(re.compile(f"[0-9a-f]{{{2 * nbytes}}}") for nbytes in (TAG_BYTES, KEY_BYTES, 1))


class _Dir:
    """One directory as we made or met it: does its own entry survive a power cut?"""

    durable = False


class NvmeDirs:
    """Leaf directories below `root`, which must be there."""

    def __init__(self, root: str, calls: Syscalls) -> None:
        self.root = root
        self._calls = calls
        self._tree = threading.Lock()  # a directory is not removed between its making and its first file
        self._dirs: dict[str, _Dir] = {}

    def create(self, path: str, align: int, deadline: Deadline) -> int:
        """A new file in a leaf that is made if need be; its fd. Raises `OSError`, `TierError`."""
        if not self._tree.acquire(timeout=deadline.left_s()):
            raise TierError("the deadline has passed")
        try:
            for level in reversed(_above(os.path.dirname(path))):
                try:
                    self._calls.mkdir(level)
                    self._dirs[level] = _Dir()
                except FileExistsError:
                    self._dirs.setdefault(level, _Dir())
            return files.open_new(self._calls, path, align)
        finally:
            self._tree.release()

    def sync(self, leaf: str) -> None:
        """The entries of `leaf`, and the way to it, survive a power cut. `leaf` must not be empty."""
        files.sync_dir(self._calls, leaf)
        for level in _above(leaf):
            entry = self._dirs.setdefault(level, _Dir())
            if not entry.durable:
                files.sync_dir(self._calls, os.path.dirname(level))
                entry.durable = True

    def prune(self, leaf: str) -> None:
        """Remove `leaf` and what is above it where that is empty; not now if others are at work there."""
        if not self._tree.acquire(blocking=False):
            return
        try:
            for level in _above(leaf):
                self._calls.rmdir(level)
                self._dirs.pop(level, None)
        except OSError:  # not empty: the usual end of it
            return
        finally:
            self._tree.release()

    def leaves(self) -> Iterator[str]:
        """The leaf directories there are. Raises `OSError`."""
        self._calls.listdir(self.root)  # raises where there is none
        yield from self._below(self.root, _LEVELS)

    def names(self, path: str) -> list[str]:
        """What is in a directory; nothing where there is none (any more). Raises `OSError`."""
        try:
            return sorted(self._calls.listdir(path))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def _below(self, path: str, levels: tuple[re.Pattern[str], ...]) -> Iterator[str]:
        if not levels:
            yield path
            return
        for name in self.names(path):
            if levels[0].fullmatch(name):
                yield from self._below(os.path.join(path, name), levels[1:])


def _above(leaf: str) -> tuple[str, str, str]:
    """The leaf and the two levels above it, from below."""
    namespace = os.path.dirname(leaf)
    return leaf, namespace, os.path.dirname(namespace)
