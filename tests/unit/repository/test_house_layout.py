"""One importable name: a foreign `router` beside Samovar harms neither, and our code uses no other name."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.house import PACKAGES, ROOT

PAST = re.compile(rf"^({'|'.join(PACKAGES)})\.(\w+)(\.\w+)*(:\w+)?$")
OF_FOLDERS = {ROOT / "tests/house.py", *(ROOT / "tests/unit/repository").glob("*.py")}
"""They name folders, and `tests.house.imports` names modules as folders."""


def names_past_samovar(source: str, root: Path = ROOT) -> Iterator[str]:
    """Yield each import and string that names a module without `samovar.`: it would be there twice."""
    for node in ast.walk(ast.parse(source)):
        named = []
        if isinstance(node, ast.Import):
            named = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            named = [node.module or ""]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("files", "import_module"):
            named = [one.value for one in node.args if isinstance(one, ast.Constant)]
        elif isinstance(node, ast.Constant) and (found := PAST.match(str(node.value))):
            place = root / found[1] / found[2]
            named = [str(node.value)] if place.is_dir() or place.with_suffix(".py").is_file() else []
        yield from (name for name in named if name.split(".")[0] in PACKAGES)


def test_each_package_is_linked() -> None:
    links = {path.name: path.readlink() for path in (ROOT / "samovar").iterdir() if path.is_symlink()}
    assert links == {name: Path("..", name) for name in PACKAGES}


def test_no_code_gets_past_the_name() -> None:
    found = {
        str(path.relative_to(ROOT)): names
        for place in (*PACKAGES, "bench", "tests")
        for path in (ROOT / place).rglob("*.py")
        if path not in OF_FOLDERS and (names := list(names_past_samovar(path.read_text(encoding="utf-8"))))
    }
    assert found == {}


def test_a_name_past_it_is_seen() -> None:
    source = "import router.auth\nfrom configs import x\nresources.files('cluster')\n"
    source += "patch('cache_tiers.media.X', setting='router.stall_s')\n"
    assert list(names_past_samovar(source)) == ["router.auth", "configs", "cluster", "cache_tiers.media.X"]


def test_a_foreign_package_of_the_same_name_is_left_alone(tmp_path: Path) -> None:
    for name in PACKAGES:
        (tmp_path / f"{name}.py").write_text("IS_FOREIGN = True\n")
    code = f"import {', '.join(PACKAGES)}, samovar.cluster.cli.main; print(router.IS_FOREIGN)"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))}
    said = [
        subprocess.run(
            [sys.executable, *words],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
        for words in (["-c", code], ["-m", "samovar", "version"])
    ]
    assert said[0] == "True\n"
    assert said[1].startswith("samovar ")


def test_a_plain_folder_of_our_name_does_not_win(tmp_path: Path) -> None:
    """As an install finds it, where Python puts the folder that it was started in first: Ray's workers do."""
    (tmp_path / "samovar").mkdir()
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", "import samovar.configs; print(samovar.__file__)"]
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip().endswith("/samovar/__init__.py")
