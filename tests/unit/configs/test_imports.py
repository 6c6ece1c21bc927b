"""Imports with the garbage collector paused, and where bytecode is kept."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from samovar.configs.imports import FOLDERS_MAX, collector_paused
from tests.house import ROOT


def test_the_collector_is_paused_inside_and_as_before_afterwards() -> None:
    for was_on in (True, False):
        gc.enable() if was_on else gc.disable()
        try:
            with collector_paused():
                assert not gc.isenabled()
                with collector_paused():
                    assert not gc.isenabled()
                assert not gc.isenabled()
            assert gc.isenabled() == was_on
            with pytest.raises(ImportError), collector_paused():
                raise ImportError
            assert gc.isenabled() == was_on
        finally:
            gc.enable()


KEPT = """
import gc, weakref
from samovar.configs.imports import collector_paused
with collector_paused():
    kept = [[number] for number in range(1000)]
    cycle = type("Cycle", (), {})()
    cycle.own, alive = cycle, weakref.ref(cycle)
    del cycle
seen = {id(one) for one in gc.get_objects()}
assert not any(id(one) in seen for one in kept), "what was made inside is looked through again"
assert alive() is None, "garbage of the block is kept for ever"
"""


def test_what_was_made_inside_is_not_looked_through_again_and_its_garbage_is_gone() -> None:
    ran = subprocess.run([sys.executable, "-c", KEPT], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


FROZEN = """
import gc, weakref
from samovar.configs.imports import keep_collections_short
class Cycle:
    def __init__(self):
        self.own = self
gc.disable()
keep_collections_short(1e9)
books = [[number] for number in range(1000)]
gc.collect()
assert gc.get_freeze_count() == 0, "no collection was so long"
keep_collections_short(0.0)
gc.collect(1)
assert gc.get_freeze_count() == 0, "a collection of what is young says nothing of what lives long"
gc.collect()
assert gc.get_freeze_count() > 1000
seen = {id(one) for one in gc.get_objects()}
assert not any(id(one) in seen for one in books), "what lives long is looked through again"
alive = weakref.ref(Cycle())
gc.collect()
assert alive() is None, "garbage from afterwards is kept"
row = Cycle.__new__(Cycle)
gone = weakref.ref(row)
gc.collect()
del row
assert gone() is None, "what is frozen is not freed as it goes"
"""


def test_after_a_long_collection_what_lives_is_not_looked_through_again() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", FROZEN], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr


PROGRAM = """
import os, sys
from pathlib import Path
from samovar.configs.imports import keep_bytecode
where = keep_bytecode(Path(sys.argv[1]), os.environ)
import sample
sys.stdout.write(f"{where} {sample.VALUE} {sample.__cached__} {os.environ.get('PYTHONDONTWRITEBYTECODE')}")
"""


def run_program(home: Path, sources: Path, **environment: str) -> list[str]:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(home)],
        cwd=sources,
        env={"PATH": os.environ["PATH"], **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return ran.stdout.split()


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """Return a folder with a module and with packages that have no bytecode, as `--no-compile` installs.

    `configs` is a copy: no bytecode is left beside our own sources.
    """
    folder = tmp_path / "sources"
    (folder / "configs").mkdir(parents=True)
    for name in ("__init__.py", "imports.py"):
        shutil.copy(ROOT / "configs" / name, folder / "configs")
    for package in ("ray", "torch"):
        (folder / package).mkdir(parents=True)
        (folder / package / "__init__.py").touch()
    (folder / "sample.py").write_text("VALUE = 1")
    return folder


def test_bytecode_is_kept_in_a_place_of_our_own_where_python_may_not_write(
    tmp_path: Path, sources: Path
) -> None:
    home = tmp_path / "cache" / "bytecode"
    where, value, cached, forbidden = run_program(home, sources, PYTHONDONTWRITEBYTECODE="1")
    assert Path(where).parent == home
    assert (value, forbidden) == ("1", "None")
    assert Path(cached).is_relative_to(where)
    assert Path(cached).is_file()
    assert not (sources / "__pycache__").exists()
    # It is used, and a source that has changed is compiled anew.
    written = Path(cached).stat().st_mtime_ns
    assert run_program(home, sources, PYTHONDONTWRITEBYTECODE="1")[1] == "1"
    assert Path(cached).stat().st_mtime_ns == written
    (sources / "sample.py").write_text("VALUE = 22")
    assert run_program(home, sources, PYTHONDONTWRITEBYTECODE="1")[1] == "22"


def test_bytecode_stays_where_python_or_the_user_keeps_it(tmp_path: Path, sources: Path) -> None:
    home = tmp_path / "home"
    where, _, cached, _ = run_program(home, sources)
    assert where == "None"
    assert Path(cached).parent == sources / "__pycache__"
    where, _, cached, forbidden = run_program(
        home, sources, PYTHONPYCACHEPREFIX=str(tmp_path / "theirs"), PYTHONDONTWRITEBYTECODE="1"
    )
    assert (where, forbidden) == ("None", "1")
    assert Path(cached).is_relative_to(tmp_path / "theirs")
    assert not home.exists()


def test_no_bytecode_is_taken_from_where_others_may_write(tmp_path: Path, sources: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    home.chmod(0o777)
    where, _, _, forbidden = run_program(home, sources, PYTHONDONTWRITEBYTECODE="1")
    assert (where, forbidden) == ("None", "1")


@pytest.mark.parametrize("above", ["parent", "grandparent"])
def test_no_bytecode_is_kept_where_others_may_put_a_folder_in_its_place(
    tmp_path: Path, sources: Path, above: str
) -> None:
    home = tmp_path / "shared" / "cache" / "bytecode"
    home.parent.mkdir(parents=True)
    open_to_all = home.parent if above == "parent" else home.parent.parent
    open_to_all.chmod(0o775)
    where, _, _, forbidden = run_program(home, sources, PYTHONDONTWRITEBYTECODE="1")
    assert (where, forbidden) == ("None", "1")
    open_to_all.chmod(0o1777)  # as /tmp: others cannot rename what is not theirs
    assert run_program(home, sources, PYTHONDONTWRITEBYTECODE="1")[0] != "None"


def test_a_link_is_not_followed_and_nothing_but_bytecode_is_deleted(tmp_path: Path, sources: Path) -> None:
    own = tmp_path / "own"
    for number in range(FOLDERS_MAX + 2):
        (own / f"letters-{number}").mkdir(parents=True)
    home = tmp_path / "home"
    home.symlink_to(own)
    assert run_program(home, sources, PYTHONDONTWRITEBYTECODE="1")[0] == "None"
    # Nor is one on the way there, which others could let point to elsewhere later.
    where = run_program(home / "cache", sources, PYTHONDONTWRITEBYTECODE="1")[0]
    assert Path(where).parent == own / "cache"
    assert run_program(own, sources, PYTHONDONTWRITEBYTECODE="1")[0] != "None"
    assert len(list(own.glob("letters-*"))) == FOLDERS_MAX + 2


def test_another_installation_has_bytecode_of_its_own_and_few_are_kept(tmp_path: Path, sources: Path) -> None:
    home, seen = tmp_path / "home", set()
    for version in range(FOLDERS_MAX + 2):
        (sources / f"something-{version}.dist-info").mkdir()
        seen.add(run_program(home, sources, PYTHONDONTWRITEBYTECODE="1")[0])
    assert len(seen) == FOLDERS_MAX + 2
    assert len(list(home.iterdir())) == FOLDERS_MAX
