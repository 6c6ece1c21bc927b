"""The part of a tokenizer that an engine needs, without transformers where its file says everything.

Importing what transformers needs to load a tokenizer takes as long as importing torch, and most of what it
loads is in tokenizer.json. One start compares the two; those after it read the file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter
from tokenizers import Tokenizer

from samovar.replicas.measurement_cache import MeasurementCache
from samovar.replicas.model import load_tokenizer

TOKENIZER_FILE = "tokenizer.json"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer as transformers sets it up, and the ids of its special tokens."""

    tokenizer: Tokenizer
    special_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class FileVerdict:
    """Whether transformers' tokenizer is the one in the file, as a start has seen; ids as of `Vocabulary`."""

    is_file: bool
    special_ids: tuple[int, ...]


VERDICT = TypeAdapter(FileVerdict | None)


def load_vocabulary(path: Path, kept: MeasurementCache) -> Vocabulary:
    """Load the tokenizer of the model in `path`, as `load_tokenizer` does. `kept`: of this model."""
    loaded: list[Vocabulary] = []

    def compare() -> FileVerdict:
        loaded.append(_of_transformers(path))
        found = loaded[0]
        is_file = _from_file(path).to_str() == found.tokenizer.to_str()
        return FileVerdict(is_file, tuple(sorted(found.special_ids)))

    verdict = kept.get("tokenizer", VERDICT, compare, None)
    if loaded:
        return loaded[0]
    if verdict is None or not verdict.is_file:
        return _of_transformers(path)
    return Vocabulary(_from_file(path), frozenset(verdict.special_ids))


def _from_file(path: Path) -> Tokenizer:
    return Tokenizer.from_file(str(path / TOKENIZER_FILE))


def _of_transformers(path: Path) -> Vocabulary:
    tokenizer = load_tokenizer(path)
    return Vocabulary(tokenizer.backend_tokenizer, frozenset(tokenizer.all_special_ids))
