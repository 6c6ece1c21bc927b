"""What the predictor has learned, in a file: written whole or not at all, believed only if all of it is sane.

Weights, standardisation, counts, whether the model was trusted, and the latest turns (`features.py`'s
numbers of each) that it goes on learning from; no session, no text. The payload is safetensors (arrays,
nothing that could run) behind a magic word, a version and a SHA-256. Of a file that is not believed the
reason is told, and the predictor stays as it was: cold at a start.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import struct
from contextlib import suppress
from pathlib import Path
from typing import Final

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from cache_tiers import files
from cache_tiers.files import Deadline, Syscalls
from cache_tiers.predictor import Predictor, State
from cache_tiers.survival import EDGES_S
from cache_tiers.tier import BadRecord, TierError

VERSION: Final = 3
"""Of the layout and of what the numbers mean: features, their order, kinds of turns, the network's shape."""
VERSION_WITHOUT_TURNS: Final = 2
"""It is still read."""

FILE_NAME: Final = "predictor.bin"
FILE_BYTES_MAX: Final = 16 * 1024 * 1024
_MAGIC: Final = b"smvrpred"
_HEADER: Final = struct.Struct("<8sIQ32s")
_TEMPORARY: Final = ".tmp"


class BadState(Exception):
    """Not what a predictor of this version has learned; says why."""


def encode(predictor: Predictor) -> bytes:
    """What it has learned. Quick: the writing may then be another thread's."""
    state = {**predictor.state(), "edges_s": EDGES_S}
    payload = save_tensors({name: np.ascontiguousarray(array) for name, array in state.items()})
    return _HEADER.pack(_MAGIC, VERSION, len(payload), hashlib.sha256(payload).digest()) + payload


def decode(data: bytes) -> State:
    """What `encode` was given, shapes and numbers unchecked. Raises `BadState`."""
    if len(data) < _HEADER.size:
        raise BadState(f"truncated: {len(data)} bytes")
    magic, version, length, digest = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise BadState("another kind of file")
    if version not in (VERSION, VERSION_WITHOUT_TURNS):
        raise BadState(f"version {version}, ours is {VERSION}")
    payload = data[_HEADER.size :]
    if len(payload) != length:
        raise BadState(f"truncated or too long: {len(payload)} bytes, not {length}")
    if hashlib.sha256(payload).digest() != digest:
        raise BadState("the checksum is wrong")
    try:
        state: State = load_tensors(payload)
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise BadState(f"no tensors: {error}") from error
    edges_s = state.pop("edges_s", None)
    if edges_s is None or not np.array_equal(edges_s, EDGES_S):
        raise BadState("other bins of idle time")
    return state


def write(path: Path, data: bytes, calls: Syscalls | None = None) -> None:
    """Puts `data` at `path`; a crash at any point leaves the old file or the new one. Raises `OSError`.

    Makes no directory: one that was removed is the nvme tier's, which is to notice that it is gone.
    """
    calls = calls or Syscalls()
    temporary = f"{path}.{secrets.token_hex(4)}{_TEMPORARY}"
    deadline = Deadline(calls, float("inf"))
    try:
        fd = files.open_new(calls, temporary, align=1)
        try:
            files.write_all(calls, fd, np.frombuffer(data, dtype=np.uint8), align=1, deadline=deadline)
            calls.fsync(fd)
        finally:
            calls.close(fd)
        calls.rename(temporary, str(path))
    except BaseException:
        with suppress(OSError):
            calls.unlink(temporary)
        raise
    files.sync_dir(calls, str(path.parent))


def save(path: Path, predictor: Predictor, calls: Syscalls | None = None) -> None:
    """`encode` and `write`. Raises `OSError`."""
    write(path, encode(predictor), calls)


def restore(path: Path, predictor: Predictor, calls: Syscalls | None = None) -> str | None:
    """None: it goes on with what the file says. Else why not; the predictor is then unchanged.

    For a start: what a write that was cut off has left beside the file is removed.
    """
    calls = calls or Syscalls()
    with suppress(OSError):  # it only takes room
        _sweep(path, calls)
    try:
        predictor.restore(decode(_read(path, calls)))
    except FileNotFoundError:
        return "no file"
    except (OSError, BadRecord, TierError) as error:
        return f"cannot be read: {error}"
    except (BadState, ValueError) as error:
        return str(error)
    return None


def _read(path: Path, calls: Syscalls) -> bytes:
    fd = files.open_old(calls, str(path), align=1)
    try:
        nbytes = calls.fstat(fd).st_size
        if nbytes > FILE_BYTES_MAX:
            raise BadState(f"too large: {nbytes} bytes")
        return files.read_range(
            calls, fd, 0, nbytes, align=1, deadline=Deadline(calls, float("inf"))
        ).tobytes()
    finally:
        calls.close(fd)


def _sweep(path: Path, calls: Syscalls) -> None:
    for name in calls.listdir(str(path.parent)):
        if name.startswith(f"{path.name}.") and name.endswith(_TEMPORARY):
            calls.unlink(os.path.join(path.parent, name))
