"""Compiles the native step for this machine, once: a shared library in a folder of the user's cache.

The library's name has digests of the sources, the flags and the compiler. What prevents it is one sentence,
and no reason not to serve: there are steps that need no compiler.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Listing
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from replicas.native.native_step import ERROR_CHARS_MAX, NotNative

SOURCES = ("step.cpp", "attention.h", "weights.h", "crew.h", "exponential.h", "kernels.h")
COMPILERS = ("c++", "g++", "clang++")
NUMBERS = {torch.bfloat16: "bf16", torch.float32: "float"}
FLAGS = (
    *("-std=c++20", "-O3", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden"),
    # No multiplication is fused with an addition unless the source says so: bits must not depend on how a
    # loop was compiled.
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
)
INT8_FLAGS = ("-DSAMOVAR_WEIGHT=int8_t",)
"""For a library whose weights are rounded to int8."""
PAIR_FLAGS = ("-DSAMOVAR_WEIGHT=pair",)
"""For a library that multiplies in bfloat16, pairs of weights with pairs of activations."""
FAILED_KEEP_S = 600.0
"""A compiler that has failed is not tried again before: those who waited for it would start too late."""
LIBRARIES_MAX = 32
"""In a folder: of two dtypes, of some compilers and versions, and what tests plant."""


@dataclass(frozen=True, slots=True)
class Variant:
    """Instructions that a library may use. `name`: as the start table says it."""

    name: str
    flags: tuple[str, ...]


AVX512 = Variant(
    "AVX-512",
    ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mprefer-vector-width=512"),
)
AVX512_BF16 = Variant("AVX512-BF16", (*AVX512.flags, "-mavx512bf16"))
"""With the CPU's dot products, for libraries of `PAIR_FLAGS`; other variants compute the same, slowly."""
AVX2 = Variant("AVX2", ("-mavx2", "-mfma"))
NEON = Variant("NEON", ())
PLAIN = Variant("plain C++", ())
"""Without vectors, for comparison: the same bits, slowly."""


def variant_here() -> Variant:
    """Return the widest variant that this CPU has and torch uses. Raises `NotNative`."""
    return variant_of(torch.backends.cpu.get_cpu_capability(), platform.machine())


def pair_variant_here() -> Variant:
    """Return the variant that multiplies pairs as fast as this CPU can. Raises `NotNative`."""
    if variant_here() != AVX512 or not torch.cpu.get_capabilities().get("avx512_bf16"):
        raise NotNative("this CPU has no dot products in bfloat16 (AVX512-BF16)")
    return AVX512_BF16


def variant_of(capability: str, machine: str) -> Variant:
    """Return the variant of torch's name for what a CPU can do. Raises `NotNative`."""
    if capability in ("AVX512", "AVX2"):
        return AVX512 if capability == "AVX512" else AVX2
    if machine in ("aarch64", "arm64"):
        return NEON
    raise NotNative(f"it needs AVX2, AVX-512 or NEON, and this CPU ({machine}) is {capability}")


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C++ compiler: how it is called, and what it says of itself."""

    command: tuple[str, ...]
    version: str


def find_compiler(environment: Mapping[str, str], *, wait_s: float) -> Compiler:
    """Return $CXX, or the first compiler on the PATH. Raises `NotNative`."""
    path, named = environment.get("PATH", os.defpath), environment.get("CXX")
    if named:
        commands = [tuple(shlex.split(named))]
    else:
        commands = [(found,) for name in COMPILERS if (found := shutil.which(name, path=path))]
    if not commands:
        raise NotNative(
            f"there is no C++ compiler on the PATH ({', '.join(COMPILERS)}); install one (Debian: g++)"
        )
    command = commands[0]
    try:
        said = _run((*command, "--version"), environment, wait_s)
    except (OSError, subprocess.SubprocessError) as error:
        raise NotNative(f"the compiler {shlex.join(command)} does not run: {_in_short(error)}") from error
    return Compiler(command, said)


def build_library(
    folder: Path,
    variant: Variant,
    dtype: torch.dtype,
    *,
    wait_s: float,
    environment: Mapping[str, str] = os.environ,
    more_flags: Listing[str] = (),
) -> Path:
    """Return the compiled library, from the folder if it is there. Raises `NotNative`.

    `dtype`: of the weights, and of K and V. `wait_s`: what one call of the compiler may take. Of processes
    that want it at the same time one compiles, and the others wait for it; if it fails, they fail, too, for
    `FAILED_KEEP_S`. Where nothing can be compiled any more, a library that was compiled from the same sources
    before serves.
    """
    if dtype not in NUMBERS:
        raise NotNative(f"it computes bfloat16 and float32, and the weights are {dtype}")
    here = Path(__file__).parent
    flags = (*FLAGS, *variant.flags, f"-DSAMOVAR_NUMBER={NUMBERS[dtype]}", *more_flags)
    sources = _digest(*flags, *((here / name).read_text() for name in SOURCES))
    try:
        _prepare(folder)
        try:
            library = _compiled(folder, sources, (*flags, str(here / SOURCES[0])), environment, wait_s)
        except (NotNative, OSError):
            there = sorted(folder.glob(f"step-{sources}-*.so"))
            if not there:
                raise
            library = there[0]
        _refuse_foreign(library)
    except OSError as error:
        raise NotNative(f"its library cannot be kept in {folder}: {_in_short(error)}") from error
    return library


def _compiled(
    folder: Path, sources: str, arguments: Listing[str], environment: Mapping[str, str], wait_s: float
) -> Path:
    """Return the library that the compiler here makes, which it may have made before."""
    compiler = find_compiler(environment, wait_s=wait_s)
    library = folder / f"step-{sources}-{_digest(*compiler.command, compiler.version)}.so"
    if library.exists():
        return library
    with _locked(library.with_suffix(".lock")):
        if library.exists():
            return library
        note = library.with_suffix(".failed")
        if note.exists() and time.time() - note.stat().st_mtime < FAILED_KEEP_S:
            raise NotNative(note.read_text(encoding="utf-8"))
        try:
            _compile((*compiler.command, *arguments), library, environment, wait_s)
        except NotNative as why:
            note.write_text(str(why), encoding="utf-8")
            raise
        note.unlink(missing_ok=True)
        _forget_old(folder)
    return library


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _forget_old(folder: Path) -> None:
    """Remove libraries of earlier sources and compilers; who has loaded one keeps it."""
    by_age = sorted(folder.glob("step-*.so"), key=lambda path: path.stat().st_mtime_ns)
    for path in by_age[:-LIBRARIES_MAX]:
        path.unlink(missing_ok=True)


def _prepare(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _refuse_foreign(folder)


def _refuse_foreign(path: Path) -> None:
    """Refuse what others could have written: it is loaded as code. Raises `NotNative`."""
    found = path.stat()
    if found.st_uid not in (0, os.geteuid()) or found.st_mode & 0o022:
        raise NotNative(f"{path} may be written by others; remove it, or chmod go-w it")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # its holder ends after `wait_s`, or with its process
        yield
    path.unlink(missing_ok=True)


def _compile(command: tuple[str, ...], library: Path, environment: Mapping[str, str], wait_s: float) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent, prefix="build-") as scratch:
        draft = Path(scratch) / library.name
        try:
            _run((*command, "-o", str(draft)), environment, wait_s)
        except subprocess.SubprocessError as error:
            raise NotNative(f"{shlex.join(command[:1])} does not compile it: {_in_short(error)}") from error
        draft.chmod(0o755)  # beforehand by root, perhaps, for whom serves
        with draft.open("rb") as written:
            os.fsync(written.fileno())  # a name without its bytes would keep every start from compiling
        draft.replace(library)


def _run(command: tuple[str, ...], environment: Mapping[str, str], wait_s: float) -> str:
    """Run a command to its end; what takes longer than `wait_s` is killed, and its children with it."""
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=dict(environment),
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            out, said = process.communicate(timeout=wait_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, out, said)
    return out


def _in_short(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        lines = [line for line in error.stderr.splitlines() if "error" in line] or error.stderr.splitlines()
        return (lines[0] if lines else f"it ended with status {error.returncode}")[:ERROR_CHARS_MAX]
    if isinstance(error, subprocess.TimeoutExpired):
        return f"it took longer than {error.timeout:.0f} s (engine.native_build_s_max)"
    return str(error)[:ERROR_CHARS_MAX]
