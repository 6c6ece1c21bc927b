"""Templates of models that take images: some read the parts of a message, and leave out what is a string."""

from __future__ import annotations

from typing import Any

import pytest

from samovar.replicas.templates import end_of_turn, rendered
from tests.support.engines.tiny_models import CHAT_TEMPLATE, EOS_ID, make_tiny_tokenizer

PARTS_ALONE = (  # SmolVLM's and Idefics 3's, in short
    "{% for message in messages %}<|im_start|>{{ message['role'] }}"
    "{% if message['content'][0]['type'] == 'image' %}:{% else %}: {% endif %}"
    "{% for line in message['content'] %}"
    "{% if line['type'] == 'text' %}{{ line['text'] }}{% elif line['type'] == 'image' %}<image>{% endif %}"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
LLAVA = (
    "{% for message in messages %}{{ message['role'] }}: "
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] }}"
    "{% endfor %}<|im_end|>{% endfor %}"
)
EITHER = (  # Gemma 3's and Qwen 2 VL's
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for item in message['content'] %}{% if item['type'] == 'text' %}[{{ item['text'] }}]{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>{% endfor %}"
)
CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "two cups"},
    {"role": "assistant", "content": "of tea", "tool_calls": []},
    {"role": "assistant", "content": None},
]


def tokenizer_with(template: str) -> Any:
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("template", [PARTS_ALONE, LLAVA, EITHER, CHAT_TEMPLATE])
def test_no_text_is_left_out(template: str) -> None:
    text = rendered(tokenizer_with(template), CHAT[:2], add_generation_prompt=False)
    assert "two cups<|im_end|>" in text
    assert "of tea<|im_end|>" in text
    assert ("[two cups]" in text) is False, "a string where a template takes one"


def test_a_turns_end_is_found_where_texts_are_parts() -> None:
    tokenizer = tokenizer_with(PARTS_ALONE)
    added = tokenizer.added_tokens_decoder
    assert end_of_turn(tokenizer, added, []) == (EOS_ID, "")
    assert end_of_turn(tokenizer, added, [EOS_ID]) == (None, "")


def test_what_is_no_text_stays_and_a_conversation_is_not_changed() -> None:
    given = [dict(message) for message in CHAT]
    text = rendered(tokenizer_with(PARTS_ALONE), given[:1], add_generation_prompt=True)
    assert text.endswith("assistant:")
    assert given == CHAT


def test_a_template_that_shows_no_text_at_all_is_given_strings() -> None:
    template = (
        "{% for message in messages %}{{ message['type'] }}{{ message['content'] is string }}{% endfor %}"
    )
    assert rendered(tokenizer_with(template), CHAT[:1], add_generation_prompt=False) == "True"
