"""The namespace of a model as vLLM runs it: its weights, its configuration, the layout of its pages."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

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


class Adapters:
    """The digests of adapters, as they were when they were first asked for. Thread-safe.

    vLLM goes on with what it has read. So files that are others than at first name nothing: who knows which
    are computed with.
    """

    def __init__(self, known: Path) -> None:
        self._known = known
        self._first: dict[tuple[int, str], bytes] = {}

    def name(self, lora: Any) -> tuple[object, ...]:
        """Return what names an adapter by its content, as two may have one name. May read all of it.

        `lora`: vLLM's request for it, or None. Raises `ValueError` if it has no name.
        """
        if lora is None:
            return ()
        path = Path(lora.lora_path)
        if not path.is_dir():
            raise ValueError(f"the adapter {lora.lora_name} is no local directory")
        config = path / "adapter_config.json"  # its scale, for one
        text = config.read_bytes() if config.is_file() else b""
        found = hashlib.sha256(weights_digest(path, self._known) + text).digest()
        if self._first.setdefault((lora.lora_int_id, lora.lora_path), found) != found:
            raise ValueError(f"the files of adapter {lora.lora_name} have changed; load it by another name")
        return ("lora", found)


def model_path(vllm_config: Any) -> Path:
    """Return where the model's weights lie. Raises `ValueError` if they are not on this machine."""
    model = vllm_config.model_config
    path = Path(model.model)
    if path.exists():
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                model.model,
                revision=model.revision,
                cache_dir=vllm_config.load_config.download_dir,
                local_files_only=True,
            )
        )
    except (LocalEntryNotFoundError, OSError) as error:
        raise ValueError(f"the weights of {model.model} are not on this machine: {error}") from error


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
    *, weights: bytes, vllm: str, config: str, block_tokens: int, layouts: Sequence[PageLayout]
) -> bytes:
    """Return the namespace: equal only where the same tokens have the same bytes.

    `config`: the model's own configuration with dtype, quantisation, cache dtype and sizes of its parallel
    groups, as one text. `layouts`: of the pages of each rank.
    """
    parts = ["vllm", vllm, config, str(block_tokens)]
    for rank, layout in enumerate(layouts):
        parts += [*layout.layers, str(layout.layer_bytes), f"{rank}/{len(layouts)}"]
    return namespace_digest(weights, *(part.encode() for part in parts))
