"""What ends a turn is read from the chat template: an answer ends there, whatever the metadata name."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM

from samovar.configs.settings import Settings
from samovar.replicas.messages import ModelRefused
from samovar.replicas.model import card, inspect_model
from samovar.replicas.model.gguf import convert_gguf
from samovar.replicas.templates import end_of_turn
from samovar.router.ingress.app import open_prompts
from tests.support.engines.tiny_models import (
    CHAT_TEMPLATE,
    EOS_ID,
    PAD_ID,
    make_tiny_model,
    make_tiny_tokenizer,
)
from tests.unit.replicas.model.test_convert import write_gguf

LLAMA3 = (
    "{% for m in messages %}{{ '<|start_header_id|>' ~ m.role ~ '<|end_header_id|>\n\n' ~ m.content | trim "
    "~ '<|eot_id|>' }}{% endfor %}"
)
HARMONY = (
    "{% for m in messages %}{{ '<|start|>' ~ m.role ~ '<|message|>' ~ m.content }}"
    "{{ '<|return|>' if loop.last and m.role == 'assistant' else '<|end|>' }}{% endfor %}"
)
MISTRAL = (
    "{% for m in messages %}{{ '[INST] ' ~ m.content ~ ' [/INST]' if m.role == 'user' "
    "else ' ' ~ m.content ~ eos_token }}{% endfor %}"
)
PLAIN = "{% for m in messages %}{{ m.role ~ ': ' ~ m.content ~ '\n' }}{% endfor %}"
NO_END = "{% for m in messages %}{{ '<|' ~ m.role ~ '|>\n' ~ m.content ~ '\n' }}{% endfor %}"


def tokenizer_with(template: str, *tokens: str, special: bool = True) -> Any:
    tokenizer = make_tiny_tokenizer(512)
    tokenizer.add_tokens([AddedToken(token, special=special) for token in tokens])
    tokenizer.chat_template = template
    return tokenizer


def ended(tokenizer: Any, known: list[int]) -> tuple[str | None, str]:
    token, doubt = end_of_turn(tokenizer, tokenizer.added_tokens_decoder, known)
    return None if token is None else tokenizer.convert_ids_to_tokens(token), doubt


@pytest.mark.parametrize(
    ("template", "tokens", "special", "end"),
    [
        (CHAT_TEMPLATE, (), True, "<|im_end|>"),
        (LLAMA3, ("<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"), True, "<|eot_id|>"),
        (LLAMA3, ("<|eot_id|>",), False, "<|eot_id|>"),  # added, and not called special
        (HARMONY, ("<|return|>", "<|end|>", "<|start|>"), True, "<|return|>"),
        (NO_END, ("<|user|>", "<|assistant|>"), True, "<|user|>"),  # the next turn's beginning, as GLM's
        (CHAT_TEMPLATE.replace("<|im_end|>", "<|end|><|im_end|>"), ("<|end|>",), True, "<|end|>"),
    ],
)
def test_the_control_token_behind_an_answer_ends_it(
    template: str, tokens: tuple[str, ...], special: bool, end: str
) -> None:
    tokenizer = tokenizer_with(template, *tokens, special=special)
    assert ended(tokenizer, [PAD_ID]) == (end, "")
    assert ended(tokenizer, [PAD_ID, tokenizer.convert_tokens_to_ids(end)]) == (None, "")


def test_a_known_end_is_enough_so_that_an_answer_of_several_messages_goes_on() -> None:
    tokenizer = tokenizer_with(HARMONY, "<|return|>", "<|end|>")
    assert ended(tokenizer, [tokenizer.convert_tokens_to_ids("<|return|>")]) == (None, "")
    assert ended(tokenizer_with(MISTRAL), [EOS_ID]) == (None, "")


def test_a_token_that_ends_calls_is_added_to_a_known_end() -> None:
    calls = HARMONY + "{% if tools %}{{ '<|call|>' }}{% endif %}"
    tokenizer = tokenizer_with(calls, "<|return|>", "<|end|>", "<|call|>")
    known = [tokenizer.convert_tokens_to_ids("<|return|>")]
    assert ended(tokenizer, known) == ("<|call|>", "")
    assert ended(tokenizer, [*known, tokenizer.convert_tokens_to_ids("<|call|>")]) == (None, "")


@pytest.mark.parametrize("template", [PLAIN, LLAMA3, NO_END])
def test_text_is_no_end_and_the_start_says_so(template: str) -> None:
    token, doubt = ended(tokenizer_with(template), [PAD_ID])
    assert token is None
    assert "answers may go on beyond their turn" in doubt


def test_a_template_that_refuses_is_said_and_one_without_end_is_refused() -> None:
    token, doubt = ended(tokenizer_with("{{ raise_exception('no') }}"), [EOS_ID])
    assert (token, "refuses" in doubt) == (None, True)
    assert ended(tokenizer_with(""), [EOS_ID]) == (None, "")
    with pytest.raises(ModelRefused, match="does not render a short conversation"):
        ended(tokenizer_with("{{ 'a' * 10**11 }}"), [EOS_ID])


def test_a_directory_whose_configs_name_another_end_stops_at_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, keep = make_tiny_model(tmp_path / "m", "llama"), tmp_path / "kept"
    for name in ("generation_config.json", "config.json"):
        stated = json.loads((path / name).read_text()) | {"eos_token_id": PAD_ID}
        (path / name).write_text(json.dumps(stated))
    own = json.loads((path / "tokenizer_config.json").read_text()) | {"eos_token": "<|endoftext|>"}
    (path / "tokenizer_config.json").write_text(json.dumps(own))
    assert inspect_model(path, keep).eos_token_ids == (PAD_ID, EOS_ID)
    settings = Settings.model_validate({"model": {"path": str(path), "cache_dir": str(tmp_path / "cache")}})
    of_ingress, prompts = open_prompts(settings, str(path))
    assert (of_ingress.eos_token_ids, set(prompts._eos_token_ids)) == ((PAD_ID, EOS_ID), {PAD_ID, EOS_ID})

    with monkeypatch.context() as patch:  # it is looked for once
        patch.setattr(card, "load_tokenizer", lambda path: pytest.fail("rendered again"))
        assert inspect_model(path, keep).eos_token_ids == (PAD_ID, EOS_ID)
    (path / "chat_template.jinja").write_text(PLAIN)
    with caplog.at_level(logging.WARNING):
        assert inspect_model(path, keep).eos_token_ids == (PAD_ID,)
    assert "answers may go on beyond their turn" in caplog.text


@pytest.mark.parametrize("ids", ["template", "eom_token_id", "eog_token_ids"])
def test_a_gguf_whose_eos_is_another_stops_at_its_turn(tmp_path: Path, ids: str) -> None:
    original = make_tiny_model(tmp_path / "original", "llama", dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(original)

    def edit(writer: Any, tensors: dict[str, Any]) -> None:
        for key in ("tokenizer.ggml.eos_token_id", "tokenizer.chat_template"):
            del writer.kv_data[0][key]
        writer.add_eos_token_id(PAD_ID)
        writer.add_chat_template(CHAT_TEMPLATE if ids == "template" else PLAIN)
        if ids == "eom_token_id":
            writer.add_uint32("tokenizer.ggml.eom_token_id", EOS_ID)
        elif ids == "eog_token_ids":
            writer.add_array("tokenizer.ggml.eog_token_ids", [PAD_ID, EOS_ID])

    (tmp_path / "out").mkdir()
    convert_gguf(write_gguf(tmp_path / "m.gguf", model, edit), tmp_path / "out")
    assert set(inspect_model(tmp_path / "out").eos_token_ids) == {PAD_ID, EOS_ID}
