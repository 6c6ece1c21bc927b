"""A disk that loses what was not flushed: records system calls, then makes what a power cut may leave.

The model is harsher than any journaling file system. Of a file, the bytes written before its last fsync are
there; later writes are there, not there, or in part, in any combination, and its length with them. Of a
directory, the entries made, renamed and removed before its last fsync are so; each later change
happened or not, on its own.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field
from pathlib import Path

from samovar.cache_tiers.media.files import Syscalls


@dataclass
class File:
    """Writes as (offset, bytes), the first `flushed` of which are on the disk; likewise the length."""

    writes: list[tuple[int, bytes]] = field(default_factory=list)
    flushed: int = 0


@dataclass
class Folder:
    """Changes of entries: name -> what it names from then on (None: nothing)."""

    changes: list[tuple[str, File | Folder | None]] = field(default_factory=list)
    flushed: int = 0

    def now(self) -> dict[str, File | Folder | None]:
        return dict(self.changes)


class RecordingCalls(Syscalls):
    """Does what it is told, and remembers it; but for `ftruncate`, which only direct I/O needs."""

    def __init__(self, root: Path) -> None:
        self.base = str(root)
        self.root = Folder()
        self.fds: dict[int, File | Folder] = {}

    def _find(self, path: str) -> tuple[Folder, str]:
        """The folder that `path` is an entry of, and its name there."""
        *above, name = os.path.relpath(path, self.base).split(os.sep)
        folder = self.root
        for part in above:
            entry = folder.now().get(part)
            assert isinstance(entry, Folder), path
            folder = entry
        return folder, name

    def _node(self, path: str) -> File | Folder | None:
        if path == self.base:
            return self.root
        folder, name = self._find(path)
        return folder.now().get(name)

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        fd = super().open(path, flags, mode)
        if flags & os.O_CREAT:
            folder, name = self._find(path)
            folder.changes.append((name, File()))
        node = self._node(path)
        assert node is not None, path
        self.fds[fd] = node
        return fd

    def close(self, fd: int) -> None:
        super().close(fd)
        del self.fds[fd]

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        written = super().pwrite(fd, data, offset)
        file = self.fds[fd]
        assert isinstance(file, File)
        file.writes.append((offset, bytes(data[:written])))
        return written

    def fsync(self, fd: int) -> None:
        node = self.fds[fd]
        node.flushed = len(node.writes if isinstance(node, File) else node.changes)

    def syncfs(self, fd: int) -> None:
        super().syncfs(fd)
        _flush_all(self.root)

    def rename(self, old: str, new: str) -> None:
        super().rename(old, new)
        folder, name = self._find(old)
        target, new_name = self._find(new)
        node = folder.now()[name]
        target.changes.append((new_name, node))
        folder.changes.append((name, None))

    def unlink(self, path: str) -> None:
        super().unlink(path)
        folder, name = self._find(path)
        folder.changes.append((name, None))

    def mkdir(self, path: str) -> None:
        super().mkdir(path)
        folder, name = self._find(path)
        folder.changes.append((name, Folder()))

    def rmdir(self, path: str) -> None:
        super().rmdir(path)
        folder, name = self._find(path)
        folder.changes.append((name, None))


def _flush_all(node: File | Folder) -> None:
    node.flushed = len(node.writes if isinstance(node, File) else node.changes)
    for entry in node.now().values() if isinstance(node, Folder) else ():
        if entry is not None:
            _flush_all(entry)


def cut_power(calls: RecordingCalls, into: Path, rng: random.Random) -> None:
    """What the disk may hold now, written below `into`; `rng` decides what was lost."""
    into.mkdir()
    _write_folder(calls.root, into, rng, rng.choice((0.0, 0.5, 0.9, 1.0)))


def _write_folder(folder: Folder, path: Path, rng: random.Random, share: float) -> None:
    kept = folder.changes[: folder.flushed]
    kept += [change for change in folder.changes[folder.flushed :] if rng.random() < share]
    for name, node in dict(kept).items():
        if isinstance(node, Folder):
            (path / name).mkdir()
            _write_folder(node, path / name, rng, share)
        elif node is not None:
            (path / name).write_bytes(_content(node, rng, share))


def _content(file: File, rng: random.Random, share: float) -> bytes:
    kept = file.writes[: file.flushed]
    length = max((offset + len(data) for offset, data in kept), default=0)
    for offset, data in file.writes[file.flushed :]:
        whole = rng.random() < share
        if whole or rng.random() < 0.5:
            length = max(length, offset + (len(data) if whole else rng.randrange(len(data) + 1)))
            kept.append((offset, data if whole else data[: rng.randrange(len(data) + 1)]))
    content = bytearray(length)
    for offset, data in kept:
        content[offset : offset + len(data)] = data[: max(length - offset, 0)]
    return bytes(content)
