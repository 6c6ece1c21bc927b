"""Keeps what a start has measured, so that the next start of the same model on the same machine is quick.

What a measurement depends on is part of the file's name: the model, torch, the CPU or GPU and how it is used,
and the code that computes. If any of these differs, the start measures again. Of replicas that start at the
same time one measures, undisturbed, and the others wait for it.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import time
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError

from samovar.configs.atomic_file import atomic_write
from samovar.configs.json_text import parse_json

logger = logging.getLogger(__name__)

T = TypeVar("T")

LIBRARY_VARIABLES = ("ATEN_", "DNNL_", "KMP_", "MKL_", "OMP_", "ONEDNN_", "OPENBLAS_")
"""Beginnings of the environment variables that choose how the math libraries compute."""
CODE = (
    "start/checkpoint.py",
    "forward",
    "kv",
    "start/measure.py",
    "model",
    "native",
    "offload",
    "ranks",
    "start/step_choice.py",
    "engine/audit.py",
)
"""What computes, in this package: another version of it is measured again."""
_VALUES: TypeAdapter[dict[str, Any]] = TypeAdapter(
    dict[str, Any], config=ConfigDict(ser_json_inf_nan="strings")
)
"""JSON knows no infinity; as a string it is a number again when it is read."""
CODE_FILES = ("*.py", "*.cpp", "*.h")


class NotMeasured(Exception):
    """What could not be measured this time; the message says why."""


class MeasurementCache:
    """The measurements of one model on one machine, in one JSON file; the values are plain data.

    `folder`: None keeps nothing. `keep_s`: older measurements are taken again. `measures`: False takes what
    is kept and measures nothing. A file that cannot be read or written costs the measurement, nothing else.
    """

    def __init__(
        self,
        folder: Path | None,
        keep_s: float,
        *depends_on: str,
        measures: bool = True,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._path: Path | None = None
        self._values: dict[str, Any] = {}
        self._is_new = False
        self._keep_s = keep_s
        self._lock: BinaryIO | None = None
        self._measures = measures
        self._wall_clock = wall_clock
        if folder is not None and keep_s > 0:
            digest = hashlib.sha256("\0".join((*depends_on, *_machine(), _code())).encode()).hexdigest()
            self._path = folder / f"{digest[:32]}.json"
            self._values = self._read(self._path)

    def get(self, name: str, kind: TypeAdapter[T], measure: Callable[[], T], unmeasured: T) -> T:
        """Return the kept value of `name`, or measure it now; `unmeasured` if nothing shall be measured.

        `measure` may raise `NotMeasured`: that is not kept, so that the next start tries again.
        Blocks while another process measures the same, until it has saved or ended; `server.start_timeout_s`
        bounds the start as a whole.
        """
        if name not in self._values and self._measures:
            self._wait_for_others()
        if name in self._values:
            try:
                return kind.validate_python(self._values[name])
            except ValidationError as error:
                logger.warning("%s: %s is measured again: %s", self._path, name, error)
        if not self._measures:
            return unmeasured
        try:
            value = measure()
        except NotMeasured as why:
            logger.info("%s: not measured: %s", name, why)
            return unmeasured
        self._values[name] = kind.dump_python(value, mode="json")
        self._is_new = True
        return value

    def save(self) -> None:
        """Write what was measured since, if anything, and let those who wait for it go on."""
        try:
            self._write()
        finally:
            if self._lock is not None:
                self._lock.close()
                self._lock = None

    def _write(self) -> None:
        if self._path is None or not self._is_new:
            return
        self._values.setdefault("measured_unix_s", self._wall_clock())
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(self._path, _VALUES.dump_json(self._values), durable=False)
        except OSError as error:
            logger.warning("the measurements of this start could not be saved: %s", error)

    def _wait_for_others(self) -> None:
        """Take the lock, which ends with its process, and read what its last holder has saved."""
        if self._path is None or self._lock is not None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = self._path.with_suffix(".lock").open("ab")
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        except OSError as error:
            logger.warning("measured beside other replicas that start, perhaps: %s", error)
        self._values = self._read(self._path) | self._values

    def _read(self, path: Path) -> dict[str, Any]:
        try:
            values = parse_json(path.read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            logger.warning("earlier measurements cannot be read and are repeated: %s: %s", path, error)
            return {}
        measured_unix_s = values.get("measured_unix_s") if isinstance(values, dict) else None
        if not isinstance(measured_unix_s, float):
            return {}
        return dict(values) if 0 <= self._wall_clock() - measured_unix_s < self._keep_s else {}


def _machine() -> tuple[str, ...]:
    """Return what the bits and the speed of a step depend on besides the model and the code."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    libraries = (
        f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(LIBRARY_VARIABLES)
    )
    return (
        _cpu(),
        str(os.cpu_count()),
        device,
        torch.backends.cpu.get_cpu_capability(),
        torch.__version__,
        _transformers(),
        *libraries,
    )


@cache
def _transformers() -> str:
    """Return its version: finding and parsing its metadata takes ten milliseconds."""
    return version("transformers")


@cache
def _cpu() -> str:
    """Return the CPU's name and flags as Linux states them; empty elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return "\n".join(
        dict.fromkeys(line for line in lines if line.startswith(("model name", "flags", "Features")))
    )


@cache
def _code() -> str:
    """Return a digest of the code that computes."""
    package, digest = Path(__file__).parent, hashlib.sha256()
    for name in CODE:
        place = package / name
        for file in (
            sorted(f for kind in CODE_FILES for f in place.glob(kind)) if place.is_dir() else (place,)
        ):
            digest.update(file.read_bytes())
    return digest.hexdigest()
