"""A library is compiled once on a machine; what prevents it is a sentence."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from configs import compiled
from configs.compiled import LibrarySource, NotCompiled, compiled_library, find_compiler, load_library


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
            compilers.build(tmp_path / "native")
        path.chmod(mode)
    (tmp_path / "file").touch()
    with pytest.raises(NotCompiled, match="cannot be kept in"):
        compilers.build(tmp_path / "file")


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
