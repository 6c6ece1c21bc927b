"""The tokenizer of an engine is the one that transformers sets up, whoever reads its file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers.convert_slow_tokenizer import bytes_to_unicode

from samovar.replicas.answers.output import _printable_stand_ins
from samovar.replicas.measurement_cache import MeasurementCache
from samovar.replicas.model import load_tokenizer
from samovar.replicas.start import checkpoint
from samovar.replicas.start.checkpoint import load_vocabulary
from tests.support.engines.tiny_models import Family, make_tiny_model

TEXT = "<|im_start|>user\nThe samovar: größer, 12 cups of tea  and 茶<|im_end|>\n"
FAMILIES: tuple[Family, ...] = ("llama", "qwen2", "qwen3", "mistral")


class Loads:
    """Counts how often transformers is asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked = 0
        monkeypatch.setattr(checkpoint, "load_tokenizer", self._load)

    def _load(self, path: Path) -> object:
        self.asked += 1
        return load_tokenizer(path)


def start(model: Path, keep: Path | None) -> checkpoint.Vocabulary:
    kept = MeasurementCache(keep, 60.0, "a model")
    found = load_vocabulary(model, kept)
    kept.save()
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_a_second_start_reads_the_same_from_the_file(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, loads = make_tiny_model(tmp_path / "model", family), Loads(monkeypatch)
    first, second = (start(model, tmp_path / "kept") for _ in range(2))
    theirs = load_tokenizer(model)
    for ours in (first, second):
        assert ours.tokenizer.to_str() == theirs.backend_tokenizer.to_str()
        assert ours.special_ids == frozenset(theirs.all_special_ids)
        assert ours.tokenizer.encode(TEXT).ids == theirs(TEXT)["input_ids"]
    is_file = checkpoint._from_file(model).to_str() == theirs.backend_tokenizer.to_str()
    assert loads.asked == (1 if is_file else 2)


def test_what_transformers_sets_up_in_another_way_is_asked_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a token that only its own file adds."""
    model, loads = make_tiny_model(tmp_path / "model", "llama"), Loads(monkeypatch)
    stated = model / "tokenizer_config.json"
    more = {"additional_special_tokens": ["<|of_the_config|>"], "extra_special_tokens": ["<|of_the_config|>"]}
    stated.write_text(json.dumps(json.loads(stated.read_text()) | more))
    theirs = load_tokenizer(model).backend_tokenizer.to_str()
    assert checkpoint._from_file(model).to_str() != theirs
    for number in (1, 2):
        assert start(model, tmp_path / "kept").tokenizer.to_str() == theirs
        assert loads.asked == number


def test_without_a_folder_transformers_is_asked(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loads = Loads(monkeypatch)
    start(tiny_llama, None)
    start(tiny_llama, None)
    assert loads.asked == 2


def test_the_characters_that_stand_for_bytes_are_those_of_transformers() -> None:
    assert {char: byte for byte, char in bytes_to_unicode().items()} == _printable_stand_ins()
