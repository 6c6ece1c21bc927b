"""The one writer of small files: each is there whole, the old or the new, for its owner only."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from samovar.cache_tiers.media.files import Syscalls
from samovar.configs.atomic_file import atomic_write


class Counted(Syscalls):
    """What was called; the `fail_at`th call fails, and pieces of two bytes are written."""

    def __init__(self, fail_at: int = 1000) -> None:
        self.seen: list[str] = []
        self._fail_at = fail_at

    def _count(self, name: str) -> None:
        self.seen.append(name)
        if len(self.seen) == self._fail_at:
            raise OSError(28, "No space left on device")

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        self._count("open")
        return super().open(path, flags, mode)

    def fchmod(self, fd: int, mode: int) -> None:
        self._count("fchmod")
        super().fchmod(fd, mode)

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        self._count("pwrite")
        return super().pwrite(fd, data[:2], offset)

    def fsync(self, fd: int) -> None:
        self._count("fsync")
        super().fsync(fd)

    def rename(self, old: str, new: str) -> None:
        self._count("rename")
        super().rename(old, new)


@pytest.mark.parametrize("replace", [True, False])
def test_a_failure_anywhere_leaves_the_old_or_the_new_and_no_draft(tmp_path: Path, replace: bool) -> None:
    path, outcomes = tmp_path / "file", []
    for fail_at in range(1, 12):
        path.write_bytes(b"old")
        try:
            atomic_write(path, b"brand-new", replace=replace, calls=Counted(fail_at))
        except OSError:
            outcomes.append("failed")
        assert path.read_bytes() in ((b"old", b"brand-new") if replace else (b"old",))
        assert os.listdir(tmp_path) == ["file"]
    assert len(outcomes) >= 8
    atomic_write(path, b"brand-new", replace=replace)
    assert path.read_bytes() == (b"brand-new" if replace else b"old")


def test_it_is_flushed_before_it_gets_its_name_and_its_directory_if_it_has_to_last(tmp_path: Path) -> None:
    lasting, fleeting = Counted(), Counted()
    atomic_write(tmp_path / "a", b"ab", calls=lasting)
    atomic_write(tmp_path / "b", b"ab", durable=False, calls=fleeting)
    assert lasting.seen == ["open", "fchmod", "pwrite", "fsync", "rename", "open", "fsync"]
    assert fleeting.seen == ["open", "fchmod", "pwrite", "fsync", "rename"]


def test_it_is_its_owners_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o277)
    try:
        atomic_write(tmp_path / "made", b"x", replace=False)
        atomic_write(tmp_path / "empty", b"")
    finally:
        os.umask(before)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("made", "empty")] == [0o600, 0o600]
