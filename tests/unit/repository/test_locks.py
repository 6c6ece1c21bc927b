"""S14: what `make setup` installs is fixed to the byte: every package has one version and its hashes."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from samovar.configs.extras import EXTRAS
from samovar.replicas.model import store as model_store

ROOT = Path(__file__).resolve().parents[3]
ONLY_TORCH = ("torch", "triton", "cuda-", "nvidia-")


def locked(name: str) -> dict[str, tuple[str, int]]:
    """Package -> version and number of hashes."""
    found = {}
    text = (ROOT / "locks" / f"{name}.lock").read_text()
    for entry in re.sub(r"#.*", "", text).replace("\\\n", " ").splitlines():
        if not entry.strip():
            continue
        requirement, *hashes = entry.split(" --hash=")
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}\s*", each) for each in hashes), requirement
        match = re.fullmatch(r"([A-Za-z0-9._-]+)==([^\s;]+)\s*(;.*)?", requirement.strip())
        assert match is not None, f"not one version of a package: {requirement}"
        found[str(canonicalize_name(match[1]))] = match[2], len(hashes)
    return found


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def wanted(*extras: str) -> list[Requirement]:
    """What Samovar requires; with the extras, and those that these name."""
    found = [Requirement(line) for line in PROJECT["dependencies"]]
    for extra in extras:
        lines = [Requirement(line) for line in PROJECT["optional-dependencies"][extra]]
        found += [one for one in lines if one.name != "samovar"]
        found += [more for one in lines if one.name == "samovar" for more in wanted(*one.extras)]
    return found


@pytest.mark.parametrize("name", ["samovar", "torch", "model", "extras", "dev", "kernels", "docs"])
def test_every_package_has_a_hash(name: str) -> None:
    packages = locked(name)
    assert packages
    assert [package for package, (_, hashes) in packages.items() if not hashes] == []


def test_the_locks_are_those_of_pyproject() -> None:
    """Else: `make lock`."""
    packages = locked("torch")
    for name, extras in (("samovar", ()), ("extras", tuple(EXTRAS.values())), ("dev", ("dev",))):
        packages |= locked(name)
        for requirement in wanted(*extras):
            version, _ = packages[canonicalize_name(requirement.name)]
            assert requirement.specifier.contains(version), f"{requirement}: {version} is locked; `make lock`"


def test_a_package_is_locked_for_serving_for_an_extra_or_for_developers() -> None:
    """And what an extra brings is not installed to serve."""
    served, extras, rest = locked("samovar"), locked("extras"), locked("dev")
    assert (served.keys() & extras.keys(), (served | extras).keys() & rest.keys()) == (set(), set())
    assert set(EXTRAS) <= extras.keys()
    assert set(PROJECT["optional-dependencies"]) == {*EXTRAS.values(), "kernels", "dev"}
    assert {requirement.name for requirement in wanted("dev")} >= set(EXTRAS), "[dev] has every extra"


def test_what_both_locks_have_is_the_same_version() -> None:
    second = locked("torch")
    for first in (locked("samovar"), locked("kernels")):
        assert {
            name: (first[name], second[name]) for name in first.keys() & second if first[name] != second[name]
        } == {}


def test_a_build_of_torch_without_cuda_brings_no_cuda() -> None:
    """A machine's own build of torch takes the place of torch.lock: the rest must do without that."""
    assert [
        name
        for name in {**locked("samovar"), **locked("extras"), **locked("dev")}
        if name.startswith(ONLY_TORCH)
    ] == []
    assert locked("torch")["torch"][0] == next(str(r.specifier)[2:] for r in wanted() if r.name == "torch")


def test_the_default_model_is_the_one_that_the_service_names() -> None:
    (package,) = locked("model").items()
    assert f"{package[0]}=={package[1][0]}" in model_store.INSTALL


def test_setup_installs_by_hash() -> None:
    text = (ROOT / "Makefile").read_text()
    recipe = text[text.index("define install") : text.index("\nendef")]
    assert "LOCKED := --no-compile --no-deps --require-hashes\n" in text
    assert "SERVED := -r locks/samovar.lock -r locks/model.lock\n" in text
    assert re.findall(r"call install,(.*)\)\n", text) == [
        "$(SERVED) -r locks/extras.lock -r locks/dev.lock",
        "$(SERVED)",
    ]
    installs = re.findall(r"pip install (.*)", recipe)
    by_hash = [line for line in installs if line.startswith("$(LOCKED) ")]
    assert [line.rstrip("; \\") for line in by_hash] == ["$(LOCKED) $(1)", "$(LOCKED) -r locks/torch.lock"]
    rest = [line for line in installs if line not in by_hash and "--dry-run" not in line]
    assert sorted(line.split()[0] for line in rest) == ["--no-compile", "--no-deps"], rest
    assert any('"$(TORCH)"' in line for line in rest), "a machine's own build: by its version"
    assert any("--no-build-isolation -e ." in line for line in rest), "built with what is locked"


@pytest.mark.parametrize(
    ("has_all", "locks"),
    [(False, ["samovar", "model", "torch"]), (True, ["samovar", "model", "extras", "dev", "torch"])],
)
def test_make_run_installs_what_serving_needs_only(tmp_path: Path, has_all: bool, locks: list[str]) -> None:
    """And keeps an environment with everything up to date as that."""
    if has_all:
        stamp = tmp_path / ".samovar-installed"
        stamp.touch()
        os.utime(stamp, (0, 0))  # older than the locks
    words = ["make", "-n", f"VENV={tmp_path}", "run"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    assert re.findall(r"-r locks/([a-z]+)\.lock", done.stdout) == locks
