"""Compiles C++ for this machine, once: a shared library in a folder of the user's cache.

The library's name has digests of the sources, the flags and the compiler. What prevents it is one sentence,
and no reason not to serve: who wants a library has another way without it. A wheel for one kind of machine
has them compiled (`setup.py`, which reads this without torch): these serve, and no compiler is asked.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from samovar.configs.imports import is_ours, is_private

REFUSED = ".refused"
COMPILERS = ("c++", "g++", "clang++")
FAILED_KEEP_S = 600.0
"""A compiler that has failed is not tried again before: those who waited for it would start too late."""
LIBRARIES_MAX = 32
"""Of a name in a folder: of two dtypes, of some compilers and versions, and what tests plant."""
ERROR_CHARS_MAX = 300
SHIPPED = Path(__file__).with_name("shipped")
"""Where a wheel has libraries, if it has any."""


class NotCompiled(Exception):
    """A library that there is not on this machine; the message is a sentence why."""


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C++ compiler: how it is called, and what it says of itself."""

    command: tuple[str, ...]
    version: str


@dataclass(frozen=True, slots=True)
class LibrarySource:
    """What a library is made of. `name`: how its file begins; `files`: the first one includes the others.

    `same_bits`: it computes the same whatever compiled it: one that is there serves, no compiler is asked.
    """

    name: str
    files: tuple[Path, ...]
    flags: tuple[str, ...]
    same_bits: bool = False

    @property
    def digest(self) -> str:
        machine = (platform.machine(),) if self.same_bits else ()  # a home may be that of several
        return _digest(*self.flags, *(path.read_text() for path in self.files), *machine)


PACKAGES = Path(__file__).resolve().parents[1]
STEP = PACKAGES / "replicas" / "native"
STEP_FILES = ("step.cpp", "attention.h", "weights.h", "crew.h", "exponential.h", "kernels.h")
NUMBERS = {"bfloat16": "bf16", "float32": "float"}
"""Of the weights, by torch's names."""
STEP_FLAGS = (
    *("-std=c++20", "-O3", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden"),
    # No multiplication is fused with an addition unless the source says so: bits must not depend on how a
    # loop was compiled.
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
)
INT8_FLAGS = ("-DSAMOVAR_WEIGHT=int8_t",)
"""For a library whose weights are rounded to int8."""
PAIR_FLAGS = ("-DSAMOVAR_WEIGHT=pair",)
"""For a library that multiplies in bfloat16, pairs of weights with pairs of activations."""


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

SUMS = LibrarySource(
    "sums",
    (PACKAGES / "cache_tiers" / "blocks" / "layer_sums.cpp",),
    ("-std=c++20", "-O3", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden"),
    same_bits=True,
)


def step_source(variant: Variant, number: str, more_flags: Sequence[str] = ()) -> LibrarySource:
    """Return what the native step is made of. `number`: torch's name of the weights' dtype."""
    flags = (*STEP_FLAGS, *variant.flags, f"-DSAMOVAR_NUMBER={NUMBERS[number]}", *more_flags)
    return LibrarySource("step", tuple(STEP / name for name in STEP_FILES), flags)


def shipped_sources(machine: str) -> Iterator[LibrarySource]:
    """Yield what a wheel for a machine has compiled: all that may be chosen at a start there."""
    is_arm = machine in ("aarch64", "arm64")
    for variant in (NEON,) if is_arm else (AVX2, AVX512):
        for number in NUMBERS:
            for flags in ((), INT8_FLAGS):
                yield step_source(variant, number, flags)
    if not is_arm:
        yield step_source(AVX512_BF16, "bfloat16", PAIR_FLAGS)
    yield SUMS


def find_compiler(environment: Mapping[str, str], *, wait_s: float) -> Compiler:
    """Return $CXX, or the first compiler on the PATH. Raises `NotCompiled`."""
    path, named = environment.get("PATH", os.defpath), environment.get("CXX")
    if named:
        commands = [tuple(shlex.split(named))]
    else:
        commands = [(found,) for name in COMPILERS if (found := shutil.which(name, path=path))]
    if not commands:
        raise NotCompiled(
            f"there is no C++ compiler on the PATH ({', '.join(COMPILERS)}); install one (Debian: g++)"
        )
    command = commands[0]
    try:
        said = _run((*command, "--version"), environment, wait_s)
    except (OSError, subprocess.SubprocessError) as error:
        raise NotCompiled(f"the compiler {shlex.join(command)} does not run: {_in_short(error)}") from error
    return Compiler(command, said)


def compiled_library(
    source: LibrarySource, folder: Path, *, wait_s: float, environment: Mapping[str, str] = os.environ
) -> Path:
    """Return the compiled library, from the folder if it is there. Raises `NotCompiled`.

    `wait_s`: what one call of the compiler may take. Of processes that want it at the same time one
    compiles, and the others wait for it; if it fails, they fail, too, for `FAILED_KEEP_S`. Where nothing can
    be compiled any more, a library that was compiled from the same sources before serves. One that came with
    the wheel serves before all others: so do all machines with that wheel compute the same.
    """
    begin = f"{source.name}-{source.digest}-"
    try:
        _prepare(folder)
        there = _newest_first(folder, begin)
        if (shipped := _shipped(folder, begin)) is not None:
            library = shipped
        elif source.same_bits and there:
            library = there[0]
        else:
            try:
                library = _compiled(source, folder, begin, environment, wait_s)
            except (NotCompiled, OSError):
                if not there:
                    raise
                library = there[0]
    except OSError as error:
        raise NotCompiled(f"its library cannot be kept in {folder}: {_in_short(error)}") from error
    return library


def load_library(path: Path) -> ctypes.CDLL:
    """Load a compiled library into this process. Raises `NotCompiled`.

    The file that is checked is the one that is loaded: it is opened once, whatever is put in its place.
    """
    try:
        if not is_private(path.parent):
            raise NotCompiled(_FOREIGN.format(path.parent))
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise NotCompiled(f"its library cannot be opened: {_in_short(error)}") from error
    try:
        return _LOADED.load(descriptor)
    except NotCompiled as why:
        raise NotCompiled(f"{path} {why}") from why
    except OSError as error:
        # Torn, or made for another C library: it would keep every later start from compiling its own.
        path.unlink(missing_ok=True)
        if (SHIPPED / path.name).exists():
            # Else it would come again, instead of one that is compiled here.
            path.with_suffix(REFUSED).touch()
        raise NotCompiled(f"its library does not load: {str(error)[:ERROR_CHARS_MAX]}") from error


class _Libraries:
    """The libraries of this process, by file.

    Each stays open: the loader knows it by the name of its descriptor, which must never be another file's.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loaded: dict[tuple[int, int], ctypes.CDLL] = {}

    def load(self, descriptor: int) -> ctypes.CDLL:
        """Load an open file, or close it if it is loaded. Raises `OSError`, and `NotCompiled` if foreign."""
        found, keeps = os.fstat(descriptor), False
        try:
            if not stat.S_ISREG(found.st_mode) or not is_ours(found):
                raise NotCompiled(_FOREIGN.format("it"))
            with self._lock:
                library = self._loaded.get((found.st_dev, found.st_ino))
                if library is None:
                    library = ctypes.CDLL(f"/proc/self/fd/{descriptor}")
                    self._loaded[found.st_dev, found.st_ino] = library
                    keeps = True
                return library
        finally:
            if not keeps:
                os.close(descriptor)


_LOADED = _Libraries()
_FOREIGN = "{} may be written by others, or a folder above it; remove it, or chmod go-w them"


def _compiled(
    source: LibrarySource, folder: Path, begin: str, environment: Mapping[str, str], wait_s: float
) -> Path:
    """Return the library that the compiler here makes, which it may have made before."""
    compiler = find_compiler(environment, wait_s=wait_s)
    library = folder / f"{begin}{_digest(*compiler.command, compiler.version)}.so"
    if library.exists():
        return library
    with _locked(library.with_suffix(".lock")):
        if library.exists():
            return library
        note = library.with_suffix(".failed")
        if note.exists() and time.time() - note.stat().st_mtime < FAILED_KEEP_S:
            raise NotCompiled(note.read_text(encoding="utf-8"))
        try:
            _compile((*compiler.command, *source.flags, str(source.files[0])), library, environment, wait_s)
        except NotCompiled as why:
            note.write_text(str(why), encoding="utf-8")
            raise
        note.unlink(missing_ok=True)
        for path in _newest_first(folder, f"{source.name}-")[LIBRARIES_MAX:]:
            path.unlink(missing_ok=True)  # of earlier sources and compilers; who has loaded it keeps it
    return library


def _shipped(folder: Path, begin: str) -> Path | None:
    """Return the folder's copy of a library that came with the wheel, but for one that did not load."""
    for found in sorted(SHIPPED.glob(f"{begin}*.so")):
        copy = folder / found.name
        if copy.with_suffix(REFUSED).exists():
            continue
        if not copy.exists():
            with tempfile.TemporaryDirectory(dir=folder, prefix="copy-") as scratch:
                _put(Path(shutil.copyfile(found, Path(scratch) / found.name)), copy)
        return copy
    return None


def _newest_first(folder: Path, begin: str) -> list[Path]:
    found = folder.glob(f"{begin}*.so")
    return sorted(found, key=lambda path: path.stat().st_mtime_ns, reverse=True)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _prepare(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_private(folder):
        raise NotCompiled(_FOREIGN.format(folder))


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
            raise NotCompiled(f"{shlex.join(command[:1])} does not compile it: {_in_short(error)}") from error
        _put(draft, library)


def _put(draft: Path, library: Path) -> None:
    draft.chmod(0o755)  # beforehand by root, perhaps, for whom serves
    with draft.open("rb") as written:
        os.fsync(written.fileno())  # a name without its bytes would keep every start from compiling
    draft.replace(library)


def _run(command: Sequence[str], environment: Mapping[str, str], wait_s: float) -> str:
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
