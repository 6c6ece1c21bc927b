"""F13: what makes blocks other blocks makes them strangers, in files of the same directory.

In one process, from engine to files. That a real service with other weights finds nothing is shown by
`test_tiers_restart.py`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from samovar.router.auth import tenant_salt
from tests.support.engines.engines import Answer, prompt_of
from tests.support.engines.tier_engines import Tiered, tiered

PROMPT = prompt_of(100, seed=13)
SECRETS = (b"one-secret-of-ours", b"another-secret-of-ours")
SALT = tenant_salt(SECRETS[0], "alice", None)


def loaded(answer: Answer) -> int:
    assert answer.admitted is not None
    return sum(count for source, count in answer.admitted.receipt.tokens.items() if source != "compute")


def told(model: Path, folder: Path, **engine: object) -> Answer:
    """A fresh engine over the files in `folder` is told the prompt; its books are right afterwards."""
    first: Tiered = tiered(model, folder, **engine)
    answer = first.run(PROMPT, salt=SALT)
    first.node.close()
    return answer


def bare(model: Path, folder: Path, **engine: object) -> Answer:
    return tiered(model, folder / "nothing", tiers={}, prefix_reuse=False, **engine).run(PROMPT, salt=SALT)


def other_weights(model: Path) -> None:
    """One number of one tensor: the file has the same size."""
    weights = load_file(model / "model.safetensors")
    name = sorted(name for name in weights if "down_proj" in name)[0]
    weights[name].view(-1)[0] += 1.0
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})


def other_rope(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    if "rope_parameters" in config:
        config["rope_parameters"]["rope_theta"] = 123456.0
    else:
        config["rope_theta"] = 123456.0
    (model / "config.json").write_text(json.dumps(config))


def other_tokenizer(model: Path) -> None:
    """Two tokens change places: the same ids stand for other text."""
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))


@pytest.mark.parametrize("change", [other_weights, other_rope, other_tokenizer])
def test_f13_another_model_under_the_same_name_finds_nothing(
    tiny_llama: Path, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    model = tmp_path / "a" / tiny_llama.name
    shutil.copytree(tiny_llama, model)
    other = tmp_path / "b" / tiny_llama.name
    shutil.copytree(tiny_llama, other)
    change(other)
    folder = tmp_path / "kv"
    assert loaded(told(model, folder)) == 0
    assert loaded(told(model, folder)) > 90, "it should be there"
    answer = told(other, folder)
    assert loaded(answer) == 0
    assert answer.ids == bare(other, tmp_path).ids


@pytest.mark.parametrize("engine", [{"block_tokens": 32}, {"dtype": "bfloat16"}, {"kv_dtype": "int8"}])
def test_f13_other_blocks_of_the_same_model_find_nothing(
    tiny_llama: Path, tmp_path: Path, engine: dict[str, object]
) -> None:
    told(tiny_llama, tmp_path)
    answer = told(tiny_llama, tmp_path, **engine)
    assert loaded(answer) == 0
    assert answer.ids == bare(tiny_llama, tmp_path, **engine).ids
    assert loaded(told(tiny_llama, tmp_path, **engine)) > 90, "its own it finds"
    assert loaded(told(tiny_llama, tmp_path)) > 90, "and so do the others"


def test_f13_another_secret_of_the_server_finds_nothing(tiny_llama: Path, tmp_path: Path) -> None:
    told(tiny_llama, tmp_path)
    other = tiered(tiny_llama, tmp_path)
    salt = tenant_salt(SECRETS[1], "alice", None)
    assert loaded(other.run(PROMPT, salt=salt)) == 0
    assert loaded(other.run(PROMPT, salt=SALT)) > 90
    other.node.close()


def test_g3_a_namespace_is_all_that_tells_them_apart(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These tests would notice: without the model's part of it, other weights do find the blocks."""
    other = tmp_path / tiny_llama.name
    shutil.copytree(tiny_llama, other)
    other_weights(other)
    monkeypatch.setattr("samovar.replicas.start.build.model_namespace", lambda *_: bytes(32))
    told(tiny_llama, tmp_path / "kv")
    answer = told(other, tmp_path / "kv")
    assert loaded(answer) > 90
