"""A library is compiled once on a machine; what prevents it is a sentence."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from samovar.configs import compiled
from samovar.configs.compiled import LibrarySource, NotCompiled, compiled_library, find_compiler, load_library


class Compilers:
    """Compilers that are played, in a folder that is the whole PATH."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "bin"
        self.path.mkdir()
        self.calls = folder / "calls"
        self.environment = {"PATH": str(self.path)}
        self.source = folder / "tea.cpp"
        self.source.write_text("int tea;")

    def add(self, name: str, does: str = 'touch "$out"', version: str = "1.0") -> Path:
        script = self.path / name
        find = 'while [ $# -gt 0 ]; do [ "$1" = -o ] && out="$2"; shift; done'
        said = f'[ "$1" = --version ] && echo {version} && exit 0'
        touch = 'touch() { : > "$1"; }'
        script.write_text(f"#!/bin/sh\n{said}\necho {name} >> {self.calls}\n{touch}\n{find}\n{does}\n")
        script.chmod(0o700)
        return script

    def called(self) -> list[str]:
        return self.calls.read_text().split() if self.calls.exists() else []

    def build(self, folder: Path, wait_s: float = 60.0, *flags: str, same_bits: bool = False) -> Path:
        source = LibrarySource("tea", (self.source,), ("-O2", *flags), same_bits)
        return compiled_library(source, folder, wait_s=wait_s, environment=self.environment)


@pytest.fixture
def compilers(tmp_path: Path) -> Compilers:
    return Compilers(tmp_path)


def test_it_is_compiled_once_for_each_compiler_its_flags_and_the_sources(
    tmp_path: Path, compilers: Compilers
) -> None:
    folder = tmp_path / "native"
    compilers.add("g++")
    first = compilers.build(folder)
    assert compilers.build(folder) == first
    assert compilers.called() == ["g++"]
    assert compilers.build(folder, 60.0, "-DSUGAR") != first
    compilers.add("g++", version="2.0")
    assert compilers.build(folder) != first
    compilers.add("c++")
    compilers.build(folder)
    compilers.source.write_text("int tea = 1;")
    compilers.build(folder)
    assert compilers.called() == ["g++", "g++", "g++", "c++", "c++"]
    compilers.environment["CXX"] = f"{compilers.add('my-compiler')} -v"
    compilers.build(folder)
    assert compilers.called()[-1] == "my-compiler"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {path.suffix for path in folder.iterdir()} == {".so"}, "no drafts, no locks"


def test_old_libraries_are_forgotten(
    tmp_path: Path, compilers: Compilers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "LIBRARIES_MAX", 2)
    made = []
    for number in range(4):
        compilers.add("c++", version=str(number))
        made.append(compilers.build(tmp_path / "native"))
        os.utime(made[-1], (number, number))
    assert [path.exists() for path in made] == [False, False, True, True]


def test_without_a_compiler_what_one_has_compiled_serves(tmp_path: Path, compilers: Compilers) -> None:
    with pytest.raises(NotCompiled, match=r"no C\+\+ compiler on the PATH \(c\+\+, g\+\+, clang\+\+\)"):
        compilers.build(tmp_path / "native")
    script = compilers.add("clang++")
    library = compilers.build(tmp_path / "native")
    script.unlink()
    assert compilers.build(tmp_path / "native") == library


@pytest.mark.parametrize(
    ("does", "said"),
    [
        (
            "echo 'tea.cpp:1: error: what is this' >&2; exit 1",
            "does not compile it: tea.cpp:1: error: what",
        ),
        ("exit 3", "it ended with status 3"),
        ("exec sleep 60", "longer than 1 s"),
        ("kill -9 $$", "status -9"),
    ],
    ids=["an error", "a silent one", "no end", "killed"],
)
def test_a_compiler_that_fails_is_a_sentence(
    tmp_path: Path, compilers: Compilers, does: str, said: str
) -> None:
    sleep = next(path for path in ("/bin/sleep", "/usr/bin/sleep") if Path(path).exists())
    compilers.add("c++", does.replace("sleep", sleep))
    with pytest.raises(NotCompiled, match=said):
        compilers.build(tmp_path / "native", wait_s=1.0)
    assert not list((tmp_path / "native").glob("*.so"))
    calls = len(compilers.called())
    compilers.add("c++")
    with pytest.raises(NotCompiled, match=said):  # of the one that has failed; others waited for it
        compilers.build(tmp_path / "native")
    assert len(compilers.called()) == calls
    (note,) = (tmp_path / "native").glob("*.failed")
    os.utime(note, (0, 0))
    assert compilers.build(tmp_path / "native").exists()
    assert not note.exists()


def test_where_nothing_can_be_compiled_what_was_serves(tmp_path: Path, compilers: Compilers) -> None:
    compilers.add("c++")
    library = compilers.build(tmp_path / "native")
    compilers.add("c++", "exit 1", version="2.0")
    assert compilers.build(tmp_path / "native") == library


def test_what_others_could_have_written_is_not_loaded(tmp_path: Path, compilers: Compilers) -> None:
    compilers.add("c++")
    library = compilers.build(tmp_path / "native")
    for path in (library, library.parent):
        mode = path.stat().st_mode
        path.chmod(mode | 0o020)
        with pytest.raises(NotCompiled, match="may be written by others"):
            load_library(compilers.build(tmp_path / "native"))
        with pytest.raises(NotCompiled, match="may be written by others"):
            load_library(library)
        path.chmod(mode)
    (tmp_path / "file").touch()
    with pytest.raises(NotCompiled, match="cannot be kept in"):
        compilers.build(tmp_path / "file")


@pytest.mark.parametrize("above", [0, 1], ids=["parent", "grandparent"])
def test_nothing_is_kept_or_loaded_where_others_may_put_a_folder_in_its_place(
    tmp_path: Path, compilers: Compilers, above: int
) -> None:
    compilers.add("c++")
    folder = tmp_path / "shared" / "cache" / "native"
    library = compilers.build(folder)
    open_to_all = folder.parents[above]
    open_to_all.chmod(0o777)
    for refused in (lambda: compilers.build(folder), lambda: load_library(library)):
        with pytest.raises(NotCompiled, match="may be written by others, or a folder above it"):
            refused()
    open_to_all.chmod(0o1777)  # as /tmp: others cannot rename what is not theirs
    assert compilers.build(folder) == library


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_nothing_is_loaded_below_another_users_folder(tmp_path: Path, compilers: Compilers) -> None:
    compilers.add("c++")
    library = compilers.build(tmp_path / "theirs" / "native")
    os.chown(tmp_path / "theirs", 65534, 65534)
    with pytest.raises(NotCompiled, match="may be written by others"):
        load_library(library)


def test_a_link_is_not_loaded(tmp_path: Path, compilers: Compilers) -> None:
    compilers.add("c++")
    library = compilers.build(tmp_path / "native")
    library.rename(tmp_path / "elsewhere.so")
    library.symlink_to(tmp_path / "elsewhere.so")
    with pytest.raises(NotCompiled, match="cannot be opened"):
        load_library(library)
    (tmp_path / "link").symlink_to(tmp_path / "native")
    with pytest.raises(NotCompiled, match="may be written by others"):
        compilers.build(tmp_path / "link")


def test_what_takes_a_librarys_place_after_the_check_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file that was checked is loaded, by its descriptor; a link that came since is not followed."""
    folder = tmp_path / "native"
    folder.mkdir(mode=0o700)
    library, planted = folder / "tea.so", tmp_path / "planted.so"
    planted.touch()
    loaded: list[tuple[int, int]] = []

    def swapped(name: str) -> object:
        library.unlink()
        library.symlink_to(planted)
        found = os.stat(name)
        loaded.append((found.st_dev, found.st_ino))
        return object()

    library.touch()
    checked = library.stat()
    monkeypatch.setattr("samovar.configs.compiled.ctypes.CDLL", swapped)
    load_library(library)
    assert loaded == [(checked.st_dev, checked.st_ino)]
    with pytest.raises(NotCompiled, match="cannot be opened"):
        load_library(library)


def test_a_file_is_loaded_once_and_two_files_are_two_libraries(tmp_path: Path) -> None:
    made = []
    for number in (1, 2):
        source = tmp_path / f"tea{number}.cpp"
        source.write_text(f'extern "C" int tea() {{ return {number}; }}')
        library = LibrarySource(f"tea{number}", (source,), ("-shared", "-fPIC"))
        made.append(compiled_library(library, tmp_path / "native", wait_s=60))
    before = len(os.listdir("/proc/self/fd"))
    found = [load_library(path) for path in (*made, *made)]
    assert [library.tea() for library in found] == [1, 2, 1, 2]
    assert found[0] is found[2]
    assert len(os.listdir("/proc/self/fd")) <= before + 2


def test_a_compiler_that_does_not_run_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(NotCompiled, match="does not run"):
        find_compiler({"CXX": str(tmp_path / "none")}, wait_s=5)


def test_where_all_compilers_make_the_same_bits_none_is_asked(tmp_path: Path, compilers: Compilers) -> None:
    folder = tmp_path / "native"
    compilers.add("g++")
    library = compilers.build(folder, same_bits=True)
    compilers.add("g++", "exit 1", version="2.0")
    assert compilers.build(folder, same_bits=True) == library
    compilers.source.write_text("int tea = 1;")
    with pytest.raises(NotCompiled, match="status 1"):
        compilers.build(folder, same_bits=True)


def test_each_machine_has_a_library_of_its_own(
    tmp_path: Path, compilers: Compilers, monkeypatch: pytest.MonkeyPatch
) -> None:
    compilers.add("g++")
    library = compilers.build(tmp_path / "native", same_bits=True)
    monkeypatch.setattr(compiled.platform, "machine", lambda: "aarch64")
    assert compilers.build(tmp_path / "native", same_bits=True) != library


def test_a_library_that_does_not_load_is_removed(tmp_path: Path) -> None:
    torn = tmp_path / "tea.so"
    torn.touch()
    with pytest.raises(NotCompiled, match="does not load"):
        load_library(torn)
    assert not torn.exists()


@pytest.fixture
def shipped(tmp_path: Path, compilers: Compilers, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library of another machine's compiler, as a wheel has it."""
    script = compilers.add("g++", version="of the wheel")
    library = compilers.build(tmp_path / "shipped")
    script.unlink()
    compilers.calls.unlink()
    monkeypatch.setattr(compiled, "SHIPPED", library.parent)
    return library


@pytest.mark.parametrize("has_compiler", [True, False])
def test_a_library_of_the_wheel_serves_and_no_compiler_is_asked(
    tmp_path: Path, compilers: Compilers, shipped: Path, has_compiler: bool
) -> None:
    folder = tmp_path / "native"
    if has_compiler:
        compilers.add("c++")
    shipped.chmod(0o644)  # as pip may write it
    for _ in range(2):
        found = compilers.build(folder)
        assert (found.parent, found.name) == (folder, shipped.name)
        assert found.read_bytes() == shipped.read_bytes()
    assert not compilers.called()
    assert [path.name for path in folder.iterdir()] == [shipped.name]


def test_a_library_of_the_wheel_is_not_that_of_other_flags(
    tmp_path: Path, compilers: Compilers, shipped: Path
) -> None:
    with pytest.raises(NotCompiled, match="no C"):
        compilers.build(tmp_path / "native", 60.0, "-DSUGAR")


def test_a_library_of_the_wheel_that_does_not_load_makes_way(
    tmp_path: Path, compilers: Compilers, shipped: Path
) -> None:
    """As one for another C library: it stays in the wheel, and one is compiled here from then on."""
    with pytest.raises(NotCompiled, match="does not load"):  # it is empty
        load_library(compilers.build(tmp_path / "native"))
    assert shipped.exists()
    compilers.add("c++")
    found = compilers.build(tmp_path / "native")
    assert found.name != shipped.name
    assert compilers.called() == ["c++"]
