"""The layout guard: a foreign package with one of our names is found and named."""

from __future__ import annotations

import base64
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import samovar_cli

ROOT = Path(__file__).resolve().parents[3]


def run(*path: Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    return subprocess.run(
        [sys.executable, "-m", "samovar_cli", "version"],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_checkout_itself_is_in_order() -> None:
    assert samovar_cli.shadowed(ROOT) == []
    assert samovar_cli.overwritten(ROOT) == []
    assert run(ROOT).returncode == 0


@pytest.mark.parametrize("form", ["package", "module"])
def test_a_foreign_package_on_the_path_is_named(tmp_path: Path, form: str) -> None:
    intruder = tmp_path / ("router" if form == "package" else "router.py")
    if form == "package":
        intruder.mkdir()
        (intruder / "__init__.py").write_text("raise SystemExit('the intruder was imported')\n")
    else:
        intruder.write_text("raise SystemExit('the intruder was imported')\n")
    done = run(tmp_path, ROOT, cwd=tmp_path)
    assert done.returncode == 2
    assert f"package `router` comes from {intruder}, ours is at {ROOT / 'router'}" in done.stderr
    assert "PYTHONPATH" in done.stderr
    assert "imported" not in done.stderr
    assert "Traceback" not in done.stderr


def test_a_plain_folder_of_that_name_does_no_harm_where_ours_is_on_the_path(tmp_path: Path) -> None:
    (tmp_path / "router").mkdir()  # no __init__.py: Python prefers a real package further on
    assert run(tmp_path, ROOT, cwd=tmp_path).returncode == 0


def test_a_plain_folder_is_named_where_it_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with an editable install, whose finder is asked after the path."""
    (tmp_path / "samovar_other").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    (problem,) = samovar_cli.shadowed(ROOT, ["samovar_other"])
    assert f"comes from {tmp_path / 'samovar_other'}" in problem


def test_a_missing_package_is_named(tmp_path: Path) -> None:
    (problem,) = samovar_cli.shadowed(tmp_path, ["samovar_no_such_package"])
    assert "is missing" in problem


OURS = {"router/__init__.py": b"", "router/auth.py": b"LIMIT = 1\n", "router/deep/part.py": b"PART = 2\n"}


def installed(site: Path) -> None:
    """What a wheel of ours leaves in site-packages."""
    for name, content in OURS.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_bytes(content)
    info = site / "samovar-9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: samovar\nVersion: 9.9\n")
    lines = ["samovar-9.9.dist-info/RECORD,,", "../../bin/samovar,sha256=x,1"]
    for name, content in OURS.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(content)}")
    (info / "RECORD").write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("changed", [[], *([name] for name in OURS), list(OURS)])
def test_a_package_that_was_installed_over_ours_is_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: list[str]
) -> None:
    """Also where the foreign `__init__.py` is as empty as ours."""
    installed(tmp_path)
    for name in changed:
        (tmp_path / name).write_text("# a foreign router\n")
    other = tmp_path / "Routes-1.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: Routes\nVersion: 1\n")
    (other / "top_level.txt").write_text("router\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    place = tmp_path / "router"
    assert samovar_cli.overwritten(tmp_path) == [
        f"package `router` at {place} was overwritten by Routes: {name} is not ours" for name in changed[:1]
    ]


def test_a_file_that_went_away_with_another_program_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(tmp_path)
    (tmp_path / "router" / "auth.py").unlink()
    monkeypatch.syspath_prepend(str(tmp_path))
    (problem,) = samovar_cli.overwritten(tmp_path)
    assert problem.endswith("was overwritten by another program: router/auth.py is missing")


def test_the_record_of_another_installation_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(tmp_path)
    (tmp_path / "router" / "auth.py").write_text("# changed\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert samovar_cli.overwritten(ROOT) == []
