"""Reads the safetensors files of a model directory: their paths, headers and digest.

Reads headers and bytes; creates no tensor and no model.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from configs.json_text import parse_json
from replicas.messages import ModelRefused

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

# Weights in other formats; named in the refusal when they are the only ones.
FOREIGN_WEIGHTS = ("*.bin", "*.gguf", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack")
SERVED_DTYPES = frozenset({"F32", "F16", "BF16", "F64"})

# The safetensors format allows headers up to 100 MB; the length is read before anything can be trusted.
HEADER_BYTES_MAX = 100_000_000
HEADER_LENGTH_BYTES = 8

# Weights up to this size are hashed whole (0.3 s per 512 MiB with SHA instructions). Beyond it, hashing would
# take as long as loading, so only windows are hashed: WINDOWS_PER_TENSOR windows, spread over *every* tensor,
# first and last bytes included. Any training step, merge or quantisation changes practically every value of
# the tensors it touches, so a window contains a change; a manual edit of a few values between two windows of
# a large model is the one change that this fingerprint may miss.
WHOLE_DIGEST_BYTES_MAX = 512 * 1024 * 1024
WINDOWS_PER_TENSOR = 3
WINDOW_BYTES = 64 * 1024
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


def read_weights(directory: Path) -> tuple[WeightsFile, ...]:
    """Return the files that transformers would load from `directory`, in the order of their names.

    Raises `ModelRefused` if there are none, if one is missing, truncated or no safetensors file, if two files
    hold the same tensor, or if a tensor has a dtype that is not a plain float.
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
            if tensor.dtype not in SERVED_DTYPES:
                raise ModelRefused(
                    f"{tensor.name} of {file.path} is {tensor.dtype}: quantized weights are not served",
                    "use the bfloat16, float16 or float32 weights of this model",
                )
    return files


def weights_digest(files: tuple[WeightsFile, ...]) -> bytes:
    """Return the sha256 over name, size, header and content of the files (see WHOLE_DIGEST_BYTES_MAX)."""
    digest = hashlib.sha256()
    whole = is_hashed_whole(files)
    digest.update(b"whole" if whole else b"windows")
    for file in files:
        for part in (file.path.name.encode(), str(file.file_bytes).encode(), file.header):
            digest.update(len(part).to_bytes(8, "little") + part)
        with file.path.open("rb") as stream:
            data_begin = HEADER_LENGTH_BYTES + len(file.header)
            spans = [(data_begin, file.file_bytes)] if whole else _windows(file)
            for begin, end in spans:
                _update_from(stream, digest, begin, end)
    return digest.digest()


def is_hashed_whole(files: tuple[WeightsFile, ...]) -> bool:
    """Return whether the digest of these files is over every byte of them."""
    return sum(file.file_bytes for file in files) <= WHOLE_DIGEST_BYTES_MAX


def _windows(file: WeightsFile) -> list[tuple[int, int]]:
    """Return the byte spans of every tensor's windows, ascending; overlapping ones are merged."""
    spans: list[tuple[int, int]] = []
    for tensor in file.tensors:
        room = max(0, tensor.end - tensor.begin - WINDOW_BYTES)
        for index in range(WINDOWS_PER_TENSOR):
            begin = tensor.begin + room * index // (WINDOWS_PER_TENSOR - 1)
            end = min(begin + WINDOW_BYTES, tensor.end)
            if spans and begin <= spans[-1][1]:
                spans[-1] = (spans[-1][0], max(end, spans[-1][1]))
            else:
                spans.append((begin, end))
    return spans


def _update_from(stream: BinaryIO, digest: hashlib._Hash, begin: int, end: int) -> None:
    stream.seek(begin)
    left = end - begin
    while left:
        chunk = stream.read(min(READ_BYTES, left))
        if not chunk:
            raise ModelRefused(f"{stream.name} became shorter while it was read", FETCH_AGAIN)
        digest.update(chunk)
        left -= len(chunk)


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
