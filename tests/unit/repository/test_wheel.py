"""The wheel and the source distribution hold every module and data file of the packages, and nothing else."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
from email import message_from_string
from pathlib import Path
from zipfile import ZipFile

import pytest

from samovar.configs.extras import EXTRAS
from tests.house import PACKAGES, ROOT
from tests.support.wheel import build_wheel, copy_of_checkout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(copy_of_checkout(tmp_path_factory.mktemp("checkout")), tmp_path_factory.mktemp("dist"))


def content(path: Path) -> set[str]:
    """What the wheel installs, its own record left out."""
    return {name for name in ZipFile(path).namelist() if ".dist-info/" not in name}


def test_the_wheel_holds_every_file_of_the_packages_and_nothing_else(wheel: Path) -> None:
    """A new kind of data file is added to `package-data` in pyproject.toml."""
    tracked = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", *PACKAGES],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    wanted = {name for name in tracked.stdout.splitlines() if (ROOT / name).exists()}
    wanted.remove("cache_tiers/vllm/pyproject.toml")  # of the other wheel
    assert content(wheel) == {
        *("samovar/__init__.py", "samovar/__main__.py"),
        *(f"samovar/{name}" for name in wanted),
    }


def test_the_wheel_names_its_command_its_license_and_its_extras(wheel: Path) -> None:
    with ZipFile(wheel) as files:
        texts = {name.partition(".dist-info/")[2]: files.read(name).decode() for name in files.namelist()}
    about = message_from_string(texts["METADATA"])
    assert "samovar = samovar.cluster.cli.main:main" in texts["entry_points.txt"]
    assert texts["licenses/LICENSE"] == (ROOT / "LICENSE").read_text()
    assert set(about.get_all("Provides-Extra", [])) == {*EXTRAS.values(), "kernels", "dev"}
    plain = [line for line in about.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert plain
    assert [line for line in plain if re.match(rf"({'|'.join(EXTRAS)})\b", line)] == []


def test_a_wheel_made_from_the_source_distribution_is_the_same(wheel: Path, tmp_path: Path) -> None:
    """As `python -m build` makes both; to the byte, wherever and whenever they are built."""
    checkout = copy_of_checkout(tmp_path / "checkout")
    made = subprocess.run(
        [sys.executable, "-c", "import setuptools.build_meta as b; print(b.build_sdist('dist'))"],
        cwd=checkout,
        capture_output=True,
        text=True,
        check=True,
    )
    with tarfile.open(checkout / "dist" / made.stdout.splitlines()[-1]) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = (one for one in tmp_path.iterdir() if one.name.startswith("samovar-"))
    again = build_wheel(unpacked, tmp_path / "dist")
    assert content(again) == content(wheel)
    assert again.read_bytes() == wheel.read_bytes()
    shutil.rmtree(unpacked)
