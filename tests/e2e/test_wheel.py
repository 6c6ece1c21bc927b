"""`pip install samovar` from an index, then `samovar serve` far from the checkout: a cached second turn."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.house import PACKAGES, ROOT
from tests.support.services.service import MODEL, for_served_dtype, serving
from tests.support.wheel import build_wheel, copy_of_checkout

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("wheel"),
]

PIP_S_MAX = 120.0


def index_with(wheel: Path, index: Path) -> str:
    """The URL of a simple index (PEP 503) with that wheel only."""
    folder = index / "samovar"
    folder.mkdir(parents=True)
    wheel.rename(folder / wheel.name)
    (folder / "index.html").write_text(f'<!DOCTYPE html><a href="{wheel.name}">{wheel.name}</a>\n')
    return index.as_uri()


def outside() -> dict[str, str]:
    """An environment in which nothing leads to the checkout."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`bin/` of a new environment with the wheel. Its requirements are this environment's, by a .pth file."""
    root = tmp_path_factory.mktemp("bare")
    wheel = build_wheel(copy_of_checkout(root / "copy"), root / "dist")
    venv.create(root / "venv", with_pip=True)
    program = root / "venv" / "bin"
    words = [program / "python", "-m", "pip", "install", "--quiet", "--no-deps", "--no-cache-dir"]
    words += ["--isolated", "--index-url", index_with(wheel, root / "index"), "samovar"]
    subprocess.run(list(map(str, words)), cwd=root, env=outside(), check=True, timeout=PIP_S_MAX)
    site = sysconfig.get_path("purelib", vars={"base": str(root / "venv")})
    here = sysconfig.get_path("purelib")
    Path(site, "requirements.pth").write_text(f"{here}\n")
    return program


def test_everything_comes_from_the_wheel(bare: Path, tmp_path: Path) -> None:
    code = (
        f"import importlib; print(*(importlib.import_module(one).__file__ for one in {PACKAGES}), sep='\\n')"
    )
    done = subprocess.run(
        [str(bare / "python"), "-c", code],
        cwd=tmp_path,
        env=outside(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert all(Path(line).is_relative_to(bare.parent) for line in done.stdout.splitlines()), done.stdout
    for words in (["config"], ["render", "--systemd"], ["serve", "--help"]):
        subprocess.run(
            [str(bare / "samovar"), *words], cwd=tmp_path, env=outside(), capture_output=True, check=True
        )
    assert sys.prefix != str(bare.parent)


def test_a_second_turn_is_cached_and_the_checkout_is_not_used(
    bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in set(os.environ) - set(outside()):
        monkeypatch.delenv(name)
    flags = ("--engine.pool-bytes-max", str(for_served_dtype(64 * 2**20)))
    with serving(tmp_path / "out.txt", *flags, cwd=tmp_path, samovar=bare / "samovar") as service:
        used = {
            part.path
            for process in service.processes()
            for part in process.memory_maps()
            if part.path.startswith(f"{ROOT}/") and "/.venv/" not in part.path
        }
        client = service.openai()
        messages = [{"role": "user", "content": "Tell me about the samovar, and who drinks from it."}]
        first = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=32, temperature=0)
        messages.append({"role": "assistant", "content": first.choices[0].message.content})
        messages.append({"role": "user", "content": "And who invented it?"})
        second = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=8, temperature=0)
        cached = second.usage.prompt_tokens_details.cached_tokens
        assert cached >= first.usage.prompt_tokens, (cached, first.usage)
        assert [process.cwd() for process in service.processes() if process.cwd() == str(ROOT)] == []
        assert used == set()
