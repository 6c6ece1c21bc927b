"""One set of weights for all servers: the default model in bfloat16, as a directory and as a GGUF file.

The directory is the one that Samovar serves (converted from the package's quantised GGUF). llama.cpp gets a
GGUF with the metadata and the tokenizer of that same file and its tensors as bfloat16, the same values; where
the CPU has no instructions for it as float16, which llama.cpp multiplies 1.5 times as quickly there.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
from tokenizers import Tokenizer
from tqdm import tqdm

from samovar.configs.settings import ModelSettings
from samovar.replicas.model import ensure_model
from samovar.replicas.model.store import DEFAULT_FILE, DEFAULT_MODULE

_BF16 = gguf.GGMLQuantizationType.BF16
_F16 = gguf.GGMLQuantizationType.F16
_OWN_KEYS = ("general.architecture", "general.file_type")  # the writer's, and ours


@dataclass(frozen=True, slots=True)
class PeerModel:
    """The same weights twice. `gguf`: for llama.cpp."""

    name: str
    directory: Path
    gguf: Path


def has_bf16() -> bool:
    """Return whether this CPU multiplies bfloat16."""
    can = torch.cpu.get_capabilities()
    return bool(can.get("avx512_bf16") or can.get("amx_bf16"))


@functools.cache
def natural_ids(directory: Path) -> list[int]:
    """Return a long natural text as the model's token ids: our pages, and the sources of Python's library."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    pages = sorted((Path(__file__).parent.parent / "docs").glob("*.md"))
    sources = sorted(Path(argparse.__file__).parent.glob("*.py"))
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in (*pages, *sources)]
    return [token for one in tokenizer.encode_batch(texts, add_special_tokens=False) for token in one.ids]


def make_model(folder: Path) -> PeerModel:
    """Make the default model's two forms; the GGUF goes into `folder`, and is kept there."""
    directory = ensure_model(ModelSettings())
    source = _packaged()
    kind = "bf16" if has_bf16() else "f16"
    target = folder / f"{directory.name}-{kind}.gguf"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_suffix(".tmp")
        write_gguf(source, unfinished, as_float16=not has_bf16())
        os.replace(unfinished, target)
    return PeerModel("SmolLM2-135M-Instruct", directory, target)


def write_gguf(source: Path, target: Path, *, as_float16: bool = False) -> None:
    """Write the GGUF file `source` again, matrices in 16 bits and vectors as float32, all of bfloat16 values.

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
    file_type = gguf.LlamaFileType.MOSTLY_F16 if as_float16 else gguf.LlamaFileType.MOSTLY_BF16
    writer.add_file_type(file_type)
    for tensor in tqdm(reader.tensors, unit="tensor", desc="writing the GGUF"):
        shape = tuple(int(size) for size in reversed(tensor.shape))  # GGUF lists sizes innermost first
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(shape)
        rounded = gguf.quants.quantize(np.ascontiguousarray(values, dtype=np.float32), _BF16)
        plain = gguf.quants.dequantize(rounded, _BF16).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(tensor.name, plain)
        elif as_float16:
            writer.add_tensor(tensor.name, gguf.quants.quantize(plain, _F16), raw_dtype=_F16)
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
