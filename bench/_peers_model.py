"""One set of weights for all servers: the default model in bfloat16, as a directory and as a GGUF file.

The directory is the one that Samovar serves (converted from the package's quantised GGUF). llama.cpp gets a
GGUF with the metadata and the tokenizer of that same file and its tensors as bfloat16: the same values.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from tqdm import tqdm

from samovar.configs.settings import ModelSettings
from samovar.replicas.model import ensure_model
from samovar.replicas.model.store import DEFAULT_FILE, DEFAULT_MODULE

_BF16 = gguf.GGMLQuantizationType.BF16
_OWN_KEYS = ("general.architecture", "general.file_type")  # the writer's, and ours


@dataclass(frozen=True, slots=True)
class PeerModel:
    """The same weights twice. `gguf`: for llama.cpp."""

    name: str
    directory: Path
    gguf: Path


def make_model(folder: Path) -> PeerModel:
    """Make the default model's two forms; the GGUF goes into `folder`, and is kept there."""
    directory = ensure_model(ModelSettings())
    source = _packaged()
    target = folder / f"{directory.name}-bf16.gguf"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_suffix(".tmp")
        write_bf16(source, unfinished)
        os.replace(unfinished, target)
    return PeerModel("SmolLM2-135M-Instruct", directory, target)


def write_bf16(source: Path, target: Path) -> None:
    """Write the GGUF file `source` again, its matrices as bfloat16 and vectors as float32 of bfloat16 values.

    llama.cpp has norms in float32 only; they are rounded as in the directory, which is all bfloat16.
    """
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key in _OWN_KEYS:
            continue
        inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, field.contents(), field.types[0], sub_type=inner)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    for tensor in tqdm(reader.tensors, unit="tensor", desc="writing bf16 GGUF"):
        shape = tuple(int(size) for size in reversed(tensor.shape))  # GGUF lists sizes innermost first
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(shape)
        rounded = gguf.quants.quantize(np.ascontiguousarray(values, dtype=np.float32), _BF16)
        if len(shape) == 1:
            writer.add_tensor(tensor.name, gguf.quants.dequantize(rounded, _BF16).astype(np.float32))
        else:
            writer.add_tensor(tensor.name, rounded, raw_dtype=_BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _packaged() -> Path:
    spec = importlib.util.find_spec(DEFAULT_MODULE)  # finds the package without running it
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(f"the package {DEFAULT_MODULE} is not installed: make setup")
    return Path(next(iter(spec.submodule_search_locations))) / DEFAULT_FILE
