"""What makes KV interchangeable: the namespace of a model as vLLM runs it, and what has none."""

from __future__ import annotations

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from samovar.cache_tiers.blocks import namespace_digest
from samovar.cache_tiers.vllm.messages import PageLayout
from samovar.configs.json_text import parse_json

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
HASHED_AT_ONCE = 4
CHUNK_BYTES = 1 << 22


def weights_digest(model: Path, known: Path) -> bytes:
    """Return the digest of all weights of a model, a directory or one file.

    `known`: a file that remembers digests by inode, size and time of change. Raises `ValueError` if there are
    no weights, `OSError` if they cannot be read.
    """
    found = [model] if model.is_file() else sorted({one for kind in WEIGHTS for one in model.glob(kind)})
    if not found:
        raise ValueError(f"{model} has no weights ({', '.join(WEIGHTS)}): their digest names what is stored")
    digests: dict[str, str] = {}
    with suppress(OSError, ValueError, AttributeError):
        digests = {str(name): str(one) for name, one in parse_json(known.read_text()).items()}
    signs = {one: _sign(one) for one in found}
    missing = [one for one, sign in signs.items() if sign not in digests]
    if missing:
        with ThreadPoolExecutor(HASHED_AT_ONCE, "samovar-weights") as pool:
            for one, digest in zip(missing, pool.map(_hashed, missing), strict=True):
                digests[signs[one]] = digest
        _remember(known, digests)
    of_all = hashlib.sha256()
    for one, sign in signs.items():
        of_all.update(f"{one.name}\0{digests[sign]}\0".encode())
    return of_all.digest()


def _sign(path: Path) -> str:
    found = path.stat()
    return f"{found.st_dev}:{found.st_ino}:{found.st_size}:{found.st_mtime_ns}:{found.st_ctime_ns}"


def _hashed(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while part := file.read(CHUNK_BYTES):
            digest.update(part)
    return digest.hexdigest()


def _remember(known: Path, digests: dict[str, str]) -> None:
    with suppress(OSError):  # hashed again at the next start
        known.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        made = known.with_name(f"{known.name}.{os.getpid()}")
        made.write_text(json.dumps(digests))
        made.replace(known)


def namespace_of(
    *, weights: bytes, vllm: str, config: str, block_tokens: int, layout: PageLayout, rank: int, ranks: int
) -> bytes:
    """Return the namespace: equal only where the same tokens have the same bytes.

    `config`: the model's own configuration with dtype, quantisation and cache dtype, as one text.
    """
    parts = (
        "vllm",
        vllm,
        config,
        str(block_tokens),
        *layout.layers,
        str(layout.layer_bytes),
        f"{rank}/{ranks}",
    )
    return namespace_digest(weights, *(part.encode() for part in parts))
