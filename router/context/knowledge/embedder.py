"""Vectors of what a text means: static word vectors that a package ships, so that nothing is fetched or run.

`wordllama` ships 256 numbers for each of the 32,000 tokens of Llama 2 (16 MB, MIT): a text's vector is the
mean of its tokens'. Only the package's two files are read. Importing it would set up the process's logging,
and its own loader looks for the tokenizer in a folder of another name.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from samovar.configs.extras import require
from samovar.router.context.knowledge.entries import Vector

PACKAGE = "wordllama"
WEIGHTS = "weights/l2_supercat_256.safetensors"
TOKENIZER = "tokenizers/l2_supercat_tokenizer_config.json"
TOKENS_MAX = 4096
"""Tokens of one text that count."""


class Embedder(Protocol):
    """Makes vectors of length 1. Thread-safe."""

    name: str

    def embed(self, texts: Sequence[str]) -> list[Vector]:
        """Return a vector for each text; of a text without words, zeros."""
        ...


class StaticEmbedder:
    """The vectors of `wordllama`. Raises `ExtraMissing` if the package is not installed."""

    name = "wordllama-l2-supercat-256"

    def __init__(self) -> None:
        require(PACKAGE, "knowledge.embedder=wordllama")
        from safetensors.numpy import load_file
        from tokenizers import Tokenizer

        spec = importlib.util.find_spec(PACKAGE)
        assert spec is not None
        assert spec.origin is not None
        folder = Path(spec.origin).parent
        self._tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(TOKENS_MAX)
        (self._rows,) = load_file(folder / WEIGHTS).values()

    def embed(self, texts: Sequence[str]) -> list[Vector]:
        """Return a vector for each text; of a text without words, zeros."""
        found = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [self._mean(one.ids) for one in found]

    def _mean(self, ids: Sequence[int]) -> Vector:
        if not ids:
            return np.zeros(self._rows.shape[1], np.float32)
        mean: Vector = self._rows[np.minimum(ids, len(self._rows) - 1)].astype(np.float32).mean(axis=0)
        return mean / max(float(np.linalg.norm(mean)), 1e-12)


def open_embedder(choice: str) -> Embedder | None:
    """Return the embedder of `knowledge.embedder`; None for words and names only. Raises `ExtraMissing`."""
    if choice == "none" or (choice == "auto" and importlib.util.find_spec(PACKAGE) is None):
        return None
    return StaticEmbedder()
