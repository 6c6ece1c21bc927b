"""What a start need not wait for: transformers' classes of the model, where they have been asked before."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer, Qwen2Tokenizer, TokenizersBackend

from samovar.replicas.messages import ModelRefused
from samovar.replicas.model import inspect_model, load_tokenizer, spec, tokenizer
from samovar.replicas.model.tokenizer import TEXTS
from tests.house import ROOT
from tests.support.engines.tiny_models import Family, make_tiny_model

FAMILIES: tuple[Family, ...] = ("llama", "qwen2", "qwen3", "mistral")
TEXT = "<|im_start|>user\nThe samovar: größer, 12 cups of tea  and 茶<|im_end|>\n"


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp(request.param), request.param)


def configs_in(keep: Path) -> list[Path]:
    return [path for path in keep.iterdir() if path.name.count(".") == 1]


def test_what_transformers_makes_of_a_config_is_asked_once(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep, asked, ask = tmp_path / "kept", list[Path](), spec._ask_transformers

    def noting(path: Path) -> spec._Config:
        asked.append(path)
        return ask(path)

    monkeypatch.setattr(spec, "_ask_transformers", noting)
    plain = inspect_model(tiny)
    assert [inspect_model(tiny, keep) for _ in range(3)] == [plain] * 3
    assert len(asked) == 2
    (kept,) = configs_in(keep)
    kept.write_text('{"model_type": "llama"}')
    assert inspect_model(tiny, keep) == plain
    assert len(asked) == 3
    changed = {**json.loads((tiny / "config.json").read_text()), "max_position_embeddings": 17}
    monkeypatch.setattr(spec, "read_config", lambda path: changed)
    inspect_model(tiny, keep)
    assert len(asked) == 4
    assert len(configs_in(keep)) == 2
    (tmp_path / "file").touch()
    inspect_model(tiny, tmp_path / "file" / "in the way")  # is not kept, and that is all
    assert len(asked) == 5


@pytest.mark.parametrize("names_its_class", [True, False])
def test_the_tokenizer_is_the_one_that_transformers_loads_or_that_of_the_file(
    tiny: Path, names_its_class: bool
) -> None:
    stated = tiny / "tokenizer_config.json"
    before = stated.read_text()
    if not names_its_class:
        fields = {key: value for key, value in json.loads(before).items() if key != "tokenizer_class"}
        stated.write_text(json.dumps(fields))
    try:
        ours, theirs = load_tokenizer(tiny), AutoTokenizer.from_pretrained(tiny, local_files_only=True)
    finally:
        stated.write_text(before)
    file = Tokenizer.from_file(str(tiny / "tokenizer.json"))
    if type(theirs) is Qwen2Tokenizer:  # it splits texts as Qwen2 does, and this file does not
        assert type(ours) is TokenizersBackend
        assert ours.backend_tokenizer.to_str() == file.to_str()
    else:
        assert type(ours) is type(theirs)
        assert ours.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()
    for text in (TEXT, *TEXTS):
        assert ours(text)["input_ids"] == file.encode(text).ids
    assert ours.chat_template == theirs.chat_template
    assert ours.all_special_ids == theirs.all_special_ids


@pytest.mark.parametrize("named", ["LlamaTokenizer", "Qwen2TokenizerFast", "GPT2Tokenizer", "GemmaTokenizer"])
def test_the_class_that_a_config_names_does_not_go_before_the_file(tiny: Path, named: str) -> None:
    stated = tiny / "tokenizer_config.json"
    before = stated.read_text()
    stated.write_text(json.dumps(json.loads(before) | {"tokenizer_class": named}))
    try:
        ours = load_tokenizer(tiny)
    finally:
        stated.write_text(before)
    file = Tokenizer.from_file(str(tiny / "tokenizer.json"))
    for text in (TEXT, *TEXTS):
        assert ours(text, add_special_tokens=False)["input_ids"] == file.encode(text).ids


def test_a_tokenizer_that_cannot_be_loaded_is_refused(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(shutil.copytree(tiny_llama, tmp_path / "m"))
    with monkeypatch.context() as patch:
        patch.setattr(tokenizer, "_first_difference", lambda ours, file, texts: texts[0])
        with pytest.raises(ModelRefused, match=r"makes other tokens of 'Hello world' than tokenizer\.json"):
            load_tokenizer(path)
    (path / "tokenizer.json").write_text('{"model": {"vocab": {}}}')
    with pytest.raises(ModelRefused, match="does not accept the tokenizer"):
        load_tokenizer(path)


def test_serve_and_the_ingress_load_no_model_classes(tiny_llama: Path, tmp_path: Path) -> None:
    inspect_model(tiny_llama, tmp_path)
    code = f"""
import sys
from pathlib import Path
import samovar.replicas.serving.deployment, samovar.cluster.serve.autoscale
assert "torch" not in sys.modules
import samovar.cluster.serve.app, samovar.router.ingress.app
from samovar.replicas.model import inspect_model, load_tokenizer
inspect_model(Path({str(tiny_llama)!r}), Path({str(tmp_path)!r}))
assert "transformers" not in sys.modules
load_tokenizer(Path({str(tiny_llama)!r}))
heavy = ("torch._dynamo", "sympy", "transformers.modeling_utils", "transformers.models.llama")
print([name for name in heavy if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
