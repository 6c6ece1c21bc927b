"""`pip install samovar` from an index, then `samovar serve` far from the checkout: a cached second turn."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import psutil
import pytest

from samovar.configs.compiled import shipped_sources
from tests.house import PACKAGES, ROOT
from tests.support.services.service import MODEL, for_served_dtype, serving
from tests.support.wheel import build_wheel, copy_of_checkout

pytestmark = pytest.mark.slow

PIP_S_MAX = 120.0
ELSEWHERE = ("PYTHONPATH", "VIRTUAL_ENV", "PIP_")
"""Variables by which something of this environment would get in."""


def outside() -> dict[str, str]:
    """An environment in which nothing leads to the checkout or to pip's own settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ELSEWHERE)}
    return kept | {"PIP_CONFIG_FILE": os.devnull}


def index_with(wheel: Path, index: Path) -> str:
    """The URL of a simple index (PEP 503) with that wheel only."""
    folder = index / "samovar"
    folder.mkdir(parents=True)
    wheel.rename(folder / wheel.name)
    (folder / "index.html").write_text(f'<!DOCTYPE html><a href="{wheel.name}">{wheel.name}</a>\n')
    return index.as_uri()


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`bin/` of a new environment with the wheel. Its requirements are this environment's, by a .pth file."""
    root = tmp_path_factory.mktemp("bare")
    wheel = build_wheel(copy_of_checkout(root / "copy"), root / "dist")
    venv.create(root / "venv", with_pip=True)
    words = [str(root / "venv/bin/python"), "-m", "pip", "install", "--quiet", "--no-deps", "--no-cache-dir"]
    words += ["--index-url", index_with(wheel, root / "index"), "samovar"]
    subprocess.run(words, cwd=root, env=outside(), check=True, timeout=PIP_S_MAX)
    # Only now: pip must not take the checkout's own installation for the wheel's.
    site = sysconfig.get_path("purelib", vars={"base": str(root / "venv")})
    requirements = [path for path in sys.path if path.endswith("site-packages")]
    Path(site, "requirements.pth").write_text("\n".join(requirements) + "\n")
    return root / "venv/bin"


def test_everything_comes_from_the_wheel(bare: Path, tmp_path: Path) -> None:
    names = [f"samovar.{name}" for name in PACKAGES]
    code = f"import importlib; print(*(importlib.import_module(one).__file__ for one in {names}), sep='\\n')"
    words = {"code": [str(bare / "python"), "-c", code]} | {
        name: [str(bare / "samovar"), *name.split()]
        for name in ("config", "render --systemd", "serve --help")
    }
    said = {
        name: subprocess.run(
            command, cwd=tmp_path, env=outside(), capture_output=True, text=True, check=True
        ).stdout
        for name, command in words.items()
    }
    assert all(Path(line).is_relative_to(bare.parent) for line in said["code"].splitlines()), said["code"]
    assert f"ExecStart={bare / 'samovar'} serve" in said["render --systemd"]


def test_a_second_turn_is_cached(bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ.keys() - outside().keys():
        monkeypatch.delenv(name)
    flags = ("--engine.pool-bytes-max", str(for_served_dtype(64 * 2**20)))
    with serving(tmp_path / "out.txt", *flags, cwd=tmp_path, samovar=bare / "samovar") as service:
        client = service.openai()

        def ask(messages: list[dict[str, str]]) -> Any:
            return client.chat.completions.create(
                model=MODEL, messages=messages, max_tokens=32, temperature=0
            )

        question = {"role": "user", "content": "Tell me about the samovar, and who drinks from it."}
        first = ask([question])
        answer = {"role": "assistant", "content": first.choices[0].message.content}
        second = ask([question, answer, {"role": "user", "content": "And who invented it?"}])
        cached = second.usage.prompt_tokens_details.cached_tokens
        assert cached >= first.usage.prompt_tokens, second.usage
        places = set()
        for process in service.processes():
            with contextlib.suppress(psutil.NoSuchProcess):  # gone meanwhile
                places.add(process.cwd())
        assert places
        assert str(ROOT) not in places


def test_a_wheel_with_libraries_needs_no_compiler_and_is_the_same_each_time(tmp_path: Path) -> None:
    """Any Python 3 takes it, on this kind of machine; both builds compile all of it."""
    wheels = [
        build_wheel(copy_of_checkout(tmp_path / name), tmp_path / f"dist-{name}", has_libraries=True)
        for name in ("one", "another-place")
    ]
    assert wheels[0].name == wheels[1].name == f"samovar-0.1.0-py3-none-linux_{platform.machine()}.whl"
    assert wheels[0].read_bytes() == wheels[1].read_bytes()
    with ZipFile(wheels[0]) as files:
        files.extractall(tmp_path / "installed")
        names = [name for name in files.namelist() if name.startswith("samovar/configs/shipped/")]
    assert len(names) == len(list(shipped_sources(platform.machine())))
    done = subprocess.run(
        [sys.executable, "-m", "samovar.replicas.native"],
        cwd=tmp_path,
        env={
            **outside(),
            "PYTHONPATH": str(tmp_path / "installed"),
            "PATH": "/nowhere",
            "HOME": str(tmp_path / "home"),
        },
        capture_output=True,
        text=True,
        check=True,
    )
    found = {Path(line.rpartition(": ")[2]).name for line in done.stdout.splitlines() if line.endswith(".so")}
    assert len(found) >= 3, done.stdout  # bfloat16, float32, checksums; in pairs where the CPU has it
    assert found <= {Path(name).name for name in names}
