"""Reads the safetensors files of a model directory: their paths, headers and digest.

Reads headers and bytes; creates no tensor and no model.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samovar.configs.atomic_file import atomic_write
from samovar.configs.json_text import parse_json
from samovar.replicas.messages import ModelRefused

logger = logging.getLogger(__name__)

STAGE = "digest"
"""Of a start, while large weights are hashed."""
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

# Weights in other formats; named in the refusal when they are the only ones.
FOREIGN_WEIGHTS = ("*.bin", "*.gguf", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack")
SERVED_DTYPES = frozenset({"F32", "F16", "BF16", "F64"})

# The safetensors format allows headers up to 100 MB; the length is read before anything can be trusted.
HEADER_BYTES_MAX = 100_000_000
HEADER_LENGTH_BYTES = 8

WHOLE_DIGEST_BYTES_MAX = 512 * 1024 * 1024
"""Weights up to this size are hashed at each start, as one stream: 0.3 s with SHA instructions. Larger ones
are hashed in parts, in threads, and the digest of a file is kept until the file is written to."""
PART_BYTES = 64 * 1024 * 1024
THREADS_MAX = 8
SETTLED_S = 2.0
"""A file that was written less than this before is not kept: it may change once more within one tick of the
file system's clock."""
READ_BYTES = 1024 * 1024

RESAVE = (
    "save it with transformers as safetensors: AutoModelForCausalLM.from_pretrained(...).save_pretrained(DIR)"
)
LFS_POINTER = b"version https://git-lfs"
FETCH_AGAIN = "copy or download the file again"


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a safetensors file. `begin` and `end` are byte offsets into the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class WeightsFile:
    """One safetensors file: its raw header (without length prefix) and its tensors by offset."""

    path: Path
    file_bytes: int
    header: bytes
    tensors: tuple[Tensor, ...]


def read_weights(directory: Path, dtypes: frozenset[str] | None = SERVED_DTYPES) -> tuple[WeightsFile, ...]:
    """Return the files that transformers would load from `directory`, in the order of their names.

    Raises `ModelRefused` if there are none, if one is missing, truncated or no safetensors file, if two files
    hold the same tensor, or if a tensor's dtype is none of `dtypes`; None: any is taken.
    """
    files = tuple(_read_file(path) for path in _weight_paths(directory))
    seen: dict[str, Path] = {}
    for file in files:
        for tensor in file.tensors:
            if tensor.name in seen:
                raise ModelRefused(
                    f"tensor {tensor.name} is both in {seen[tensor.name].name} and in {file.path.name}",
                    RESAVE,
                )
            seen[tensor.name] = file.path
            if dtypes is not None and tensor.dtype not in dtypes:
                raise ModelRefused(
                    f"{tensor.name} of {file.path} is {tensor.dtype}: quantized weights are not served",
                    "use the bfloat16, float16 or float32 weights of this model",
                )
    return files


def weights_digest(
    files: tuple[WeightsFile, ...],
    keep: Path | None = None,
    begin: Callable[[str], object] = lambda stage: None,
) -> bytes:
    """Return the sha256 over name, size, header and every byte of the files.

    `keep`: folder of the digests of large files; None: they are read each time. `begin`: is told the stage
    of the start in which they are.
    """
    digest = hashlib.sha256()
    is_small = sum(file.file_bytes for file in files) <= WHOLE_DIGEST_BYTES_MAX
    digest.update(b"whole" if is_small else b"parts")
    contents = [] if is_small else _large_digests(files, keep, begin)
    for number, file in enumerate(files):
        for part in (file.path.name.encode(), str(file.file_bytes).encode(), file.header):
            digest.update(len(part).to_bytes(8, "little") + part)
        if is_small:
            _update_from(file.path, digest, HEADER_LENGTH_BYTES + len(file.header), file.file_bytes)
        else:
            digest.update(contents[number])
    return digest.digest()


def _large_digests(
    files: tuple[WeightsFile, ...], keep: Path | None, begin: Callable[[str], object]
) -> list[bytes]:
    """Return a digest of each file's bytes: the kept one, or one over the digests of its parts.

    Of processes that start at the same time one reads, and the others wait for what it keeps.
    """
    digests = {file.path: _read_kept(file.path, keep) for file in files}
    if None in digests.values():
        begin(STAGE)
        with _one_reader(keep):
            digests = {file.path: _read_kept(file.path, keep) for file in files}
            missing = [file for file in files if digests[file.path] is None]
            before = [_identity(file.path) for file in missing]
            digests |= _hashed(missing)
            for file, identity in zip(missing, before, strict=True):
                _write_kept(file.path, keep, identity, digests[file.path] or b"")
    return [digests[file.path] or b"" for file in files]


def _hashed(files: Sequence[WeightsFile]) -> dict[Path, bytes]:
    parts = [
        (file.path, first, min(first + PART_BYTES, file.file_bytes))
        for file in files
        for first in range(0, file.file_bytes, PART_BYTES)
    ]
    hashes = {file.path: hashlib.sha256() for file in files}
    threads = min(THREADS_MAX, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads, thread_name_prefix="weights-digest") as pool:
        for (path, _, _), made in zip(parts, pool.map(_part_digest, parts), strict=True):
            hashes[path].update(made)
    return {path: one.digest() for path, one in hashes.items()}


def _part_digest(part: tuple[Path, int, int]) -> bytes:
    path, first, end = part
    digest = hashlib.sha256()
    _update_from(path, digest, first, end)
    return digest.digest()


@contextmanager
def _one_reader(keep: Path | None) -> Iterator[None]:
    """Hold a lock that ends with its process; without a folder that can be written there is none."""
    with ExitStack() as stack:
        if keep is not None:
            try:
                keep.mkdir(parents=True, exist_ok=True)
                lock = stack.enter_context((keep / "weights.lock").open("ab"))
                fcntl.flock(lock, fcntl.LOCK_EX)
            except OSError as error:
                logger.info("weights are hashed beside others, perhaps: %s", error)
        yield


def _identity(path: Path) -> list[int]:
    """Return what changes with every write to a file, and with another one in its place."""
    found = path.stat()
    return [found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def _kept_path(path: Path, keep: Path) -> Path:
    return keep / f"{hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32]}.weights.json"


def _read_kept(path: Path, keep: Path | None) -> bytes | None:
    if keep is None:
        return None
    try:
        kept = parse_json(_kept_path(path, keep).read_bytes())
        if kept["file"] != _identity(path) or kept["part_bytes"] != PART_BYTES:
            return None
        digest = bytes.fromhex(kept["sha256"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("the kept digest of %s cannot be read, and is made again: %s", path, error)
        return None
    return digest if len(digest) == hashlib.sha256().digest_size else None


def _write_kept(path: Path, keep: Path | None, before: list[int], digest: bytes) -> None:
    """Keep the digest of a file that was not written to while it was read, nor just before."""
    written_ns = max(before[-2:])
    if keep is None or before != _identity(path) or time.time_ns() - written_ns < SETTLED_S * 1e9:
        return
    kept = {"path": str(path), "file": before, "part_bytes": PART_BYTES, "sha256": digest.hex()}
    try:
        atomic_write(_kept_path(path, keep), json.dumps(kept).encode(), durable=False)
    except OSError as error:
        logger.warning("the digest of %s could not be kept: %s", path, error)


def _update_from(path: Path, digest: hashlib._Hash, begin: int, end: int) -> None:
    with path.open("rb", buffering=0) as stream:
        stream.seek(begin)
        room = memoryview(bytearray(READ_BYTES))
        left = end - begin
        while left:
            count = stream.readinto(room[: min(READ_BYTES, left)])
            if not count:
                raise ModelRefused(f"{path} became shorter while it was read", FETCH_AGAIN)
            digest.update(room[:count])  # without the GIL
            left -= count


def _weight_paths(directory: Path) -> list[Path]:
    if (directory / SINGLE_FILE).is_file():
        return [directory / SINGLE_FILE]
    if (directory / INDEX_FILE).is_file():
        return _shard_paths(directory / INDEX_FILE)
    unexpected = sorted(path.name for path in directory.glob("*.safetensors"))
    if unexpected:
        raise ModelRefused(
            f"{directory} has {', '.join(unexpected[:3])} but neither {SINGLE_FILE} nor {INDEX_FILE}",
            f"rename a single file to {SINGLE_FILE}, or copy the index that belongs to the shards",
        )
    foreign = sorted(path.name for pattern in FOREIGN_WEIGHTS for path in directory.glob(pattern))
    if foreign:
        raise ModelRefused(
            f"{directory} has no *.safetensors weights, only {', '.join(foreign[:3])}",
            f"convert it: {RESAVE}",
        )
    raise ModelRefused(
        f"{directory} has no *.safetensors weights",
        "copy the model's weights there, or point --model elsewhere",
    )


def _shard_paths(index_path: Path) -> list[Path]:
    try:
        weight_map = parse_json(index_path.read_bytes())["weight_map"]
        names = sorted({str(name) for name in weight_map.values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelRefused(
            f"{index_path} is not a shard index with a weight_map ({error!r})", FETCH_AGAIN
        ) from error
    if not names:
        raise ModelRefused(f"{index_path} names no shards", FETCH_AGAIN)
    for name in names:
        if Path(name).name != name:
            raise ModelRefused(f"{index_path} names the shard {name!r}, which is no plain file name", RESAVE)
    missing = [name for name in names if not (index_path.parent / name).is_file()]
    if missing:
        raise ModelRefused(
            f"{index_path} names {len(names)} shards, of which {len(missing)} are missing: "
            + ", ".join(missing[:3]),
            "copy or download the missing shards",
        )
    return [index_path.parent / name for name in names]


def _read_file(path: Path) -> WeightsFile:
    file_bytes = path.stat().st_size
    with path.open("rb") as stream:
        prefix = stream.read(HEADER_LENGTH_BYTES)
        header_bytes = int.from_bytes(prefix, "little")
        if len(prefix) < HEADER_LENGTH_BYTES or header_bytes > HEADER_BYTES_MAX:
            raise ModelRefused(
                f"{path} does not begin like a safetensors file{_pointer_hint(path)}", FETCH_AGAIN
            )
        header = stream.read(header_bytes)
    if len(header) < header_bytes:
        raise ModelRefused(
            f"{path} is truncated: its header should have {header_bytes} bytes, the file has {file_bytes}",
            FETCH_AGAIN,
        )
    data_begin = HEADER_LENGTH_BYTES + header_bytes
    try:
        entries = parse_json(header)
        tensors = [
            _tensor(name, entry, data_begin) for name, entry in entries.items() if name != "__metadata__"
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelRefused(f"{path} has a damaged safetensors header ({error!r})", FETCH_AGAIN) from error
    expected_bytes = max((tensor.end for tensor in tensors), default=data_begin)
    if file_bytes != expected_bytes:
        what = "truncated" if file_bytes < expected_bytes else "longer than its header says"
        raise ModelRefused(
            f"{path} is {what}: the header asks for {expected_bytes} bytes, the file has {file_bytes}",
            FETCH_AGAIN,
        )
    tensors.sort(key=lambda tensor: (tensor.begin, tensor.name))
    return WeightsFile(path, file_bytes, header, tuple(tensors))


def _tensor(name: str, entry: dict[str, Any], data_begin: int) -> Tensor:
    begin, end = (int(offset) for offset in entry["data_offsets"])
    if not 0 <= begin <= end:
        raise ValueError(f"offsets [{begin}, {end}] of {name}")
    shape = tuple(int(size) for size in entry["shape"])
    return Tensor(name, str(entry["dtype"]), shape, data_begin + begin, data_begin + end)


def _pointer_hint(path: Path) -> str:
    """Return a hint if the file is a git-lfs pointer, which clones without LFS have instead of weights."""
    with path.open("rb") as stream:
        is_pointer = stream.read(len(LFS_POINTER)) == LFS_POINTER
    return " (it is a git-lfs pointer: run `git lfs pull`)" if is_pointer else ""
