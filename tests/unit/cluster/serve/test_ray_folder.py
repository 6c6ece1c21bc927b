"""S5: Ray's session directory lies in one of ours alone; dead ones go, but for the last."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from ray._private.utils import validate_socket_filepath

from samovar.cluster.serve import ray_cluster as ray_folder
from samovar.cluster.serve.preflight import StartFailed
from samovar.cluster.serve.ray_cluster import (
    SOCKET_BELOW,
    SOCKET_BYTES_MAX,
    RayFolder,
    base_folder,
    remove_dead,
)


def folders(base: Path) -> set[str]:
    return {path.name for path in base.iterdir()}


def outer(folder: RayFolder) -> Path:
    return folder.path.parent


def test_only_we_enter_it_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        folder = RayFolder(tmp_path)
        folder.path.mkdir()
        folder.path.chmod(0o777)  # as Ray does
    finally:
        os.umask(before)
    assert stat.S_IMODE(outer(folder).stat().st_mode) == 0o700
    folder.close(keep=False)
    assert folders(tmp_path) == set()


def test_those_that_live_stay_and_of_the_dead_the_last(tmp_path: Path) -> None:
    alive = RayFolder(tmp_path)
    dead = []
    for number in range(3):
        one = RayFolder(tmp_path)
        one.path.mkdir()
        (one.path / "log").write_text("why")
        os.utime(outer(one), (number, number))
        dead.append(one)
    for one in dead:
        one.close(keep=True)
    new = RayFolder(tmp_path)
    assert folders(tmp_path) == {outer(one).name for one in (alive, dead[-1], new)}
    assert (dead[-1].path / "log").read_text() == "why"
    for one in (alive, new):
        one.close(keep=False)


def test_what_only_looks_like_one_is_not_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_folder, "DEAD_KEPT", 0)
    (tmp_path / "samovar-abcdefgh").mkdir()
    (tmp_path / "samovar-abcdefgh" / "thesis.tex").touch()
    (tmp_path / "samovar-notes").mkdir()
    (tmp_path / "samovar-12345678").symlink_to(tmp_path / "samovar-notes")
    there = folders(tmp_path)
    remove_dead(tmp_path)
    assert folders(tmp_path) == there
    (tmp_path / "samovar-strange_").mkdir()
    with monkeypatch.context() as other:
        other.setattr(ray_folder.os, "geteuid", lambda: os.getuid() + 1)
        remove_dead(tmp_path)
    assert (tmp_path / "samovar-strange_").exists()
    remove_dead(tmp_path)
    assert not (tmp_path / "samovar-strange_").exists()


def test_one_that_is_swept_before_it_is_locked_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_folder, "DEAD_KEPT", 0)
    made, names = ray_folder.tempfile.mkdtemp, []

    def mkdtemp(*, prefix: str, dir: Path) -> str:
        names.append(made(prefix=prefix, dir=dir))
        if len(names) == 1:
            remove_dead(tmp_path)
        return names[-1]

    monkeypatch.setattr(ray_folder.tempfile, "mkdtemp", mkdtemp)
    folder = RayFolder(tmp_path)
    assert [str(outer(folder))] == names[1:]
    assert folders(tmp_path) == {outer(folder).name}
    folder.close(keep=False)


def test_the_names_of_sockets_are_never_too_long() -> None:
    longest = "/" + "x" * (SOCKET_BYTES_MAX - len(SOCKET_BELOW) - 1)
    for environ in ({}, {"TMPDIR": longest}, {"TMPDIR": longest + "x"}, {"RAY_TMPDIR": longest}):
        base = base_folder(environ)
        validate_socket_filepath(f"{base}{SOCKET_BELOW}")
    assert base_folder({"TMPDIR": longest}) == Path(longest)
    assert base_folder({"TMPDIR": longest + "x"}) == base_folder({}) == Path("/tmp")
    with pytest.raises(StartFailed, match="RAY_TMPDIR"):
        base_folder({"RAY_TMPDIR": longest + "x"})


def test_a_place_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartFailed, match="RAY_TMPDIR"):
        RayFolder(tmp_path / "none")
